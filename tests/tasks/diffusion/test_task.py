"""The diffusion task in the training engine: what is learnt, resumed, measured and refused."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.data.images.files import some_pixels, write_folder

from siamesenorm.errors import ConfigError
from siamesenorm.lab.report.records import read_run
from siamesenorm.tasks import find_task
from siamesenorm.tasks.base import Ranks
from siamesenorm.tasks.diffusion.data import to_bytes
from siamesenorm.train.folder import WEIGHTS, read_metrics
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import recipe_names, resolve
from siamesenorm.train.trained import open_trained
from train.small_runs import train_until

from .small_runs import tiny


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where the classifier of the digits is kept, which some tests need and the first of them trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def make_task(*overrides):
    config = tiny(*overrides)
    return find_task("diffusion")(config)


def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    config = tiny("checkpoint.every=2")
    train(config, tmp_path / "whole")
    train_until(5, config, tmp_path / "killed")
    assert train(config, tmp_path / "killed").state == "finished"

    def losses(name):
        return [(record["step"], record["loss"]) for record in read_metrics(tmp_path / name) if "loss" in record]

    assert losses("killed") == losses("whole")
    one, other = (load_file(tmp_path / name / WEIGHTS) for name in ("whole", "killed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "how",
    [
        ["diffusion.schedule=linear"],
        ["diffusion.prediction=velocity"],
        ["diffusion.prediction=flow", "learn_sigma=false"],
        ["learn_sigma=false"],
    ],
)
def test_a_small_model_learns_whatever_it_predicts(how, tmp_path):
    result = train(tiny("steps=40", "lr=5e-3", "batch_size=32", "evaluation.every=40", *how), tmp_path / "run")
    first = next(record for record in read_metrics(tmp_path / "run") if "loss" in record)
    assert result.evaluation["mse"] < 0.9 * first.get("mse", first["loss"])


def test_held_out_losses_are_on_fixed_noise_and_their_quarters_make_the_whole(tmp_path):
    result = train(tiny("evaluation.every=6", "evaluation.at_once=100"), tmp_path / "run")
    metrics = result.evaluation
    assert metrics["loss"] == pytest.approx(metrics["mse"] + metrics["vlb"])
    quarters = [metrics[f"mse/quarter_{k}"] for k in (1, 2, 3, 4)]
    assert np.mean(quarters) == pytest.approx(metrics["mse"], rel=0.01)
    task, model = make_task("evaluation.every=6"), open_trained(tmp_path / "run").model
    whole = {"rank": 0, "world_size": 1, "average": lambda values: values, "final": False}
    again = task.evaluate(model, Ranks(**whole))
    assert again["mse"] == pytest.approx(metrics["mse"], rel=1e-4)
    assert task.evaluate(model, Ranks(**whole)) == again
    parts = [task.evaluate(model, Ranks(**{**whole, "rank": rank, "world_size": 2})) for rank in (0, 1)]
    assert np.mean([part["mse"] for part in parts]) == pytest.approx(again["mse"], rel=0.01)


def test_samples_are_compared_with_the_training_images(tmp_path, cache):
    sampled = ("evaluation.every=6", "evaluation.samples=20", "sampling_steps=2")
    result = train(tiny(*sampled), tmp_path / "run")
    assert result.evaluation["frechet"] > 0
    assert 0 <= result.evaluation["sample_accuracy"] <= 1
    assert set(result.evaluation) == set(make_task(*sampled).measures())
    assert make_task(*sampled).held_out_sizes() == {"images": 359, "samples": 20}


# Collapse -------------------------------------------------------------------------------------------------

BLIND = {
    "epsilon": (),
    "velocity": ("diffusion.prediction=velocity",),
    "flow": ("diffusion.prediction=flow", "learn_sigma=false"),
}
LONGER = ("steps=60", "history=5", "warmup=5", "train.batch_size=32", "schedule.kind=constant")


@pytest.mark.parametrize("prediction", BLIND)
def test_chance_is_the_loss_of_the_mean_picture_and_no_noise(prediction):
    task = make_task(*BLIND[prediction])
    batch = task.data.batch(np.arange(1000, dtype=np.int64))
    kept = task.process.schedule.kept[(batch["time"] * 1000).long()].float().view(-1, 1, 1, 1)
    clean, noise = batch["image"], batch["noise"]
    target = {
        "epsilon": noise,
        "velocity": kept.sqrt() * noise - (1 - kept).sqrt() * clean,
        "flow": noise - clean,
    }[prediction]
    known = {"epsilon": 0.0, "velocity": -(1 - kept).sqrt() * clean.mean(0), "flow": -clean.mean(0)}[prediction]
    assert task.chance_loss() == pytest.approx(float(((target - known) ** 2).mean()), abs=0.03)
    assert task.chance_loss() < float((target**2).mean()) + 0.03  # no worse than predicting zero


@pytest.mark.parametrize("prediction", BLIND)
def test_a_run_that_stays_at_its_trivial_loss_has_diverged(tmp_path, prediction):
    result = train(tiny(*LONGER, *BLIND[prediction], "lr=1e-12"), tmp_path / "run")
    assert result.state == "diverged"
    assert result.message.endswith("is what a prediction that does not look at its input gives")


def test_a_run_that_collapses_under_its_learning_rate_has_diverged(tmp_path):
    """For real: its loss explodes, comes back to that of predicting nothing, and stays."""
    result = train(tiny(*LONGER, "lr=0.3", "topology=pre", "spike=null"), tmp_path / "run")
    assert result.state == "diverged"
    losses = [record["mse"] for record in read_metrics(tmp_path / "run")]
    assert max(losses) > 2
    assert np.mean(losses[-10:]) == pytest.approx(1, abs=0.1)


def test_a_run_that_learns_has_not(tmp_path):
    result = train(tiny(*LONGER, "lr=5e-3"), tmp_path / "run")
    assert result.state == "finished"


def test_a_short_run_at_its_trivial_loss_is_no_result_of_a_report(tmp_path):
    for name, lr in (("stuck", 1e-12), ("good", 5e-3)):
        config = tiny("steps=40", "warmup=2", "train.batch_size=32", f"lr={lr}")  # too short for training to judge it
        assert train(config, tmp_path / name).state == "finished"
    assert [read_run(tmp_path / name).state for name in ("stuck", "good")] == ["stuck", "finished"]


def test_real_images_are_nearer_than_noise_in_the_classifiers_features(cache):
    task = make_task()
    real = np.stack([task.images[k] for k in range(300)])
    found = task.fidelity(real, task.images.labels[:300])
    noise = np.random.default_rng(0).integers(0, 256, real.shape, dtype=np.uint8)
    far = task.fidelity(noise, task.images.labels[:300])
    assert found["accuracy"] > 0.95
    assert found["frechet"] < 0.1 * far["frechet"]


def test_a_batch_is_the_same_for_one_process_and_for_two():
    task = make_task()

    def batch(rank, world_size):
        return next(task.loader(rank=rank, world_size=world_size, sample=16, pin_memory=False))

    whole, parts = batch(0, 1), [batch(rank, 2) for rank in (0, 1)]
    for name in ("image", "label", "noise", "time"):
        assert torch.equal(whole[name][0::2], parts[0][name])
        assert torch.equal(whole[name][1::2], parts[1][name])


def test_pixels_are_scaled_to_one_and_back():
    task = make_task()
    batch = next(task.loader(rank=0, world_size=1, sample=0, pin_memory=False))
    assert batch["image"].min() == -1
    assert batch["image"].max() == 1
    numbers = task.data.numbers(np.arange(8))
    assert np.array_equal(to_bytes(batch["image"]), np.stack([task.images[int(k)] for k in numbers]))


def test_with_images_to_test_on_those_to_train_on_are_taken_whole(tmp_path):
    for name, count in (("train", 20), ("test", 8), ("other", 6)):
        classes = ("a", "b") if name != "other" else ("a", "c")
        write_folder(tmp_path / name, some_pixels(count, 8, 8, 1), np.arange(count) % 2, classes)
    alone = make_task(f"data.train={tmp_path / 'train'}", "evaluation.every=1")
    assert (len(alone.images), len(alone.test_images)) == (16, 4)
    both = make_task(f"data.train={tmp_path / 'train'}", f"data.test={tmp_path / 'test'}", "evaluation.every=1")
    assert (len(both.images), len(both.test_images)) == (20, 8)
    with pytest.raises(ValueError, match=r"data\.test: the classes of 'other' are not those of 'train'"):
        make_task(f"data.train={tmp_path / 'train'}", f"data.test={tmp_path / 'other'}", "evaluation.every=1")


def test_what_does_not_fit_is_refused_in_one_sentence():
    for overrides, message in (
        (["diffusion.prediction=flow"], "learn_sigma = true is not allowed with diffusion.prediction = flow"),
        (["patch_size=3"], "patch_size = 3 is not allowed; it takes a divisor of input_size = 8"),
        (
            ["evaluation.samples=9", "guidance=2.0", "class_dropout=0"],
            "guidance = 2.0 is not allowed with model.class_dropout = 0",
        ),
        (["evaluation.samples=9", "sampler=euler"], "evaluation.sampler: 'euler' is not allowed for epsilon; it takes"),
        (
            ["diffusion.timesteps=9", "sampling_steps=9"],
            "sampling_steps: 9 is not allowed; dpm takes 1 to 8",
        ),
        (["diffusion.schedule=wave"], "schedule"),
    ):
        with pytest.raises((ConfigError, ValueError), match="is not") as error:
            tiny(*overrides)
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="classes = 4 is not allowed; it takes 10 or more"):
        make_task("classes=4")
    with pytest.raises(ValueError, match=r"samples are compared with images of model\.input_size = 4"):
        make_task("input_size=4", "evaluation.samples=10")


@pytest.mark.parametrize("name", ["dit-digits", "dit-fashion"])
def test_recipes_measure_samples_as_the_model_makes_them_not_as_guidance_narrows_them(name):
    evaluation = resolve(name).evaluation
    assert (evaluation.samples, evaluation.guidance) == (500, 1.0)


@pytest.mark.parametrize("name", ["dit-b-2", "dit-l-4", "dit-xl-2"])
def test_the_official_recipes_are_the_published_ones(name):
    config = resolve(name)
    assert name in recipe_names()
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.train.batch_size) == (1e-4, 0.0, 256)
    assert (config.train.ema, config.schedule.kind, config.train.steps) == (0.9999, "constant", 400_000)
    assert (config.diffusion.schedule, config.diffusion.prediction, config.diffusion.timesteps) == (
        "linear",
        "epsilon",
        1000,
    )
    assert config.model.learn_sigma
    assert config.model.class_dropout == 0.1
    assert config.optimizer.clip is None
