"""Muon: torch's own equations on every matrix by itself, however matrices are fused, sharded, stopped and resumed."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

from siamesenorm.errors import ConfigError
from siamesenorm.models.dit import DiT, DiTConfig
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.models.stack import Block
from siamesenorm.models.vit import VisionTransformer, ViTConfig
from siamesenorm.residual import TOPOLOGIES
from siamesenorm.train.config import OptimizerConfig
from siamesenorm.train.loop import train
from siamesenorm.train.muon import Muon, newton_schulz
from siamesenorm.train.optimizer import build_optimizer, parameter_groups, set_lr

from .small_runs import engine, losses, tiny, train_until, weights
from .test_divergence import poison

CONFIG = OptimizerConfig(kind="muon", lr=1e-2, weight_decay=0.3)
SHAPE = {"vocab_size": 32, "dim": 8, "blocks": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 12}
MATRICES = ("attention.qkv.weight", "attention.out.weight", "ffn.up.weight", "ffn.down.weight", "ffn.w_in", "ffn.w_out")


def by_muon(model: nn.Module) -> set[str]:
    return {name for group in parameter_groups(model, CONFIG) if group["muon"] for name in group["names"]}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_matrices_of_sublayers_are_muons_and_everything_else_is_adamws(topology):
    """Whatever a topology brings with it is AdamW's, and so are embedding, head, router and adaLN."""
    language = {**SHAPE, "topology": topology}
    models = [LanguageModel(LMConfig(**language), seed=0)]
    if topology == "siamese":
        models += [
            LanguageModel(LMConfig(**language, moe={"experts": 4, "top_k": 2, "expert_dim": 12}), seed=0),
            VisionTransformer(ViTConfig(dim=8, blocks=1, heads=2, ffn_dim=16, image_size=8, patch_size=4, classes=3)),
            DiT(DiTConfig(dim=8, blocks=1, heads=2, ffn_dim=16, input_size=8, patch_size=2, channels=1, classes=3)),
        ]
    for model in models:
        expected = {name for name, _ in model.named_parameters() if name.endswith(MATRICES)}
        assert by_muon(model) == expected
        assert len(expected) == 4 * len(model.blocks)


def moe() -> LanguageModel:
    return LanguageModel(LMConfig(**SHAPE, moe={"experts": 3, "top_k": 2, "expert_dim": 12}), seed=0)


