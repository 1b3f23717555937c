"""What Muon costs beside AdamW: whole training steps of a language model.

    python benchmarks/optimizers.py                 # writes benchmarks/results/optimizers.json
    python benchmarks/optimizers.py --quick
    python benchmarks/optimizers.py --shapes d512x12 --batch 32

Muon's own work is a number of matrix products for every weight, whatever the batch: its share of a step falls as
the batch grows. A step of the trainer's optimisers is raced, with their groups of parameters.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from contestants import SHAPES, Shape, build, next_token_loss, training
from race import Results, Turn, arguments, count
from siamesenorm.train.config import OptimizerConfig
from siamesenorm.train.optimizer import build_optimizer

KINDS = ("adamw", "muon")


def line_up(shape: Shape, ways: list[str]) -> dict[str, Turn]:
    """A model of its own for each optimiser, in each way."""
    turns: dict[str, Turn] = {}
    for kind in KINDS:

        def optimized(model: nn.Module, kind: str = kind) -> Optimizer:
            return build_optimizer(model, OptimizerConfig.model_validate({"kind": kind, "lr": 1e-5}))

        loss = next_token_loss("pre", shape)
        made = training(lambda: build("pre", shape), loss, ways, steps=shape.steps, optimized=optimized)
        turns |= {f"{kind}@{way}": turn for way, turn in made.items()}
    return turns


def main() -> int:
    parser = arguments(__doc__, "optimizers", rounds=12)
    parser.add_argument("--shapes", nargs="+", default=["d256x8", "d512x12"], choices=list(SHAPES))
    parser.add_argument("--ways", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--batch", type=count, help="sequences per step (the shape's own)")
    args = parser.parse_args()
    results = Results(parser, args, ways=args.ways, batch=args.batch)
    for name in ["d256x8"] if args.quick else args.shapes:
        shape = SHAPES[name].quick() if args.quick else SHAPES[name]
        if args.batch is not None and not args.quick:
            shape = replace(shape, batch=args.batch)
        results.race(name, lambda shape=shape: line_up(shape, args.ways), shape=vars(shape))  # type: ignore[misc]
    return results.close()


if __name__ == "__main__":
    sys.exit(main())
