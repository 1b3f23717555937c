"""Mixture of experts against a dense FFN of equal active parameters, in interleaved runs of one process.

    OMP_WAIT_POLICY=passive python benchmarks/moe.py [--rounds 12] [--out benchmarks/results/moe.json]

Threads that spin while they wait (OpenMP's default) lose a time slice per product where other processes want the same
cores, and an MoE has 16 products where the dense FFN has one; the passive policy keeps that out of the ratios.

Dense hidden width = top_k × expert hidden width, so that both spend the same products on a token. Every round times
one dense and one MoE call back to back; a ratio is dense time / MoE time of the same round (MoE throughput as a share
of dense), and the median over rounds is reported beside the ratio of the fastest calls. The language models train on
random tokens of Zipf frequency, each followed by a fixed successor half of the time, with balance and z-loss, AdamW
(fused) included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm import Residual
from siamesenorm.layers.moe import MoE, RouterStats

DIM, EXPERTS, TOP_K, BLOCKS, HEADS, SEQUENCE, VOCABULARY = 256, 16, 2, 8, 4, 256, 512
TARGET = 0.6


class Dense(nn.Module):
    """SwiGLU FFN in ordinary operators."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * hidden, bias=False), nn.Linear(hidden, DIM, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """(..., dim) to the same."""
        value, gate = self.up(h).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Attention(nn.Module):
    """Causal self-attention without positions: enough for a cost."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """(batch, tokens, dim) to the same."""
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, DIM // HEADS)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class LM(nn.Module):
    """Pre-Norm language model with a dense or MoE FFN in every block."""

    def __init__(self, ffn: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.sublayers = nn.ModuleList(m for _ in range(BLOCKS) for m in (Attention(), ffn()))
        self.residual = Residual("pre", DIM, BLOCKS)
        self.stats: list[RouterStats] = []

    def loss(self, ids: Tensor) -> Tensor:
        """Next-token loss with the routers' losses, where there are any."""
        flow = self.residual.start(self.embedding(ids[:, :-1]))
        results = [flow.through(sublayer) for sublayer in self.sublayers]
        self.stats = [result[1] for result in results if isinstance(result, tuple)]
        loss = F.cross_entropy(self.head(flow.close()).flatten(0, 1), ids[:, 1:].flatten())
        for stats in self.stats:
            loss = loss + (0.01 * stats.balance_loss + 0.001 * stats.z_loss) / len(self.stats)
        return loss


