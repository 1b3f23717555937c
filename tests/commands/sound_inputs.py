"""A sound one of everything that commands read, and for every command invocations that take them."""

import contextlib
import gzip
import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from siamesenorm.cli import main
from siamesenorm.data.images import ArrayImages, open_images
from siamesenorm.data.latents.encoding import encode_images
from siamesenorm.tasks.fidelity.references import Reference, write_reference
from siamesenorm.tasks.fidelity.statistics import Gaussian

TINY = ["dim=8", "blocks=1", "heads=2", "ffn_dim=8", "tensorboard=false", "peak_flops=1e12", "warmup=0", "steps=2"]
LANGUAGE = [*TINY, "sequence_length=8", "max_length=32", "train.batch_size=2", "evaluation.every=2"]
IMAGES = [*TINY, "batch_size=4", "evaluation.every=2"]
DIFFUSION = [*IMAGES, "evaluation.samples=0"]
LATENT = ["input_size=4", "channels=2", "classes=3", *DIFFUSION]
TEXT = "".join(f"line {number} of some text\n\n" for number in range(400))
FEATURES = 64
"""Of the small classifier that stands in for Inception."""


class Invocation(NamedTuple):
    """Arguments that work; ``{lm}`` is a sound input of that name, ``{out}`` a place that is free."""

    arguments: tuple[str, ...]

    @property
    def inputs(self) -> list[str]:
        """Names of what it reads."""
        return [a[a.index("{") + 1 : a.index("}")] for a in self.arguments if "{" in a and "{out}" not in a]

    def filled(self, places: dict[str, Path], out: Path) -> list[str]:
        """The arguments as they are typed."""
        return [argument.format(**places, out=out) if "{" in argument else argument for argument in self.arguments]


def of(text: str) -> Invocation:
    return Invocation(tuple(text.split()))


SMALL_FID = "--classifier digits --cache {cache} --json"
INVOCATIONS = [
    *map(of, (
        "topologies siamese --blocks 2 --dim 8", "models lm-nano --topology pre", "recipes {recipe} lr=1e-3",
        "generate {lm} a --tokens 2 --seed 1", "generate {half} a --tokens 2", "generate {hf} a --tokens 2",
        "inspect {lm} --tokens 16 --no-removal --json", "inspect {cls} --tokens 16 --no-removal --json",
        "inspect {dit} --tokens 16 --no-removal --json", "inspect {hf} --text {text} --tokens 16 --no-removal --json",
        "evaluate {lm}", "evaluate {half}", "evaluate {cls}", "evaluate {lm} --text {text}",
        "evaluate {hf} --text {text}", "export {lm} {out} --to safetensors", "export {half} {out} --to safetensors",
        "export {cls} {out} --to safetensors", "export {lm} {out} --to hf",
        "predict {cls} {png}", "predict {cls} {npy}", "predict {weights} {npy} --json",
        "sample {dit} --steps 1 --sampler ddim --per-class 1 --out {out}.png",
        "report {grid} --out {out}", "report {grid}", "runs {grid}", "runs {lm} --json",
        "import {llama} {out}", "graft {llama} {out} --to siamese --tokens 16",
        "branch {trunk} --at 1 --decay 1 -o {out}", "train {recipe} init_from={lm} --run {out}",
        "train {recipe} init_from={llama} init_model=true --run {out}",
        "train {recipe} optimizer.kind=muon --run {out}",
        "train {half}", "train {recipe} --run {out}", "train {recipe} data.train={array} --run {out}",
        "train lm-tiny data.train={tokens} --run {out} " + " ".join(LANGUAGE),
        "train deit-digits data.train={pictures} --run {out} " + " ".join(IMAGES),
        "train deit-digits data.train={idx} --run {out} " + " ".join(IMAGES),
        "train dit-digits data.train={latents} --run {out} " + " ".join(LATENT),
        "data show {tokens} --tokens 8", "data verify {tokens} --workers 1", "data verify {latents}",
        "data prepare {text} --unit line --tokenizer {bpe} --workers 1 -o {out}",
        "data prepare {lines} --workers 1 -o {out}", "data prepare {table} --workers 1 -o {out}",
        "data prepare {packed} --workers 1 -o {out}", "data tokenizer {text} --vocab-size 260 -o {out}",
        "fid {made} digits --cache {cache} --json", f"fid {{made}} {{npz}} {SMALL_FID}",
        f"fid {{made}} {{stats}} {SMALL_FID}", "fid {made} {npz} --weights {tensors}",
        "compare --recipe {recipe} --topologies pre --lrs 1e-3 --seeds 0 --jobs 1 --out {out}",
        "study {plan} --jobs 1 --cells {out}-cells --out {out}", "study {plan} --merge {results} --out {out}",
    )),
]  # fmt: skip
WITH_DIFFUSERS = [
    *map(of, (
        "data encode-images {pictures} --vae {vae} --size 8 -o {out}", "export {dit} {out} --to diffusers",
        "sample {latent_dit} --vae {vae} --steps 1 --sampler ddim --per-class 1 --out {out}.png",
    )),
]  # fmt: skip
"""These import diffusers, which takes long."""


