"""Bad names, options, layouts and shapes: one sentence that names the field, the value and what is allowed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siamesenorm.residual import TOPOLOGIES, Flow, NormSpec, Residual, TopologyError, find_topology

KINDS = "attention, cross_attention, ffn, parallel"
NAMES = ", ".join(TOPOLOGIES)
x3 = torch.zeros(3, 4)
same = torch.zeros_like


def residual(text="pre", dim=4, blocks=1, **how):
    return lambda: Residual(text, dim, blocks, **how)


def run(sublayers, x=x3, text="pre"):
    return lambda: Residual(text, 4, 1)(x, sublayers)


CASES = {
    # names and the text form
    "unknown topology": (residual("siamsee"), ["topology", "'siamsee'", NAMES]),
    "empty name": (residual(""), ["topology", "''", NAMES]),
    "a name that is no text": (residual(7), ["topology", "7", NAMES]),
    "case": (residual("Pre"), ["'Pre'", NAMES]),
    "text without a value": (residual("siamese:form"), ["'form'", "name:option=value,option=value"]),
    "text without a name": (residual("siamese:=plain"), ["'=plain'", "name:option=value"]),
    "nothing after the colon": (residual("siamese:"), ["'siamese:'", "name:option=value"]),
    "a comma too many": (residual("siamese:form=plain,"), ["''", "name:option=value"]),
    "doubled in the text": (residual("hyper:rate=2,rate=3"), ["'rate'", "twice"]),
    "doubled outside": (residual("hyper:rate=2", rate=2), ["hyper", "'rate'", "both"]),
    # options
    "unknown option": (residual("siamese:depth=1"), ["siamese", "'depth'", "form, x, y, input_norm"]),
    "option of none": (residual(rate=2), ["pre", "'rate'", "its options are prores"]),
    "wrong choice": (residual("siamese", form="both"), ["form", "'both'", "post_pre, plain, hybrid_pre"]),
    "wrong scaling": (residual("siamese:depth_scaling=l"), ["depth_scaling", "'l'", "sqrt(2(l+1)), sqrt(l+1)"]),
    "not a switch": (residual("siamese", input_norm=1), ["input_norm", "1", "true or false"]),
    "not a switch in text": (residual("hyper:dynamic=maybe"), ["dynamic", "'maybe'", "true or false"]),
    "not whole": (residual("hyper", rate=2.5), ["rate", "2.5", "whole number from 1 to 64"]),
    "a switch for a number": (residual("hyper", rate=True), ["rate", "True", "whole number"]),
    "below the range": (residual("hyper", rate=0), ["rate", "0", "from 1 to 64"]),
    "above the range": (residual("mhc:rate=65"), ["rate", "'65'", "from 2 to 64"]),
    "beyond all numbers": (residual("hyper", rate=10**400), ["rate", "from 1 to 64"]),
    "one row cannot mix": (residual("mhc:rate=1"), ["rate", "'1'", "from 2 to 64"]),
    "share above one": (residual("mix:post_fraction=1.5"), ["post_fraction", "'1.5'", "from 0 to 1"]),
    "not finite": (residual("layerscale:start=nan"), ["start", "'nan'", "a number"]),
    "too large for float32": (residual("layerscale", start=1e300), ["start", "1e+300", "from -1000 to 1000"]),
    "no text": (residual("siamese", x=3), ["x", "3", "text"]),
    # pairs
    "x of the pre kind": (residual("siamese", x="pre"), ["x", "'pre'", "x takes post, hybrid", "deepnorm"]),
    "y of the post kind": (residual("siamese", y="post"), ["y", "'post'", "y takes pre, ", "sandwich", "scaled"]),
    "x of several streams": (residual("siamese", x="residual_dual"), ["x", "'residual_dual'", "several streams"]),
    "x of rows": (residual("siamese", x="gr"), ["x", "'gr'", "never normalises its stream"]),
    "x of sources": (residual("siamese", x="attnres"), ["x", "'attnres'", "never normalises its stream"]),
    "a ramp of one stream": (residual("siamese", y="pre:prores=10"), ["y", "pre:prores=10", "belongs to the pair"]),
    "y of several streams": (residual("siamese", y="siamese"), ["y", "'siamese'", "several streams"]),
    "mixed kind": (residual("siamese:x=mix"), ["x", "'mix'", "Post-Norm in some blocks"]),
    "unknown part": (residual("siamese:y=nothing"), ["'nothing'", NAMES]),
    "option of a part": (residual("siamese:x=post:at=end"), ["post", "'at'", "norm_at"]),
    "two attention norms": (
        residual("siamese:x=hybrid,y=reordered"),
        ["x=hybrid", "y=reordered", "qk_projection, qkv_head"],
    ),
    "two init rules": (residual("siamese:x=deepnorm,y=subln"), ["x=deepnorm", "y=subln", "initial weights"]),
    # layout
    "no blocks": (residual(blocks=0), ["blocks", "0", "at least 1"]),
    "no blocks in a list": (residual(blocks=[]), ["blocks", "at least 1"]),
    "empty block": (residual(blocks=[["attention"], []]), ["blocks", "at least 1 sublayer"]),
    "unknown kind": (residual(blocks=[["attention", "mlp"]]), ["blocks", "'mlp'", KINDS]),
    "half a block": (residual(blocks=1.5), ["blocks", "1.5", "number"]),
    "no layout": (residual(blocks=None), ["blocks", "None", "number"]),
    "parallel in hybrid": (residual("hybrid", blocks=[["parallel"]]), ["hybrid", "'parallel'", "attention, cross"]),
    "parallel in a hybrid pair": (residual("siamese:form=hybrid_pre", blocks=[["parallel"]]), ["'parallel'", "ffn"]),
    "width zero": (residual(dim=0), ["dim", "0", "whole number from 1"]),
    "width of a fraction": (residual(dim=4.0), ["dim", "4.0", "whole number"]),
    "width of a switch": (residual(dim=True), ["dim", "True", "whole number"]),
    "unknown norm": (residual(norm="batch"), ["norm", "'batch'", "rms, layer"]),
    "unknown norm spec": (lambda: NormSpec("batch"), ["norm", "'batch'", "rms, layer"]),
    "no norm": (residual(norm=3), ["norm", "3", "rms, layer"]),
    # drop rates
    "dropout of one": (residual(dropout=1.0), ["dropout", "1.0", "from 0 to below 1"]),
    "negative dropout": (residual(dropout=-0.1), ["dropout", "-0.1", "from 0 to below 1"]),
    "dropout in words": (residual(dropout="much"), ["dropout", "'much'", "from 0 to below 1"]),
    "drop_path of two": (residual(drop_path=2), ["drop_path", "2", "from 0 to below 1"]),
    "drop_path nan": (residual(drop_path=float("nan")), ["drop_path", "nan", "from 0 to below 1"]),
    "drop_path in words": (residual(drop_path="much"), ["drop_path", "'much'", "from 0 to below 1"]),
    "one bad rate": (residual(blocks=2, drop_path=[0.1, 1.0]), ["drop_path", "1.0", "from 0 to below 1"]),
    "rates for other blocks": (residual(blocks=3, drop_path=[0.1, 0.2]), ["drop_path", "2 rates", "3 blocks"]),
    # running
    "wrong width": (run([same] * 2, torch.zeros(3, 5)), ["pre", "4", "(3, 5)"]),
    "no dimension": (run([same] * 2, torch.tensor(1.0)), ["pre", "4", "()"]),
    "whole numbers": (run([same] * 2, torch.zeros(3, 4, dtype=torch.long)), ["pre", "floating-point", "int64"]),
    "no tensor": (run([same] * 2, [1.0]), ["pre", "tensor", "list"]),
    "output too wide": (run([lambda h: torch.zeros(3, 5)] * 2), ["sublayer 0", "(3, 4)", "(3, 5)"]),
    "output of the second": (run([same, lambda h: h[:1]]), ["sublayer 1", "(3, 4)", "(1, 4)"]),
    "output a row stack": (run([lambda h: torch.zeros(3, 2, 4)], text="hyper"), ["hyper", "(3, 4)", "(3, 2, 4)"]),
    "no output": (run([lambda h: None]), ["sublayer 0", "(3, 4)", "NoneType"]),
    "empty tuple": (run([lambda h: ()]), ["sublayer 0", "(3, 4)", "tuple"]),
    "too few sublayers": (run([same]), ["2 sublayers", "1 were run"]),
    "too many sublayers": (run([same] * 3), ["2 sublayers", "one more"]),
    "read twice": (lambda: [flow.read() for flow in [Flow(Residual("pre", 4, 1), x3)] * 2], ["read", "not written"]),
    "written before read": (lambda: Flow(Residual("pre", 4, 1), x3).write(x3), ["written before it was read"]),
    "streams after a read": (
        lambda: [flow.read() is flow.streams for flow in [Flow(Residual("pre", 4, 1), x3)]],
        ["read but not written"],
    ),
    "at beyond the end": (lambda: Flow(Residual("pre", 4, 1), streams=x3, at=3), ["at", "3", "0 to 2"]),
    "at before the start": (lambda: Flow(Residual("pre", 4, 1), streams=x3, at=-1), ["at", "-1", "0 to 2"]),
    "nothing to start from": (lambda: Flow(Residual("pre", 4, 1)), ["embedding", "streams"]),
}


@pytest.mark.parametrize(("act", "words"), CASES.values(), ids=CASES)
def test_one_sentence_says_what_is_wrong_and_what_is_allowed(act, words):
    with pytest.raises(TopologyError) as caught:
        act()
    message = str(caught.value)
    for word in words:
        assert word in message
    assert "\n" not in message
    assert not message.endswith(".")
    assert isinstance(caught.value, ValueError)
    assert caught.value.__cause__ is None


LONG = {
    "name": lambda text, _: residual(text),
    "option": lambda text, _: residual(f"siamese:{text}=1"),
    "option of a part": lambda text, _: residual(f"siamese:x=post:{text}=1"),
    "no option": lambda text, _: residual(f"siamese:{text}"),
    "doubled": lambda text, _: residual(f"siamese:{text}=1,{text}=1"),
    "value": lambda text, _: residual(f"siamese:form={text}"),
    "part": lambda text, _: residual(f"siamese:y={text}"),
    "argument": lambda text, _: residual("hyper", **{text: 1}),
    "number in words": lambda text, _: residual("hyper", rate=text),
    "number": lambda _, size: residual("hyper", rate=10**size),
    "list": lambda _, size: residual("hyper", rate=[1] * size),
    "switch": lambda text, _: residual("hyper", dynamic=text),
    "norm": lambda text, _: residual(norm=text),
    "norms": lambda _, size: residual(norm=[1] * size),
    "kind": lambda text, _: residual(blocks=[[text]]),
    "blocks": lambda text, _: residual(blocks=text),
    "number of blocks": lambda _, size: residual(blocks=-(10**size)),
    "width": lambda text, _: residual(dim=text),
    "dropout": lambda text, _: residual(dropout=text),
    "needs": lambda text, _: residual(needs=text),
}


@pytest.mark.parametrize("case", LONG)
def test_long_values_are_cut_short(case):
    for size in (301, 5000):
        with pytest.raises(TopologyError) as caught:
            LONG[case]("a" * size, size)()
        message = str(caught.value)
        assert len(message) < 400
        assert "\n" not in message
        assert "…" in message or "too large to show" in message


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_option_cuts_long_values_short(name):
    for option in (*TOPOLOGIES[name].options_class.__dataclass_fields__, "a" * 5000):
        for value in ("a" * 5000, ["a"] * 5000, -(10**5000)):
            with pytest.raises(TopologyError) as caught:
                find_topology(name)(4, 2, options={option: value})
            assert len(str(caught.value)) < 400


def test_find_topology():
    for name, topology in TOPOLOGIES.items():
        assert find_topology(name) is topology
        assert topology.name == name


OPTION_NAMES = sorted({name for t in TOPOLOGIES.values() for name in t.options_class.__dataclass_fields__})
TEXTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["true", "off", "default", "plain", "hybrid_pre", "start", "end", "1/L", "none", "learned", "0.5"]),
    st.sampled_from(sorted(TOPOLOGIES)),
    st.integers(-3, 99).map(str),
)
VALUES = st.one_of(
    TEXTS,
    st.none(),
    st.booleans(),
    st.integers(-3, 8),
    st.integers(10**300, 10**400),
    st.floats(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
    st.binary(max_size=3),
)


@settings(max_examples=150)
@given(
    name=st.sampled_from(sorted(TOPOLOGIES)),
    options=st.dictionaries(st.sampled_from(OPTION_NAMES) | st.text(max_size=5), VALUES, max_size=2),
)
def test_any_option_builds_or_raises_topology_error(name, options):
    reserved = {"topology", "dim", "blocks", "norm", "dropout", "drop_path", "fused", "needs", "device", "dtype"}
    options = {key: value for key, value in options.items() if key not in reserved}
    try:
        topology = Residual(name, 3, 2, needs="waived", **options)
    except TopologyError:
        pass
    else:
        assert topology(torch.randn(2, 3), [torch.tanh] * 4).shape == (2, 3)


@settings(max_examples=200)
@given(
    text=st.one_of(
        st.text(max_size=12),
        st.tuples(st.sampled_from(sorted(TOPOLOGIES)), TEXTS, TEXTS).map("{0[0]}:{0[1]}={0[2]}".format),
        st.tuples(st.sampled_from(sorted(TOPOLOGIES)), st.sampled_from(OPTION_NAMES), TEXTS).map(
            "{0[0]}:{0[1]}={0[2]}".format
        ),
    )
)
def test_any_text_builds_or_raises_topology_error(text):
    try:
        topology = Residual(text, 3, 1, needs="waived")
    except TopologyError:
        pass
    else:
        topology.set_step(0)  # for what changes over training
        assert topology(torch.randn(3), [torch.tanh] * 2).shape == (3,)
