"""Augmentations: seeded random changes of rows that keep their meaning."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.checks import share
from vflsec.base.layout import Layout

YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))  # of red, green and blue


@dataclass
class ImageAugmentation:
    """Random resized crop, color jitter, Gaussian blur and horizontal flip of flat pixels.

    Pixels may be standardized: there is no black and no white to refer to. So brightness moves an image by a share of
    its own deviation, contrast stretches it about its own mean, and nothing is clipped; an affine change of all pixels
    gives the same change of the result. Saturation and hue stretch and turn the chroma of YIQ. The four commute, so
    that they need no random order. An image without three channels has no chroma.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), section V-A; the defaults are those of its authors' code. That
    of MoCo v1 (He et al. 2020, arXiv 1911.05722), which SS-VFL takes over, is ``scale=(0.2, 1), jitter=(0.4, 0.4, 0.4,
    0.4), jitter_p=1, grey_p=0.2, blur_p=0``.

    Args:
        image: (c, h, w).
        scale: least and largest area of a crop, as a share of the image's.
        ratio: least and largest width of a crop over its height, both as shares of the image's; 1 is among them.
        jitter: largest change of brightness, contrast and saturation, as shares, and of hue, as a share of the circle.
        jitter_p: probability in [0, 1] that a row is jittered.
        grey_p: that it loses its colors.
        blur_p: that it is blurred.
        sigma: least and largest deviation of the blur in pixels; its kernel is a tenth of the shorter side, at least 3.
        flip_p: probability that a row is mirrored.
    """

    image: tuple[int, int, int]
    scale: tuple[float, float] = (0.3, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    jitter: tuple[float, float, float, float] = (0.3, 0.3, 0.3, 0.1)
    jitter_p: float = 0.8
    grey_p: float = 0.0
    blur_p: float = 0.5
    sigma: tuple[float, float] = (0.1, 2.0)
    flip_p: float = 0.5

    def __post_init__(self) -> None:
        """Check the sizes of crops."""
        assert 0 < self.scale[0] <= self.scale[1] <= 1, "a crop is a part of the image"
        assert 0 < self.ratio[0] <= 1 <= self.ratio[1], "a crop can be the whole image"

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return altered copies of rows (B, c·h·w)."""
        if not len(x):  # a grouped convolution needs a group
            return x.clone()
        # The same number of draws whatever is switched off, so that the other changes stay the same.
        draws = torch.rand(13, len(x), generator=generator, device=x.device, dtype=x.dtype)
        images = x.reshape(-1, *self.image)
        images = self._crop(images, *draws[:4])
        images = self._color(images, draws[4] < self.jitter_p, draws[5] < self.grey_p, 2 * draws[6:10] - 1)
        images = self._blur(images, draws[10] < self.blur_p, draws[11])
        flipped = _spread(draws[12] < self.flip_p)
        return torch.where(flipped, images.flip(3), images).flatten(1)

    def _crop(self, images: Tensor, area: Tensor, ratio: Tensor, left: Tensor, top: Tensor) -> Tensor:
        """Enlarge a part of each image to full size; all but the images are U(0, 1) of shape (B,)."""
        area = _interpolate(*self.scale, area)
        least = area.clamp(min=self.ratio[0]).log()  # beyond these a side of the crop would exceed the image's
        most = area.reciprocal().clamp(max=self.ratio[1]).log()
        ratio = torch.lerp(least, most, ratio).exp()
        width, height = (area * ratio).sqrt(), (area / ratio).sqrt()  # shares of the image's, at most 1
        _, h, w = self.image
        across = _place_pixels(width, left, w).unsqueeze(1).expand(-1, h, -1)
        down = _place_pixels(height, top, h).unsqueeze(2).expand(-1, -1, w)
        grid = torch.stack([across, down], dim=3)  # (B, h, w, 2)
        return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)

    def _color(self, images: Tensor, jittered: Tensor, gray: Tensor, change: Tensor) -> Tensor:
        """Jitter where ``jittered`` (B,), drop colors where ``gray``; ``change`` is U(-1, 1) of shape (4, B)."""
        brightness, contrast, saturation, hue = change * change.new_tensor(self.jitter).unsqueeze(1) * jittered
        if self.image[0] == 3:
            to_yiq = images.new_tensor(YIQ)
            rotation = _turn_chroma(torch.where(gray, 0, 1 + saturation), 2 * math.pi * hue)
            images = torch.einsum("bdc,bchw->bdhw", torch.linalg.inv(to_yiq) @ rotation @ to_yiq, images)
            light = torch.einsum("c,bchw->bhw", to_yiq[0], images)
        else:
            light = images
        mean = light.flatten(1).mean(dim=1)
        deviation = (light.flatten(1) - mean.unsqueeze(1)).square().mean(dim=1).sqrt()
        return (images - _spread(mean)) * _spread(1 + contrast) + _spread(mean + brightness * deviation)

    def _blur(self, images: Tensor, blurred: Tensor, sigma: Tensor) -> Tensor:
        """Blur where ``blurred`` (B,), by deviations that ``sigma``, U(0, 1) of shape (B,), chooses."""
        reach = max(1, min(self.image[1:]) // 20)
        offsets = torch.arange(-reach, reach + 1, device=images.device, dtype=images.dtype)
        deviation = _interpolate(*self.sigma, sigma).unsqueeze(1)
        kernel = torch.softmax(-0.5 * (offsets / deviation).square(), dim=1)  # (B, k)
        kernel = torch.where(blurred.unsqueeze(1), kernel, (offsets == 0).to(kernel))
        kernels = kernel.repeat_interleave(images.shape[1], dim=0)[:, None, None]  # (B·c, 1, 1, k)
        planes = F.pad(images, [reach] * 4, mode="replicate").flatten(0, 1)  # each with a kernel of its own
        planes = F.conv2d(F.conv2d(planes, kernels, groups=len(planes)), kernels.mT, groups=len(planes))
        return planes.view_as(images)


def _interpolate(low: float, high: float, share: Tensor) -> Tensor:
    return low + (high - low) * share


def _place_pixels(share: Tensor, place: Tensor, count: int) -> Tensor:
    """Return ``count`` pixel centers (B, count) on a part of the side [-1, 1], of a share and a place in [0, 1]."""
    centers = (2 * torch.arange(count, device=share.device, dtype=share.dtype) + 1) / count - 1
    return torch.outer(share, centers) + ((2 * place - 1) * (1 - share)).unsqueeze(1)


def _spread(values: Tensor) -> Tensor:
    """One value for each image: (B,) -> (B, 1, 1, 1)."""
    return values.view(-1, 1, 1, 1)


def _turn_chroma(saturation: Tensor, angle: Tensor) -> Tensor:
    """Return (B, 3, 3), which keep the first coordinate, stretch the others by ``saturation`` and rotate them."""
    real, imaginary = saturation * angle.cos(), saturation * angle.sin()
    nothing, unit = torch.zeros_like(angle), torch.ones_like(angle)
    rows = [unit, nothing, nothing, nothing, real, -imaginary, nothing, imaginary, real]
    return torch.stack(rows, dim=1).view(-1, 3, 3)


class ColumnChoice:
    """For each row, round(rate · n) of the n raw columns, without replacement.

    | case | result |
    |---|---|
    | rate = 0, or so small that it rounds to no column | nothing is chosen |
    | rate = 1 | every column is chosen |

    Args:
        layout: of the party's matrix.
        rate: share of the raw columns, 0 to 1.
        device: of the rows.

    Attributes:
        columns: n.
        owner: (d,) the raw column that each encoded column belongs to.

    Raises:
        UsageError: a rate outside [0, 1].
    """

    def __init__(self, layout: Layout, rate: float, device: torch.device) -> None:
        share(rate=rate)
        self.columns = len(layout.columns)
        owners = [j for j, column in enumerate(layout.columns) for _ in range(column.width)]
        self.owner = torch.tensor(owners, device=device)
        self._count = round(rate * self.columns)

    def __call__(self, rows: int, generator: torch.Generator) -> Tensor:
        """Return a mask (rows, d), true where a row's encoded column belongs to one of the chosen."""
        draws = torch.rand(rows, self.columns, generator=generator, device=self.owner.device)
        largest = draws.topk(self._count, dim=1, sorted=False).indices
        chosen = torch.zeros_like(draws, dtype=torch.bool).scatter_(1, largest, True)  # (rows, n)
        return chosen.index_select(1, self.owner)


class ScarfCorruption:
    """Replaces some raw columns of each row by draws from their empirical marginal distributions.

    Each value is that of a random reference row, drawn anew for each column. A category's one-hot block moves as a
    whole: what is corrupted is the category, not its embedding. A drawn value can equal the one it replaces.

    Source: Scarf (Bahri et al. 2022, arXiv 2106.15147), algorithm 1, with its rate of 0.6; VFLHLP, section 4.2.

    Args:
        layout: of the party's matrix.
        reference: (n, d) training rows, n >= 1.
        rate: share of the raw columns, rounded to whole columns.

    Raises:
        UsageError: a rate outside [0, 1].
    """

    def __init__(self, layout: Layout, reference: Tensor, rate: float = 0.6) -> None:
        assert reference.shape == (len(reference), layout.width), "the reference has another width than its layout"
        self._chosen = ColumnChoice(layout, rate, reference.device)
        self._reference = reference

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return corrupted copies of rows (B, d)."""
        chosen = self._chosen(len(x), generator)
        drawn = (len(x), self._chosen.columns)
        donors = torch.randint(len(self._reference), drawn, generator=generator, device=x.device)
        return torch.where(chosen, self._reference.gather(0, donors.index_select(1, self._chosen.owner)), x)


class UniformCorruption:
    """Replaces some raw columns of each row: a number by U(min, max) of its column, a category by the mask.

    The mask is the first slot of a one-hot block, which no training row uses.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), section V-A: "30 % features are distorted by replacing the
    original value with a random value". The distribution and the mask are those of the authors' code; the paper leaves
    the embedding of the mask untrained, here it is trained like any other.

    | case | result |
    |---|---|
    | a number constant in the reference | that constant |

    Args:
        layout: of the party's matrix.
        reference: (n, d) training rows, n >= 1, for the ranges.
        rate: share of the raw columns, rounded to whole columns.

    Raises:
        UsageError: a rate outside [0, 1].
    """

    def __init__(self, layout: Layout, reference: Tensor, rate: float = 0.3) -> None:
        assert reference.shape == (len(reference), layout.width), "the reference has another width than its layout"
        self._chosen = ColumnChoice(layout, rate, reference.device)
        self._low, self._high = reference.amin(dim=0), reference.amax(dim=0)  # (d,)
        for column in layout.columns:
            if column.kind == "categorical":
                for bound in (self._low, self._high):
                    bound[column.start : column.start + column.width] = 0
                    bound[column.start] = 1

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return corrupted copies of rows (B, d)."""
        chosen = self._chosen(len(x), generator)
        share = torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        return torch.where(chosen, torch.lerp(self._low, self._high, share), x)


__all__ = ["ImageAugmentation", "ScarfCorruption", "TwoViews", "UniformCorruption", "make_two_views"]

TwoViews = Callable[[Tensor, torch.Generator], tuple[Tensor, Tensor]]


def make_two_views(layout: Layout, reference: Tensor) -> TwoViews:
    """Return what makes two views of rows: of images two alterations, of a table the rows themselves and a corruption.

    Corruption draws from the ``reference`` (n, d), n >= 1, of training rows.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), the authors' code.
    """
    if layout.image:
        alter = ImageAugmentation(layout.image)
        return lambda x, generator: (alter(x, generator), alter(x, generator))
    corrupt = UniformCorruption(layout, reference)
    return lambda x, generator: (x, corrupt(x, generator))