class Halves:
    """An encoder for latents that needs no weights."""

    fingerprint = hashlib.sha256(b"halves").hexdigest()
    channels, latent_channels, downscale, scale, shift = 1, 2, 2, 0.5, 0.0

    def encode(self, images: np.ndarray) -> np.ndarray:
        mean = images[:, ::2, ::2, 0].astype(np.float32)
        return np.stack([mean, mean / 2, mean * 0 + 1, mean * 0 + 1], axis=1)


def make_surroundings(folder: Path) -> Path:
    """Where commands are called: a folder with an empty folder and a file in it."""
    (folder / "here" / "empty").mkdir(parents=True, exist_ok=True)
    (folder / "here" / "file").write_text(TEXT, encoding="utf-8")
    return folder / "here"


def quietly(*arguments: str) -> None:
    """Run a command that must work."""
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        assert main(arguments) == 0, heard.getvalue()


def make_inputs(root: Path, *, huggingface: bool = True, diffusers: bool = False) -> dict[str, Path]:
    """Make every input in a folder; by name."""
    root.mkdir(parents=True, exist_ok=True)
    text = root / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    (root / "lines.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(50)))
    with gzip.GzipFile(root / "packed.txt.gz", "wb", mtime=0) as file:
        file.write(text.read_bytes())
    quietly("data", "prepare", f"{text}", "-o", f"{root / 'tokens'}", "--unit", "line", "--validation", "0.1")
    quietly("data", "tokenizer", f"{text}", "-o", f"{root / 'bpe.json'}", "--vocab-size", "270")
    np.arange(200, dtype=np.uint16).tofile(root / "array.npy")
    (root / "recipe.yaml").write_text(_recipe(root / "tokens"), encoding="utf-8")
    language = ["train", "lm-tiny", f"data.train={root / 'tokens'}", *LANGUAGE]
    quietly(*language, "--run", f"{root / 'lm'}")
    quietly(*language, "checkpoint.every=1", "train.ema=0.9", "--run", f"{root / 'half'}")
    for name in ("weights.safetensors", "status.json"):
        (root / "half" / name).unlink()
    trunk = ["checkpoint.every=1", "schedule.kind=constant", "optimizer.kind=muon"]
    quietly(*language, *trunk, "--run", f"{root / 'trunk'}")
    quietly("train", "deit-digits", *IMAGES, "--run", f"{root / 'cls'}")
    quietly("train", "dit-digits", *DIFFUSION, "--run", f"{root / 'dit'}")
    quietly("export", f"{root / 'cls'}", f"{root / 'weights.safetensors'}", "--to", "safetensors")
    _pictures(root)
    _statistics(root)
    _grid(root)
    _study(root)
    _table(root)
    if huggingface:
        from transformers import LlamaConfig, LlamaForCausalLM

        quietly("export", f"{root / 'lm'}", f"{root / 'hf'}", "--to", "hf")
        shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=32, **shape))
        llama.save_pretrained(root / "llama")
    if diffusers:
        from tests.interop.diffusers_models import tiny_autoencoder

        tiny_autoencoder(root / "vae", latent_channels=2)
        quietly("train", "dit-digits", f"data.train={root / 'latents'}", *LATENT, "--run", f"{root / 'latent_dit'}")
    named = {path.name.partition(".")[0]: path for path in root.iterdir()}
    return {**named, "png": root / "image.png", "npy": root / "image4.npy", "npz": root / "stats_npz.npz"}


