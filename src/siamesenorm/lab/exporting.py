"""Exports: the weights of a run, or of another folder of ours, in the forms that others use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from siamesenorm.data.atomic import check_output
from siamesenorm.data.streams import is_stream
from siamesenorm.data.tensor_files import parse_size
from siamesenorm.errors import ConfigError
from siamesenorm.interop.gguf.exporter import is_gguf_export
from siamesenorm.interop.pretrained.architectures import ARCHITECTURES
from siamesenorm.interop.staging import check_target
from siamesenorm.lab.sampling import open_generator
from siamesenorm.opening import is_model, open_source
from siamesenorm.tasks.corpora import saved_template
from siamesenorm.train.trained import is_export, open_stored, run_tokenizer, save_stored

FORMATS = ("diffusers", "gguf", "hf", "safetensors")
DTYPES = ("float32", "bfloat16", "float16")
SHARD = "5GB"


def export_folder(
    run: Path,
    target: Path,
    to: str,
    *,
    dtype: str | None = None,
    shard_size: str | None = None,
    tokenizer: bool = True,
    remote_code: bool = True,
    vae: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Write the weights of a run or model folder in one of `FORMATS`, or as an architecture of transformers."""
    if to not in (*FORMATS, *ARCHITECTURES):
        raise ConfigError.not_allowed("--to", to, (*FORMATS, *ARCHITECTURES))
    if dtype is not None and (dtype not in DTYPES or to == "diffusers"):
        allowed = "a pipeline keeps the run's" if to == "diffusers" else f"it takes one of {', '.join(DTYPES)}"
        raise ConfigError.refused("--dtype", dtype, allowed)
    if shard_size is not None and to in FORMATS and to != "hf":
        raise ConfigError.not_allowed("--shard-size", shard_size, "a Hugging Face folder", f"with --to {to}")
    size = parse_size(shard_size or SHARD, "--shard-size")
    check_export(run, target, to, overwrite)
    weights = None if dtype is None else getattr(torch, dtype)
    if to == "diffusers":
        export_pipeline(run, target, vae, overwrite)
    elif to == "safetensors":
        save_stored(open_stored(run), target, weights)
    else:
        export_language(run, target, to, weights, tokenizer, remote_code, overwrite, size)


def export_language(
    source: Path, target: Path, to: str, dtype: Any, tokenizer: bool, remote_code: bool, overwrite: bool, size: int
) -> None:
    """A language model as a folder of ours, of a stock architecture, or as a GGUF file."""
    with ConfigError.importing(f"--to: {to!r}", "transformers", "gguf" if to == "gguf" else "hf"):
        if to == "gguf":
            import gguf  # noqa: F401
        from siamesenorm.interop.gguf.exporter import export_gguf
        from siamesenorm.interop.huggingface import export
        from siamesenorm.interop.pretrained.stock import export_stock
    options: dict[str, Any] = {"dtype": dtype}
    template = saved_template(source)
    folder_options: dict[str, Any] = {"chat_template": template, "max_shard_size": size, "overwrite": overwrite}
    if to == "hf" and not is_model(source):  # weights are read and written one after the other
        stored: Any = open_stored(source, "language")
        reading = run_tokenizer(stored.folder, stored.config) if tokenizer else None
        options |= {"tokenizer": reading, "weights": stored.weights, "remote_code": remote_code}
        export(stored.model, target, **options, **folder_options)
        return
    found = open_source(source, "run")
    options["tokenizer"] = found.tokenizer if tokenizer else None
    if to == "gguf":
        export_gguf(found.model, target, **options)
    elif to == "hf":
        export(found.model, target, remote_code=remote_code, generation=found.generation, **options, **folder_options)
    else:
        export_stock(found.model, target, to, generation=found.generation, **options, **folder_options)


def check_export(run: Path, target: Path, to: str, overwrite: bool) -> None:
    """Say what cannot be written or replaced before anything is opened."""
    is_file = to in ("gguf", "safetensors")
    if to == "safetensors" and not target.is_dir() and is_stream(target):
        return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not overwrite or is_file == target.is_dir():
            raise ConfigError(f"target: {str(target)!r} is there already; --overwrite replaces a {to} export")
        if target.resolve() in (run.resolve(), *run.resolve().parents):
            raise ConfigError.refused("target", target, "the run lies in it")
        if is_file and not (is_export if to == "safetensors" else is_gguf_export)(target):
            raise ConfigError(f"target: {str(target)!r} is not replaced; it is no file that an export wrote")
    if is_file:
        check_output(target, "target")
    else:
        check_target(target, overwrite)


def export_pipeline(run: Path, target: Path, vae: Path | None, overwrite: bool = False) -> None:
    """A run of diffusion as a pipeline of diffusers; models of pixels are held within ±1 on the way."""
    with ConfigError.importing("--to: 'diffusers'", "diffusers", "diffusion"):
        from siamesenorm.interop.diffusers import export
    found = open_generator(run)
    if vae is not None and not found.latent:
        raise ConfigError.refused("--vae", vae, "this model makes pixels")
    names, clip = found.class_names or None, not found.latent
    export(found.model, found.process, target, class_names=names, vae=vae, clip=clip, overwrite=overwrite)
