"""``siamesenorm export``: the weights of a run, or of another folder of ours, for others to use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from siamesenorm.commands.completion import complete_export

FORMATS = ("diffusers", "gguf", "hf", "safetensors")
DTYPES = ("float32", "bfloat16", "float16")
SHARD = "5GB"
SOURCES = (
    "Folder of a run; a Hugging Face folder, ours or another's, or a GGUF file for all but diffusers and safetensors."
)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help=SOURCES, show_default=False)],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="Folder, or file (gguf, safetensors).", show_default=False)
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="diffusers: a pipeline folder; gguf: a file for llama.cpp; hf: a Hugging Face model folder; "
            "safetensors: weights in one file; llama, mistral, qwen2, qwen3, olmo2, gemma2, gpt2, gpt_neox, mixtral, "
            "…: a folder of this architecture of transformers, where the model is one.",
            autocompletion=complete_export,
        ),
    ],
    remote_code: Annotated[
        bool, typer.Option(help="hf: put the code beside it that transformers loads without this package.")
    ] = True,
    tokenizer: Annotated[
        bool, typer.Option("--tokenizer/--no-tokenizer", help="Language: put the tokenizer in, or leave it behind.")
    ] = True,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"All but diffusers: {', '.join(DTYPES)}; default: as the run has them.", show_default=False),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Hugging Face folders: largest file of weights, 5GB by default.", show_default=False
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export, and nothing else.")
    ] = False,
    vae: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="diffusers: AutoencoderKL that decodes the latents of a model of latents.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the weights of a run, finished or not, in another form."""
    import torch

    from siamesenorm.data.streams import is_stream
    from siamesenorm.data.tensor_files import parse_size
    from siamesenorm.train.errors import ConfigError
    from siamesenorm.train.stored import open_stored, save_stored

    if to not in (*FORMATS, *(stock := stock_names())):
        raise ConfigError(f"--to: {to!r} is not allowed; it takes one of {', '.join((*FORMATS, *stock))}")
    if dtype is not None and (dtype not in DTYPES or to == "diffusers"):
        allowed = "a pipeline keeps the run's" if to == "diffusers" else f"it takes one of {', '.join(DTYPES)}"
        raise ConfigError(f"--dtype: {dtype!r} is not allowed; {allowed}")
    if shard_size is not None and to in FORMATS and to != "hf":
        raise ConfigError(f"--shard-size: {shard_size!r} is not allowed with --to {to}; it takes a Hugging Face folder")
    size = parse_size(shard_size or SHARD, "--shard-size")
    check_place(run, target, to, overwrite)
    weights = None if dtype is None else getattr(torch, dtype)
    if to == "hf" or to == "gguf" or to in stock:
        export_language(run, target, to, weights, tokenizer, remote_code, overwrite, size)
    elif to == "diffusers":
        export_pipeline(run, target, vae, overwrite)
    else:
        save_stored(open_stored(run), target, weights)
    typer.echo(str(target), err=not target.is_dir() and is_stream(target))  # which may be this very output


def stock_names() -> list[str]:
    """Architectures of transformers that a model may be exported as."""
    from siamesenorm.interop.pretrained.architectures import ARCHITECTURES

    return list(ARCHITECTURES)


