"""``siamesenorm export``: a run's weights for others to use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

FORMATS = ("hf", "safetensors")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="Folder (hf) or file (safetensors) to write.", show_default=False)
    ],
    to: Annotated[str, typer.Option("--to", help="hf: a Hugging Face model folder; safetensors: weights in one file.")],
    remote_code: Annotated[
        bool, typer.Option(help="hf: put the code beside it that transformers loads without this package.")
    ] = True,
) -> None:
    """Write the weights of a run, finished or not, in another form."""
    from siamesenorm.train.errors import ConfigError
    from siamesenorm.train.trained import open_language_model, open_trained, save_trained

    if to not in FORMATS:
        raise ConfigError(f"--to: {to!r} is not allowed; it takes one of {', '.join(FORMATS)}")
    if to == "hf":
        exporter = huggingface_export()
        trained = open_language_model(run)
        exporter(trained.model, target, tokenizer=trained.tokenizer, remote_code=remote_code)
    else:
        if target.is_dir() or not target.absolute().parent.is_dir():
            raise ConfigError(f"target: {str(target)!r} is not allowed; it takes a file in a folder that is there")
        save_trained(open_trained(run), target)
    typer.echo(str(target))


def huggingface_export() -> Callable[..., Any]:
    """The exporter, or one sentence about what is missing."""
    from siamesenorm.train.errors import ConfigError

    try:
        exporter: Callable[..., Any] = importlib.import_module("siamesenorm.interop.huggingface").export
    except ImportError as error:
        raise ConfigError(
            f"--to: 'hf' needs the package {(error.name or 'transformers').partition('.')[0]!r}; "
            f"install it with pip install 'siamesenorm[hf]'"
        ) from None
    return exporter
