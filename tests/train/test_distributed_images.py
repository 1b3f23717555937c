"""Models of images in several processes: the same first weights, images, losses and confusion as in one."""

import pytest
import torch
from torch import nn

from models.families import FAMILIES
from siamesenorm.errors import ConfigError
from siamesenorm.train.folder import read_metrics
from siamesenorm.train.loop import train
from siamesenorm.train.parallel import apply_parallelism, clip_gradients
from siamesenorm.train.recipes import resolve
from siamesenorm.train.weights import gather_weights

from .worlds import run_world

SMALL = [
    "dim=16", "blocks=2", "heads=2", "ffn_dim=32", "batch_size=16", "steps=4", "warmup=1", "evaluation.every=4",
    "repeats=2", "tensorboard=false", "peak_flops=1e9", "parallel.device=cpu",
]  # fmt: skip


def run_in(world, config, folder):
    return train(config, folder, world=world).evaluation


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_processes_train_a_classifier_as_one_does(tmp_path, mode):
    config = resolve("deit-digits", [*SMALL, f"parallel.mode={mode}"])
    one = train(config, tmp_path / "one")
    two = run_world(2, run_in, config, tmp_path / "two", mode=mode)
    assert two[0] == pytest.approx(one.evaluation, rel=1e-4)
    assert two[0] == two[1]
    losses = [
        [record["loss"] for record in read_metrics(tmp_path / name) if "loss" in record] for name in ("one", "two")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert (tmp_path / "one" / "confusion.csv").read_text() == (tmp_path / "two" / "confusion.csv").read_text()


TOPOLOGIES = ["siamese", "reordered"]  # draws by fans, and by a std that the topology fixes


def made_and_differentiated(world):
    """First weights that are made part by part, and norms of the gradients of a model far from its start."""
    found = {}
    for name in ("vit", "dit"):
        for topology in TOPOLOGIES:
            with torch.device("meta"):
                model = FAMILIES[name].make(topology)
            weights = gather_weights(apply_parallelism(model, world, seed=0))
            model = apply_parallelism(FAMILIES[name].model(topology), world)
            FAMILIES[name].loss(model, torch.float64).backward()
            found[name, topology] = weights, clip_gradients(model, 1.0).item()
    if world.mode == "tp":
        with pytest.raises(ConfigError, match="'tp' is not allowed for Linear; it splits models of siamesenorm"):
            apply_parallelism(nn.Linear(4, 4), world)
    return found


@pytest.mark.parametrize("mode", ["fsdp", "tp"])
def test_models_of_images_are_made_and_split_as_language_models_are(mode):
    for found in run_world(2, made_and_differentiated, mode=mode):
        for (name, topology), (weights, norm) in found.items():
            expected = FAMILIES[name].make(topology).state_dict()
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[key], value) for key, value in expected.items())
            model = FAMILIES[name].model(topology)
            FAMILIES[name].loss(model, torch.float64).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            assert norm == pytest.approx(nn.utils.get_total_norm(gradients).item(), rel=1e-9)
