"""``siamesenorm export``: the weights of a run, or of another folder of ours, for others to use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.commands.completion import complete_export
from siamesenorm.commands.options import DTYPES

SOURCES = (
    "Folder of a run; a Hugging Face folder, ours or another's, or a GGUF file for all but diffusers and safetensors."
)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help=SOURCES)],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder, or file (gguf, safetensors).")],
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
        str | None, typer.Option(help=f"All but diffusers: {', '.join(DTYPES)}; default: as the run has them.")
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Hugging Face folders: largest file of weights, 5GB by default.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export, and nothing else.")
    ] = False,
    vae: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="diffusers: AutoencoderKL that decodes the latents of a model of latents."),
    ] = None,
) -> None:
    """Write the weights of a run, finished or not, in another form."""
    from siamesenorm.data.streams import is_stream
    from siamesenorm.lab.exporting import export_folder

    export_folder(
        run,
        target,
        to,
        dtype=dtype,
        shard_size=shard_size,
        tokenizer=tokenizer,
        remote_code=remote_code,
        vae=vae,
        overwrite=overwrite,
    )
    typer.echo(str(target), err=not target.is_dir() and is_stream(target))  # which may be this very output
