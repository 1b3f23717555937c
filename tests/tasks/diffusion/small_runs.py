"""Diffusion runs so small that a whole one takes a second."""

from siamesenorm.train.recipes import resolve

SMALL = [
    "dim=16",
    "blocks=2",
    "heads=2",
    "ffn_dim=32",
    "train.batch_size=8",
    "warmup=2",
    "steps=6",
    "train.ema=0.9",
    "checkpoint.every=null",
    "evaluation.every=null",
    "evaluation.samples=0",
    "tensorboard=false",
    "peak_flops=1e12",
]


def tiny(*overrides, recipe="dit-digits"):
    return resolve(recipe, [*SMALL, *overrides])
