"""Signal propagation at initialisation: forward variance and gradient norm by depth, for every topology.

    python benchmarks/signal_propagation.py --out docs/pictures      # signal_propagation.png and .json
    python benchmarks/signal_propagation.py --quick --out /tmp/demo  # 16 and 64 sublayers only

Random sublayers (causal attention, GELU MLP; weights of std 1/sqrt(fan_in), times the topology's own init rule,
with the norms inside that it asks for) stand on a random embedding of unit variance. After every write the
variance of each stream is recorded; from a random linear loss on the stack's output, the gradient norm of every
sublayer's output projection. Medians over the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.residual import TOPOLOGIES, InitRule, Residual, SublayerNeeds

DIM, HEADS, TOKENS, BATCH = 64, 4, 32, 2
COLOURS, STYLES = ("#9ecae1", "#4292c6", "#08306b"), ("-", "--", ":", "-.")
VARIANTS = ["siamese", "siamese:form=plain", "siamese:form=hybrid_pre"]


def weight(rule: InitRule, role: Any, fan_out: int, fan_in: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(fan_out, fan_in) * fan_in**-0.5 * rule.scale.get(role, 1.0))


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=1e-5)


class Attention(nn.Module):
    """Causal attention with the norms that a topology asks for, gains at 1."""

    def __init__(self, rule: InitRule, needs: SublayerNeeds) -> None:
        super().__init__()
        self.needs = needs
        self.q, self.k = weight(rule, "query", DIM, DIM), weight(rule, "key", DIM, DIM)
        self.v, self.out = weight(rule, "value", DIM, DIM), weight(rule, "attention_out", DIM, DIM)

    def forward(self, h: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        q, k, v = h @ self.q.T, h @ self.k.T, h @ self.v.T
        if self.needs.attention_norm == "qk_projection":
            q, k = rms(q), rms(k)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        if self.needs.attention_norm in ("qk_head", "qkv_head"):
            q, k = rms(q), rms(k)
        if self.needs.attention_norm == "qkv_head":
            v = rms(v)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return (rms(mixed) if self.needs.output_norm else mixed) @ self.out.T


class MLP(nn.Module):
    """GELU MLP, four times as wide inside."""

    def __init__(self, rule: InitRule, needs: SublayerNeeds) -> None:
        super().__init__()
        self.needs = needs
        self.into, self.out = weight(rule, "ffn_in", 4 * DIM, DIM), weight(rule, "ffn_out", DIM, 4 * DIM)

    def forward(self, h: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        inner = F.gelu(h @ self.into.T)
        return (rms(inner) if self.needs.output_norm else inner) @ self.out.T


def propagate(topology: str, sublayers: int, seed: int) -> dict[str, list[float]]:
    """Variance of every stream after each sublayer, and the gradient norm of each output projection."""
    torch.manual_seed(seed)
    residual = Residual(topology, DIM, sublayers // 2, needs="met")
    rule = residual.init_rule
    modules = [(Attention if p.is_attention else MLP)(rule, residual.needs(p)) for p in residual.places]
    curves: dict[str, list[float]] = defaultdict(list)
    flow = residual.start(torch.randn(BATCH, TOKENS, DIM))
    for module in modules:
        flow.through(module)
        for name, stream in residual.named_streams(flow.streams).items():
            curves[f"variance {name}"].append(stream.detach().var().item())
    out = flow.close()
    # ReZero starts with a = 0 and LayerScale near it: their sublayers hear next to nothing, which is their law.
    (out * torch.randn_like(out)).sum().div(BATCH * TOKENS).backward()
    curves["gradient"] = [0.0 if m.out.grad is None else m.out.grad.norm().item() for m in modules]
    return dict(curves)


def median_curves(runs: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {
        key: [statistics.median(values) for values in zip(*(run[key] for run in runs), strict=True)] for key in runs[0]
    }


def draw(results: dict[str, dict[str, dict[str, list[float]]]], path: Path) -> None:
    """Two fields of panels, one panel a topology, one colour a depth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns, names = 6, list(results)
    rows = -(-len(names) // columns)
    figure = plt.figure(figsize=(2.6 * columns, 3.7 * rows), layout="constrained")
    fields: Any = figure.subfigures(2, 1, hspace=0.04)
    titles = ("Variance of the stream(s) after each sublayer", "Gradient norm of each output projection")
    for field, title, limits in zip(fields, titles, ((1e-1, 1e4), (1e-4, 1e3)), strict=True):
        variance = field is fields[0]
        field.suptitle(title, fontsize=12, weight="bold")
        axes = field.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
        for ax, name in zip(axes, names, strict=False):
            for colour, (depth, curves) in zip(COLOURS, results[name].items(), strict=False):
                for style, (label, values) in zip(STYLES, _lines(curves, variance).items(), strict=False):
                    share = [i / (len(values) - 1) for i in range(len(values))]
                    ax.plot(share, values, style, color=colour, linewidth=1.3, label=f"{depth} {label}")
            if not variance and not any(map(any, (c["gradient"] for c in results[name].values()))):
                ax.text(0.5, 1e-1, "0 at the start", ha="center", fontsize=8)
            ax.set(yscale="log", ylim=limits)
            ax.set_title(name.replace("siamese:form=", "siamese "), fontsize=9)
            ax.tick_params(labelsize=7)
            ax.grid(alpha=0.25)
        for ax in axes[len(names) :]:
            ax.axis("off")
        handles, labels = axes[0].get_legend_handles_labels()
        field.legend(handles, labels, loc="lower right", fontsize=8, ncols=2, title="sublayers, line")
        field.supxlabel("depth (share of the stack)", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _lines(curves: dict[str, list[float]], variance: bool) -> dict[str, list[float]]:
    if variance:
        return {key.split()[-1]: values for key, values in curves.items() if key.startswith("variance")}
    return {"attention": curves["gradient"][0::2], "ffn": curves["gradient"][1::2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="folder for the picture and the JSON")
    parser.add_argument("--depths", type=int, nargs="+", default=[16, 64, 256], help="numbers of sublayers, even")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--topologies", nargs="+", default=VARIANTS + [n for n in TOPOLOGIES if n != "siamese"])
    parser.add_argument("--quick", action="store_true", help="16 and 64 sublayers, one seed")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are small
    depths, seeds = ([16, 64], 1) if args.quick else (args.depths, args.seeds)
    if any(depth < 4 or depth % 2 for depth in depths):
        parser.error(f"--depths: {depths} is not allowed; it takes even numbers from 4")
    results: dict[str, dict[str, Any]] = {}
    print(f"{'topology':26s} {'sublayers':>9s}  variance first → last       gradient first → last")
    for topology in args.topologies:
        results[topology] = {}
        for depth in depths:
            curves = median_curves([propagate(topology, depth, seed) for seed in range(seeds)])
            results[topology][str(depth)] = curves
            variance = next(v for k, v in curves.items() if k.startswith("variance"))
            gradient = curves["gradient"]
            print(
                f"{topology:26s} {depth:9d}  {variance[0]:9.2e} → {variance[-1]:9.2e}"
                f"     {gradient[0]:9.2e} → {gradient[-1]:9.2e}",
                flush=True,
            )
    args.out.mkdir(parents=True, exist_ok=True)
    data = {"dim": DIM, "heads": HEADS, "tokens": TOKENS, "batch": BATCH, "seeds": seeds, "topologies": results}
    # Every figure in the picture can be read off the file beside it.
    (args.out / "signal_propagation.json").write_text(json.dumps(_rounded(data)) + "\n")
    draw(results, args.out / "signal_propagation.png")
    print(f"\n{args.out / 'signal_propagation.png'}\n{args.out / 'signal_propagation.json'}")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    main()
