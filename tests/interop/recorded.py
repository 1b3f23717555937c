"""What the official code gave, in tests/fixtures: weights, inputs, outputs, gradients; and how ours is compared."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from closeness import ROUNDING, assert_same_but_for_rounding
from siamesenorm.interop.official import to_official

FIXTURES = Path(__file__).parent.parent / "fixtures"


def read(name):
    """Config, weights, and everything recorded."""
    with safe_open(FIXTURES / f"{name}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return config, part(tensors, "state."), tensors


def part(tensors, prefix):
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def assert_outputs_and_gradients(model, outputs, recorded, tolerance=ROUNDING):
    """Outputs to `tolerance` of their size, and to ten times that the gradients of the recorded loss, which weighs
    every number of the outputs with a fixed random one."""
    generator, loss, size = torch.Generator().manual_seed(5), 0.0, 0.0
    for index, output in enumerate(outputs):
        assert_same_but_for_rounding(output, recorded[f"output.{index}"], tolerance)
        terms = output * torch.randn(output.shape, generator=generator)
        loss, size = loss + terms.sum(), size + terms.detach().norm().item()
    assert_same_but_for_rounding(loss[None], recorded["output.loss"], tolerance, at_least=size)
    loss.backward()
    grads, expected = to_official(model, grads=True), part(recorded, "grad.")
    assert grads.keys() == expected.keys()
    for key, grad in grads.items():
        assert (grad - expected[key]).norm() <= 10 * tolerance * expected[key].norm(), key


def assert_comes_back(load, name):
    """Loaded and given back, a state dict is the same to the bit."""
    config, state, _ = read(name)
    back = to_official(load(state, config))
    assert back.keys() == state.keys()
    for key in state:
        assert torch.equal(back[key], state[key]), key
