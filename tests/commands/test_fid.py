"""``siamesenorm fid`` as people type it."""

import json

import numpy as np
import pytest
from tests.commands.refusals import one_sentence
from tests.tasks.fidelity.means import Means

from siamesenorm.cli import main
from siamesenorm.data.images import open_images
from siamesenorm.tasks.fidelity.features import FeatureNetwork


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Generated digits."""
    root = tmp_path_factory.mktemp("fid")
    images = open_images("digits", "test")
    np.savez(root / "made.npz", np.stack([images[number] for number in range(60)]))
    return root


@pytest.fixture(autouse=True)
def short_training(monkeypatch):
    from siamesenorm.tasks.fidelity import classifier

    monkeypatch.setattr(classifier, "LEAST_STEPS", 40)


def run(folder, *arguments, capsys):
    capsys.readouterr()
    assert main(["fid", *map(str, arguments), "--cache", str(folder / "cache")]) == 0
    return capsys.readouterr().out


def test_digits_beside_digits_in_the_features_of_a_classifier(folder, capsys):
    out = run(folder, folder / "made.npz", "digits", "--json", capsys=capsys)
    found = json.loads(out)
    assert found["features"] == "classifier"
    assert (found["images"], found["reference_images"]) == (60, 1438)
    assert "fid" not in found
    assert found["frechet"] >= 0
    assert len(found["notes"]) == 2
    table = run(folder, folder / "made.npz", "digits", capsys=capsys)
    assert "Fréchet distance (not FID)" in table
    assert "60 images: with fewer than 10,000" in " ".join(table.split())


def test_samples_that_name_their_classes_are_counted_as_recognised_or_not(folder, capsys, tmp_path):
    image = pytest.importorskip("PIL.Image")
    digits = open_images("digits", "test")
    pixels, labels = np.stack([digits[number] for number in range(60)]), digits.labels[:60]
    np.savez(tmp_path / "right.npz", pixels, labels)
    np.savez(tmp_path / "wrong.npz", pixels, (labels + 1) % 10)
    for number in range(60):
        (tmp_path / "folder" / str(labels[number])).mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels[number, ..., 0]).save(tmp_path / "folder" / str(labels[number]) / f"{number}.png")
    right, wrong, folders = (
        json.loads(run(folder, tmp_path / name, "digits", "--json", capsys=capsys))["accuracy"]
        for name in ("right.npz", "wrong.npz", "folder")
    )
    assert right > 0.2 > wrong
    assert folders == right
    assert "recognised as their class" in run(folder, tmp_path / "folder", "digits", capsys=capsys)
    assert "accuracy" not in json.loads(run(folder, folder / "made.npz", "digits", "--json", capsys=capsys))


def test_saved_statistics_give_the_same_figures_as_the_images(folder, capsys):
    stats = folder / "digits.safetensors"
    first = run(folder, folder / "made.npz", "digits", "--save-stats", stats, "--json", capsys=capsys)
    again = run(folder, folder / "made.npz", stats, "--classifier", "digits", "--json", capsys=capsys)
    assert json.loads(first) == json.loads(again)


def test_an_archive_of_statistics_has_precision_only_where_images_lie_beside_them(folder, capsys):
    stats, classifier = folder / "digits.npz", ("--classifier", "digits", "--json")
    first = json.loads(run(folder, folder / "made.npz", "digits", "--save-stats", stats, "--json", capsys=capsys))
    alone = json.loads(run(folder, folder / "made.npz", stats, *classifier, capsys=capsys))
    assert alone["frechet"] == first["frechet"]
    assert alone["precision"] is None
    assert "precision and recall are left out" in alone["notes"][-1]
    with np.load(stats) as file:
        np.savez(folder / "adm.npz", arr_0=np.load(folder / "made.npz")["arr_0"], **file)
    both = json.loads(run(folder, folder / "made.npz", folder / "adm.npz", *classifier, capsys=capsys))
    assert (both["frechet"], both["precision"]) == (first["frechet"], 1)


def test_inception_gives_all_five_figures(folder, capsys, monkeypatch):
    monkeypatch.setattr(
        "siamesenorm.tasks.fidelity.sources.load_inception", lambda *_: FeatureNetwork("inception", Means())
    )
    few = np.load(folder / "made.npz")["arr_0"]
    np.savez(folder / "one.npz", few[:5])
    np.savez(folder / "other.npz", few[5:10])
    weights = ("--weights", folder / "inception.pth", "--json")
    found = json.loads(run(folder, folder / "one.npz", folder / "other.npz", *weights, capsys=capsys))
    assert found["features"] == "inception"
    assert set(found) >= {"fid", "sfid", "inception_score", "precision", "recall"}
    assert found["fid"] > 0
    assert found["sfid"] > 0
    assert found["inception_score"] >= 1


def test_wrong_input_is_one_sentence(folder, capsys, tmp_path):
    made = str(folder / "made.npz")
    for arguments, words in (
        ((made, "nowhere"), "nowhere"),
        (("nowhere", "digits"), "a folder of images"),
        ((made, "digits", "--split", "dev"), "train, test"),
        ((made, "digits", "--weights", "missing.pth"), "pt_inception-2015-12-05-6726825d.pth"),
        ((made, made), "--classifier"),
        ((made, "digits", "--weights", "missing.pth", "--classifier", "digits"), "take one of them"),
        ((made, "digits", "--save-stats", str(tmp_path)), "--save-stats"),
        ((made, "digits", "--save-stats", str(tmp_path / "s.pt")), ".safetensors or .npz"),
        ((made, "digits", "--device", "abacus"), "device: 'abacus'"),
        ((made, "digits", "--cache", made), "--cache"),
    ):
        assert words in one_sentence(["fid", *arguments], capsys)
    assert not list(tmp_path.iterdir())
