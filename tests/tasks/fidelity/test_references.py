"""Pictures and statistics on disk."""

import numpy as np
import pytest
import torch
from tests.tasks.fidelity.means import Means

from siamesenorm.errors import DataError
from siamesenorm.lab.sample_files import open_samples
from siamesenorm.tasks.fidelity.features import FeatureNetwork
from siamesenorm.tasks.fidelity.image_batches import of_array, open_pictures
from siamesenorm.tasks.fidelity.measure import cached_reference, compare, describe
from siamesenorm.tasks.fidelity.references import Reference, read_reference, write_reference
from siamesenorm.tasks.fidelity.statistics import Gaussian

PIXELS = np.random.default_rng(0).integers(0, 256, (11, 4, 5, 3), dtype=np.uint8)


def joined(pictures, size):
    return np.concatenate(list(pictures.batches(size)))


def test_an_archive_is_read_in_batches_without_holding_it(tmp_path):
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "made.npz", PIXELS, np.arange(11))
        pictures = open_pictures(tmp_path / "made.npz")
        assert pictures.count == 11
        assert [len(batch) for batch in pictures.batches(4)] == [4, 4, 3]
        assert np.array_equal(joined(pictures, 4), PIXELS)


def test_a_folder_is_read_with_its_subfolders_in_order_of_names(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "b").mkdir()
    for number, name in enumerate(("a.png", "b/0.png", "c.PNG")):
        image.fromarray(PIXELS[number]).save(tmp_path / name)
    image.fromarray(PIXELS[3][:3]).save(tmp_path / "d.png")
    (tmp_path / "notes.txt").write_text("no image")
    pictures = open_pictures(tmp_path)
    assert [batch.shape for batch in pictures.batches(8)] == [(3, 4, 5, 3), (1, 3, 5, 3)]
    assert np.array_equal(next(pictures.batches(8)), PIXELS[:3])
    before = pictures.fingerprint()
    image.fromarray(PIXELS[5]).save(tmp_path / "a.png")
    assert open_pictures(tmp_path).fingerprint() != before


def test_samples_written_by_class_are_read_back_with_their_classes_whatever_these_are_called(tmp_path):
    names, labels = ["bag", "t-shirt/top", "dress"], np.arange(11) % 3
    open_samples(tmp_path, labels, 11, names).write(0, PIXELS)
    pictures = open_pictures(tmp_path)
    order = np.concatenate([np.flatnonzero(labels == names.index(name)) for name in sorted(names)])
    assert np.array_equal(joined(pictures, 20), PIXELS[order])
    assert np.array_equal(pictures.labels(names), labels[order])
    assert pictures.labels(["bag", "dress"]) is None


def test_what_holds_no_pictures_is_refused_in_a_sentence(tmp_path):
    np.savez(tmp_path / "names.npz", other=PIXELS)
    np.savez(tmp_path / "floats.npz", PIXELS.astype(np.float32))
    np.savez(tmp_path / "objects.npz", np.array([{"a": 1}], dtype=object))
    (tmp_path / "text.npz").write_text("text")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("names.npz", "no array arr_0"),
        ("floats.npz", r"float32 \(11, 4, 5, 3\)"),
        ("objects.npz", "object"),
        ("text.npz", "no array arr_0"),
        ("empty", "holds no images"),
        ("missing", "is not allowed"),
    ):
        with pytest.raises(DataError, match=message):
            open_pictures(tmp_path / name)


def test_an_archive_that_ends_early_is_refused(tmp_path):
    import io
    import zipfile

    whole = io.BytesIO()
    np.save(whole, PIXELS)
    with zipfile.ZipFile(tmp_path / "cut.npz", "w") as archive:
        archive.writestr("arr_0.npy", whole.getvalue()[:-5])
    with pytest.raises(DataError, match="not what 783 bytes can hold"):
        joined(open_pictures(tmp_path / "cut.npz"), 4)


