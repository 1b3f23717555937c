"""What of the vLLM plugin needs no vLLM: that it is found, and that streams survive the way between pipeline ranks."""

import importlib.metadata
import sys

import torch
from torch.testing import assert_close

from residual.stacks import PAIR, D, every_row, make, make_sublayers, randomise
from siamesenorm.interop.vllm.streams import Wire
from siamesenorm.residual import Flow
from siamesenorm.residual.depth import make_factors_plain

BLOCKS, TOKENS = 4, 5


@every_row
def test_streams_between_ranks(row):
    """Cut in front of every block, sent token by token and in parts, a stack gives what it gives in one piece."""
    torch.manual_seed(0)
    topology, sublayers = make(row.text, BLOCKS), make_sublayers([PAIR] * BLOCKS)
    randomise(topology)
    x = torch.randn(1, TOKENS, D, dtype=torch.float64)
    expected = topology(x, sublayers)
    shapes, flow = make(row.text, BLOCKS).to("meta"), Flow(topology, x)
    for block in range(BLOCKS):
        wire = Wire(shapes, block)
        sent = wire.pack(flow.streams)
        room = wire.empty(TOKENS, x.dtype, torch.device("cpu"))
        assert {name: t.shape for name, t in room.items()} == {name: t.shape for name, t in sent.items()}
        for name, tensor in sent.items():
            room[name][:2].copy_(tensor[:2])
            room[name][2:].copy_(tensor[2:])
        flow = Flow(topology, streams=wire.unpack(room), at=2 * block)
        for sublayer in sublayers[2 * block : 2 * block + 2]:
            flow.through(sublayer)
    assert_close(flow.close(), expected)


def test_the_plugin_is_found_by_its_entry_point():
    found = {e.name: e.value for e in importlib.metadata.entry_points(group="vllm.general_plugins")}
    assert found["siamesenorm"] == "siamesenorm.interop.vllm:register"


def test_importing_the_plugin_imports_neither_vllm_nor_transformers():
    import subprocess

    code = "import sys, siamesenorm.interop.vllm; assert not {'vllm', 'transformers', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@every_row
def test_depth_factors_become_numbers(row):
    """The plugin's models hold no factor as a tensor, and flow as before."""
    topology, sublayers = make(row.text, BLOCKS), make_sublayers([PAIR] * BLOCKS)
    randomise(topology)
    x = torch.randn(1, TOKENS, D, dtype=torch.float64)
    expected = topology(x, sublayers)
    make_factors_plain(topology)
    held = [v for m in topology.modules() for v in vars(m).values() if isinstance(v, torch.Tensor) and not v.dim()]
    assert not held
    assert_close(topology(x, sublayers), expected)


def test_compiles_ahead_of_time():
    """As vLLM compiles: without a second try, which a factor held as a tensor would need."""
    topology, sublayers = make("siamese", 2), make_sublayers([PAIR] * 2)
    make_factors_plain(topology)
    x = torch.randn(1, TOKENS, D, dtype=torch.float64)
    compiled = torch.compile(lambda x: topology(x, sublayers), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled.aot_compile(((x,), {}))(x), topology(x, sublayers))
