"""Options: the same from Python and from text, typed, with their defaults, and shown."""

import dataclasses

import pytest

from siamesenorm.residual import TOPOLOGIES, NormSpec, Residual, parse_topology

SAME = [
    ("siamese:depth_scaling=none,input_norm=false", {"depth_scaling": "none", "input_norm": False}),
    ("siamese:form=hybrid_pre,final_norm=off", {"form": "hybrid_pre", "final_norm": False}),
    ("siamese:depth_scaling=sqrt(2(l+1))", {"depth_scaling": "sqrt(2(l+1))"}),
    ("siamese:x=post:norm_at=end,y=sandwich", {"x": "post:norm_at=end", "y": "sandwich"}),
    ("siamese: form = plain , input_norm = YES ", {"form": "plain", "input_norm": True}),
    ("siamese:input_norm=default", {"input_norm": None}),
    ("hyper:rate=4,dynamic=no", {"rate": 4, "dynamic": False}),
    ("mhc:rate=3,sinkhorn_steps=5,collapse=learned", {"rate": 3, "sinkhorn_steps": 5, "collapse": "learned"}),
    ("layerscale:start=1e-2", {"start": 0.01}),
    ("mix:post_fraction=1", {"post_fraction": 1.0}),
    ("span:branch_std=1/L", {"branch_std": "1/L"}),
    ("post:norm_at=end", {"norm_at": "end"}),
]


@pytest.mark.parametrize(("text", "options"), SAME, ids=[text for text, _ in SAME])
def test_text_and_python_say_the_same(text, options):
    from_text = Residual(text, 4, 2)
    from_python = Residual(text.partition(":")[0], 4, 2, **options)
    assert from_text.options == from_python.options
    for name, value in options.items():
        got = getattr(from_text.options, name)
        assert got == value
        assert type(got) is type(value)
    assert str(from_text) == str(from_python)


def test_text_and_python_may_be_mixed():
    topology = Residual("siamese:form=plain", 4, 2, depth_scaling="sqrt(l+1)")
    assert (topology.options.form, topology.depth_scaling) == ("plain", "sqrt(l+1)")


def test_parse_topology():
    assert parse_topology("pre") == ("pre", {})
    assert parse_topology("siamese:x=post:norm_at=end,y=pre") == ("siamese", {"x": "post:norm_at=end", "y": "pre"})


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_options_are_frozen_and_explained(name):
    topology = Residual(name, 4, 1)
    for field in dataclasses.fields(topology.options):
        assert field.metadata["help"]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(topology.options, field.name, None)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_describes_itself(name):
    topology = TOPOLOGIES[name]
    assert topology.__doc__
    for text in (topology.equation, topology.end, topology.arxiv, topology.streams):
        assert text.strip()
        assert "\n" not in text
    assert len(topology.drawing.strip("\n").splitlines()) >= 2
    assert name in repr(Residual(name, 4, 1))


@pytest.mark.parametrize(
    ("spec", "kind", "affine", "bias"),
    [
        ("rms", "rms", True, False),
        ("layer", "layer", True, True),
        (NormSpec("rms", bias=True), "rms", True, True),
        (NormSpec("layer", bias=False), "layer", True, False),
        (NormSpec("layer", affine=False), "layer", False, False),
        (NormSpec("rms", eps=1e-3, affine=False), "rms", False, False),
    ],
)
def test_norms(spec, kind, affine, bias):
    norm = Residual("pre", 4, 1, norm=spec).final_norm
    assert (norm.kind, norm.weight is not None, norm.bias is not None) == (kind, affine, bias)
    assert norm.eps == (1e-5 if isinstance(spec, str) else spec.eps)