def parts(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The matrices of a parameter, straight from what the layers say of their rows."""
    head, hidden = SHAPE["dim"] // SHAPE["heads"], SHAPE["ffn_dim"]
    if name.endswith("qkv.weight"):
        return [tensor[row : row + head] for row in range(0, len(tensor), head)]
    if name.endswith("up.weight"):
        return [tensor[:hidden], tensor[hidden:]]
    if name.endswith("w_in"):
        return [half for expert in tensor for half in (expert[:hidden], expert[hidden:])]
    return list(tensor) if name.endswith("w_out") else [tensor]


def train_with(model: nn.Module, steps: int = 3) -> list[dict[str, torch.Tensor]]:
    """Steps with drawn gradients; those gradients."""
    optimizer, drawn = build_optimizer(model, CONFIG), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        drawn.append({name: parameter.grad for name, parameter in model.named_parameters()})
        set_lr(optimizer, CONFIG.lr / (step + 1))
        optimizer.step()
    return drawn


def unfused(model: nn.Module, drawn: list[dict[str, torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    """What torch.optim.Muon makes of copies, a parameter a matrix."""
    copies = {
        name: [nn.Parameter(part.clone()) for part in parts(name, parameter.detach())]
        for name, parameter in model.named_parameters()
        if name in by_muon(model)
    }
    flat = [copy for found in copies.values() for copy in found]
    optimizer = torch.optim.Muon(flat, weight_decay=CONFIG.weight_decay, adjust_lr_fn="match_rms_adamw")
    for step, grads in enumerate(drawn):
        for name, found in copies.items():
            for copy, grad in zip(found, parts(name, grads[name]), strict=True):
                copy.grad = grad.clone()
        optimizer.param_groups[0]["lr"] = CONFIG.lr / (step + 1)
        optimizer.step()
    return {name: [copy.detach() for copy in found] for name, found in copies.items()}


needs_torchs = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


@needs_torchs
@pytest.mark.parametrize("make", [moe, lambda: LanguageModel(LMConfig(**SHAPE), seed=0)], ids=["experts", "swiglu"])
def test_equals_torchs_muon_on_unfused_copies(monkeypatch, make):
    """With torch's iteration kept from rounding to bfloat16, to the last digits of float64."""
    first, model = make().double(), make().double()
    drawn = train_with(model)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    for name, expected in unfused(first, drawn).items():
        for mine, theirs in zip(parts(name, model.get_parameter(name).detach()), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@needs_torchs
def test_differs_from_torchs_bfloat16_by_its_rounding():
    model = moe()
    drawn = train_with(model)
    for name, expected in unfused(moe(), drawn).items():
        start, ours = moe().get_parameter(name).detach(), model.get_parameter(name).detach()
        apart = (
            torch.cat([p.flatten() for p in parts(name, ours)]) - torch.cat([p.flatten() for p in expected])
        ).norm()
        assert 0 < apart <= 0.03 * (ours - start).norm()


def test_equals_the_equations_written_out():
    """One matrix at a time, in plain float64: momentum, the iteration, decay, the matched size."""
    model, start = moe().double(), dict(moe().double().named_parameters())
    drawn = train_with(model)
    for name in by_muon(model):
        for number, matrix in enumerate(parts(name, start[name].detach())):
            weight, mean = matrix.clone(), torch.zeros_like(matrix)
            for step, grads in enumerate(drawn):
                grad, lr = parts(name, grads[name])[number], CONFIG.lr / (step + 1)
                mean = 0.95 * mean + 0.05 * grad
                x = 0.95 * mean + 0.05 * grad
                x = x / math.sqrt((x * x).sum())
                for _ in range(5):
                    x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
                weight = weight - lr * 0.3 * weight - lr * 0.2 * math.sqrt(max(weight.shape)) * x
            torch.testing.assert_close(parts(name, model.get_parameter(name).detach())[number], weight)


def test_other_parameters_are_trained_as_by_adamw():
    model, plain = moe().double(), moe().double()
    drawn = train_with(model)
    optimizer = build_optimizer(plain, CONFIG.model_copy(update={"kind": "adamw"}))
    for step, grads in enumerate(drawn):
        for name, parameter in plain.named_parameters():
            parameter.grad = grads[name].clone()
        set_lr(optimizer, CONFIG.lr / (step + 1))
        optimizer.step()
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)) == (name not in by_muon(model)), name


def test_singular_values_come_near_one_and_nothing_stays_nothing():
    tall = torch.randn(3, 40, 10, generator=torch.Generator().manual_seed(0))
    for matrices in (tall, tall.mT, 1e6 * tall, 1e-5 * tall):
        values = torch.linalg.svdvals(newton_schulz(matrices))
        assert values.min() > 0.6
        assert values.max() < 1.3
    assert torch.equal(newton_schulz(torch.zeros(2, 4, 3)), torch.zeros(2, 4, 3))


def test_one_learning_rate_moves_both_kinds_alike():
    """The root mean square of an update is 0.2 lr, which is about AdamW's."""
    model, start = LanguageModel(LMConfig(**{**SHAPE, "dim": 64}), seed=0), {}
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, CONFIG.model_copy(update={"weight_decay": 0.0}))
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    for name in by_muon(model):
        moved = (model.get_parameter(name).detach() - start[name]).square().mean().sqrt().item()
        # a head of 16 rows in 64 columns; the square of out is full
        assert 0.1 * CONFIG.lr < moved < 0.3 * CONFIG.lr, name


def test_topologies_factors_count():
    model = LanguageModel(LMConfig(**{**SHAPE, "topology": "x0"}), seed=0)
    optimizer = build_optimizer(model, CONFIG)
    assert isinstance(optimizer, Muon)
    set_lr(optimizer, 1.0)
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    named = {f"residual.{n}": f for n, f in model.residual.learning_rates().items()}
    expected = {n: named.get(n, f) for n, f in _link_factors(model).items()}
    assert set(expected.values()) != {1.0}
    assert {name: rates[parameter] for name, parameter in model.named_parameters()} == expected


def _link_factors(model: nn.Module) -> dict[str, float]:
    found = dict.fromkeys((name for name, _ in model.named_parameters()), 1.0)
    for prefix, module in model.named_modules():
        if prefix and hasattr(module, "learning_rates"):
            found |= {f"{prefix}.{name}": factor for name, factor in module.learning_rates().items()}
    return found


def test_models_that_name_no_matrices_are_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.kind: 'muon' is not allowed for Linear; it takes models with"):
        build_optimizer(nn.Linear(2, 2), CONFIG)


