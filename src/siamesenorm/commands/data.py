"""``siamesenorm data``: prepare token shards, train a tokenizer, encode images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from siamesenorm.commands import data_folder
from siamesenorm.commands.arguments import CommandLine
from siamesenorm.commands.data_folder import reported, show_splits

app = CommandLine(
    name="data",
    help="Turn text into token shards and images into latents, train tokenizers, look at and verify prepared folders.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE…",
        help="Text, JSONL (both also .gz) or parquet files, folders of them, hf:NAME for a Hugging Face dataset, "
        "or an embedded corpus: python-code, python-docs, arithmetic.",
    ),
]
Format = Annotated[str, typer.Option(help="auto, text, jsonl or parquet.")]
Pattern = Annotated[str | None, typer.Option(help="Which files of a folder, such as '*.txt'.")]
Field = Annotated[str, typer.Option(help="JSONL field or column that holds the text.")]
Unit = Annotated[str, typer.Option(help="What of a text file is one document: file, line or paragraph.")]
Invalid = Annotated[str, typer.Option(help="What to do with text that cannot be read: error, replace or skip.")]
Subset = Annotated[str | None, typer.Option(help="Subset of a Hugging Face dataset.")]
HubSplit = Annotated[str, typer.Option("--split", help="Split of a Hugging Face dataset.")]


@app.command()
def prepare(
    sources: Sources,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    tokenizer: Annotated[str, typer.Option(help="byte, or the path of a tokenizer.json or its folder.")] = "byte",
    eos: Annotated[str | None, typer.Option(help="Token that ends a document; default: by its common names.")] = None,
    format: Format = "auto",
    pattern: Pattern = None,
    field: Field = "text",
    unit: Unit = "file",
    invalid: Invalid = "error",
    subset: Subset = None,
    split: HubSplit = "train",
    validation: Annotated[float, typer.Option(help="Share of the text to hold out.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Decides which parts are held out.")] = 0,
    shard_bytes: Annotated[
        int | None, typer.Option(help="Bytes of text per shard; by default a 64th, 1 MiB to 256 MiB.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; by default one per core.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another preparation in the folder.")] = False,
) -> None:
    """Turn text into token shards with an index; run it again to go on after an interruption."""
    with reported():
        from siamesenorm.commands.data_progress import shown_progress
        from siamesenorm.data.preparation import prepare as run

        with shown_progress(Console(stderr=True)) as progress:
            index = run(
                sources,
                out,
                tokenizer=tokenizer,
                eos=eos,
                format=format,
                pattern=pattern,
                field=field,
                unit=unit,
                invalid=invalid,
                subset=subset,
                hub_split=split,
                validation=validation,
                seed=seed,
                shard_bytes=shard_bytes,
                workers=workers,
                overwrite=overwrite,
                progress=progress,
            )
        show_splits(Console(), out, index)


@app.command("tokenizer")
def train_tokenizer(
    sources: Sources,
    out: Annotated[Path, typer.Option("--out", "-o", help="tokenizer.json to write.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens, 258 or more.")] = 32768,
    megabytes: Annotated[float, typer.Option(help="Text to learn from, from the start of the sources.")] = 1000.0,
    format: Format = "auto",
    pattern: Pattern = None,
    field: Field = "text",
    unit: Unit = "file",
    invalid: Invalid = "error",
    subset: Subset = None,
    split: HubSplit = "train",
) -> None:
    """Train a byte-level BPE tokenizer."""
    with reported():
        from siamesenorm.data.bpe import learn_tokenizer

        tokenizer = learn_tokenizer(
            sources,
            out,
            vocab_size=vocab_size,
            megabytes=megabytes,
            format=format,
            pattern=pattern,
            field=field,
            unit=unit,
            invalid=invalid,
            subset=subset,
            hub_split=split,
            progress=Console(stderr=True).is_terminal,
        )
        typer.echo(
            f"{out}: {tokenizer.vocab_size:,} tokens, end of document {tokenizer.eos_token} ({tokenizer.eos_id})"
        )


@app.command("encode-images")
def encode_images(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="Labelled images: digits, fashion-mnist, hf:NAME, a .parquet file or a folder."
        ),
    ],
    vae: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of diffusers' AutoencoderKL, or of a pipeline with one.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    size: Annotated[int, typer.Option(min=1, max=2**14, help="Height and width that images are fitted to.")] = 256,
    flip: Annotated[bool, typer.Option("--flip", help="Encode mirror images too, for data.flip.")] = False,
    dtype: Annotated[str, typer.Option(help="float32 or float16.")] = "float32",
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="Images encoded together.")] = 16,
    device: Annotated[str, typer.Option(help="cpu, cuda or another of torch's devices.")] = "cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace other latents in the folder.")] = False,
) -> None:
    """Encode labelled images as latents to train on; run it again to go on after an interruption."""
    from siamesenorm.interrupts import loading

    with loading():
        from siamesenorm.data.images import open_images
        from siamesenorm.data.latents.encoding import DTYPES, Splits
        from siamesenorm.data.latents.encoding import encode_images as run
        from siamesenorm.errors import DataError
        from siamesenorm.interop.autoencoder import load_autoencoder
        from siamesenorm.terminal import counting_bar

    if dtype not in DTYPES:
        raise DataError.not_allowed("--dtype", dtype, DTYPES)
    if out.exists() and not out.is_dir():
        raise DataError(f"--out: {str(out)!r} is a file; it takes a folder")
    splits: Splits = {"train": open_images(source, "train"), "test": open_images(source, "test")}
    with loading():
        encoder = load_autoencoder(vae, device)
    with counting_bar(Console(stderr=True), "encoding", sum(map(len, splits.values()))) as progress:
        index = run(
            splits,
            encoder,
            out,
            size=size,
            flip=flip,
            dtype=DTYPES[dtype],
            batch=batch_size,
            overwrite=overwrite,
            progress=progress,
        )
    counts = ", ".join(f"{sum(shard.images for shard in shards):,} {split}" for split, shards in index.splits.items())
    typer.echo(f"{out}: {counts}; model.input_size={index.size} model.channels={index.channels}")


app.command()(data_folder.show)
app.command()(data_folder.verify)
