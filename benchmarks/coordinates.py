"""The coordinate check of every topology: standard and CompleteP, AdamW and Muon; and where a branch factor goes.

    python benchmarks/coordinates.py                # goes on where benchmarks/results/coordinates.json stands
    python benchmarks/coordinates.py --quick --out /tmp/coordinates.json

Small models take a few steps on a made-up language whose every second token follows from the one before; see
`siamesenorm.lab.inspection.coordinates` for what is measured. `placements` are CompleteP with its branch factor, or
the learning rates of what lies on the skip, put elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from siamesenorm.data.atomic import write_json
from siamesenorm.lab.inspection.coordinates import Coordinates, check_coordinates
from siamesenorm.models.dit import DiT, DiTConfig
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.models.stack import Block, Stack
from siamesenorm.models.vit import VisionTransformer, ViTConfig
from siamesenorm.residual import TOPOLOGIES
from siamesenorm.residual.base import Link, Step
from siamesenorm.train.config import OptimizerConfig

RESULTS = Path(__file__).parent / "results" / "coordinates.json"
SAMPLE = ("pre", "siamese", "post", "hyper", "attnres")
"""Topologies that are checked in the standard parametrisation, and on images."""
VARIANTS = ("siamese:form=plain", "siamese:form=hybrid_pre", "post:norm_at=end", "attnres:blocks=0")
WIDTHS, DEPTHS, STEPS, SEEDS = (1, 2, 4), (1, 2, 4), 3, 2
LR = {"language": 3e-3, "vision": 1e-3, "diffusion": 1e-3}
SHAPE = {"dim": 32, "blocks": 4, "heads": 2, "ffn_dim": 64, "qk_norm": "head"}
IMAGE = {"channels": 1, "classes": 4, "patch_size": 2}
WORDS = 64
UNIT = 32**0.5
"""What brings an embedding of std 1/sqrt(32) to rms 1."""
Batch = Mapping[str, Tensor]
Prepare = Callable[[Stack[Any]], None]


def language(topology: str, **base: Any) -> tuple[Stack[Any], list[Batch]]:
    """A language model whose embedding has rms 1, and its text."""
    scale = 50.0 if topology == "reordered" else UNIT  # OLMo-2's rule makes all weights .02
    fields = {**SHAPE, "vocab_size": WORDS, "max_length": 64, "first_logits": "small", "embedding_scale": scale}
    ids = torch.randint(0, WORDS, (STEPS, 4, 17), generator=torch.Generator().manual_seed(0))
    ids[:, :, 1::2] = (ids[:, :, 0:-1:2] * 3 + 1) % WORDS
    model = LanguageModel(LMConfig(**fields, topology=topology, **base), seed=0)  # type: ignore[arg-type]
    return model, [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in ids]


def vision(topology: str, **base: Any) -> tuple[Stack[Any], list[Batch]]:
    """A vision Transformer, and pictures of four kinds of stripes."""
    config = ViTConfig(**SHAPE, **IMAGE, image_size=8, topology=topology, **base)  # type: ignore[arg-type]
    return VisionTransformer(config, seed=0), pictures()


def diffusion(topology: str, **base: Any) -> tuple[Stack[Any], list[Batch]]:
    """A diffusion Transformer, and the same pictures."""
    config = DiTConfig(**SHAPE, **IMAGE, input_size=8, topology=topology, **base)  # type: ignore[arg-type]
    return DiT(config, seed=0), pictures()


def pictures() -> list[Batch]:
    """Batches of noisy stripes with their kind, and a time and noise for each."""
    draw = torch.Generator().manual_seed(0)
    batches: list[Batch] = []
    for _ in range(STEPS + 1):  # gates of adaLN open in the second step
        label = torch.randint(0, 4, (8,), generator=draw)
        stripes = torch.sin(torch.arange(8) * (label[:, None] + 1)).view(8, 1, 1, 8).expand(8, 1, 8, 8)
        noise = torch.randn(2, 8, 1, 8, 8, generator=draw)
        time = torch.rand(8, generator=draw) * 1000
        batches.append({"image": stripes + 0.3 * noise[0], "label": label, "noise": noise[1], "time": time})
    return batches


def loss_of(model: Any, batch: Batch) -> Tensor:
    """What each kind of model is trained on."""
    if isinstance(model, LanguageModel):
        loss = model(batch["input_ids"], labels=batch["labels"]).loss
        assert loss is not None
        return loss
    if isinstance(model, VisionTransformer):
        return F.cross_entropy(model(batch["image"]), batch["label"])
    share = (batch["time"] / 1000).view(-1, 1, 1, 1)
    noisy = (1 - share) ** 0.5 * batch["image"] + share**0.5 * batch["noise"]
    predicted = model(noisy, batch["time"], batch["label"])[:, : noisy.shape[1]]
    return F.mse_loss(predicted, batch["noise"])


FAMILIES = {"language": language, "vision": vision, "diffusion": diffusion}


def check(family: str, topology: str, parametrization: str, optimizer: str, prepare: Prepare | None = None) -> Any:
    """One check, in short."""
    base = {"parametrization": parametrization, "base_width": SHAPE["dim"], "base_depth": SHAPE["blocks"]}
    model, batches = FAMILIES[family](topology, **base)
    config = OptimizerConfig.model_validate({"lr": LR[family], "kind": optimizer})
    options = {"widths": WIDTHS, "depths": DEPTHS, "seeds": SEEDS, "prepare": prepare or (lambda model: None)}
    return short(check_coordinates(model, loss_of, batches, config, **options))  # type: ignore[arg-type]


def short(found: Coordinates) -> dict[str, Any]:
    """Verdict, steepest and all slopes of each axis."""
    return {
        axis.direction: {
            "flat": axis.is_flat,
            "steepest": None if axis.steepest is None else [axis.steepest[0], rounded(axis.steepest[1])],
            "slopes": {each.name: [rounded(each.size_slope), rounded(each.update_slope)] for each in axis.coordinates},
        }
        for axis in found.axes
    }


def rounded(slope: float | None) -> float | None:
    """Two digits; JSON has none for infinity."""
    return None if slope is None or abs(slope) == float("inf") else round(slope, 2)


def links(model: Stack[Any]) -> Iterator[Any]:
    """Every link, run without its fused form, so that its parts can be changed."""
    for block in model.blocks:
        assert isinstance(block, Block)
        first, last = block.links
        assert isinstance(first, Link)
        assert isinstance(last, Link)
        block.between = Step(first, last)
        yield from (first, last)


def only(*streams: str) -> Prepare:
    """The branch factor on what these streams of a siamese pair receive, and on nothing else."""

    def prepare(model: Stack[Any]) -> None:
        for pair in links(model):
            factor, pair.branch = pair.branch, None
            for stream in streams:
                getattr(pair, stream).branch = factor

    return prepare


def same_rates(model: Stack[Any]) -> None:
    """No factor for depth on the learning rates of what lies on the skip."""
    for module in model.modules():
        if isinstance(module, Link):
            module.depth_powers = dict  # type: ignore[method-assign]


def skip_alone(model: Stack[Any]) -> None:
    """Nothing is trained but what lies on the skip."""
    model.requires_grad_(False)
    for link in model.modules():
        if isinstance(link, Link):
            for name in link.depth_powers():
                found = link.get_submodule(name) if name in dict(link.named_modules()) else getattr(link, name)
                found.requires_grad_(True)


def skip_alone_same_rates(model: Stack[Any]) -> None:
    """Both."""
    skip_alone(model)
    same_rates(model)


PLACEMENTS: dict[str, tuple[str, Prepare]] = {
    "siamese, factor on y alone": ("siamese", only("y")),
    "siamese, factor on x alone": ("siamese", only("x")),
    "siamese, no factor": ("siamese", only()),
    **{
        f"{name}, {title}": (name, prepare)
        for name in ("siamese", "post", "zaya", "dense", "x0", "hyper", "residual_dual")
        for title, prepare in (
            ("same learning rates on the skip", same_rates),
            ("the skip alone is trained", skip_alone),
            ("the skip alone is trained, same learning rates", skip_alone_same_rates),
        )
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="Pre-Norm alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = ("pre",) if args.quick else (*TOPOLOGIES, *VARIANTS)
    wanted: dict[str, Callable[[], Any]] = {}
    for title, (name, prepare) in {} if args.quick else PLACEMENTS.items():
        wanted[f"placements/{title}"] = lambda asked=(name, prepare): check(  # type: ignore[misc]
            "language", asked[0], "completep", "adamw", asked[1]
        )
    for optimizer in ("adamw", "muon"):
        for family in FAMILIES:
            for parametrization in ("completep", "standard"):
                everywhere = parametrization == "completep" and family == "language"
                for name in names if everywhere or args.quick else SAMPLE:
                    key = f"{family}/{parametrization}/{optimizer}/{name}"
                    wanted[key] = lambda asked=(family, name, parametrization, optimizer): check(*asked)  # type: ignore[misc]
    kept = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for key in wanted:
        if key not in kept:
            kept[key] = wanted[key]()
            write_json(args.out, kept)
            print(key, {axis: found["steepest"] or "flat" for axis, found in kept[key].items()}, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
