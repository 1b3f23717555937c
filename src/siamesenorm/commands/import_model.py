"""``siamesenorm import``: a language model that others have trained, as a folder of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.commands.options import DTYPES, RemoteCode


def import_model(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Hugging Face folder or GGUF file of another's model.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to be made.")],
    dtype: Annotated[
        str | None, typer.Option(help=f"Of the weights: {', '.join(DTYPES)}; default: as SRC has them.")
    ] = None,
    tokenizer: Annotated[
        bool, typer.Option("--tokenizer/--no-tokenizer", help="Bring its tokenizer along, or leave it behind.")
    ] = True,
    remote_code: RemoteCode = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier import or export, and nothing else.")
    ] = False,
) -> None:
    """Import a language model into the topology that it is, with its tokenizer and settings of generation.

    Llama, Mistral, Qwen, OLMo, Gemma, GPT-2 and their kin; what cannot be carried is refused by name.
    """
    import torch

    from siamesenorm.errors import ConfigError

    if dtype is not None and dtype not in DTYPES:
        raise ConfigError.not_allowed("--dtype", dtype, DTYPES)
    with ConfigError.importing("import: it", "transformers", "hf"):
        from siamesenorm.interop.huggingface import SiameseNormConfig  # noqa: F401  # says what is missing
        from siamesenorm.interop.pretrained import convert
    weights = None if dtype is None else getattr(torch, dtype)
    convert(source, target, dtype=weights, tokenizer=tokenizer, remote_code=remote_code, overwrite=overwrite)
    typer.echo(str(target))
