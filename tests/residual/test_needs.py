"""What topologies want inside other people's sublayers: on offer, and loud until it is taken, met or waived."""

import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from siamesenorm.layers.attention import Attention
from siamesenorm.models.dit import DiT, DiTConfig
from siamesenorm.models.lm import LanguageModel, LMConfig, MoEConfig
from siamesenorm.models.vit import VisionTransformer, ViTConfig
from siamesenorm.residual import AttentionNorms, Flow, InitRule, TopologyError, UnmetNeedsWarning

from .stacks import D, L, every_row, make

X = torch.randn(3, D, dtype=torch.float64)
HEADS, HEAD = 3, 2
WEIGHTS = ("query", "key", "value", "attention_out", "ffn_in", "ffn_out")
constant = partial(nn.init.constant_, val=2.0)


def said(topology, runs=2):
    """The warnings of some passes through a stack whose sublayers take nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(runs):
            topology(X, [torch.tanh] * len(topology.links))
    return [warning for warning in caught if warning.category is UnmetNeedsWarning]


def roles_of(place):
    return WEIGHTS[4:] if place.kind == "ffn" else WEIGHTS if place.kind == "parallel" else WEIGHTS[:4]


def take(topology, *offers, but=0):
    """Take these for all sublayers, or for all but the last few."""
    for place in topology.places[: len(topology.places) - but]:
        if "norms" in offers and place.kind != "ffn":
            topology.attention_norms(place, HEAD, HEADS)
        if "inner" in offers:
            topology.inner_norm(place, 8)
        if "init" in offers:
            topology.init_weights_(place, constant, **{role: torch.empty(2, 2) for role in roles_of(place)})


def wants(row):
    named = {"norms": row.attention_norm != "none", "inner": row.output_norm, "init": row.rule(L) != InitRule()}
    return {offer for offer, wanted in named.items() if wanted}


NAMES = {"norms": "residual.attention_norms", "inner": "residual.inner_norm", "init": "residual.init_weights_"}


@every_row
def test_what_nobody_took_is_said_once_with_where_to_take_it(row):
    for taken in ((), ("norms",), ("inner",), ("init",)):
        topology = make(row, needs="check")
        take(topology, *taken)
        left, found = wants(row) - set(taken), said(topology)
        assert len(found) == bool(left)
        for warning in found:
            text = str(warning.message)
            assert {offer for offer, name in NAMES.items() if name in text} == left
            assert row.name in text
            assert "'waived'" in text
            assert warning.filename == __file__


@every_row
def test_nothing_is_said_where_needs_are_taken_met_or_waived(row):
    topology = make(row, needs="check")
    take(topology, *NAMES)
    assert not said(topology)
    assert not said(make(row, needs="met"))
    assert not said(make(row, needs="waived"))


@every_row
def test_one_sublayer_left_out_is_enough(row):
    topology = make(row, 3, needs="check")
    take(topology, *NAMES, but=2)
    found = said(topology)
    assert bool(found) == bool(wants(row))
    for warning in found:
        assert set(re.findall(r"in (\d+)", str(warning.message))) <= {"1", "2"}


@every_row
def test_norms_on_offer_are_those_our_own_attention_has(row):
    """Same numbers as `Attention`, per head or over the whole projection, with fewer heads of keys."""
    topology = make(row, needs="check", dtype=torch.float32, norm="layer")
    place = topology.places[0]
    own = Attention(D, 4, 2, HEAD, needs=topology.needs(place), norm=topology.norms.stream)
    norms = topology.attention_norms(place, HEAD, heads=4, kv_heads=2)
    for mine, theirs in ((norms.q, own.q_norm), (norms.k, own.k_norm), (norms.v, own.v_norm)):
        assert (mine is None) == (theirs is None)
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True) if mine is not None else ():
            nn.init.normal_(a)
            b.data.copy_(a)
    h = torch.randn(2, 5, D)
    assert_close(norms(*own.split(own.qkv(h))), own.project(h))
    assert isinstance(topology.inner_norm(place, 8), nn.Identity) == (not topology.needs(place).output_norm)


@every_row
def test_first_weights_follow_the_rule(row):
    """The factor by role on what is drawn, once, however often it is asked; one std where the authors fix it."""
    topology, rule = make(row, 6, needs="check"), row.rule(6)
    for place in topology.places:
        weights = {role: nn.Parameter(torch.empty(60, 50)) for role in roles_of(place)}
        for _ in range(2):
            topology.init_weights_(place, constant, **weights)
        for role, weight in weights.items():
            if rule.std is None:
                assert_close(weight.detach(), torch.full((60, 50), 2.0 * rule.scale.get(role, 1.0)))
            else:
                assert weight.std().item() == pytest.approx(rule.std, rel=0.1)


def test_fused_and_several_matrices_are_taken():
    topology = make("deepnorm", 2, needs="check")
    attention, ffn = topology.places[:2]
    qkv, gate, up, down = (nn.Parameter(torch.zeros(6, 2)) for _ in range(4))
    q, k, v = qkv.chunk(3)
    topology.init_weights_(attention, constant, query=q, key=k, value=v, attention_out=down)
    topology.init_weights_(ffn, constant, ffn_in=[gate, up], ffn_out=down)
    factor = 16**-0.25
    assert_close(qkv.detach(), torch.tensor([2.0, 2.0, 2 * factor]).repeat_interleave(2)[:, None].expand(6, 2))
    for weight in (gate, up, down):
        assert_close(weight.detach(), torch.full((6, 2), 2 * factor))


def test_weights_without_memory_do_not_count():
    topology = make("deepnorm", 1, needs="check")
    for place in topology.places:
        weights = {role: torch.empty(2, 2, device="meta") for role in roles_of(place)}
        topology.init_weights_(place, constant, **weights)
    assert said(topology)


WAYS = {
    "forward": lambda t: t(X, [torch.tanh] * 4),
    "start": lambda t: t.start(X),
    "middle": lambda t: Flow(t, streams=t.open(X), at=2),
    "by hand": lambda t: t.check_needs(),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_says_it(way):
    topology = make("hybrid", needs="check")
    with pytest.warns(UnmetNeedsWarning):
        WAYS[way](topology)


def test_as_an_error_it_stays_until_it_is_met():
    topology = make("deepnorm", needs="check")
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnmetNeedsWarning)
            with pytest.raises(UnmetNeedsWarning, match="deepnorm wants first weights"):
                topology.start(X)
    take(topology, "init")
    topology.start(X)


def test_a_compiled_stack_says_it_without_a_graph_break():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.residual = make("hybrid", 1, needs="check")

        def forward(self, x):
            return self.residual(x, [torch.tanh, torch.tanh])

    compiled = torch.compile(Model(), fullgraph=True, backend="eager")
    with pytest.warns(UnmetNeedsWarning):
        compiled(X)
    compiled(X)


WRONG = {
    "no such state": (lambda t, p: make("pre", needs="no"), ["needs = 'no'", "check, met or waived"]),
    "no head": (lambda t, p: t.attention_norms(p[0], 0, 2), ["head_dim = 0", "whole number from 1"]),
    "half a head": (lambda t, p: t.attention_norms(p[0], 2, 1.5), ["heads = 1.5", "whole number from 1"]),
    "another stack's place": (lambda t, p: t.attention_norms(make("pre", 9).places[-1], 2, 2), ["residual.places"]),
    "role of another kind": (lambda t, p: t.init_weights_(p[0], constant, ffn_in=X), ["'ffn_in'", "query, key"]),
    "no role": (lambda t, p: t.init_weights_(p[1], constant, down=X), ["'down'", "ffn_in, ffn_out"]),
    "a role left out": (lambda t, p: t.init_weights_(p[1], constant, ffn_in=X), ["missing", "ffn_out"]),
}  # fmt: skip


@pytest.mark.parametrize(("act", "words"), WRONG.values(), ids=WRONG)
def test_wrong_requests_are_refused_in_one_sentence(act, words):
    topology = make("deepnorm", needs="check")
    with pytest.raises(TopologyError) as refused:
        act(topology, topology.places)
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)
    assert said(topology)


MODELS = {
    "lm": lambda text: LanguageModel(LMConfig(vocab_size=8, dim=8, blocks=2, heads=2, ffn_dim=8, topology=text)),
    "moe": lambda text: LanguageModel(
        LMConfig(
            vocab_size=8, dim=8, blocks=2, heads=2, ffn_dim=8, topology=text,
            moe=MoEConfig(experts=2, top_k=1, expert_dim=4),
        )
    ),
    "vit": lambda text: VisionTransformer(
        ViTConfig(image_size=4, patch_size=2, classes=2, dim=8, blocks=2, heads=2, ffn_dim=8, topology=text)
    ),
    "dit": lambda text: DiT(
        DiTConfig(input_size=4, patch_size=2, channels=1, classes=2, dim=8, blocks=2, heads=2, ffn_dim=8, topology=text)
    ),
}  # fmt: skip


@every_row
def test_our_own_models_say_nothing(row):
    for kind, make_model in MODELS.items():
        model = make_model(row.text)
        image = torch.zeros(1, 1 if kind == "dit" else 3, 4, 4)
        inputs = {"vit": (image,), "dit": (image, torch.zeros(1), torch.zeros(1, dtype=torch.long))}
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnmetNeedsWarning)
            model(*inputs.get(kind, (torch.zeros(1, 3, dtype=torch.long),)))


def test_norms_of_a_topology_without_wishes_do_nothing():
    norms = AttentionNorms("none", nn.LayerNorm, 2, 2, 2)
    heads = torch.randn(3, 2, 2)
    assert norms(heads, heads, heads) == (heads, heads, heads)
    assert not list(norms.parameters())
