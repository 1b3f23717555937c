"""How much of the machine's own matrix-product speed a training step reaches, and where the rest of its time goes.

    python benchmarks/share.py                      # writes benchmarks/results/share.json
    python benchmarks/share.py --quick

The first contestant multiplies square matrices, of the size that is fastest here; the second makes the very matrix
products of a `pre` step and nothing else, as PyTorch makes them. FLOPs of a step are those of its matrix products and
attention, counted by PyTorch. The breakdown is of profiled steps, by kind of operator.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from contestants import SHAPES, Shape, build, line_up, next_token_loss
from race import Results, Turn, arguments, repeated

MODELS = ("pre", "siamese", "siamese:form=hybrid_pre", "llama")
WAYS = ("eager", "compiled", "layers", "whole")
PROFILED = 3
SIZES = (256, 512, 1024, 2048)
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
KINDS = {  # the first that has a part of the operator's name
    "attention": ("scaled_dot_product", "flash_attention"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul"),
    "optimiser": ("_fused_adamw", "Optimizer"),
    "compiled kernels": ("cpp_fused", "cpp_CppMicroGemm", "graph_"),
    "norms and streams": ("siamesenorm::rms_norm", "siamesenorm::siamese_step", "rms_norm", "layer_norm"),
    "rotary and SwiGLU": ("siamesenorm::rotary", "siamesenorm::swiglu", "silu"),
    "cross-entropy": ("softmax", "nll_loss", "cross_entropy", "exp", "log"),
    "embedding": ("embedding", "index"),
    "copies and fresh memory": ("copy_", "cat", "clone", "contiguous", "fill_", "zero", "empty", "resize"),
    "elementwise": ("aten::add", "aten::mul", "aten::sub", "aten::div", "aten::sum", "aten::neg", "aten::pow"),
}


class Recorded(TorchDispatchMode):
    """Collects the matrix products that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], list[tuple[torch.Size, tuple[int, ...]]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the operands' layout and lets the operator run."""
        if func in PRODUCTS:
            self.calls.append((func, [(t.shape, t.stride()) for t in args if isinstance(t, Tensor)]))
        return func(*args, **(kwargs or {}))


def step_once(name: str, shape: Shape) -> None:
    next_token_loss(name, shape)(build(name, shape)).backward()


def products_of(name: str, shape: Shape) -> Turn:
    """The matrix products of a step, on operands of the same layout."""
    with Recorded() as recorded:
        step_once(name, shape)
    layouts = {layout for _, operands in recorded.calls for layout in operands}
    made = {(size, stride): torch.randn(size).as_strided(size, stride) for size, stride in layouts}
    calls = [(func, [made[layout] for layout in operands]) for func, operands in recorded.calls]

    @torch.no_grad()
    def turn() -> None:
        for func, operands in calls:
            func(*operands)

    return turn


def fastest_square() -> int:
    """The size of square matrices whose product reaches most FLOPs a second."""

    def best(size: int) -> float:
        a, b, times = torch.randn(size, size), torch.randn(size, size), []
        for _ in range(max(3, int(2e9 / size**3))):
            began = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - began)
        return 2 * size**3 / min(times)

    return max(SIZES, key=best)


def square_products(size: int, flops: float) -> tuple[Turn, float]:
    """Products of square matrices, of about so many FLOPs together; and how many they are."""
    count = max(1, round(flops / (2 * size**3)))
    a, b = torch.randn(size, size), torch.randn(size, size)
    return repeated(lambda: torch.mm(a, b), count), count * 2.0 * size**3


def counted(name: str, shape: Shape) -> int:
    """FLOPs of a step by PyTorch's counter."""
    with FlopCounterMode(display=False) as counter:
        step_once(name, shape)
    return counter.get_total_flops()


def breakdown(contestant: str, shape: Shape) -> dict[str, float]:
    """Share of a step's time by kind of operator; what no operator has is Python, autograd and dispatch."""
    name, way = contestant.rsplit("@", 1)
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": True}):
        (turn,) = line_up([name], shape, [way]).values()
        turn()
        turn()
        turn()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            began = time.perf_counter()
            repeated(turn, PROFILED)()
            whole = 1e6 * (time.perf_counter() - began)
    torch.compiler.reset()
    shares = dict.fromkeys([*KINDS, "other operators"], 0.0)
    for event in profile.key_averages():
        if event.key.startswith(("aten::", "siamesenorm::", "graph_", "cpp_")) or "cpp_fused" in event.key:
            kind = next((k for k, parts in KINDS.items() if any(p in event.key for p in parts)), "other operators")
            shares[kind] += event.self_cpu_time_total / whole
    shares["Python, autograd, dispatch"] = 1 - sum(shares.values())
    return shares


def main() -> int:
    parser = arguments(__doc__, "share", rounds=12)
    parser.add_argument("--shapes", nargs="+", default=["d512x12", "d1024x6"], choices=list(SHAPES))
    parser.add_argument("--ways", nargs="+", default=["eager", "compiled", "whole"], choices=WAYS)
    args = parser.parse_args()
    results = Results(parser, args, ways=args.ways)
    for name in ["d512x12"] if args.quick else args.shapes:
        shape = SHAPES[name].quick() if args.quick else SHAPES[name]
        models = ("pre",) if args.quick else MODELS
        flops = results.measure(f"{name} flops", lambda: {m: shape.steps * counted(m, shape) for m in models})  # noqa: B023

        def line() -> dict[str, Turn]:
            size = results.measure(f"{name} square size", fastest_square)  # noqa: B023
            square, results.data["facts"][f"{name} square flops"] = square_products(size, flops["pre"] / 4)  # noqa: B023
            turns = {"square products": square, "products of pre": products_of("pre", shape)}  # noqa: B023
            return turns | line_up(models, shape, args.ways)  # noqa: B023

        rounds = results.race(name, line, shape=vars(shape))
        for contestant in list(rounds[0])[2:] if rounds else []:
            shares = results.measure(f"{name} breakdown {contestant}", lambda: breakdown(contestant, shape))  # noqa: B023
            print(name, contestant, {kind: round(share, 3) for kind, share in (shares or {}).items() if share > 5e-4})
    return results.close()


if __name__ == "__main__":
    sys.exit(main())
