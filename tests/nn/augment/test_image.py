"""Each change of an image is the one its name says, by as much as it says, and for each row its own."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vflsec.base.seeds import make_rng
from vflsec.nn.augmentation import ImageAugmentation

GREY, COLORS, WIDE = (1, 12, 8), (3, 16, 16), (2, 32, 32)
OFF = {"scale": (1.0, 1.0), "jitter_p": 0.0, "blur_p": 0.0, "flip_p": 0.0}
LUMA = torch.tensor([0.299, 0.587, 0.114])
YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])


def pixels(image, count=6, seed=0):
    """Standardized pixels."""
    return torch.randn(count, math.prod(image), generator=make_rng(seed, "pixels"))


def augmented(image, x, seed=0, **options):
    """One augmentation with everything off but ``options``."""
    return ImageAugmentation(image, **{**OFF, **options})(x, make_rng(seed))


def assert_uniform(values, low, high):
    """Pass uniform values; a range 10 % wider would not pass."""
    assert low - 1e-4 <= float(values.min()) <= float(values.max()) <= high + 1e-4
    assert stats.kstest(values.numpy(), "uniform", (low, high - low)).pvalue > 0.01
    assert stats.kstest(values.numpy(), "uniform", (low, 1.1 * (high - low))).pvalue < 1e-4


@pytest.mark.parametrize("image", [GREY, COLORS, (2, 5, 9), (1, 1, 1)])
class TestAny:
    def test_nothing_is_the_identity(self, image):
        x = pixels(image)
        torch.testing.assert_close(augmented(image, x), x, rtol=1e-5, atol=1e-5)

    def test_seeds_decide_and_nothing_else_is_touched(self, image):
        x = pixels(image)
        before, state = x.clone(), torch.get_rng_state()
        augment = ImageAugmentation(image)
        view, again, other = (augment(x, make_rng(seed)) for seed in (0, 0, 1))
        assert view.shape == x.shape
        assert torch.isfinite(view).all()
        assert torch.equal(view, again)
        assert image == (1, 1, 1) or not torch.equal(view, other)
        assert torch.equal(x, before)
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("count", [0, 1])
    def test_few_rows(self, image, count):
        x = pixels(image)[:count]
        view = ImageAugmentation(image)(x, make_rng(0))
        assert view.shape == x.shape
        assert count == 0 or view.data_ptr() != x.data_ptr()

    def test_units_and_origin_of_the_pixels_do_not_matter(self, image):
        """Standardized pixels and those in [0, 255] are altered alike."""
        x, augment = pixels(image), ImageAugmentation(image, grey_p=0.3)
        view, in_other_units = augment(x, make_rng(0)), augment(30 * x + 100, make_rng(0))
        torch.testing.assert_close(in_other_units, 30 * view + 100, rtol=1e-4, atol=1e-2)

    def test_rows_do_not_know_of_each_other(self, image):
        x = pixels(image)
        view = ImageAugmentation(image)(x, make_rng(0))
        x[2:] = 9
        torch.testing.assert_close(ImageAugmentation(image)(x, make_rng(0))[:2], view[:2])


@pytest.mark.parametrize("image", [GREY, COLORS])
def test_equal_rows_are_altered_differently(image):
    x = pixels(image, 1).expand(20, -1)
    assert len(ImageAugmentation(image)(x, make_rng(0)).unique(dim=0)) == 20


def test_pictures_of_224_pixels():
    x = pixels((3, 224, 224), 1)
    assert torch.isfinite(ImageAugmentation((3, 224, 224))(x, make_rng(0))).all()


def test_what_is_left_on_does_not_depend_on_what_is_off():
    x = pixels(GREY, 50)
    flips = augmented(GREY, x, flip_p=0.5)
    calm = augmented(GREY, x, flip_p=0.5, blur_p=1, sigma=(0.01, 0.01))  # a blur of no width
    torch.testing.assert_close(calm, flips, rtol=1e-5, atol=1e-5)


class TestFlip:
    def test_mirrors_left_and_right(self):
        x = pixels(COLORS)
        view = augmented(COLORS, x, flip_p=1)
        torch.testing.assert_close(view.view(-1, *COLORS), x.view(-1, *COLORS).flip(3), rtol=1e-5, atol=1e-5)

    def test_twice_is_the_identity(self):
        x = pixels(COLORS)
        twice = augmented(COLORS, augmented(COLORS, x, flip_p=1), flip_p=1)
        torch.testing.assert_close(twice, x, rtol=1e-5, atol=1e-5)

    def test_happens_as_often_as_it_is_said(self):
        x = pixels(GREY, 2000)
        flipped = (augmented(GREY, x, flip_p=0.2) - x).abs().amax(dim=1) > 1e-3
        assert stats.binomtest(int(flipped.sum()), 2000, 0.2).pvalue > 0.01


class TestCrop:
    def ramps(self, count, **options):
        """Where in [-1, 1] each pixel was taken from, across and down: each (B, 32), of which the middle is exact."""
        places = (2 * torch.arange(32) + 1) / 32 - 1
        ramps = torch.stack([places.expand(32, 32), places.view(32, 1).expand(32, 32)]).flatten()
        view = augmented(WIDE, ramps.expand(count, -1), **options).view(-1, *WIDE)
        return view[:, 0, 16], view[:, 1, :, 16]

    def parts(self, count=3000, **options):
        """Width and height of each crop, and its center across and down."""
        across, down = self.ramps(count, **options)
        width, height = ((ramp[:, 16] - ramp[:, 15]) * 16 for ramp in (across, down))
        return width, height, (across[:, 16] + across[:, 15]) / 2, (down[:, 16] + down[:, 15]) / 2

    def test_areas_are_uniform(self):
        width, height, _, _ = self.parts(scale=(0.3, 1.0))
        assert_uniform(width * height, 0.3, 1.0)

    def test_shapes_are_log_uniform(self):
        width, height, _, _ = self.parts(scale=(0.3, 0.5), ratio=(0.75, 4 / 3))
        assert_uniform((width / height).log(), -math.log(4 / 3), math.log(4 / 3))

    def test_crops_lie_within_the_image_and_anywhere_in_it(self):
        width, height, x, y = self.parts(scale=(0.3, 0.9))
        for share, center in ((width, x), (height, y)):
            assert float(share.max()) <= 1
            assert_uniform(center / (1 - share), -1, 1)

    def test_a_crop_that_no_ratio_fits_keeps_its_area(self):
        width, height, _, _ = self.parts(scale=(0.95, 0.95), ratio=(0.5, 2))
        torch.testing.assert_close(width * height, torch.full_like(width, 0.95), rtol=1e-3, atol=1e-3)
        assert float(width.max()) <= 1.0001
        assert float(height.max()) <= 1.0001

    def test_ratios_are_of_the_whole_image(self):
        """Half an image is cropped in the shape of half an image: nothing is stretched but by ``ratio``."""
        places = ((2 * torch.arange(28) + 1) / 28 - 1).view(28, 1).expand(28, 14).flatten()
        view = augmented((1, 28, 14), places.expand(50, -1), scale=(0.25, 0.25), ratio=(1, 1)).view(-1, 28, 14)
        torch.testing.assert_close((view[:, 14, 7] - view[:, 13, 7]) * 14, torch.full((50,), 0.5), rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"scale": (0.5, 1.1)}, "part of the image"),
            ({"scale": (0.0, 1.0)}, "part of the image"),
            ({"ratio": (1.5, 2.0)}, "be the whole image"),
        ],
    )
    def test_impossible_crops(self, options, expected):
        with pytest.raises(AssertionError, match=expected):
            ImageAugmentation(GREY, **options)


class TestColor:
    def jittered(self, image, jitter, count=3000, **options):
        x = pixels(image, count)
        view = augmented(image, x, jitter=jitter, **{"jitter_p": 1, **options})
        return x.view(-1, *image), view.view(-1, *image)

    def test_brightness_is_a_share_of_the_deviation(self):
        x, view = self.jittered(GREY, (0.3, 0, 0, 0))
        shift = (view - x).flatten(1) / x.flatten(1).std(dim=1, correction=0, keepdim=True)
        torch.testing.assert_close(shift, shift[:, :1].expand_as(shift), rtol=1e-3, atol=1e-5)
        assert_uniform(shift[:, 0], -0.3, 0.3)

    def test_contrast_stretches_about_the_mean(self):
        x, view = (images.flatten(1) for images in self.jittered(GREY, (0, 0.3, 0, 0)))
        torch.testing.assert_close(view.mean(dim=1), x.mean(dim=1), rtol=1e-3, atol=1e-5)
        factor = view.std(dim=1) / x.std(dim=1)
        assert_uniform(factor, 0.7, 1.3)
        mean = x.mean(dim=1, keepdim=True)
        torch.testing.assert_close(view, mean + factor.unsqueeze(1) * (x - mean), rtol=1e-3, atol=1e-4)

    def test_saturation_mixes_an_image_with_its_greyscale(self):
        x, view = self.jittered(COLORS, (0, 0, 0.3, 0))
        grey = torch.einsum("c,bchw->bhw", LUMA, x).unsqueeze(1)
        factor = ((view - grey) * (x - grey)).flatten(1).sum(dim=1) / (x - grey).square().flatten(1).sum(dim=1)
        assert_uniform(factor, 0.7, 1.3)
        torch.testing.assert_close(view, grey + factor.view(-1, 1, 1, 1) * (x - grey), rtol=1e-3, atol=1e-4)

    def test_hue_turns_the_chroma_and_keeps_the_light(self):
        x, view = (torch.einsum("dc,bchw->dbhw", YIQ, i) for i in self.jittered(COLORS, (0, 0, 0, 0.1)))
        torch.testing.assert_close(view[0], x[0], rtol=1e-3, atol=1e-4)
        before, after = torch.complex(x[1], x[2]), torch.complex(view[1], view[2])
        turn = after[:, 0, 0] / before[:, 0, 0]
        torch.testing.assert_close(turn.abs(), torch.ones_like(turn.abs()), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(after, before * turn.view(-1, 1, 1), rtol=1e-2, atol=1e-2)
        assert_uniform(turn.angle() / (2 * math.pi), -0.1, 0.1)

    @pytest.mark.parametrize("image", [GREY, (2, 6, 6)])
    def test_without_three_channels_there_is_no_chroma(self, image):
        x, view = self.jittered(image, (0, 0, 0.3, 0.1), 50, grey_p=1)
        torch.testing.assert_close(view, x, rtol=1e-5, atol=1e-5)

    def test_a_grey_image_shows_its_light_in_each_channel(self):
        x, view = self.jittered(COLORS, (0, 0, 0.3, 0.1), 50, grey_p=1)
        light = torch.einsum("c,bchw->bhw", LUMA, x).unsqueeze(1)
        torch.testing.assert_close(view, light.expand_as(view), rtol=1e-4, atol=1e-5)

    def test_jitter_and_greyscale_happen_as_often_as_is_said(self):
        x, view = self.jittered(COLORS, (0.3, 0.3, 0.3, 0.1), jitter_p=0.8)
        changed = (view - x).abs().flatten(1).amax(dim=1) > 1e-4
        assert stats.binomtest(int(changed.sum()), 3000, 0.8).pvalue > 0.01
        x, view = self.jittered(COLORS, (0, 0, 0, 0), grey_p=0.2)
        grey = view.var(dim=1).amax(dim=(1, 2)) < 1e-6
        assert stats.binomtest(int(grey.sum()), 3000, 0.2).pvalue > 0.01

    def test_jitter_and_greyscale_do_not_depend_on_each_other(self):
        x, view = self.jittered(COLORS, (0.3, 0, 0, 0), jitter_p=0.5, grey_p=0.2)
        light, seen = (torch.einsum("c,bchw->bhw", LUMA, images) for images in (x, view))
        brighter = (seen - light).abs().amax(dim=(1, 2)) > 1e-4
        grey = view.var(dim=1).amax(dim=(1, 2)) < 1e-6
        assert stats.binomtest(int((brighter & grey).sum()), 3000, 0.1).pvalue > 0.01

    def test_the_four_commute(self):
        """What one call does to colors, calls for each in turn do too."""
        x = pixels(COLORS, 20)
        at_once = augmented(COLORS, x, jitter=(0.3, 0.3, 0.3, 0.1), jitter_p=1)
        one_by_one = x
        for jitter in [(0.3, 0, 0, 0), (0, 0, 0, 0.1), (0, 0, 0.3, 0), (0, 0.3, 0, 0)]:
            one_by_one = augmented(COLORS, one_by_one, jitter=jitter, jitter_p=1)
        torch.testing.assert_close(one_by_one, at_once, rtol=1e-4, atol=1e-4)


class TestBlur:
    def point(self, side, sigma, blur_p=1.0, count=1):
        """What becomes of one bright pixel in the middle."""
        image = torch.zeros(count, 1, side, side)
        image[:, 0, side // 2, side // 2] = 1
        options = {"blur_p": blur_p, "sigma": (sigma, sigma)}
        return augmented((1, side, side), image.flatten(1), **options).view(-1, side, side)

    @pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
    def test_a_point_becomes_a_gaussian(self, sigma):
        weights = torch.tensor([math.exp(-0.5 * (i / sigma) ** 2) for i in (-1, 0, 1)])
        weights = weights / weights.sum()
        spot = self.point(20, sigma)[0]
        torch.testing.assert_close(spot[9:12, 9:12], torch.outer(weights, weights), rtol=1e-4, atol=1e-6)
        assert float(spot.sum()) == pytest.approx(1)

    @pytest.mark.parametrize(("side", "kernel"), [(8, 3), (32, 3), (64, 7), (100, 11)])
    def test_the_kernel_is_a_tenth_of_the_side(self, side, kernel):
        spot = self.point(side, 50.0)[0]
        assert int((spot > 1e-3).any(dim=0).sum()) == int((spot > 1e-3).any(dim=1).sum()) == kernel

    def test_an_even_image_stays_even_up_to_its_edge(self):
        x = torch.full((5, 96), 3.0)
        torch.testing.assert_close(augmented(GREY, x, blur_p=1), x)

    def test_all_channels_of_an_image_are_blurred_alike(self):
        grey = pixels((1, 16, 16), 20).repeat(1, 3)
        view = augmented(COLORS, grey, blur_p=0.5).view(-1, *COLORS)
        torch.testing.assert_close(view, view[:, :1].expand_as(view), rtol=1e-4, atol=1e-5)

    @given(st.integers(0, 2**20))
    def test_a_blur_only_calms(self, seed):
        x = pixels(COLORS, seed=seed)
        view = augmented(COLORS, x, blur_p=1, seed=seed)
        assert (view.amax(dim=1) <= x.amax(dim=1) + 1e-5).all()
        assert (view.std(dim=1) <= x.std(dim=1) + 1e-5).all()

    def test_deviations_are_uniform(self):
        image = torch.zeros(3000, 1, 9, 9)
        image[:, :, 4, 4] = 1
        view = augmented((1, 9, 9), image.flatten(1), blur_p=1, sigma=(0.4, 2.0)).view(-1, 9, 9)
        ratio = view[:, 4, 5] / view[:, 4, 4]  # exp(-1 / (2 sigma^2))
        assert_uniform((-0.5 / ratio.log()).sqrt(), 0.4, 2.0)

    def test_happens_as_often_as_is_said(self):
        blurred = self.point(8, 1.0, blur_p=0.3, count=2000)[:, 4, 4] < 0.9
        assert stats.binomtest(int(blurred.sum()), 2000, 0.3).pvalue > 0.01