@pytest.mark.parametrize("ending", ["safetensors", "npz"])
def test_statistics_come_back_from_their_file(tmp_path, ending):
    network = FeatureNetwork("means", Means())
    made = describe(of_array(PIXELS), network).reference
    write_reference(tmp_path / f"s.{ending}", made)
    found = read_reference(tmp_path / f"s.{ending}")
    for side in ("pool", "spatial"):
        for one, other in zip(getattr(made, side), getattr(found, side), strict=True):
            assert torch.equal(one, other)
    if ending == "safetensors":
        assert torch.equal(found.features, made.features)
        assert (found.count, found.network) == (11, network.fingerprint)


def test_an_archive_of_statistics_is_one_that_adm_reads(tmp_path):
    write_reference(tmp_path / "s.npz", describe(of_array(PIXELS), FeatureNetwork("means", Means())).reference)
    with np.load(tmp_path / "s.npz", allow_pickle=False) as file:
        features = PIXELS.reshape(11, -1, 3).astype(np.float64).mean(1)
        np.testing.assert_allclose(file["mu"], features.mean(0), rtol=1e-6)
        np.testing.assert_allclose(file["sigma"], np.cov(features, rowvar=False), rtol=1e-5)
        spatial = PIXELS[:, 0, :, 0].astype(np.float64)
        np.testing.assert_allclose(file["mu_s"], spatial.mean(0))
        np.testing.assert_allclose(file["sigma_s"], np.cov(spatial, rowvar=False))


def test_damaged_statistics_are_refused(tmp_path):
    bad = Reference(Gaussian(torch.zeros(3).double(), torch.zeros(2, 2).double()))
    nan = Reference(Gaussian(torch.zeros(2).double(), torch.full((2, 2), torch.nan).double()))
    for reference, message in ((bad, r"\(3,\) and \(2, 2\)"), (nan, "not finite")):
        for ending in ("safetensors", "npz"):
            write_reference(tmp_path / f"s.{ending}", reference)
            with pytest.raises(DataError, match=message):
                read_reference(tmp_path / f"s.{ending}")
    np.savez(tmp_path / "objects.npz", mu=np.array([{}], dtype=object), sigma=np.zeros((1, 1)))
    (tmp_path / "text.safetensors").write_text("text")
    for name, message in (
        ("objects.npz", "is not a sound NumPy file"),
        ("text.safetensors", "cannot be read"),
        ("missing.safetensors", "is not a file"),
        ("missing.npz", "has no mu and sigma"),
    ):
        with pytest.raises(DataError, match=message):
            read_reference(tmp_path / name)


def test_statistics_of_another_network_are_refused():
    made = describe(of_array(PIXELS), FeatureNetwork("means", Means()))
    other = describe(of_array(PIXELS), FeatureNetwork("means", Means(2.0)))
    assert compare(made, made.reference).frechet == pytest.approx(0, abs=1e-9)
    with pytest.raises(DataError, match="another feature network"):
        compare(made, other.reference)


def test_statistics_are_computed_once_for_the_same_pictures_and_network(tmp_path):
    network = FeatureNetwork("means", Means())
    seen = []
    first = cached_reference(of_array(PIXELS), network, tmp_path, progress=seen.append)
    again = cached_reference(of_array(PIXELS), network, tmp_path, progress=seen.append)
    assert sum(seen) == 11
    assert torch.equal(first.pool.covariance, again.pool.covariance)
    cached_reference(of_array(PIXELS[:9]), network, tmp_path, progress=seen.append)
    cached_reference(of_array(PIXELS), FeatureNetwork("means", Means(2.0)), tmp_path, progress=seen.append)
    assert sum(seen) == 11 + 9 + 11


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path):
    (tmp_path / "file").write_text("")
    found = cached_reference(of_array(PIXELS), FeatureNetwork("means", Means()), tmp_path / "file")
    assert found.count == 11
