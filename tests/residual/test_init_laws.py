"""Where topologies start: parameter values, the function at initialisation, depth scales, init rules and needs."""

import math

import pytest
import torch
from torch.testing import assert_close

from siamesenorm.residual import TOPOLOGIES, InitRule, Norms, NormSpec, Place, SublayerNeeds
from siamesenorm.residual.norms import Norm

from .stacks import PAIR, D, L, every_row, make, make_sublayers
from .table import ROWS, Drawn

STARTS_AS_PRE = [row for row in ROWS if row.starts_as == "pre"]


@every_row
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_every_parameter_starts_at_its_law(row, norm):
    topology = make(row, norm=norm)
    for name, parameter in topology.named_parameters():
        *module, last = name.split(".")
        in_norm = isinstance(topology.get_submodule(".".join(module)), Norm)
        law = {"weight": 1.0, "bias": 0.0}[last] if in_norm else row.start.get(last, 1.0)
        if isinstance(law, Drawn):
            spread = parameter.detach() / law.std
            assert spread.abs().max() < 6, name
            assert spread.std() > 0.3, name
            continue
        value = law(int(module[1]) if module[:1] == ["links"] else 0, parameter.shape) if callable(law) else law
        assert_close(parameter.detach(), torch.as_tensor(value).to(parameter).expand_as(parameter), msg=name)