def test_state_dicts_go_from_one_optimizer_to_another():
    one, other = moe(), moe()
    first = build_optimizer(one, CONFIG)
    for model, optimizer in ((one, first), (other, build_optimizer(other, CONFIG))):
        for step in range(4):
            if model is other and step == 2:
                state = optimizer.state_dict()
                optimizer = build_optimizer(other, CONFIG)
                optimizer.load_state_dict(state)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# Runs ------------------------------------------------------------------------------------------------------

VARIANTS = {
    "completep": ["parametrization=completep", "base_width=8", "base_depth=1"],
    "everything": [
        "precision=bf16",
        "micro_batch_size=2",
        "ema=0.9",
        "topology=mhc",
        "model.moe={experts: 4, top_k: 2, expert_dim: 8}",
    ],
    "fp16": ["precision=fp16", "policy=skip"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_and_resumed_ends_bit_by_bit_the_same(tmp_path, variant):
    config = tiny("optimizer.kind=muon", "checkpoint.every=5", "steps=9", *VARIANTS[variant])
    train(config, tmp_path / "whole")
    train_until(7, config, tmp_path / "killed")
    train(config, tmp_path / "killed", mode="resume")
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")
    ours, theirs = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_kind_does_not_go_on_with_a_run(tmp_path):
    train_until(3, tiny("checkpoint.every=2"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"optimizer\.kind"):
        train(tiny("checkpoint.every=2", "optimizer.kind=muon"), tmp_path / "run", mode="resume")


def test_a_step_whose_gradients_are_no_numbers_moves_nothing():
    """As it is told on a device that nobody waits for."""
    model = moe()
    optimizer = build_optimizer(model, CONFIG)
    before: list[torch.Tensor] = []
    for number in (0.5, math.nan):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, number)
        moments = (value for state in optimizer.state.values() for value in state.values())
        before = [tensor.detach().clone() for tensor in (*model.parameters(), *moments)]
        optimizer.found_inf = torch.tensor(float(math.isnan(number)))
        optimizer.step()
    moments = (value for state in optimizer.state.values() for value in state.values())
    assert all(torch.equal(a, b) for a, b in zip(before, (*model.parameters(), *moments), strict=True))


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_bad_steps_leave_no_trace(tmp_path, monkeypatch, policy):
    """A run that leaves one out, or goes back, ends with finite weights; killed behind it, with the same ones."""
    poison(monkeypatch, {16})  # step 5
    config = tiny("optimizer.kind=muon", "checkpoint.every=3", "steps=9", f"policy={policy}")
    assert train(config, tmp_path / "whole").state == "finished"
    train_until(8, config, tmp_path / "killed")
    train(config, tmp_path / "killed")
    ours, theirs = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].isfinite().all() for name in ours)


def test_compiled_blocks_train_as_plain_ones_do(monkeypatch):
    """With a branch factor and factors on learning rates; the code is not inductor's, which takes a minute."""
    monkeypatch.setattr(Block, "compile", functools.partialmethod(Block.compile, backend="eager"))
    completep = ("parametrization=completep", "base_width=8", "base_depth=1")
    found = []
    for compiled in ("true", "false"):
        made = engine("optimizer.kind=muon", f"train.compile={compiled}", "optimizer.lr=1e-2", *completep)
        assert made.compiled == (compiled == "true")
        found.append([])
        for step in range(1, 4):
            found[-1].append(made.compute(step).loss)
            made.apply(step)
        made.close()
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("shape", [(1, 1, 6), (2, 6, 1), (1, 1, 1)])
def test_matrices_of_one_row_or_column_are_brought_to_one(shape):
    drawn = 1e3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sizes = torch.linalg.matrix_norm(newton_schulz(drawn))
    assert ((sizes > 0.6) & (sizes < 1.3)).all()


def test_an_expert_without_tokens_keeps_its_weights_but_for_decay():
    """Its gradient is zero, and the others' updates do not spill over."""
    model = moe().double()
    optimizer = build_optimizer(model, CONFIG)
    weight = model.get_parameter("blocks.0.ffn.w_in")
    before = weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    weight.grad = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight.grad[1] = 0
    set_lr(optimizer, CONFIG.lr)
    optimizer.step()
    torch.testing.assert_close(weight[1].detach(), before[1] * (1 - CONFIG.lr * CONFIG.weight_decay))
    assert not torch.allclose(weight[0], before[0], rtol=1e-3)
