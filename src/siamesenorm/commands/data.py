"""``siamesenorm data``: prepare token shards, train a tokenizer, encode images, verify what was prepared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from siamesenorm.data.index import Index

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2

app = typer.Typer(
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
        show_default=False,
    ),
]
Format = Annotated[str, typer.Option(help="auto, text, jsonl or parquet.")]
Pattern = Annotated[str | None, typer.Option(help="Which files of a folder, such as '*.txt'.", show_default=False)]
Field = Annotated[str, typer.Option(help="JSONL field or column that holds the text.")]
Unit = Annotated[str, typer.Option(help="What of a text file is one document: file, line or paragraph.")]
Invalid = Annotated[str, typer.Option(help="What to do with text that cannot be read: error, replace or skip.")]
Subset = Annotated[str | None, typer.Option(help="Subset of a Hugging Face dataset.", show_default=False)]
HubSplit = Annotated[str, typer.Option("--split", help="Split of a Hugging Face dataset.")]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A prepared folder.", show_default=False)]


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Bad input ends as one sentence with exit code 2, a failing machine with 1."""
    from siamesenorm.data.errors import DataError

    try:
        yield
    except DataError as error:
        typer.echo(f"siamesenorm: {error}", err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except (OSError, RuntimeError) as error:
        typer.echo(f"siamesenorm: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None


@app.command()
def prepare(
    sources: Sources,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.", show_default=False)],
    tokenizer: Annotated[str, typer.Option(help="byte, or the path of a tokenizer.json or its folder.")] = "byte",
    eos: Annotated[
        str | None, typer.Option(help="Token that ends a document, if not a usual one.", show_default=False)
    ] = None,
    format: Format = "auto",
    pattern: Pattern = None,
    field: Field = "text",
    unit: Unit = "file",
    invalid: Invalid = "error",
    subset: Subset = None,
    split: HubSplit = "train",
    validation: Annotated[float, typer.Option(help="Share of the documents to hold out.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Decides which documents are held out.")] = 0,
    shard_bytes: Annotated[
        int | None, typer.Option(help="Bytes of text a shard; by default a 64th, 1 MiB to 256 MiB.", show_default=False)
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; by default one a core.", show_default=False)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another preparation in the folder.")] = False,
) -> None:
    """Turn text into token shards with an index; run it again to go on after an interruption."""
    with _reported():
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
        _show_splits(Console(), out, index)


@app.command("tokenizer")
def train_tokenizer(
    sources: Sources,
    out: Annotated[Path, typer.Option("--out", "-o", help="tokenizer.json to write.", show_default=False)],
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
    with _reported():
        from siamesenorm.data.bpe import train_bpe
        from siamesenorm.data.documents import Reading
        from siamesenorm.data.errors import DataError
        from siamesenorm.data.index import check_settings
        from siamesenorm.data.sources import find_sources, read_documents
        from siamesenorm.data.tokenizer import save_tokenizer

        settings = check_settings(field=field, unit=unit, invalid=invalid)
        if not megabytes > 0:
            raise DataError(f"megabytes: {megabytes} is not allowed; it takes a number above 0")
        if out.is_dir() or not out.parent.is_dir():
            raise DataError(f"out: {str(out)!r} is not allowed; it takes the path of a file in a folder that is there")
        found = find_sources(sources, format=format, pattern=pattern, subset=subset, hub_split=split)
        reading = Reading(settings.field, settings.unit, settings.invalid)

        def texts() -> Iterator[str]:
            left = megabytes * 1e6
            for document, _ in read_documents(found, reading):
                yield document.text
                left -= len(document.text)
                if left <= 0:
                    return

        console = Console(stderr=True)
        tokenizer = train_bpe(texts(), vocab_size, progress=console.is_terminal)
        save_tokenizer(tokenizer, out)
        typer.echo(
            f"{out}: {tokenizer.vocab_size:,} tokens, end of document {tokenizer.eos_token} ({tokenizer.eos_id})"
        )


@app.command("encode-images")
def encode_images(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Labelled images: digits, fashion-mnist, hf:NAME, a .parquet file or a folder.",
            show_default=False,
        ),
    ],
    vae: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of diffusers' AutoencoderKL, or of a pipeline with one.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.", show_default=False)],
    size: Annotated[int, typer.Option(min=1, max=2**14, help="Height and width that images are fitted to.")] = 256,
    flip: Annotated[bool, typer.Option("--flip", help="Encode mirror images too, for data.flip.")] = False,
    dtype: Annotated[str, typer.Option(help="float32 or float16.")] = "float32",
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="Images encoded together.")] = 16,
    device: Annotated[str, typer.Option(help="cpu, cuda or another of torch's devices.")] = "cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace other latents in the folder.")] = False,
) -> None:
    """Encode labelled images as latents to train on; run it again to go on after an interruption."""
    from siamesenorm.loading import loading

    with loading():
        from siamesenorm.commands.data_progress import counted_images
        from siamesenorm.data.errors import DataError
        from siamesenorm.data.images import open_images
        from siamesenorm.data.latents.encoding import DTYPES, Splits
        from siamesenorm.data.latents.encoding import encode_images as run
        from siamesenorm.interop.autoencoder import load_autoencoder

    if dtype not in DTYPES:
        raise DataError(f"--dtype: {dtype!r} is not allowed; it takes one of {', '.join(DTYPES)}")
    if out.exists() and not out.is_dir():
        raise DataError(f"--out: {str(out)!r} is a file; it takes a folder")
    splits: Splits = {"train": open_images(source, "train"), "test": open_images(source, "test")}
    with loading():
        encoder = load_autoencoder(vae, device)
    with counted_images(Console(stderr=True), sum(map(len, splits.values()))) as progress:
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


