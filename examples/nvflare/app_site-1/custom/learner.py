"""The passive party: it leads the training, sends embeddings, and gets gradients in reply."""

import numpy as np
import pandas as pd
import torch
from nvflare.apis.dxo import DXO, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.app_common.abstract.learner_spec import Learner
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.workflows.splitnn_workflow import SplitNNConstants, SplitNNDataKind
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs
from torch import nn

N_TRAIN = 400


class Passive(Learner):
    def __init__(self, file):
        super().__init__()
        self.file = file

    def initialize(self, parts, fl_ctx):
        fobs.register(TensorDecomposer)
        z = torch.tensor(pd.read_csv(self.file, index_col="id").to_numpy()).float()
        self.train_z, self.test_z = z[:N_TRAIN], z[N_TRAIN:]
        torch.manual_seed(0)
        self.bottom = nn.Sequential(nn.Linear(z.shape[1], 16), nn.ReLU(), nn.Linear(16, 8))
        self.optimizer = torch.optim.SGD(self.bottom.parameters(), lr=0.5)

    def init_model(self, shareable, fl_ctx, abort_signal):
        return make_reply(ReturnCode.OK)  # each site builds its own model

    def train(self, shareable, fl_ctx, abort_signal):
        order = np.random.default_rng(0)
        for _ in range(shareable.get_header(AppConstants.NUM_ROUNDS)):
            rows = order.integers(0, N_TRAIN, shareable.get_header(SplitNNConstants.BATCH_SIZE))
            h = self.bottom(self.train_z[rows])
            reply = self.send(SplitNNConstants.TASK_TRAIN_LABEL_STEP, rows, h, fl_ctx)
            self.optimizer.zero_grad()
            h.backward(fobs.loads(from_shareable(reply).data[SplitNNConstants.DATA]))
            self.optimizer.step()
        rows = np.arange(len(self.test_z))
        self.send(SplitNNConstants.TASK_VALID_LABEL_STEP, rows, self.bottom(self.test_z), fl_ctx)
        return make_reply(ReturnCode.OK)

    def send(self, topic, rows, h, fl_ctx):
        dxo = DXO(SplitNNDataKind.ACTIVATIONS, data={SplitNNConstants.DATA: fobs.dumps(h.detach())})
        dxo.set_meta_prop(SplitNNConstants.BATCH_INDICES, rows)
        replies = fl_ctx.get_engine().send_aux_request(
            targets="site-2", topic=topic, request=dxo.to_shareable(), timeout=SplitNNConstants.TIMEOUT, fl_ctx=fl_ctx
        )
        return replies["site-2"]