def export_language(
    source: Path, target: Path, to: str, dtype: Any, tokenizer: bool, remote_code: bool, overwrite: bool, size: int
) -> None:
    """A language model as a folder of ours, of a stock architecture, or as a GGUF file."""
    from siamesenorm.language_folder import is_model
    from siamesenorm.opening import open_source
    from siamesenorm.tasks.corpora import saved_template

    rooms = {"hf": ("huggingface", "export", "hf"), "gguf": ("gguf.exporter", "export_gguf", "gguf")}
    room, name, extra = rooms.get(to, ("pretrained.stock", "export_stock", "hf"))
    exporter = exporter_of(to, room, "transformers", extra=extra, name=name)
    if to == "hf" and not is_model(source):
        export_stored(exporter, source, target, tokenizer, dtype=dtype, max_shard_size=size, overwrite=overwrite,
                      remote_code=remote_code, chat_template=saved_template(source))  # fmt: skip
        return
    found = open_source(source, "run")
    options = {"tokenizer": found.tokenizer if tokenizer else None, "dtype": dtype}
    if to == "gguf":
        exporter(found.model, target, **options)
        return
    options |= {"chat_template": saved_template(source), "max_shard_size": size}
    if to == "hf":
        generation = found.generation
        exporter(found.model, target, remote_code=remote_code, overwrite=overwrite, generation=generation, **options)
    else:
        exporter(found.model, target, to, overwrite=overwrite, generation=found.generation, **options)


def export_stored(exporter: Callable[..., Any], source: Path, target: Path, tokenizer: bool, **options: Any) -> None:
    """A run as a folder of ours; its weights are read and written one after the other."""
    from siamesenorm.train.stored import open_stored
    from siamesenorm.train.trained import run_tokenizer

    found = open_stored(source, "language")
    reading = run_tokenizer(found.folder, found.config) if tokenizer else None
    exporter(found.model, target, tokenizer=reading, weights=found.weights, **options)


def check_place(run: Path, target: Path, to: str, overwrite: bool) -> None:
    """Say what cannot be written or replaced before anything is opened."""
    from siamesenorm.data.atomic import check_output
    from siamesenorm.data.streams import is_stream
    from siamesenorm.interop.gguf.exporter import is_gguf_export
    from siamesenorm.interop.staging import check_target
    from siamesenorm.train.errors import ConfigError
    from siamesenorm.train.stored import is_export

    is_file = to in ("gguf", "safetensors")
    if to == "safetensors" and not target.is_dir() and is_stream(target):
        return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not overwrite or is_file == target.is_dir():
            raise ConfigError(f"target: {str(target)!r} is there already; --overwrite replaces a {to} export")
        if target.resolve() in (run.resolve(), *run.resolve().parents):
            raise ConfigError(f"target: {str(target)!r} is not allowed; the run lies in it")
        if is_file and not (is_export if to == "safetensors" else is_gguf_export)(target):
            raise ConfigError(f"target: {str(target)!r} is not replaced; it is no file that an export wrote")
    if is_file:
        check_output(target, "target")
    else:
        check_target(target, overwrite)


def export_pipeline(run: Path, target: Path, vae: Path | None, overwrite: bool = False) -> None:
    """A run of diffusion as a pipeline of diffusers; models of pixels are held within ±1 on the way."""
    from siamesenorm.lab.sampling import open_generator
    from siamesenorm.train.errors import ConfigError

    exporter = exporter_of("diffusers", "diffusers", "diffusers", extra="diffusion")
    made = open_generator(run)
    if vae is not None and not made.latent:
        raise ConfigError(f"--vae: {str(vae)!r} is not allowed; this model makes pixels")
    names = made.class_names or None
    options = {"class_names": names, "vae": vae, "clip": not made.latent, "overwrite": overwrite}
    exporter(made.model, made.process, target, **options)


def exporter_of(to: str, room: str, package: str, extra: str = "hf", name: str = "export") -> Callable[..., Any]:
    """The exporter of a room of interop, or one sentence about what is missing."""
    from siamesenorm.train.errors import ConfigError

    try:
        if extra != "diffusion":
            importlib.import_module("transformers")
        if extra == "gguf":
            importlib.import_module("gguf")
        exporter: Callable[..., Any] = getattr(importlib.import_module(f"siamesenorm.interop.{room}"), name)
    except ImportError as error:
        raise ConfigError(
            f"--to: {to!r} needs the package {(error.name or package).partition('.')[0]!r}; "
            f"install it with pip install 'siamesenorm[{extra}]'"
        ) from None
    return exporter
