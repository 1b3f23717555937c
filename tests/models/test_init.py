"""First weights: the published tables of stds, topologies' rules on top, and small first logits where asked for."""

import math

import pytest
import torch

from siamesenorm.models.lm import LanguageModel, LMConfig

from .small import ALL

WIDE = {"vocab_size": 300, "dim": 256, "blocks": 3, "heads": 4, "ffn_dim": 512}


def stds(**changes):
    """std of every weight of a model: embedding, head and the last block's four projections (q, k, v apart)."""
    model = LanguageModel(LMConfig(**{**WIDE, **changes}), seed=0)
    block, found = model.blocks[-1], {"embedding": model.embedding.weight, "head": model.head.weight}
    for sublayer in (block.attention, block.ffn):
        found.update(sublayer.role_weights())
    return {role: weight.std().item() for role, weight in found.items()}


CUT = 0.98658  # std of a standard normal cut at 3
MITCHELL = {
    "embedding": CUT / 16,
    "head": CUT / 16,
    "query": CUT / 16,
    "key": CUT / 16,
    "value": CUT / 16,
    "attention_out": CUT / math.sqrt(2 * 256 * 3),
    "ffn_in": CUT / 16,
    "ffn_out": CUT / math.sqrt(2 * 512 * 3),
}
MEGATRON = dict.fromkeys(MITCHELL, 0.02) | dict.fromkeys(("attention_out", "ffn_out"), 0.02 / math.sqrt(6))
NORMAL = dict.fromkeys(MITCHELL, 0.02)


@pytest.mark.parametrize(("init", "expected"), [("mitchell", MITCHELL), ("megatron", MEGATRON), ("normal", NORMAL)])
def test_the_table(init, expected):
    assert stds(init=init, topology="pre") == pytest.approx(expected, rel=0.02)
    small = {"head": (CUT if init == "mitchell" else 1) * min(0.3 / 16, 1 if init == "mitchell" else 0.02)}
    assert stds(init=init, topology="pre", first_logits="small") == pytest.approx(expected | small, rel=0.02)


def test_mitchell_is_what_olmo_calls_so():
    """1/sqrt(d) for what reads the stream, embedding and head; 1/sqrt(2·fan_in·(l+1)) at block l; cut at 3 std."""
    model = LanguageModel(LMConfig(**{**WIDE, "topology": "pre"}), seed=0)
    laws = [(model.embedding.weight, 256**-0.5), (model.head.weight, 256**-0.5)]
    for l, block in enumerate(model.blocks):
        laws += [(block.attention.qkv.weight, 256**-0.5), (block.ffn.up.weight, 256**-0.5)]
        laws += [(block.attention.out.weight, (2 * 256 * (l + 1)) ** -0.5)]
        laws += [(block.ffn.down.weight, (2 * 512 * (l + 1)) ** -0.5)]
    for weight, std in laws:
        assert weight.std().item() == pytest.approx(CUT * std, rel=0.02)
        assert 2.9 * std < weight.abs().max() <= 3 * std
    drawn = {id(weight) for weight, _ in laws}
    assert all((p == 1).all() for p in model.parameters() if id(p) not in drawn)


@pytest.mark.parametrize("init", ["mitchell", "megatron", "normal"])
@pytest.mark.parametrize("tied", [False, True])
def test_without_the_switch_every_gain_starts_at_one(init, tied):
    for topology in ("pre", "siamese", "siamese:form=plain", "siamese:form=hybrid_pre", "post"):
        config = {**WIDE, "blocks": 1, "init": init, "tied": tied, "topology": topology}
        model, small = (LanguageModel(LMConfig(**config, first_logits=how), seed=0) for how in ("standard", "small"))
        for name, parameter in model.residual.named_parameters():
            assert (parameter == 1).all(), name
        assert any((p != 1).any() for p in small.residual.parameters()) == tied


