import numpy as np
import pytest
import torch

from siamesenorm.data.images import ArrayImages, open_images
from siamesenorm.data.images.loader import ImageLoader, TestImages, TrainingImages
from siamesenorm.data.images.timm_transforms import TimmTransform
from siamesenorm.data.images.transforms import CentreCrop, Scale, Shift
from siamesenorm.errors import DataError

from .files import some_pixels, write_folder

PLAIN = CentreCrop((8, 8), 1, Scale((0.0,), (1.0,)))


def numbered(count):
    """Images whose grey level is their number."""
    pixels = np.arange(count, dtype=np.uint8)[:, None, None, None].repeat(8, 1).repeat(8, 2)
    return ArrayImages("numbered", pixels, np.zeros(count, dtype=np.int64), ["only"])


def which(batch):
    return torch.round(batch["image"][:, 0, 4, 4] * 255).int().tolist()


def every(batches):
    """Numbers of the images that count."""
    return [number for batch in batches for number in counted(batch)]


def counted(batch):
    return [n for n, counts in zip(which(batch), batch.get("counted", [True] * 99), strict=False) if counts]


def training(count=20, transform=PLAIN, **options):
    return TrainingImages(numbered(count), transform, **options)


def take(loader, count):
    batches = [next(loader) for _ in range(count)]
    loader.close()
    return batches


def same(one, other):
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


def test_an_epoch_has_every_image_once_and_the_next_another_order():
    loader = ImageLoader(training(20), 5)
    first, second = (every(take(loader, 4)) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_labels_belong_to_their_images():
    images = open_images("digits", "train")
    batch = ImageLoader(TrainingImages(images, PLAIN), 32).make(0)
    for image, label in zip(batch["image"], batch["label"], strict=True):
        pixels = torch.round(image * 255).byte().numpy().transpose(1, 2, 0)
        assert int(label) in {images.label(n) for n in range(len(images)) if np.array_equal(images[n], pixels)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_from_any_sample_bit_by_bit(workers):
    data = TrainingImages(open_images("digits", "train"), Shift(PLAIN, 1, 0.5), seed=3)
    whole = take(ImageLoader(data, 12), 6)
    loader = ImageLoader(data, 12, workers=workers)
    take(loader, 2)
    assert loader.sample == 24
    resumed = ImageLoader(data, 12, sample=loader.sample, workers=workers)
    assert same(take(resumed, 4), whole[2:])
    resumed.seek(36)
    assert same(take(resumed, 2), whole[3:5])


def test_the_number_of_workers_changes_nothing_also_with_timm():
    images = ArrayImages("noise", some_pixels(9, 40, 40, 3), np.arange(9) % 2, ["a", "b"])
    transform = TimmTransform((24, 24), 3, Scale((0.5,) * 3, (0.5,) * 3))
    data = TrainingImages(images, transform, seed=1)
    assert same(take(ImageLoader(data, 4), 5), take(ImageLoader(data, 4, workers=2), 5))


@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_together_have_the_samples_of_one(world):
    data = TrainingImages(open_images("digits", "train"), Shift(PLAIN, 1), seed=3)
    (alone,) = take(ImageLoader(data, 16), 1)
    parts = [take(ImageLoader(data, 16, rank=rank, world_size=world), 1)[0] for rank in range(world)]
    for name in alone:
        assert torch.equal(torch.stack([part[name] for part in parts], dim=1).flatten(0, 1), alone[name])


def test_repeats_of_an_image_are_augmented_differently_and_go_to_different_ranks():
    data = TrainingImages(open_images("digits", "train"), Shift(PLAIN, 2), seed=3, repeats=3)
    numbers = data.numbers(np.arange(12, dtype=np.int64))
    assert len(set(numbers)) == 4
    assert (numbers.reshape(4, 3) == numbers[::3, None]).all()
    firsts = [ImageLoader(data, 12, rank=rank, world_size=3).make(0) for rank in range(3)]
    labels = [part["label"] for part in firsts]
    assert torch.equal(labels[0], labels[1])  # the same images, in the same places
    assert not torch.equal(firsts[0]["image"], firsts[1]["image"])


def test_with_repeats_an_epoch_is_as_long_and_has_a_third_of_the_images():
    data = training(21, repeats=3)
    first, second = data.numbers(np.arange(21)), data.numbers(np.arange(21, 42))
    assert len(set(first)) == len(set(second)) == 7
    assert set(first) != set(second)


def test_other_seeds_give_another_order_and_other_augmentation():
    one, other = (TrainingImages(numbered(20), PLAIN, seed=seed).numbers(np.arange(20)) for seed in (0, 1))
    assert list(one) != list(other)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_ends_training_with_its_name(tmp_path, workers):
    write_folder(tmp_path, some_pixels(4, 8, 8, 3), [0, 1, 0, 1], ("a", "b"))
    for file in tmp_path.rglob("*.png"):
        file.write_bytes(b"no image")
    loader = ImageLoader(TrainingImages(open_images(tmp_path, held_out=None), PLAIN), 2, workers=workers)
    with pytest.raises(DataError, match="is not a sound image") as error:
        next(loader)
    assert "\n" not in str(error.value)
    loader.close()


def test_held_out_images_come_once_over_all_ranks_in_order():
    data = TestImages(numbered(11), PLAIN)
    alone = every(data.batches(4))
    assert alone == list(range(11))
    assert every(TestImages(numbered(11), PLAIN, 3).batches(4)) == [0, 5, 10]
    for size, world_size in [(4, 2), (3, 2), (1, 4), (4, 16)]:
        ranks = [list(data.batches(size, rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert sorted(every(batch for batches in ranks for batch in batches)) == alone
        assert len({len(batches) for batches in ranks}) == 1  # a pass of a sharded model takes all ranks
        together = [batch["label"].tolist() for batch in data.batches(size)]
        assert all(batch["label"].tolist() in together for batches in ranks for batch in batches)


def test_a_batch_is_shared_evenly_as_far_as_it_can_be_and_refused_where_a_rank_has_nothing():
    shares = []
    for rank in range(3):
        loader = ImageLoader(training(), 4, rank=rank, world_size=3)
        shares.append(len(next(loader)["label"]))
        loader.close()
    assert shares == [2, 1, 1]
    with pytest.raises(DataError, match="global_batch_size: 2 is not allowed; it takes world_size 3 or more"):
        ImageLoader(training(), 2, world_size=3)
