"""Parameter groups: every parameter in one of them, decayed or not by its kind."""

import pytest
import torch
from torch import nn

from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.residual import TOPOLOGIES, Link
from siamesenorm.train.config import OptimizerConfig
from siamesenorm.train.optimizer import build_optimizer, parameter_groups, set_lr


def model(**fields) -> LanguageModel:
    shape = {"vocab_size": 32, "dim": 8, "blocks": 2, "heads": 2, "ffn_dim": 16, "qk_norm": "head", **fields}
    return LanguageModel(LMConfig(**shape), seed=0)


def decayed(m: nn.Module, **fields) -> set[str]:
    groups = parameter_groups(m, OptimizerConfig(lr=1e-3, **fields))
    return {name for group in groups if group["weight_decay"] for name in group["names"]}


def names(m: nn.Module, keep) -> set[str]:
    return {name for name, parameter in m.named_parameters() if keep(name, parameter)}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_parameter_is_in_exactly_one_group(topology):
    m = model(topology=topology)
    groups = parameter_groups(m, OptimizerConfig(lr=1e-3))
    listed = [name for group in groups for name in group["names"]]
    assert sorted(listed) == sorted(name for name, _ in m.named_parameters())
    for group in groups:
        assert [id(p) for p in group["params"]] == [id(m.get_parameter(name)) for name in group["names"]]


def test_matrices_are_decayed_and_vectors_are_not():
    m = model(bias=True)
    assert decayed(m) == names(m, lambda name, p: p.dim() == 2)
    assert not any("norm" in name or "bias" in name for name in decayed(m))


def test_embeddings_by_choice():
    m = model()
    assert decayed(m) - decayed(m, decay_embeddings=False) == {"embedding.weight"}
    tied = model(tied=True)
    assert "embedding.weight" not in decayed(tied, decay_embeddings=False)


def test_vectors_by_choice():
    m = model()
    assert decayed(m, decay_vectors=True) == names(m, lambda name, p: True)


@pytest.mark.parametrize("topology", ["hyper", "mhc"])
def test_what_the_topology_names_is_never_decayed(topology):
    m = model(topology=topology)
    links = [(name, part) for name, part in m.named_modules() if isinstance(part, Link)]
    kept = {f"{prefix}.{name}" for prefix, link in links for name in link.no_weight_decay()}
    assert kept
    assert not kept & decayed(m, decay_vectors=True)
    assert kept <= names(m, lambda name, p: True)


def test_frozen_parameters_are_left_out():
    m = model()
    m.embedding.weight.requires_grad_(False)
    listed = [name for group in parameter_groups(m, OptimizerConfig(lr=1e-3)) for name in group["names"]]
    assert "embedding.weight" not in listed


def test_optimizer_has_the_configured_numbers():
    m = model()
    optimizer = build_optimizer(m, OptimizerConfig(lr=2e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3))
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.3, 0.0}
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (2e-3, (0.8, 0.9), 1e-6)
    set_lr(optimizer, 1e-4)
    assert all(group["lr"] == 1e-4 for group in optimizer.param_groups)


def test_fused_and_plain_steps_agree():
    grads = [torch.randn_like(p) for p in model().parameters()]
    results = []
    for fused in (True, False):
        m = model()
        optimizer = build_optimizer(m, OptimizerConfig(lr=1e-2, fused=fused))
        for _ in range(3):
            for parameter, grad in zip(m.parameters(), grads, strict=True):
                parameter.grad = grad.clone()
            optimizer.step()
        results.append([p.detach() for p in m.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def rates(m: nn.Module, **fields) -> dict[str, float]:
    optimizer = build_optimizer(m, OptimizerConfig(lr=1e-3, **fields))
    set_lr(optimizer, 0.5)
    found = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {name: found[id(p)] for name, p in m.named_parameters()}


def test_factors_that_a_topology_puts_on_learning_rates():
    """x0's scalars that multiply themselves up over the depth take a hundredth."""
    m = model(topology="x0")
    slow = {name for name, rate in rates(m).items() if rate != 0.5}
    assert slow == names(m, lambda name, p: name.endswith(".r"))
    assert all(rates(m)[name] == pytest.approx(0.005) for name in slow)
    assert set(rates(m, lr_factors=False).values()) == {0.5}
