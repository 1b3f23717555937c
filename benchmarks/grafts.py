"""Grafts of a small trained Pre-Norm model to every topology: KL to the source behind every stage, as a table.

    python benchmarks/grafts.py                 # benchmarks/results/grafts.json; `make docs` makes docs/grafts.md of it
    python benchmarks/grafts.py --quick --out /tmp/g.json

The model reads bytes of Python's documentation. Gains are set on 1,024 tokens and judged on 1,024 others, held out from
training. Figures are mean KL in nats per token, in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from siamesenorm.data.sources import embedded_documents
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.models.lm.grafting import compare_predictions
from siamesenorm.models.lm.transplant import transplant
from siamesenorm.residual import TOPOLOGIES

RESULT = Path(__file__).parent / "results" / "grafts.json"
SHAPE = {"vocab_size": 256, "dim": 64, "blocks": 6, "heads": 4, "ffn_dim": 128, "max_length": 128, "topology": "pre"}
MORE = ("siamese:form=hybrid_pre", "siamese:form=plain", "attnres:blocks=0")
NORMS = {"pre, QK-norm by head": "head", "pre, QK-norm over the projection": "projection"}
WIDTH, ROWS = 128, 16


def tokens(split: str) -> Tensor:
    """Bytes of Python's documentation."""
    return torch.tensor(list("\n".join(embedded_documents("python-docs", split)).encode()))


def train(steps: int) -> LanguageModel:
    """A Pre-Norm model that has learnt something."""
    model, data = LanguageModel(LMConfig(**SHAPE), seed=0), tokens("train")  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    torch.manual_seed(0)
    for step in range(steps):
        rows = torch.stack([data[i : i + WIDTH] for i in torch.randint(len(data) - WIDTH, (8,))])
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1, (step + 1) / 30) * (1 - 0.9 * step / steps)
        optimizer.zero_grad()
        loss: Any = model(rows[:, :-1], labels=rows[:, 1:]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def measure(model: LanguageModel, ids: Tensor, topology: str, qk_norm: str | None) -> dict[str, Any]:
    """Agreement behind every stage, and of what is written by a ramp."""
    made = transplant(model, topology, ids, qk_norm=qk_norm)
    if not made.stages:
        return {"exact": asdict(compare_predictions(model, made.model, ids))}
    begun = transplant(model, topology, ids, qk_norm=qk_norm, ramp=100, regression=0)
    found = {**made.stages, "ramp": compare_predictions(model, begun.model, ids)}
    return {name: asdict(agreement) for name, agreement in found.items()}


def table(results: dict[str, dict[str, Any]]) -> str:
    """As Markdown."""
    lines = ["| to | exact | copied | calibrated | regressed | `--ramp`, first step |", "|---|---|---|---|---|---|"]
    for name, found in results.items():
        cells = [
            f"{found[stage]['mean_kl']:.2g}" if stage in found else "–"
            for stage in ("exact", "copied", "calibrated", "regressed", "ramp")
        ]
        lines.append(f"| {name if ' ' in name else f'`{name}`'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_results() -> str:
    """The table of what was measured last."""
    return table(json.loads(RESULT.read_text(encoding="utf-8"))["grafts"])


def main() -> int:
    """Train, graft, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two steps and two topologies: whether it runs")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    model = train(2 if arguments.quick else 300)
    ids = tokens("validation")[: ROWS * WIDTH].view(ROWS, WIDTH)
    wanted: dict[str, tuple[str, str | None]] = {name: (name, None) for name in [*TOPOLOGIES, *MORE]}
    wanted |= {words: ("pre", norm) for words, norm in NORMS.items()}
    if arguments.quick:
        wanted = {name: wanted[name] for name in ("siamese", "post")}
    results = {}
    for name, (topology, qk_norm) in wanted.items():
        results[name] = measure(model, ids, topology, qk_norm)
        print(name, {stage: f"{found['mean_kl']:.2g}" for stage, found in results[name].items()}, file=sys.stderr)
    said = {"command": "python benchmarks/grafts.py", "torch": torch.__version__, "quick": arguments.quick}
    arguments.out.write_text(json.dumps({**said, "shape": SHAPE, "grafts": results}, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
