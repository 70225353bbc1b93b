"""Builds the encoder of a party from the model's settings and the layout of its columns."""

from __future__ import annotations

from torch import nn

from vflsec.base.errors import UsageError
from vflsec.core.layout import Layout
from vflsec.core.settings import ModelSpec
from vflsec.nn.bottoms import Encoder, MLPBottom
from vflsec.nn.cnn import SmallCNN
from vflsec.nn.resnet import ResNet18
from vflsec.nn.tabular import TabularEncoder

__all__ = ["Encoder", "build_encoder"]


def build_encoder(layout: Layout, spec: ModelSpec, n_classes: int) -> Encoder:
    """Return the encoder (B, d) -> (B, width) of a party whose d columns have this ``layout``.

    | encoder | bottom | top | width |
    |---|---|---|---|
    | ``mlp``, None | Linear-ReLU for each width | Linear | ``cut``, or ``n_classes`` |
    | ``tabular`` | embedding, all blocks but the last | last block, Linear-BatchNorm-ReLU | ``cut``, or 128 |
    | ``cnn`` | two convolutions | convolution, pool, such a block | ``cut``, or 128 |
    | ``resnet18`` | stem and stage 1 | stages 2 to 4, pool | ``cut``, or 512 |

    In the latter three a Linear layer reduces the width to ``cut``, or to ``n_classes`` without a head. Without either,
    the last of ``spec.bottom``, if given, is the width.

    With the same settings, parties with the same encoder have tops of one shape, unless ``spec.bottom`` leaves ``mlp``
    no hidden layer or ``tabular`` a single one: then the top reads the columns themselves.

    Args:
        layout: of the party's matrix.
        spec: ``bottom`` are the widths of the fully connected layers, the last ones of ``cnn`` and ``resnet18``.
        n_classes: C.

    Raises:
        UsageError: an encoder of images for other columns, or ``tabular`` without a hidden layer.
    """
    cut = n_classes if spec.head == "none" else spec.cut
    kind = spec.encoder or "mlp"
    if kind == "auto":
        kind = "cnn" if layout.image else "tabular"
    if kind == "mlp":
        return _mlp(layout.width, (64,) if spec.bottom is None else spec.bottom, cut or n_classes)
    if kind == "tabular":
        return TabularEncoder(layout, (128, 128) if spec.bottom is None else spec.bottom, cut)
    if layout.image is None:
        raise UsageError(
            f"expected pixels of an image at every party for model.encoder={kind}, got columns of a table: "
            "take auto, tabular or mlp"
        )
    if kind == "cnn":
        return SmallCNN(layout.image, (128,) if spec.bottom is None else spec.bottom, cut)
    return ResNet18(layout.image, spec.bottom or (), cut)


def _mlp(features: int, hidden: tuple[int, ...], cut: int) -> Encoder:
    *layers, last = MLPBottom(features, hidden, cut)
    return Encoder(nn.Sequential(*layers), last, cut)
