"""ResNet-18 at 32 x 32, FedHSSL's encoder of images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.nn.bottoms import Encoder, dense

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
        bottom = nn.Sequential(nn.Unflatten(1, image), _Resize(), *stem, *_stage(64, 64, 1))
        top = nn.Sequential(
            *_stage(64, 128, 2),
            *_stage(128, 256, 2),
            *_stage(256, 512, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            *dense(512, hidden, cut),
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


def _stage(before: int, after: int, stride: int) -> tuple[nn.Module, ...]:
    return _Block(before, after, stride), _Block(after, after, 1)
