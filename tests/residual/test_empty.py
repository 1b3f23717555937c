"""No rows or no tokens: right shapes, gradients of zero, and what streams in other layouts and dtypes give."""

import torch
from torch.testing import assert_close

from .stacks import PAIR, D, L, every_graph, gradients, make, make_sublayers, randomise


def stack(row, dtype=torch.float32):
    torch.manual_seed(1)
    topology, sublayers = make(row, dtype=torch.float32), make_sublayers([PAIR] * L, dtype=torch.float32)
    randomise(topology, 0.2)
    return topology.to(dtype), sublayers.to(dtype)


@every_graph
def test_nothing_in_nothing_out(row):
    topology, sublayers = stack(row)
    for shape in ((0, 3), (2, 0), (0,)):
        x = torch.randn(*shape, D, requires_grad=True)
        out = topology(x, sublayers if len(shape) == 2 else [torch.tanh] * (2 * L))
        assert out.shape == x.shape
        assert not any(grad.any() for grad in gradients(out, x, topology))


LAYOUTS = {
    "strided": lambda *shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
    "turned": lambda *shape: torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2),
    "expanded": lambda *shape: torch.randn(1, *shape[1:]).expand(*shape),
    "a slice": lambda *shape: torch.randn(shape[0], shape[1] + 2, *shape[2:])[:, 1:-1],
}


@every_graph
def test_streams_that_do_not_lie_in_one_piece(row):
    topology, sublayers = stack(row)
    for name, lay in LAYOUTS.items():
        results, odd = [], lay(2, 3, D)
        for x in (odd, odd.contiguous()):
            x = x.detach().requires_grad_()
            out = topology(x, sublayers)
            results.append((out, *gradients(out, x, topology, sublayers)))
        assert_close(*results, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@every_graph
def test_float16_is_near_float32(row):
    x, dtype = torch.randn(2, 3, D), torch.float16
    exact, sublayers = stack(row)
    expected = exact(x, sublayers)
    for autocast in (True, False):
        topology, sublayers = stack(row, torch.float32 if autocast else dtype)
        given = (x if autocast else x.to(dtype)).detach().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=autocast):
            out = topology(given, sublayers)
        assert autocast or out.dtype is dtype
        assert (out.float() - expected).norm() < 0.1 * expected.norm()
        assert all(grad.isfinite().all() for grad in gradients(out.float(), given, topology))
