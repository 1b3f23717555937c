"""What a topology costs: time of whole training steps and of the glue alone, saved activations, peak memory.

    python benchmarks/residual.py                   # writes benchmarks/results/residual.json
    python benchmarks/residual.py --topologies pre siamese hyper --norm layer

Every time is a ratio to the first topology of the list: the contestants take turns in one process, and the
median over the rounds of (contestant / first) is reported with its quartiles. Saved activations are the bytes of
all distinct storages that autograd keeps, parameters left out, counted with saved-tensor hooks. Peak memory is
the growth of the resident set during three forward and backward passes, each contestant in a process of its
own (Linux only).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saved import saved_bytes
from siamesenorm import Residual, __version__

RESULT = Path(__file__).parent / "results" / "residual.json"
CONTESTANTS = ["pre", "siamese", "siamese:form=hybrid_pre", "siamese:form=plain"]
SHAPES = {"d256x8": (256, 8, 4), "d512x12": (512, 12, 8)}  # width, blocks, heads
VOCABULARY = 512


class Attention(nn.Module):
    """Causal self-attention with one joint projection."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """(batch, tokens, dim) to the same."""
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """silu(gate) * value."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.hidden = 8 * dim // 3 // 32 * 32
        self.into = nn.Linear(dim, 2 * self.hidden, bias=False)
        self.out = nn.Linear(self.hidden, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """(batch, tokens, dim) to the same."""
        value, gate = self.into(h).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


class SmallLM(nn.Module):
    """A decoder of nothing but an embedding, sublayers, a topology and a head."""

    def __init__(self, topology: str, norm: str, dim: int, blocks: int, heads: int, fused: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, dim)
        # The same sublayers for all: what is measured is the topology, not the norms that some want inside attention.
        self.residual = Residual(topology, dim, blocks, norm=norm, fused=fused, needs="waived")
        self.sublayers = nn.ModuleList(m for _ in range(blocks) for m in (Attention(dim, heads), SwiGLU(dim)))
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean next-token loss."""
        logits = self.head(self.residual(self.embed(tokens[:, :-1]), self.sublayers))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make(contestant: str, norm: str, shape: tuple[int, int, int]) -> SmallLM:
    topology, _, tag = contestant.partition("@")
    return SmallLM(topology, norm, *shape, fused=tag != "unfused")


def batch(sequence: int, size: int) -> Tensor:
    return torch.randint(VOCABULARY, (size, sequence + 1), generator=torch.Generator().manual_seed(0))


def step_of(model: SmallLM, tokens: Tensor) -> Callable[[], None]:
    """A whole training step: forward, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(tokens).backward()
        optimizer.step()

    return step


def glue_of(model: SmallLM, tokens: Tensor) -> Callable[[], None]:
    """The topology alone, forward and backward: every sublayer returns a constant that needs its gradient."""
    x = model.embed(tokens[:, :-1]).detach().requires_grad_()
    outputs = [torch.randn_like(x).requires_grad_() for _ in model.sublayers]
    grad = torch.randn_like(x)

    def step() -> None:
        flow = model.residual.start(x)
        seen = [flow.through(lambda h, o=o: (o, h))[1] for o in outputs]
        hidden = flow.close()
        torch.autograd.backward([hidden, *seen], [grad] * (len(seen) + 1), inputs=[x, *outputs, *params])

    params = list(model.residual.parameters())
    return step


def interleave(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, dict[str, Any]]:
    """Ratios to the first contestant, taking turns."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds):
        names = list(steps)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    first = times[next(iter(times))]
    table = {}
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, first, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        table[name] = {
            "ratio": middle,
            "quartiles": [low, high],
            "ratio_of_minima": min(values) / min(first),
            "milliseconds": 1e3 * statistics.median(values),
        }
    return table


def peak_growth(contestant: str, norm: str, shape: str, sequence: int, size: int) -> int:
    """Growth of a fresh process's resident set by three steps, in KiB."""
    command = [sys.executable, __file__, "--peak-of", contestant, "--norm", norm, "--shapes", shape]
    command += ["--sequence", str(sequence), "--batch", str(size)]
    # One arena and immediate return of freed blocks: the peak then follows live tensors, not malloc's habits.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def measure_peak(contestant: str, norm: str, shape: tuple[int, int, int], tokens: Tensor) -> int:
    model = make(contestant, norm, shape)
    model(tokens[:, :9]).backward()  # lazy initialisation is not the topology's cost
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts anew
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(tokens).backward()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--topologies", nargs="+", default=[*CONTESTANTS, "siamese@unfused"])
    parser.add_argument("--norm", default="rms", choices=["rms", "layer"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    tokens = batch(args.sequence, args.batch)
    if args.peak_of:
        print(measure_peak(args.peak_of, args.norm, SHAPES[args.shapes[0]], tokens))
        return

    report: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/residual.py", *sys.argv[1:]]),
        "versions": {"siamesenorm": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "norm": args.norm,
        "sequence": args.sequence,
        "batch": args.batch,
        "rounds": args.rounds,
        "shapes": {},
    }
    for shape in args.shapes:
        models = {name: make(name, args.norm, SHAPES[shape]) for name in args.topologies}
        rows: dict[str, dict[str, Any]] = {name: {} for name in models}
        glue = interleave({name: glue_of(model, tokens) for name, model in models.items()}, args.rounds)
        whole = interleave({name: step_of(model, tokens) for name, model in models.items()}, args.rounds)
        first_saved = first_peak = 0
        for name, model in models.items():
            saved = saved_bytes(model, tokens)
            peak = peak_growth(name, args.norm, shape, args.sequence, args.batch)
            first_saved, first_peak = first_saved or saved, first_peak or peak
            rows[name] = {
                "step": whole[name],
                "glue": glue[name],
                "saved_bytes": saved,
                "saved_ratio": saved / first_saved,
                "peak_kib": peak,
                "peak_ratio": peak / first_peak,
            }
        report["shapes"][shape] = rows
        print(f"\n{shape}, {args.norm} norm, sequence {args.sequence}, batch {args.batch}")
        print(f"{'topology':28s} {'step':>6s} {'quartiles':>15s} {'glue':>6s} {'saved':>6s} {'peak':>6s}")
        for name, row in rows.items():
            low, high = row["step"]["quartiles"]
            print(
                f"{name:28s} {row['step']['ratio']:6.3f} {f'{low:.3f}..{high:.3f}':>15s} "
                f"{row['glue']['ratio']:6.2f} {row['saved_ratio']:6.3f} {row['peak_ratio']:6.3f}"
            )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{args.out}")


if __name__ == "__main__":
    main()
