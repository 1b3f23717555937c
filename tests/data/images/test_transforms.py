import random

import numpy as np
import pytest
import torch

from siamesenorm.data.images.timm_transforms import TimmTransform, import_timm
from siamesenorm.data.images.transforms import CentreCrop, Scale, Shift
from siamesenorm.data.seeding import seeded
from siamesenorm.errors import DataError

from .files import some_pixels

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def generator(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("size", [(50, 70), (70, 50), (31, 31), (200, 33)])
@pytest.mark.parametrize(("side", "share"), [(28, 0.875), (32, 1.0), (16, 0.9)])
def test_evaluation_sees_the_same_pixels_as_with_timm(size, side, share):
    data = import_timm("timm.data", "the test")
    from PIL import Image

    image = some_pixels(1, *size, 3, seed=side)[0]
    theirs = data.create_transform(
        (3, side, side), is_training=False, interpolation="bicubic", crop_pct=share, mean=MEAN, std=STD
    )(Image.fromarray(image))
    ours = CentreCrop((side, side), 3, Scale(MEAN, STD), share)(image, generator())
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-6)


def test_an_image_of_the_right_size_is_only_scaled():
    image = some_pixels(1, 8, 8, 1)[0]
    seen = CentreCrop((8, 8), 1, Scale((0.5,), (0.25,)))(image, generator())
    np.testing.assert_allclose(seen[0], (image[..., 0] / 255 - 0.5) / 0.25, atol=1e-6)


def test_grey_images_can_be_seen_in_colour_and_colour_in_grey():
    scale = Scale((0.0,) * 3, (1.0,) * 3)
    grey = some_pixels(1, 8, 8, 1)[0]
    assert np.ptp(CentreCrop((8, 8), 3, scale)(grey, generator()), axis=0).max() == 0
    red = np.zeros((8, 8, 3), dtype=np.uint8)
    red[..., 0] = 255
    assert CentreCrop((8, 8), 1, Scale((0.0,), (1.0,)))(red, generator())[0, 0, 0] == pytest.approx(76 / 255)


def test_a_shift_moves_an_image_by_each_of_its_places_and_fills_with_black():
    image = np.zeros((5, 5, 1), dtype=np.uint8)
    image[2, 2] = 255
    shift, draws = Shift(CentreCrop((5, 5), 1, Scale((0.0,), (1.0,))), 1), generator()
    places = {tuple(np.argwhere(shift(image, draws)[0])[0]) for _ in range(200)}
    assert places == {(row, column) for row in (1, 2, 3) for column in (1, 2, 3)}


def test_a_mirror_image_comes_with_its_probability():
    image = np.zeros((4, 4, 1), dtype=np.uint8)
    image[:, 0] = 255
    shift, draws = Shift(CentreCrop((4, 4), 1, Scale((0.0,), (1.0,))), 0, flip=0.25), generator()
    mirrored = sum(shift(image, draws)[0, 0, 3] == 1 for _ in range(1000))
    assert 200 < mirrored < 300


def test_timm_augments_by_the_given_generator_alone_and_leaves_global_ones_as_they_were():
    transform = TimmTransform((24, 24), 3, Scale(MEAN, STD))
    image = some_pixels(1, 40, 40, 3)[0]
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    first = transform(image, generator(1))
    after = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    assert after == (random.random(), np.random.rand(), torch.rand(()).item())
    np.testing.assert_array_equal(first, transform(image, generator(1)))
    assert not np.array_equal(first, transform(image, generator(2)))
    assert first.shape == (3, 24, 24)


def test_timm_augments_grey_images_too():
    seen = TimmTransform((28, 28), 1, Scale((0.5,), (0.5,)))(some_pixels(1, 28, 28, 1)[0], generator())
    assert seen.shape == (1, 28, 28)


def test_erasing_is_honoured():
    image = np.full((40, 40, 3), 128, dtype=np.uint8)
    settings = {"rand_augment": None, "color_jitter": 0.0}
    kept = TimmTransform((40, 40), 3, Scale(MEAN, STD), erasing=0.0, **settings)(image, generator())
    erased = TimmTransform((40, 40), 3, Scale(MEAN, STD), erasing=1.0, **settings)(image, generator())
    assert np.ptp(kept, axis=(1, 2)).max() < 1e-6
    assert np.ptp(erased, axis=(1, 2)).min() > 1


def test_an_unknown_policy_is_refused_in_one_sentence():
    with pytest.raises(DataError, match=r"data.rand_augment: 'nonsense-policy' is not allowed"):
        TimmTransform((24, 24), 3, Scale(MEAN, STD), rand_augment="nonsense-policy")


def test_a_block_of_seeded_draws_is_the_same_each_time():
    def draws():
        with seeded(11):
            return random.random(), np.random.rand(), torch.rand(()).item()

    assert draws() == draws()