def interleaved(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call, `rounds` each, in turn; the order alternates so that neither is always first."""
    for call in calls.values():
        call()
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in calls if i % 2 else reversed(calls):
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
    return times


def cell(name: str, calls: dict[str, Callable[[], None]], rounds: int, **facts: Any) -> dict[str, Any]:
    """One row of the report: dense and MoE milliseconds and their ratios."""
    load = os.getloadavg()[0]
    times = interleaved(calls, rounds)
    ratios = sorted(d / m for d, m in zip(times["dense"], times["moe"], strict=True))
    return {
        "name": name,
        **facts,
        "threads": torch.get_num_threads(),
        "dense_ms": 1e3 * statistics.median(times["dense"]),
        "moe_ms": 1e3 * statistics.median(times["moe"]),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "ratio_of_fastest": min(times["dense"]) / min(times["moe"]),
        "rounds": rounds,
        "load_average_before": load,
    }


def sublayer(tokens: int, hidden: int, rounds: int) -> dict[str, Any]:
    """Forward and backward of one FFN."""
    torch.manual_seed(0)
    dense, moe = Dense(TOP_K * hidden), MoE(DIM, hidden, EXPERTS, TOP_K)
    h, grad = torch.randn(tokens, DIM, requires_grad=True), torch.randn(tokens, DIM)

    def run_dense() -> None:
        dense.zero_grad()
        dense(h).backward(grad)

    def run_moe() -> None:
        moe.zero_grad()
        out, stats = moe(h)
        torch.autograd.backward([out, 0.01 * stats.balance_loss + 0.001 * stats.z_loss], [grad, None])

    calls = {"dense": run_dense, "moe": run_moe}
    return cell("sublayer forward+backward", calls, rounds, tokens=tokens, expert_hidden=hidden)


def decode(batch: int, hidden: int, rounds: int) -> dict[str, Any]:
    """A token of every row of a batch through one FFN without gradients, a hundred times a call."""
    torch.manual_seed(0)
    dense, moe, h = Dense(TOP_K * hidden), MoE(DIM, hidden, EXPERTS, TOP_K), torch.randn(batch, 1, DIM)

    def run(module: nn.Module) -> Callable[[], None]:
        @torch.no_grad()
        def hundred() -> None:
            for _ in range(100):
                module(h)

        return hundred

    calls = {"dense": run(dense), "moe": run(moe)}
    return cell("100 × decoding, no gradient", calls, rounds, tokens=batch, expert_hidden=hidden)


def zipf_text(batch: int) -> Tensor:
    """Tokens of Zipf frequency; half of them are followed by their fixed successor."""
    weights = 1 / torch.arange(1, VOCABULARY + 1)
    ids = torch.multinomial(weights, batch * (SEQUENCE + 1), replacement=True).view(batch, -1)
    follows = torch.rand(batch, SEQUENCE) < 0.5
    ids[:, 1:] = torch.where(follows, (ids[:, :-1] * 7 + 3) % VOCABULARY, ids[:, 1:])
    return ids


def language_model(batch: int, hidden: int, rounds: int) -> dict[str, Any]:
    """A training step of an 8-block language model, optimiser included."""
    torch.manual_seed(0)
    models = {"dense": LM(lambda: Dense(TOP_K * hidden)), "moe": LM(lambda: MoE(DIM, hidden, EXPERTS, TOP_K))}
    optimisers = {name: torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for name, m in models.items()}
    spent: dict[str, list[float]] = {name: [] for name in models}

    def step(name: str) -> Callable[[], None]:
        def run() -> None:
            optimisers[name].zero_grad()
            models[name].loss(zipf_text(batch)).backward()
            start = time.perf_counter()
            optimisers[name].step()
            spent[name].append(time.perf_counter() - start)

        return run

    row = cell("LM training step", {name: step(name) for name in models}, rounds, batch=batch, expert_hidden=hidden)
    loads = [s.tokens_per_expert.max() / s.tokens_per_expert.float().mean() for s in models["moe"].stats]
    row |= {f"{name}_adamw_ms": 1e3 * statistics.median(times) for name, times in spent.items()}
    row |= {f"{name}_parameters": sum(p.numel() for p in m.parameters()) for name, m in models.items()}
    return row | {"busiest_expert_over_mean": float(sum(loads) / len(loads)), "tokens": batch * SEQUENCE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "moe.json")
    parser.add_argument(
        "--only", choices=("sublayer", "training", "decoding"), help="measure this part again, keep the others' rows"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kept = [] if arguments.only is None else json.loads(arguments.out.read_text())["rows"]
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "sublayer": lambda: [sublayer(*size, 3 * arguments.rounds) for size in ((1024, 256), (1024, 512), (2048, 512))],
        "training": lambda: [language_model(*size, arguments.rounds) for size in ((4, 512), (8, 512), (8, 256))],
        "decoding": lambda: [decode(batch, 512, 3 * arguments.rounds) for batch in (1, 4, 16)],
    }
    rows = [
        row
        for part, measure in parts.items()
        for row in (measure() if arguments.only in (None, part) else [row for row in kept if part in row["name"]])
    ]
    report = {
        "shape": {"dim": DIM, "experts": EXPERTS, "top_k": TOP_K, "blocks": BLOCKS, "sequence": SEQUENCE},
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "torch": torch.__version__,
        "processor": platform.machine(),
        "target_ratio": TARGET,
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    heads = (("", -30), ("tokens", 6), ("hidden", 6), ("dense ms", 9), ("MoE ms", 9), ("ratio", 6), ("quartiles", 13))
    print(*(f"{name:{'<' if width < 0 else '>'}{abs(width)}}" for name, width in (*heads, ("fastest", 7))))
    for row in rows:
        low, high = row["ratio_quartiles"]
        print(
            f"{row['name']:30} {row['tokens']:6} {row['expert_hidden']:6} {row['dense_ms']:9.2f} {row['moe_ms']:9.2f} "
            f"{row['ratio']:6.2f} {low:6.2f}–{high:6.2f} {row['ratio_of_fastest']:7.2f}"
        )


if __name__ == "__main__":
    main()
