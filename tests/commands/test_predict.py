"""What is asked of a trained classifier on the command line: predict, evaluate, export, inspect, compare."""

import json
import shutil

import numpy as np
import pytest
import torch

from siamesenorm.cli import main
from siamesenorm.data.images import open_images
from siamesenorm.lab.prediction import open_classifier, read_image
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve
from siamesenorm.train.trained import open_trained

from .refusals import one_sentence

SMALL = [
    "dim=16",
    "blocks=2",
    "heads=2",
    "ffn_dim=32",
    "batch_size=32",
    "warmup=4",
    "steps=30",
    "evaluation.every=30",
    "tensorboard=false",
    "peak_flops=1e12",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    assert train(resolve("deit-digits", SMALL), folder).state == "finished"
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Four test images as a stack and the first of them as a picture."""
    from PIL import Image

    folder, images = tmp_path_factory.mktemp("images"), open_images("digits", "test")
    np.save(folder / "four.npy", np.stack([images[n] for n in range(4)]))
    Image.fromarray(images[0][..., 0]).save(folder / "first.png")
    return folder


def test_predictions_are_the_models_probabilities_by_class(run, files, capsys):
    assert main(["predict", str(run), str(files / "four.npy"), str(files / "first.png"), "--json", "--top", "10"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [answer["image"].rpartition("/")[2] for answer in answers][3:] == ["four.npy[3]", "first.png"]
    for one, other in zip(answers[0]["classes"], answers[4]["classes"], strict=True):
        assert one == {"class": other["class"], "probability": pytest.approx(other["probability"], rel=1e-5)}
    images = torch.from_numpy(np.load(files / "four.npy")).permute(0, 3, 1, 2).float()
    chances = torch.softmax(open_trained(run).model((images / 255 - 0.3) / 0.37), 1)
    for answer, expected in zip(answers, chances, strict=False):
        found = {each["class"]: each["probability"] for each in answer["classes"]}
        assert [found[str(digit)] for digit in range(10)] == pytest.approx(expected.tolist(), abs=1e-5)
        assert list(found.values()) == sorted(found.values(), reverse=True)


def test_an_exported_file_predicts_as_its_run_does(run, files, tmp_path):
    assert main(["export", str(run), str(tmp_path / "model.safetensors"), "--to", "safetensors"]) == 0
    images = read_image(files / "four.npy")
    assert open_classifier(tmp_path / "model.safetensors")(images) == open_classifier(run)(images)


def test_a_run_without_exported_weights_predicts_from_its_checkpoint(run, files, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for name in ("weights.safetensors", "images.json"):
        (tmp_path / "run" / name).unlink()
    images = read_image(files / "four.npy")
    assert open_classifier(tmp_path / "run")(images) == open_classifier(run)(images)


def test_the_terminal_shows_the_likeliest_classes(run, files, capsys):
    assert main(["predict", str(run), str(files / "first.png"), "--top", "2"]) == 0
    shown = capsys.readouterr().out
    assert "first.png" in shown.replace("\n", "")
    assert shown.count("%") == 2


def test_evaluate_measures_a_run_again_with_its_classes(run, tmp_path, capsys):
    assert main(["evaluate", str(run), "--output", str(tmp_path / "found.json")]) == 0
    assert "what it was taken for" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    status = json.loads((run / "status.json").read_text())
    assert found["metrics"] == pytest.approx(status["evaluation"])
    assert np.trace(found["confusion"]) / 359 == pytest.approx(found["metrics"]["accuracy"])
    assert found["classes"]["by_class"].keys() == {str(digit) for digit in range(10)}


def test_evaluate_measures_a_run_of_language_as_the_run_did(tmp_path):
    small = ["data.train=arithmetic", "dim=16", "blocks=1", "ffn_dim=32", "steps=2", "warmup=0", "batch_size=4"]
    config = resolve("lm-tiny", [*small, "evaluation.every=2", "sequences=8", "tensorboard=false", "peak_flops=1e12"])
    result = train(config, tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), "-o", str(tmp_path / "found.json")]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["metrics"] == pytest.approx(result.evaluation)


def test_inspect_looks_into_a_classifier(run, capsys):
    assert main(["inspect", str(run), "--tokens", "170", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["source"]["images"] == 10
    assert found["source"]["image_set"] == "digits (test)"


def test_compare_shows_accuracy_beside_loss(tmp_path, capsys):
    small = [part for item in SMALL[:7] if not item.startswith("steps") for part in ("--set", item)]
    options = ["--topologies", "pre,siamese", "--lrs", "4e-3", "--seeds", "0", "--set", "steps=6"]
    arguments = ["compare", "--recipe", "deit-digits", *options, *small, "--set", "evaluation.every=6"]
    assert main([*arguments, "--out", str(tmp_path / "grid"), "--jobs", "1"]) == 0
    shown = capsys.readouterr().out
    assert "held-out loss" in shown
    assert "held-out accuracy" in shown
    assert "Held-out accuracy" in (tmp_path / "grid" / "report.html").read_text()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is not a file"),
        (b"no image", "is not a sound"),
        (np.zeros((4, 4)), "it takes uint8"),
        (np.zeros((2, 3, 4, 5), np.uint8), "it takes uint8"),
        (np.array([{}], dtype=object), "is not a sound NumPy file"),
    ],
)
def test_what_is_no_image_is_said_in_one_sentence(run, tmp_path, content, said, capsys):
    path = tmp_path / ("image.npy" if not isinstance(content, bytes) else "image.png")
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content, allow_pickle=True)
    assert said in one_sentence(["predict", str(run), str(path)], capsys)


def test_what_is_no_classifier_is_said_in_one_sentence(run, files, tmp_path, capsys):
    image = str(files / "first.png")
    (tmp_path / "noise.safetensors").write_bytes(b"noise")
    assert "cannot be read" in one_sentence(["predict", str(tmp_path / "noise.safetensors"), image], capsys)
    assert "is not a run" in one_sentence(["predict", str(tmp_path / "nowhere"), image], capsys)
    assert "it takes one of language" in one_sentence(["generate", str(run)], capsys)
    assert "it takes one of language" in one_sentence(["evaluate", str(run), "--tasks", "piqa"], capsys)
    assert "reads images" in one_sentence(["inspect", str(run), "--text", image], capsys)
