"""Encoders: the networks of a party on its own columns."""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.base.errors import UsageError
from vflsec.base.layout import Layout
from vflsec.base.seeds import seed_torch
from vflsec.base.sparse_rows import WIDE
from vflsec.core.settings import ModelSpec
from vflsec.nn.wide import CategoryEmbedding, WideLinear

M = TypeVar("M", bound=nn.Module)


class Encoder(nn.Module):
    """A bottom model in two parts, (B, features) -> (B, width).

    The shape of ``bottom`` depends on the party's columns. Partial model aggregation averages ``top`` over parties, if
    it has the same shape.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), section IV-B, local bottom and local top encoder.

    Args:
        bottom: the part that never leaves the party.
        top: the part that follows; its output is the embedding.
        width: of the embedding.
    """

    def __init__(self, bottom: nn.Module, top: nn.Module, width: int) -> None:
        super().__init__()
        self.bottom = bottom
        self.top = top
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Return embeddings (B, width) of rows (B, features)."""
        embedding: Tensor = self.top(self.bottom(x))
        return embedding


class MLPBottom(nn.Sequential):
    """Fully connected ReLU network (B, features) -> (B, cut); no activation after the last layer.

    Args:
        features: number of input columns.
        hidden: widths of the hidden layers.
        cut: width of the cut layer.
    """

    def __init__(self, features: int, hidden: Sequence[int], cut: int) -> None:
        widths = [features, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [make_linear(before, after), nn.ReLU()]
        super().__init__(*layers, make_linear(widths[-1], cut))


def make_linear(features: int, width: int) -> nn.Module:
    """Return a linear layer, for many columns one that reads sparse rows in less time."""
    return WideLinear(features, width) if features > WIDE else nn.Linear(features, width)


def build_dense(features: int, hidden: Sequence[int], cut: int | None = None) -> list[nn.Module]:
    """Return Linear-BatchNorm-ReLU for each hidden width, then a plain Linear of width ``cut`` if there is one."""
    layers: list[nn.Module] = []
    for before, after in pairwise([features, *hidden]):
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
    return layers if cut is None else [*layers, nn.Linear([features, *hidden][-1], cut)]


def reinitialize(model: M, seed: int) -> M:
    """Return a copy of ``model`` with all layers reinitialized from ``seed``."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    fresh = copy.deepcopy(model).cpu()  # drawn there, so that all devices get the same
    with torch.random.fork_rng(devices=[]):
        seed_torch(seed)
        for module in fresh.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    return fresh.to(device)


EMBEDDING = 32
DEVIATION = 1e-4


class TabularEncoder(Encoder):
    """Linear-BatchNorm-ReLU blocks on numbers and embedded categories, (B, d) -> (B, last hidden width, or cut).

    The bottom is the embedding and all blocks but the last; the top the last block, then Linear(cut) if there is a cut.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), table III: "1 Emb + 2 FC". Embeddings of width 32
    and deviation 1e-4 are those of its authors' code, which has blocks of 512 for a thousand columns.

    Args:
        layout: of the party's matrix.
        hidden: widths of the blocks.
        cut: width of the cut layer, or None.

    Raises:
        UsageError: no hidden layer.
    """

    def __init__(self, layout: Layout, hidden: Sequence[int] = (128, 128), cut: int | None = None) -> None:
        if not hidden:
            raise UsageError(
                "expected widths in model.bottom for model.encoder=tabular, got none: give one, or take mlp"
            )
        bottom, features = nn.Sequential(), layout.width
        if any(column.kind == "categorical" for column in layout.columns):
            embedding = CategoryEmbedding(layout, EMBEDDING, DEVIATION)
            bottom, features = bottom.append(embedding), embedding.width
        bottom.extend(build_dense(features, hidden[:-1]))
        top = nn.Sequential(*build_dense([features, *hidden][-2], hidden[-1:], cut))
        super().__init__(bottom, top, cut or hidden[-1])


class SmallCNN(Encoder):
    """Three convolutions of 32, 64 and 128 channels on flat pixels, (B, c·h·w) -> (B, last hidden width or cut).

    Each is Conv3x3-BatchNorm-ReLU, the latter two with stride 2; averages over quarters of the image and
    Linear-BatchNorm-ReLU follow. The bottom is the first two convolutions. The top does not depend on the image's size.

    Args:
        image: (c, h, w), of any size.
        hidden: widths of the fully connected layers.
        cut: width of the cut layer, or None.
    """

    def __init__(self, image: tuple[int, int, int], hidden: Sequence[int] = (128,), cut: int | None = None) -> None:
        bottom = nn.Sequential(nn.Unflatten(1, image), *_build_conv(image[0], 32, 1), *_build_conv(32, 64, 2))
        pooled = 128 * 2 * 2
        top = nn.Sequential(
            *_build_conv(64, 128, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), *build_dense(pooled, hidden, cut)
        )
        super().__init__(bottom, top, cut or [pooled, *hidden][-1])


def _build_conv(before: int, after: int, stride: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()


SIDE = 32


class ResNet18(Encoder):
    """ResNet-18 with the ImageNet stem on flat pixels, (B, c·h·w) -> (B, 512), or the last hidden width, or cut.

    Images of another size than 32 x 32 are resized. The bottom is the stem and stage 1 (64 channels), the top stages 2
    to 4 (128, 256, 512) and the average pool.

    Source: He et al. 2016 (arXiv 1512.03385), table 1; cut in two as by FedHSSL (He et al. 2022, arXiv 2208.08934),
    table III. Size and stem are those of its authors' code.

    Args:
        image: (c, h, w), of any size.
        hidden: widths of fully connected layers (Linear-BatchNorm-ReLU) after the pool.
        cut: width of the cut layer, or None.
    """

    def __init__(self, image: tuple[int, int, int], hidden: Sequence[int] = (), cut: int | None = None) -> None:
        stem = (_Convolution(image[0], 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
        bottom = nn.Sequential(nn.Unflatten(1, image), _Resize(), *stem, *_build_stage(64, 64, 1))
        top = nn.Sequential(
            *_build_stage(64, 128, 2),
            *_build_stage(128, 256, 2),
            *_build_stage(256, 512, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            *build_dense(512, hidden, cut),
        )
        super().__init__(bottom, top, cut or [512, *hidden][-1])


class _Resize(nn.Module):
    """Images (B, c, h, w) -> (B, c, 32, 32), bilinear, with antialiasing."""

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[2:] == (SIDE, SIDE):
            return images
        return F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", antialias=True)


class _Convolution(nn.Conv2d):
    """A convolution without bias that keeps the size at stride 1, drawn for ReLU (He et al. 2015, arXiv 1502.01852)."""

    def __init__(self, before: int, after: int, kernel: int, stride: int) -> None:
        super().__init__(before, after, kernel, stride, padding=kernel // 2, bias=False)

    def reset_parameters(self) -> None:
        """Reinitialize the weights, N(0, 2 / (kernel area · outputs))."""
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class _Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, which is projected where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _Convolution(before, after, 3, stride),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            _Convolution(after, after, 3, 1),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(_Convolution(before, after, 1, stride), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self.shortcut(x))


def _build_stage(before: int, after: int, stride: int) -> tuple[nn.Module, ...]:
    return _Block(before, after, stride), _Block(after, after, 1)


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
        *layers, last = MLPBottom(layout.width, (64,) if spec.bottom is None else spec.bottom, cut or n_classes)
        return Encoder(nn.Sequential(*layers), last, cut or n_classes)
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