@app.command()
def show(
    folder: Folder,
    tokens: Annotated[int, typer.Option(min=0, max=100_000, help="Tokens of the sample.")] = 200,
    split: Annotated[str, typer.Option(help="train or validation.")] = "train",
    start: Annotated[int, typer.Option(min=0, help="First token of the sample.")] = 0,
) -> None:
    """Show what a prepared folder holds, and a decoded sample of it."""
    with _reported():
        from rich.markup import escape

        from siamesenorm.data.index import read_index
        from siamesenorm.data.tokenizer import load_tokenizer
        from siamesenorm.data.tokens import open_tokens

        index = read_index(folder)
        console = Console()
        _show_splits(console, folder, index)
        console.print(f"settings   {escape(str(index.settings))}")
        for source in index.sources[:10]:
            console.print(f"source     {escape(source.name)} ({source.kind}, {source.bytes:,} bytes)", highlight=False)
        if len(index.sources) > 10:
            console.print(f"           and {len(index.sources) - 10:,} more")
        opened = open_tokens(folder, split=split)
        tokenizer = load_tokenizer(folder, index.tokenizer.eos_token)
        ids = opened.read(min(start, len(opened)), min(start + tokens, len(opened)))
        if ids.size:
            console.rule(f"{split}, tokens {start:,} to {start + ids.size:,}")
            for part in _documents(ids.tolist(), index.tokenizer.eos_id):
                console.print(tokenizer.decode(part), markup=False, highlight=False)
                console.print("·" * 8, style="dim")


@app.command()
def verify(
    folder: Folder,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Files read at a time.")] = 4,
) -> None:
    """Check the size and SHA-256 of every file of a prepared folder; damage ends with exit code 1."""
    with _reported():
        from siamesenorm.commands.data_progress import counted_files
        from siamesenorm.data.index import read_index
        from siamesenorm.data.index import verify as check
        from siamesenorm.data.latents.index import is_latents, verify_latents

        if is_latents(folder):
            _say_sound(folder, *verify_latents(folder))
            return
        count = sum(1 for _ in read_index(folder).files())
        with counted_files(Console(stderr=True), count) as done:
            damaged = check(folder, workers=workers, done=done)
        _say_sound(folder, damaged, count)


def _say_sound(folder: Path, damaged: list[str], count: int) -> None:
    for name in damaged:
        typer.echo(f"damaged or missing: {name}")
    if damaged:
        typer.echo(f"{folder}: {len(damaged)} of {count} files are damaged; prepare it again to mend them")
        raise typer.Exit(EXIT_FAILED)
    typer.echo(f"{folder}: all {count} files are sound")


def _documents(ids: list[int], eos_id: int) -> Iterator[list[int]]:
    part: list[int] = []
    for token in ids:
        if token == eos_id:
            yield part
            part = []
        else:
            part.append(token)
    if part:
        yield part


def _show_splits(console: Console, folder: Path, index: Index) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(str(folder)), title_justify="left", box=None, pad_edge=False)
    for heading in ("split", "documents", "tokens", "bytes of text", "bytes/token", "shards"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for name, split in index.splits.items():
        rate = f"{split.text_bytes / split.tokens:.2f}" if split.tokens else "–"
        table.add_row(
            name, f"{split.documents:,}", f"{split.tokens:,}", f"{split.text_bytes:,}", rate, f"{len(split.shards):,}"
        )
    console.print(table)
    tokenizer = index.tokenizer
    console.print(
        f"tokenizer  {tokenizer.vocab_size:,} tokens, end of document {escape(tokenizer.eos_token)} "
        f"({tokenizer.eos_id}), {index.dtype}, fingerprint {tokenizer.fingerprint[:12]}",
        highlight=False,
    )
    if index.skipped:
        console.print("left out   " + ", ".join(f"{count:,} {reason}" for reason, count in index.skipped.items()))
    if index.settings.validation and not index.splits["validation"].documents:
        console.print("note       no document was held out; raise --validation, or take a smaller --unit")
