"""Training steps of DeiT-tiny beside timm's, and of DiT-S/2 beside diffusers', eager and compiled.

    python benchmarks/vision.py                     # writes benchmarks/results/vision.json
    python benchmarks/vision.py --quick
    python benchmarks/vision.py --models deit-tiny --rounds 30

Float32, fused AdamW, no stochastic depth. Ours are compiled block by block, theirs both whole and block by block.
DiT-S/2 works on 32² latents. diffusers' model has a label and time embedding in every block, ours and the paper's one.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from contestants import Loss, training
from race import Results, Turn, arguments
from siamesenorm.models.dit import DiT, dit_preset
from siamesenorm.models.vit import VisionTransformer, vit_preset

MODELS = {"deit-tiny": "timm", "dit-s-2": "diffusers"}
"""Each with the library of its rival."""
OURS = ("pre", "siamese")
WAYS = ("eager", "compiled", "layers", "whole")
BATCH = {"deit-tiny": 32, "dit-s-2": 8}


def build(model: str, contestant: str, blocks: int) -> nn.Module:
    """One of ours by its topology, or the rival by its library."""
    torch.manual_seed(0)
    if contestant == "timm":
        import timm

        return timm.create_model("deit_tiny_patch16_224", depth=blocks).train()
    if contestant == "diffusers":
        from diffusers import DiTTransformer2DModel

        made: nn.Module = DiTTransformer2DModel(
            num_attention_heads=6, attention_head_dim=64, in_channels=4, out_channels=8, num_layers=blocks
        )
        return made.train()
    if model == "deit-tiny":
        return VisionTransformer(vit_preset(model, topology=contestant, drop_path=0.0, blocks=blocks), seed=0)
    return DiT(dit_preset(model, topology=contestant, blocks=blocks), seed=0)


def loss_of(model: str, contestant: str, batch: int) -> Loss:
    """Cross-entropy of a class, or the squared error of a denoiser."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(1000, (batch,), generator=generator)
    if model == "deit-tiny":
        images = torch.randn(batch, 3, 224, 224, generator=generator)
        return lambda run: F.cross_entropy(run(images), labels)
    latents = torch.randn(batch, 4, 32, 32, generator=generator)
    times = torch.randint(1000, (batch,), generator=generator)
    target = torch.randn(batch, 8, 32, 32, generator=generator)
    if contestant == "diffusers":
        return lambda run: F.mse_loss(run(latents, timestep=times, class_labels=labels).sample, target)
    return lambda run: F.mse_loss(run(latents, times, labels), target)


def layers(model: Any) -> Any:
    """The blocks of a rival."""
    return model.transformer_blocks if hasattr(model, "transformer_blocks") else model.blocks


def line_up(model: str, batch: int, blocks: int, chosen: list[str]) -> dict[str, Turn]:
    """Turns of ours and of the rival in all their ways."""
    turns: dict[str, Turn] = {}
    for contestant in (*OURS, MODELS[model]):
        which = ("eager", "compiled") if contestant in OURS else ("eager", "layers", "whole")
        made = training(
            lambda contestant=contestant: build(model, contestant, blocks),  # type: ignore[misc]
            loss_of(model, contestant, batch),
            [way for way in which if way in chosen],
            layers,
        )
        turns |= {f"{contestant}@{way}": turn for way, turn in made.items()}
    return turns


def main() -> int:
    parser = arguments(__doc__, "vision", rounds=20)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    args = parser.parse_args()
    results = Results(parser, args, ways=args.ways)
    blocks = 1 if args.quick else 12
    ways = [way for way in args.ways if way != "whole" or not args.quick]  # the slowest to compile
    for model in args.models:
        batch = 1 if args.quick else BATCH[model]
        parameters = {
            name: sum(p.numel() for p in build(model, name, blocks).parameters()) for name in (*OURS, MODELS[model])
        }
        results.race(
            model,
            lambda model=model, batch=batch: line_up(model, batch, blocks, ways),  # type: ignore[misc]
            batch=batch,
            blocks=blocks,
            parameters=parameters,
        )
    return results.close()


if __name__ == "__main__":
    sys.exit(main())
