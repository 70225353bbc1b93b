"""A component for NVFlare's split learning workflow that records the messages of its site as a transcript."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vflsec.audit.opening import read_ids
from vflsec.audit.recorder import Recorder
from vflsec.base.errors import UsageError, clean

try:
    from nvflare.apis.dxo import from_shareable
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_component import FLComponent
    from nvflare.apis.fl_constant import ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.app_common.workflows.splitnn_workflow import SplitNNConstants, SplitNNDataKind
    from nvflare.app_opt.pt.decomposers import TensorDecomposer
    from nvflare.fuel.utils import fobs
except ImportError:
    raise ImportError("this component runs in NVFlare, which is not installed: pip install 'vflsec[nvflare]'") from None

TOPICS = {SplitNNConstants.TASK_TRAIN_LABEL_STEP: "train", SplitNNConstants.TASK_VALID_LABEL_STEP: "test"}
"""The split of the rows of a request."""


class SplitNNRecorder(FLComponent):  # type: ignore[misc]  # NVFlare has no types
    """Records the activations and gradients of a site of the ``SplitNNController`` workflow.

    Add it to the ``components`` of ``config_fed_client.json``, at one site or at both. It sees what the learner sends
    and gets as auxiliary messages, and changes nothing.

    Args:
        folder: of the transcript, absolute.
        parties: ``active`` or ``passive`` by the name of the site, for example
            ``{"site-1": "passive", "site-2": "active"}``.
        train_ids: a text file with the id of each training row, one per line, in the learner's order; by default the
            positions in a batch are the ids.
        resume: whether a transcript in ``folder`` is continued, for an interrupted job.
        test_ids: likewise for the rows of validation; required if ``train_ids`` is given and the learner validates.

    Raises:
        UsageError: the folder holds something else, or the site is not one of ``parties``.
    """

    def __init__(
        self,
        folder: str,
        parties: dict[str, Any],
        train_ids: str | None = None,
        test_ids: str | None = None,
        resume: bool = False,
    ) -> None:
        super().__init__()
        self.folder, self.parties, self.resume = folder, parties, resume
        self.ids = {
            split: None if file is None else read_ids(Path(file))
            for split, file in (("train", train_ids), ("test", test_ids))
        }
        self._recorder: Recorder | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Start before the learner of the site is initialized; close at the end of the run."""
        if event_type == EventType.ABOUT_TO_START_RUN:
            fobs.register(TensorDecomposer)
            site = fl_ctx.get_identity_name()
            self._recorder = Recorder(self.folder, parties=self.parties, observer=site, resume=self.resume)
            self._listen(fl_ctx.get_engine())
        elif event_type == EventType.END_RUN and self._recorder is not None:
            self._recorder.close()

    def _listen(self, engine: Any) -> None:
        """Read what passes through the two methods of the engine by which learners exchange messages."""
        send, register = engine.send_aux_request, engine.register_aux_message_handler

        def send_aux_request(targets: Any, topic: str, request: Shareable, *rest: Any, **named: Any) -> dict[str, Any]:
            self._record(topic, request, None)
            replies: dict[str, Any] = send(targets, topic, request, *rest, **named)
            for reply in replies.values():
                self._record(topic, request, reply)
            return replies

        def register_aux_message_handler(topic: str, message_handle_func: Callable[..., Shareable]) -> None:
            def handle(topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
                self._record(topic, request, None)
                reply = message_handle_func(topic=topic, request=request, fl_ctx=fl_ctx)
                self._record(topic, request, reply)
                return reply

            register(topic, handle)

        engine.send_aux_request = send_aux_request
        engine.register_aux_message_handler = register_aux_message_handler

    def _record(self, topic: str, request: Shareable, reply: Shareable | None) -> None:
        """Record the activations of a request, or the gradient of a reply to it."""
        if topic not in TOPICS or self._recorder is None:
            return
        split, asked = TOPICS[topic], from_shareable(request)
        rows = self._rows(split, asked.get_meta_prop(SplitNNConstants.BATCH_INDICES))
        if reply is None:
            self._recorder.embedding(_to_tensor(asked, SplitNNDataKind.ACTIVATIONS), rows=rows, split=split)
        elif split == "train" and reply.get_return_code() == ReturnCode.OK:
            answer = from_shareable(reply)
            self._recorder.gradient(_to_tensor(answer, SplitNNDataKind.GRADIENT), rows=rows, split=split)

    def _rows(self, split: str, positions: Any) -> Any:
        ids = self.ids[split]
        if ids is not None:
            return [ids[int(position)] for position in positions]
        if split == "test" and self.ids["train"] is None:
            return [f"test {int(position)}" for position in positions]  # or they would be the ids of training rows
        if split == "test":
            raise UsageError("expected test_ids, since the learner validates and train_ids are given: add their file")
        return [int(position) for position in positions]


def _to_tensor(message: Any, kind: str) -> torch.Tensor:
    """Return the tensor that a message carries.

    Raises:
        UsageError: another kind of message.
    """
    if message.data_kind != kind:
        raise UsageError(f"expected a message with {kind}, found {clean(str(message.data_kind))}")
    data = message.data[SplitNNConstants.DATA]
    return torch.as_tensor(fobs.loads(data) if isinstance(data, bytes) else data)
