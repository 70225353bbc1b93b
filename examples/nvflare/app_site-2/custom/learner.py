"""The active party: it has the labels and the top model, and answers embeddings with gradients."""

import pandas as pd
import torch
from nvflare.apis.dxo import DXO, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.app_common.abstract.learner_spec import Learner
from nvflare.app_common.workflows.splitnn_workflow import SplitNNConstants, SplitNNDataKind
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs
from torch import nn

WIDTH = 8


class Active(Learner):
    def __init__(self, file):
        super().__init__()
        self.file = file

    def initialize(self, parts, fl_ctx):
        fobs.register(TensorDecomposer)
        table = pd.read_csv(self.file, index_col="id")
        self.y = torch.tensor(table.pop("label").to_numpy())
        self.x = torch.tensor(table.to_numpy()).float()
        torch.manual_seed(1)
        self.top = nn.Linear(self.x.shape[1] + WIDTH, 2)
        self.optimizer = torch.optim.SGD(self.top.parameters(), lr=0.5)
        engine = fl_ctx.get_engine()
        engine.register_aux_message_handler(SplitNNConstants.TASK_TRAIN_LABEL_STEP, self.train_step)
        engine.register_aux_message_handler(SplitNNConstants.TASK_VALID_LABEL_STEP, self.validation_step)

    def init_model(self, shareable, fl_ctx, abort_signal):
        return make_reply(ReturnCode.OK)  # each site builds its own model

    def train(self, shareable, fl_ctx, abort_signal):
        return make_reply(ReturnCode.OK)  # the other site leads; this one answers

    def train_step(self, topic, request, fl_ctx):
        dxo = from_shareable(request)
        rows = dxo.get_meta_prop(SplitNNConstants.BATCH_INDICES)
        h = fobs.loads(dxo.data[SplitNNConstants.DATA]).requires_grad_()
        loss = nn.functional.cross_entropy(self.top(torch.cat([self.x[rows], h], dim=1)), self.y[rows])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return DXO(SplitNNDataKind.GRADIENT, data={SplitNNConstants.DATA: fobs.dumps(h.grad)}).to_shareable()

    def validation_step(self, topic, request, fl_ctx):
        return make_reply(ReturnCode.OK)