@pytest.mark.parametrize("row", STARTS_AS_PRE, ids=lambda row: row.text)
def test_starts_as_pre_norm(row):
    """The sum of n equal rows is n times Pre-Norm's stream; the final norm takes n away as eps vanishes."""
    norm = NormSpec("rms", eps=1e-30)
    sublayers, x = make_sublayers([PAIR] * 3), torch.randn(2, 3, D, dtype=torch.float64)
    expected = make("pre", 3, norm=norm)(x, sublayers)
    assert_close(make(row, 3, norm=norm)(x, sublayers), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rate", [3, 5, 8])
@pytest.mark.parametrize("name", ["hyper", "mhc"])
def test_starts_as_pre_norm_at_any_rate(name, rate):
    norm = NormSpec("layer", eps=1e-30)
    sublayers, x = make_sublayers([PAIR] * 5), torch.randn(2, 3, D, dtype=torch.float64)
    expected = make("pre", 5, norm=norm)(x, sublayers)
    exact = {"eps": 0.0} if name == "mhc" else {}
    assert_close(make(name, 5, norm=norm, rate=rate, **exact)(x, sublayers), expected, rtol=1e-10, atol=1e-10)


SEVERAL = [row.text for row in ROWS if len(row.streams_at(4)) > 1]


@pytest.mark.parametrize("text", SEVERAL + [f"{name}:rate={n}" for name in ("hyper", "mhc") for n in (3, 5, 8)])
def test_streams_come_apart(text):
    """Ten steps leave no two streams equal, not even in direction: equal ones get equal gradients for ever."""
    torch.manual_seed(0)
    topology, sublayers = make(text, 4), make_sublayers([PAIR] * 4)
    x, target = torch.randn(2, 4, 5, D, dtype=torch.float64)
    optimizer = torch.optim.AdamW([*topology.parameters(), *sublayers.parameters()], lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        (topology(x, sublayers) - target).square().mean().backward()
        optimizer.step()
    flow = topology.start(x)
    for sublayer in sublayers:
        flow.through(sublayer)
    rows = [row / row.norm() for row in topology.named_streams(flow.streams).values()]
    assert len(rows) > 1
    assert min((a - b).norm() for i, a in enumerate(rows) for b in rows[:i]) > 1e-3


def test_every_topology_of_several_streams_is_in_the_table():
    def at_the_end(topology):
        flow = topology.start(torch.ones(1, D, dtype=torch.float64))
        for _ in topology.links:
            flow.through(torch.tanh)
        return topology.named_streams(flow.streams)

    several = {name for name in TOPOLOGIES if len(at_the_end(make(name))) > 1}
    assert several == {text.partition(":")[0] for text in SEVERAL}


def test_rezero_starts_as_the_identity():
    x = torch.randn(2, 3, D, dtype=torch.float64)
    assert torch.equal(make("rezero")(x, make_sublayers([PAIR] * L)), x)


def test_layerscale_starts_with_branches_at_its_start_value():
    sublayers, x = make_sublayers([PAIR]), torch.randn(2, 3, D, dtype=torch.float64)
    for start in (1e-4, 0.3):
        flow = make("layerscale", 1, start=start).start(x)
        flow.through(sublayers[0])
        branch = sublayers[0](make("pre", 1).links[0].norm(x))
        assert_close(flow.streams - x, start * branch, rtol=1e-6, atol=0)
    assert make("layerscale", 1).options.start == 1e-4


@pytest.mark.parametrize(
    ("law", "table"),
    [
        ("none", [1] * 8),
        ("sqrt(2(l+1))", [2**0.5, 2, 6**0.5, 8**0.5, 10**0.5, 12**0.5, 14**0.5, 4]),
        ("sqrt(l+1)", [1, 2**0.5, 3**0.5, 2, 5**0.5, 6**0.5, 7**0.5, 8**0.5]),
    ],
)
@pytest.mark.parametrize("form", ["post_pre", "plain", "hybrid_pre"])
def test_siamese_depth_scales(form, law, table):
    """X receives O / c_l, the same c_l for both sublayers of a block; Y receives O."""
    topology = make("siamese", 8, form=form, depth_scaling=law)
    O = torch.randn(D, dtype=torch.float64)
    for k, link in enumerate(topology.links):
        link.x.norm = torch.nn.Identity()
        X, Y = link.write((torch.zeros(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)), O)
        assert_close(X, O / table[k // 2], rtol=1e-14, atol=0)
        assert torch.equal(Y, O)


@pytest.mark.parametrize(
    ("form", "law", "input_norm", "final_norm"),
    [
        ("post_pre", "sqrt(2(l+1))", True, True),
        ("plain", "none", False, False),
        ("hybrid_pre", "sqrt(2(l+1))", True, True),
    ],
)
def test_siamese_forms_set_what_is_not_given(form, law, input_norm, final_norm):
    topology = make("siamese", form=form)
    assert topology.depth_scaling == law
    assert (topology.links[1].input_norm is not None) == input_norm
    assert (topology.final_norm is not None) == final_norm
    given = make("siamese", form=form, depth_scaling="sqrt(l+1)", input_norm=not input_norm, final_norm=not final_norm)
    assert given.depth_scaling == "sqrt(l+1)"
    assert (given.links[1].input_norm is not None) != input_norm
    assert (given.final_norm is not None) != final_norm


def test_scaled_reads_by_depth():
    x = torch.randn(D, dtype=torch.float64)
    for k, link in enumerate(make("scaled", 8).links):
        assert_close(link.read(x)[1], link.norm(x) / math.sqrt(k // 2 + 1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("blocks", [1, 2, 6, 18])
def test_skip_scales(blocks):
    """DeepNorm's (2L)^(1/4) and Keel's 2L multiply the skip, not the update."""
    one = torch.ones(D, dtype=torch.float64)
    for name, norm, scale in (("deepnorm", "norm", (2 * blocks) ** 0.25), ("keel", "stream_norm", 2 * blocks)):
        for place, link in zip((topology := make(name, blocks)).places, topology.links, strict=True):
            setattr(link, norm, torch.nn.Identity())
            expected = 1 if name == "keel" and place.block == 0 else scale
            assert_close(link.write(one, torch.zeros_like(one)), expected * one, rtol=1e-15, atol=0)
            assert_close(link.write(0 * one, one), one)


@every_row
@pytest.mark.parametrize("blocks", [1, 4, 12])
def test_init_rule(row, blocks):
    got, expected = make(row, blocks).init_rule, row.rule(blocks)
    assert set(got.scale) == set(expected.scale)
    for role, factor in expected.scale.items():
        assert got.scale[role] == pytest.approx(factor, rel=1e-12)
    assert (got.keeps_depth_factor, got.std) == (expected.keeps_depth_factor, expected.std)
    assert got.is_neutral == (expected == InitRule())


@every_row
def test_needs_of_every_place(row):
    """Norms inside attention for attention alone (parallel sublayers contain one); output norms everywhere."""
    kinds = ["attention", "cross_attention", "ffn"] + ["parallel"] * row.parallel
    topology = make(row, [kinds] * 2)
    for place in topology.places:
        attends = place.kind != "ffn"
        expected = SublayerNeeds(row.attention_norm if attends else "none", row.output_norm)
        assert topology.needs(place) == expected, place


@pytest.mark.parametrize(
    ("blocks", "fraction", "post"), [(4, 0.25, 1), (8, 0.25, 2), (3, 0.25, 0), (5, 0.5, 2), (4, 0, 0), (4, 1, 4)]
)
def test_mix_is_post_norm_in_its_first_blocks(blocks, fraction, post):
    x, O = torch.randn(2, D, dtype=torch.float64)
    for place, link in zip((mix := make("mix", blocks, post_fraction=fraction)).places, mix.links, strict=True):
        _, h = link.read(x)
        is_post = place.block < post
        assert_close(h, x if is_post else link.norm(x))
        assert_close(link.write(x, O), link.norm(x + O) if is_post else x + O)


@every_row
def test_the_end_norms_no_stream_twice(row):
    """`close` runs each of its norms once, and none where the stream ends normalised."""
    ran = []
    topology = make(row)
    flow = topology.start(torch.randn(2, 3, D, dtype=torch.float64))
    for sublayer in make_sublayers([PAIR] * L):
        flow.through(sublayer)
    streams = flow.streams
    for module in topology.modules():
        if isinstance(module, Norm):
            module.register_forward_hook(lambda module, *_: ran.append(module))
    topology.close(streams)
    assert len(ran) == len(set(ran)) == row.end_norms


def test_norms_are_made_by_role():
    """adaLN models want the last norm before a sublayer without affine, and leave the others."""
    norms = Norms(stream=NormSpec("rms"), input=NormSpec("layer", affine=False), final=NormSpec("layer"))
    pair = make("siamese", norm=norms)
    for link in pair.links:
        assert link.x.norm.kind == link.y.norm.kind == "rms"
        assert (link.input_norm.kind, link.input_norm.weight) == ("layer", None)
    assert (pair.x.final_norm.kind, pair.y.final_norm.kind, pair.final_norm.kind) == ("rms", "rms", "layer")
    assert make("pre", norm=norms).links[0].norm.weight is None


def test_places_of_a_stack():
    places = make("pre", [["attention"], PAIR]).places
    assert places == [
        Place(index=0, kind="attention", block=0, blocks=2, position=0, size=1, total=3),
        Place(index=1, kind="attention", block=1, blocks=2, position=0, size=2, total=3),
        Place(index=2, kind="ffn", block=1, blocks=2, position=1, size=2, total=3),
    ]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("hyper", {"A_m", "A_r", "B"}),
        ("mhc:collapse=learned", {"a", "b"}),
        ("mhc_lite", {"a", "b"}),
        ("ihc", {"a", "b"}),
        ("gr", {"weight"}),
        ("attnres", {"query", "key_gain"}),
        ("dense", {"a"}),
        ("widen", {"a"}),
        ("x0", {"r", "z", "b"}),
        ("zaya", {"s_r", "b_r", "s_o", "b_o"}),
        ("muse", {"w"}),
        ("layerscale", {"gain"}),
        ("rezero", {"gain"}),
        ("pre", set()),
    ],
)
def test_parameters_whose_start_is_their_meaning_are_not_decayed(text, kept):
    topology = make(text)
    names = {name for name, _ in topology.named_parameters()}
    norms = {f"{name}.weight" for name, module in topology.named_modules() if isinstance(module, Norm)}
    assert topology.no_weight_decay() == {name for name in names - norms if name.rsplit(".", 1)[-1] in kept}
