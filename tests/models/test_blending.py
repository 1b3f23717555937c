"""Language models on their way to another topology: whatever they are made of, the ends of the way are exact."""

import pytest
import torch
from torch.testing import assert_close

from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.models.lm.blending import blend, settle
from siamesenorm.models.lm.calibration import LAST, calibrate, fit, regress
from siamesenorm.models.lm.transplant import transplant
from siamesenorm.residual import TopologyError
from siamesenorm.residual.norms import NormSpec
from siamesenorm.residual.ramp import ramps_of

IDS = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(0))
KINDS = {
    "plain": {},
    "experts": {"moe": {"experts": 4, "top_k": 2, "expert_dim": 16}},
    "biases": {"norm": "layer", "norm_bias": True, "bias": True, "learned_positions": True, "rotary_dim": 0},
    "grouped": {"kv_heads": 2, "tied": True, "qk_norm": "head", "embedding_scale": 3.0},
    "no gains": {"norm_affine": False},
    "gated": {"norm": "gated"},
}


def source(**fields):
    shape = {"vocab_size": 64, "dim": 32, "blocks": 2, "heads": 4, "ffn_dim": 48, "max_length": 32, "topology": "pre"}
    model = LanguageModel(LMConfig(**{**shape, **fields}), seed=0).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topology", ["sandwich", "siamese:form=hybrid_pre", "subln"])
def test_the_source_at_first_and_the_other_alone_at_last(topology, kind):
    model = source(**KINDS[kind])
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    blended, carried = blend(model, topology, steps=10, start=5)
    calibrate(blended, IDS)
    regress(blended, model, IDS, steps=2)
    own = dict(blended.named_parameters())
    assert sorted(carried.values()) == sorted(weights)
    assert all(torch.equal(own[name], weights[there]) for name, there in carried.items())
    assert all(parameter.requires_grad for parameter in own.values())
    blended.residual.set_step(6)
    assert {float(ramp.value) for ramp in ramps_of(blended)} == {0.0}
    with torch.no_grad():
        assert torch.equal(blended(IDS).logits, model(IDS).logits)
        blended.residual.set_step(LAST)
        settled = settle(blended)[0]
        assert settled.config.topology == topology
        assert_close(settled(IDS).logits, blended(IDS).logits)


def test_stages_are_judged_and_the_best_stays():
    model = source()
    made = transplant(model, "sandwich", IDS, regression=3)
    assert list(made.stages) == ["copied", "calibrated", "regressed"]
    assert made.kept == min(made.stages, key=lambda name: made.stages[name].mean_kl) != "copied"
    averaged = source()
    with torch.no_grad():
        averaged.embedding.weight.mul_(1.1)
    again = dict(made.again(averaged).named_parameters())
    assert torch.equal(again["embedding.weight"], averaged.embedding.weight)
    fitted = "blocks.0.links.0.output_norm.weight"
    assert torch.equal(again[fitted], dict(made.model.named_parameters())[fitted])
    assert transplant(model, "widen", IDS).kept == "exact"


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gains_are_the_least_squares(kind):
    torch.manual_seed(0)
    u, gain = torch.randn(2, 50, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    norm = NormSpec(kind)(8).double()
    with torch.no_grad():
        wanted = norm(u) * gain + (3 if kind == "layer" else 0)
        fit(norm, u, wanted)
        assert_close(norm(u), wanted)
        noisy = wanted + torch.randn_like(wanted)
        fit(norm, u, noisy)
    (norm(u) - noisy).square().sum().backward()
    assert_close(norm.weight.grad, torch.zeros(8, dtype=torch.float64), rtol=0, atol=1e-9)


def test_a_block_is_compiled_once_whatever_b_is():
    graphs = []
    model = LanguageModel(source().config.model_copy(update={"topology": "blend:to=hybrid,steps=4"}), seed=0)
    model.compile_blocks(backend=lambda graph, inputs: (graphs.append(graph), graph.forward)[1])
    losses = set()
    for step in range(1, 7):
        model.residual.set_step(step)
        losses.add(model(IDS, labels=IDS).loss.item())
    assert len(graphs) == 1
    assert len(losses) == 5


def test_what_cannot_be_is_one_sentence():
    with pytest.raises(TopologyError, match="the source has 'head'"):
        blend(source(qk_norm="head"), "pre", steps=1, qk_norm="projection")
    with pytest.raises(TopologyError, match="takes a model of pre"):
        blend(source(topology="post"), "sandwich", steps=1)
    blended = blend(source(), "post", steps=3)[0]
    with pytest.raises(TopologyError, match="has blended into 'post'"):
        transplant(blended, "span", IDS)
    with pytest.raises(TopologyError, match="b = 0 only"):
        transplant(blended, "post", IDS)
