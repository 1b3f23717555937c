"""Latent folders: what is encoded comes back, interruptions change nothing, damage is found."""

import hashlib
import json

import numpy as np
import pytest

from siamesenorm.data.images import ArrayImages
from siamesenorm.data.images.loader import ImageLoader, TrainingImages
from siamesenorm.data.index import damaged_files
from siamesenorm.data.latents import is_latents, open_latents
from siamesenorm.data.latents.encoding import encode_images
from siamesenorm.data.latents.index import read_latent_index
from siamesenorm.errors import DataError


class Blocks:
    """An encoder whose latents are known: means of 2×2 pixels and their halves; the deviation is a tenth."""

    fingerprint = hashlib.sha256(b"blocks").hexdigest()
    channels, latent_channels, downscale, scale, shift = 1, 2, 2, 0.5, 3.0

    def __init__(self, fail_after=None):
        self.left, self.batches = fail_after, []

    def encode(self, images):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left = self.left and self.left - 1
        self.batches.append(len(images))
        mean = images[..., 0].astype(np.float32).reshape(len(images), 4, 2, 4, 2).mean((2, 4))
        means = np.stack([mean, mean / 2], axis=1)
        return np.concatenate([means, np.full_like(means, 0.1)], axis=1)


def images(count, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)
    return ArrayImages("made", pixels, np.arange(count) % 3, ["a", "b", "c"])


SPLITS = {"train": images(11, 0), "test": images(4, 1)}
SETTINGS = {"size": 8, "flip": True, "batch": 3, "shard_images": 4}


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path):
    encode_images(SPLITS, Blocks(), tmp_path / "latents", **SETTINGS)
    return tmp_path / "latents"


def test_latents_are_those_of_the_encoder_scaled_and_in_order(folder):
    latents = open_latents(folder, "test")
    assert (len(latents), latents.channels, latents.size) == (4, 2, (4, 4))
    assert latents.class_names == ("a", "b", "c")
    assert latents.labels.tolist() == SPLITS["test"].labels.tolist()
    pixels = np.stack([SPLITS["test"][number] for number in range(4)])
    expected = (Blocks().encode(pixels)[:, :2] - 3.0) * 0.5
    fixed = latents.transform(random=False)
    found = np.stack([fixed(latents[number], np.random.default_rng(0)) for number in range(4)])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    train = open_latents(folder)
    assert [len(array) for array in train.arrays] == [4, 4, 3]
    assert all(isinstance(array, np.memmap) for array in train.arrays)
    last = train.transform(random=False)(train[10], np.random.default_rng(0))
    np.testing.assert_allclose(last, (Blocks().encode(SPLITS["train"][10][None])[0, :2] - 3.0) * 0.5, rtol=1e-6)


def test_a_sample_is_a_draw_of_the_posterior_and_of_both_views(folder):
    latents = open_latents(folder)
    draw, generator = latents.transform(flip=0.5), np.random.default_rng(0)
    drawn = np.stack([draw(latents[0], generator) for _ in range(4000)]) / 0.5 + 3.0
    views = latents[0][:, :2]
    nearest = np.abs(drawn[:, None] - views).sum((2, 3, 4)).argmin(1)
    assert nearest.mean() == pytest.approx(0.5, abs=0.05)
    assert (drawn - views[nearest]).std() == pytest.approx(0.1, abs=0.002)
    mirrored = Blocks().encode(SPLITS["train"][0][None, :, ::-1])[0, :2]
    np.testing.assert_allclose(views[1], mirrored, rtol=1e-6)


def test_an_interrupted_encoding_goes_on_and_ends_with_the_same_bytes(folder, tmp_path):
    out = tmp_path / "again"
    encoder = Blocks(fail_after=5)
    with pytest.raises(KeyboardInterrupt):
        encode_images(SPLITS, encoder, out, **SETTINGS)
    with pytest.raises(DataError, match="unfinished"):
        open_latents(out)
    rest = Blocks()
    encode_images(SPLITS, rest, out, **SETTINGS)
    assert sum(rest.batches) == 2 * (15 - 4)
    assert files(out) == files(folder)


def test_damage_is_found_and_mended_by_encoding_again(folder):
    before = files(folder)
    path = folder / "train-00001.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    indexed = list(read_latent_index(folder).files())
    assert (damaged_files(folder, indexed), len(indexed)) == (["train-00001.npy"], 8)
    mend = Blocks()
    encode_images(SPLITS, mend, folder, **SETTINGS)
    assert sum(mend.batches) == 2 * 4
    assert files(folder) == before
    (folder / "test-00000.npy").unlink()
    with pytest.raises(DataError, match="damaged or missing"):
        open_latents(folder, "test")


def test_other_work_in_the_folder_is_left_alone_unless_told(folder):
    before = files(folder)
    with pytest.raises(DataError, match="holds other work"):
        encode_images(SPLITS, Blocks(), folder, **{**SETTINGS, "flip": False})
    assert files(folder) == before
    encode_images({"train": images(3, 2), "test": images(2, 3)}, Blocks(), folder, size=8, overwrite=True)
    assert len(open_latents(folder)) == 3
    assert {name for name in files(folder) if name.startswith("train")} == {"train-00000.npy", "train-00000-labels.npy"}


def test_a_folder_of_other_things_is_not_written_to(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train-00000.npy").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(DataError, match=r"holds other files, such as 'train-00000\.npy'"):
            encode_images(SPLITS, Blocks(), tmp_path / "out", **SETTINGS, overwrite=overwrite)
    assert files(tmp_path / "out") == {"train-00000.npy": b"mine"}


def test_half_precision_halves_the_files(folder, tmp_path):
    encode_images(SPLITS, Blocks(), tmp_path / "half", **SETTINGS, dtype="float16")
    small, large = open_latents(tmp_path / "half"), open_latents(folder)
    assert small[5].nbytes * 2 == large[5].nbytes
    np.testing.assert_allclose(small[5], large[5], rtol=1e-3)
    assert small.fingerprint != large.fingerprint


def test_what_cannot_be_is_refused(folder, tmp_path):
    with pytest.raises(DataError, match="multiple of 2"):
        encode_images(SPLITS, Blocks(), tmp_path / "odd", size=9)
    assert not (tmp_path / "odd").exists()
    encode_images(SPLITS, Blocks(), tmp_path / "plain", size=8)
    with pytest.raises(DataError, match="encoded again with --flip"):
        open_latents(tmp_path / "plain").transform(flip=0.5)
    with pytest.raises(DataError, match="not a folder of latents"):
        open_latents(tmp_path)
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "views": 3}))
    with pytest.raises(DataError, match="damaged at views"):
        open_latents(folder)
    assert is_latents(folder)
    assert not is_latents(tmp_path)


def test_a_loader_reads_latents_as_it_reads_images(folder):
    latents = open_latents(folder)
    data = TrainingImages(latents, latents.transform(flip=0.5), seed=3)
    batches = [next(ImageLoader(data, 4, rank=0, world_size=1, sample=8)) for _ in range(2)]
    assert batches[0]["image"].shape == (4, 2, 4, 4)
    assert np.array_equal(batches[0]["image"].numpy(), batches[1]["image"].numpy())