def test_topologies_rules_come_on_top():
    deep = (8 * 3) ** -0.25  # DeepNorm: ÷ (8L)^(1/4), in place of the depth factor
    expected = dict.fromkeys(("value", "attention_out", "ffn_in", "ffn_out"), 0.02 * deep)
    assert stds(init="megatron", topology="deepnorm") == pytest.approx(NORMAL | expected, rel=0.02)
    expected = dict.fromkeys(("attention_out", "ffn_out"), 0.02 / math.sqrt(3))  # SpanNorm: 1/sqrt(L)
    assert stds(init="megatron", topology="span") == pytest.approx(NORMAL | expected, rel=0.02)
    cut = {role: CUT * std for role, std in NORMAL.items()}  # OLMo-2: .02 whatever the initialiser says
    assert stds(init="mitchell", topology="reordered") == pytest.approx(cut, rel=0.02)


def test_draws_do_not_depend_on_the_topology():
    pre, siamese = (LanguageModel(LMConfig(**WIDE, topology=name), seed=3) for name in ("pre", "siamese"))
    others = dict(siamese.named_parameters())
    drawn = {name: p for name, p in pre.named_parameters() if name not in pre.residual_parameters()}
    assert len(drawn) == len(others) - len(siamese.residual_parameters())
    for name, parameter in drawn.items():
        assert torch.equal(parameter, others[name]), name


def first_loss(topology, dim, tied, init, vocabulary=1024, **changes):
    config = LMConfig(
        vocab_size=vocabulary,
        dim=dim,
        blocks=2,
        heads=4,
        ffn_dim=dim,
        topology=topology,
        tied=tied,
        init=init,
        **{"first_logits": "small", **changes},
    )
    model = LanguageModel(config, seed=0)
    ids = torch.randint(0, vocabulary, (2, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids[:, :-1], labels=ids[:, 1:]).loss.item() - math.log(vocabulary)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("topology", ALL)
def test_small_first_logits_give_a_first_loss_of_ln_vocabulary(topology, dim, tied):
    for init in ("mitchell", "megatron", "normal"):
        assert abs(first_loss(topology, dim, tied, init)) < 0.13, init


@pytest.mark.parametrize("init", ["mitchell", "megatron", "normal"])
def test_first_loss_at_full_width(init):
    for tied in (False, True):
        assert abs(first_loss("siamese", 1024, tied, init)) < 0.1


def test_norms_without_gains_shrink_the_shared_matrix_instead():
    assert abs(first_loss("siamese", 256, True, "mitchell", norm_affine=False)) < 0.1


def test_a_tied_model_would_predict_its_input_without_the_smaller_start():
    config = LMConfig(vocab_size=1024, dim=1024, blocks=2, heads=4, ffn_dim=1024, tied=True, init="normal")
    model = LanguageModel(config, seed=0)
    ids = torch.randint(0, 1024, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = model(ids, labels=ids.roll(-1, 1), logits_to_keep=33)
    assert output.loss > math.log(1024) + 3
    assert (output.logits.argmax(-1) == ids).float().mean() > 0.9


def test_only_the_last_gains_start_below_one():
    tied = {**WIDE, "tied": True, "first_logits": "small"}
    model = LanguageModel(LMConfig(**tied), seed=0)
    small = [name for name, p in model.residual_parameters().items() if not torch.equal(p, torch.ones_like(p))]
    assert small == ["residual.final_norm.weight"]
    plain = LanguageModel(LMConfig(**{**tied, "topology": "siamese:form=plain"}), seed=0)
    small = {name for name, p in plain.residual_parameters().items() if not torch.equal(p, torch.ones_like(p))}
    assert small == {"residual.y.final_norm.weight", "blocks.2.links.1.x.norm.weight"}


@pytest.mark.parametrize("topology", ALL)
def test_output_norms_carry_the_whole_output(topology):
    """Halving the gains that `output_norms` names halves the output, and nothing else is named."""
    model = LanguageModel(LMConfig(**{**WIDE, "dim": 32, "topology": topology, "norm_eps": 1e-9}), seed=0)
    norms = model.residual.output_norms(model.residual.links[-1])
    ids = torch.randint(0, 300, (1, 5))
    with torch.no_grad():
        before = model(ids).hidden
        for norm in norms:
            norm.weight.mul_(0.5)
        after = model(ids).hidden
    if topology == "rezero":
        assert not norms
    elif topology == "gr":  # its gates see the gains too, nearly not at first
        torch.testing.assert_close(after, before / 2, rtol=0.1, atol=0.01)
    else:
        torch.testing.assert_close(after, before / 2)
