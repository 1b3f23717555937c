"""What every topology of the registry costs beside `pre`: whole training steps of a language model.

    python benchmarks/topologies.py                 # writes benchmarks/results/topologies.json
    python benchmarks/topologies.py --quick
    python benchmarks/topologies.py --topologies mhc hyper --shapes d256x8

Each topology races `pre` by itself, both eager and compiled block by block, with the norms inside sublayers that it
wants. Saved activations and peak memory: benchmarks/memory.py.
"""

from __future__ import annotations

import sys

from contestants import SHAPES, every_topology, line_up
from race import Results, arguments
from siamesenorm.errors import TopologyError
from siamesenorm.residual.registry import parse_topology


def main() -> int:
    parser = arguments(__doc__, "topologies", rounds=12)
    parser.add_argument("--shapes", nargs="+", default=["d256x8", "d512x12"], choices=list(SHAPES))
    parser.add_argument("--topologies", nargs="+", default=every_topology()[1:])
    parser.add_argument("--ways", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    args = parser.parse_args()
    try:
        for topology in args.topologies:
            parse_topology(topology)
    except TopologyError as error:
        parser.error(f"--topologies: {error}")
    results = Results(parser, args, ways=args.ways)
    for name in ["d256x8"] if args.quick else args.shapes:
        shape = SHAPES[name].quick() if args.quick else SHAPES[name]
        for topology in ["siamese", "hyper"] if args.quick else args.topologies:
            results.race(
                f"{name} {topology}",
                lambda topology=topology, shape=shape: line_up(("pre", topology), shape, args.ways),  # type: ignore[misc]
                shape=vars(shape),
            )
    return results.close()


if __name__ == "__main__":
    sys.exit(main())
