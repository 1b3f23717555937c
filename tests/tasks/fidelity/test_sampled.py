"""The small classifier and what is measured in its features."""

import numpy as np
import pytest
import torch

from siamesenorm.data.images import ArrayImages, open_images
from siamesenorm.errors import DataError
from siamesenorm.models.fingerprint import weights_hash
from siamesenorm.tasks.fidelity import ClassifierFidelity
from siamesenorm.tasks.fidelity.classifier import SmallClassifier, classifier_for, train

STEPS = 120
"""Fewer than usual, to be quick."""


def arrays(images, count=None):
    chosen = range(len(images))[:count]
    return np.stack([images[number] for number in chosen]), images.labels[list(chosen)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def fidelity(cache):
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:  # inference: as evaluations call it
        patch.setattr("siamesenorm.tasks.fidelity.classifier.LEAST_STEPS", STEPS)
        made = ClassifierFidelity(open_images("digits", "train"), cache)
        assert made.network.name == "classifier"
    return made


def test_held_out_digits_are_recognised_and_near(fidelity):
    found = fidelity(*arrays(open_images("digits", "test")))
    assert found["accuracy"] > 0.97
    assert found["frechet"] < 0.2


def test_distance_grows_and_accuracy_falls_with_noise(fidelity):
    pixels, labels = arrays(open_images("digits", "test"))
    noise = np.random.default_rng(0).normal(size=pixels.shape)
    found = [fidelity(np.clip(pixels + level * noise, 0, 255).astype(np.uint8), labels) for level in (0, 40, 120)]
    distances, accuracies = ([entry[name] for entry in found] for name in ("frechet", "accuracy"))
    assert distances == sorted(distances)
    assert accuracies == sorted(accuracies, reverse=True)
    assert distances[-1] > 10 * distances[0]


def test_a_missing_class_is_seen_by_the_distance_alone(fidelity):
    pixels, labels = arrays(open_images("digits", "test"))
    some = labels < 5
    found, whole = fidelity(pixels[some], labels[some]), fidelity(pixels, labels)
    assert found["accuracy"] > 0.97
    assert found["frechet"] > 5 * whole["frechet"]


def test_images_of_three_channels_are_read_as_grey(fidelity):
    pixels, labels = arrays(open_images("digits", "test"), 50)
    assert fidelity(pixels.repeat(3, axis=3), labels) == pytest.approx(fidelity(pixels, labels), rel=1e-6)


def test_other_sizes_and_missing_labels_are_refused(fidelity):
    with pytest.raises(DataError, match="16 × 16 pixels are not allowed; the classifier takes 8 × 8"):
        fidelity(np.zeros((4, 16, 16, 1), np.uint8), [0, 1, 2, 3])
    with pytest.raises(DataError, match="3 for 4 samples"):
        fidelity(np.zeros((4, 8, 8, 1), np.uint8), [0, 1, 2])


def test_classifier_and_statistics_are_kept_and_made_again_when_damaged(cache, fidelity, monkeypatch):
    fidelity.reference  # noqa: B018
    expected = fidelity.network.fingerprint
    (kept,) = cache.glob("classifier-*.safetensors")
    (statistics,) = cache.glob("statistics-*.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr("siamesenorm.tasks.fidelity.classifier.LEAST_STEPS", STEPS)
        patch.setattr("siamesenorm.tasks.fidelity.classifier.train", None)
        again = ClassifierFidelity(open_images("digits", "train"), cache)
        assert again.network.fingerprint == expected
    statistics.write_bytes(b"damaged")
    assert torch.equal(again.reference.pool.mean, fidelity.reference.pool.mean)
    assert statistics.stat().st_size > 1000
    kept.write_bytes(b"damaged")
    called = []
    monkeypatch.setattr("siamesenorm.tasks.fidelity.classifier.LEAST_STEPS", STEPS)
    monkeypatch.setattr("siamesenorm.tasks.fidelity.classifier.train", lambda *parts: called.append(parts))
    classifier_for(open_images("digits", "train"), cache)
    assert called


def test_training_gives_the_same_weights_again_and_leaves_the_random_state_alone():
    images = open_images("digits", "train")
    hashes = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        module = SmallClassifier(1, 10, (8, 8))
        before = torch.get_rng_state()
        train(module, images, steps=3)
        assert torch.equal(torch.get_rng_state(), before)
        hashes.add(weights_hash(module))
    assert len(hashes) == 1


@pytest.mark.parametrize("size", [3, 8, 28, 64])
def test_every_size_of_image_has_a_classifier(size):
    pixels = np.random.default_rng(0).integers(0, 256, (6, size, size, 3), dtype=np.uint8)
    images = ArrayImages("random", pixels, np.arange(6) % 2, ["a", "b"])
    module = SmallClassifier(3, 2, (size, size))
    train(module, images, steps=1)
    found = module(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert found.pool.shape == (6, 64)
    assert found.logits.shape == (6, 2)
