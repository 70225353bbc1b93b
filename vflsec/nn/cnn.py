"""Encoder of small images that trains in seconds on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vflsec.nn.bottoms import Encoder, dense


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
        bottom = nn.Sequential(nn.Unflatten(1, image), *_convolution(image[0], 32, 1), *_convolution(32, 64, 2))
        pooled = 128 * 2 * 2
        top = nn.Sequential(
            *_convolution(64, 128, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), *dense(pooled, hidden, cut)
        )
        super().__init__(bottom, top, cut or [pooled, *hidden][-1])


def _convolution(before: int, after: int, stride: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()