def _recipe(tokens: Path) -> str:
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard):
        assert main(["recipes", "lm-tiny", f"data.train={tokens}", *LANGUAGE, "--yaml"]) == 0
    return heard.getvalue()


def _pictures(root: Path) -> None:
    from PIL import Image

    digits = open_images("digits", "train")
    for number in range(12):
        folder = root / "pictures" / f"{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits[number][..., 0]).save(folder / f"{number}.png")
    shutil.copyfile(root / "pictures" / "0" / "0.png", root / "image.png")
    some = np.stack([digits[number] for number in range(40)])
    np.save(root / "image4.npy", some[:2])
    np.savez(root / "made.npz", some, digits.labels[:40])
    (root / "idx").mkdir()
    for split, count in (("train", 20), ("t10k", 8)):
        for kind, array in (("images", some[:count, ..., 0]), ("labels", digits.labels[:count].astype(np.uint8))):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            (root / "idx" / f"{split}-{kind}-idx{array.ndim}-ubyte").write_bytes(head + array.tobytes())
    sets = {
        split: ArrayImages("made", some[:count], np.arange(count) % 3, ["a", "b", "c"])
        for split, count in (("train", 12), ("test", 6))
    }
    encode_images(sets, Halves(), root / "latents", size=8, flip=True, shard_images=5)


def _statistics(root: Path) -> None:
    gaussian = Gaussian(torch.zeros(FEATURES).double(), torch.eye(FEATURES).double())
    write_reference(root / "stats_npz.npz", Reference(gaussian))
    write_reference(root / "stats.safetensors", Reference(gaussian, features=torch.zeros(5, FEATURES), count=5))
    save_file({"a": torch.zeros(2)}, root / "tensors.safetensors")
    (root / "cache").mkdir()
    quietly("fid", f"{root / 'made.npz'}", "digits", "--cache", f"{root / 'cache'}")


def _grid(root: Path) -> None:
    facts = {
        "command": "siamesenorm compare",
        "data": {},
        "versions": {"torch": "2"},
        "machine": {"processor": "one", "cores": 2, "system": "Linux"},
        "chance_loss": 5.0,
        "processor_seconds": 1.0,
        "memory_bytes": 1000,
    }
    for name in ("one", "two"):
        folder = shutil.copytree(root / "lm", root / "grid" / name)
        config = (folder / "config.yaml").read_text(encoding="utf-8")
        (folder / "config.yaml").write_text(config.replace("seed: 0", f"seed: {len(name) + (name == 'two')}"))
        (folder / "cell.json").write_text(json.dumps(facts))
        (folder / "weights.safetensors").unlink()
    (root / "grid" / "grid.json").write_text(json.dumps({"cells": ["one", "two"], "preset": None}))


def _study(root: Path) -> None:
    from tests.lab.study_records import fill, plan_values

    from siamesenorm.lab.study.plan import read_plan
    from siamesenorm.lab.study.record import write_ledger
    from siamesenorm.train.provenance import hash_of
    from siamesenorm.train.yaml import write_yaml

    code = {"set": {"data.train": ["python-code"]}, "sha256": {"python-code": hash_of("python-code")}}
    (root / "plan.yaml").write_text(write_yaml(plan_values(corpora={"code": code})), encoding="utf-8")
    (root / "results").mkdir()
    write_ledger(root / "results", fill(read_plan(root / "plan.yaml"), lambda cell: 2.0 + cell.number / 10))


def _table(root: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": [f"row {n}" for n in range(50)]}), root / "table.parquet")
