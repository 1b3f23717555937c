"""Training steps of language models: ours beside transformers' Llama, OLMo-2 and Qwen3 of the same shape.

    python benchmarks/lm.py                         # writes benchmarks/results/lm.json
    python benchmarks/lm.py --quick
    python benchmarks/lm.py --shapes d256x8 --rounds 30

Whole steps in float32 with fused AdamW, sequence 256, batch 4; d64x12 is of the demo's size, with sequence 64, batch 16
and ours alone. Every model runs eager and compiled: ours block by block, theirs both whole and layer by layer.
"""

from __future__ import annotations

import sys

from contestants import OURS, SHAPES, THEIRS, line_up
from race import Results, arguments

WAYS = ("eager", "compiled", "layers", "whole")


def main() -> int:
    parser = arguments(__doc__, "lm", rounds=20)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    args = parser.parse_args()
    results = Results(parser, args, ways=args.ways)
    for name in ["d256x8"] if args.quick else args.shapes:
        shape = SHAPES[name].quick() if args.quick else SHAPES[name]
        models = OURS if name == "d64x12" else OURS + THEIRS
        if args.quick:
            models = ("pre", "siamese", "llama")
        results.race(name, lambda models=models, shape=shape: line_up(models, shape, args.ways), shape=vars(shape))  # type: ignore[misc]
    return results.close()


if __name__ == "__main__":
    sys.exit(main())
