"""``siamesenorm data show`` and ``verify``: what a prepared folder holds, and whether it is sound."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from siamesenorm.refusal import EXIT_FAILED

if TYPE_CHECKING:
    from siamesenorm.data.index import Index

BAD_NAMES = (errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""What the system says of names that were asked for, not of the machine."""
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A prepared folder.")]


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """A failing machine ends as one sentence with exit code 1; bad input is the command line's business."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # a file that is not ours, a name that no file can have: inputs that can be put right
        if isinstance(error, ValueError) or (isinstance(error, OSError) and error.errno in BAD_NAMES):
            raise
        typer.echo(f"siamesenorm: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None


def show(
    folder: Folder,
    tokens: Annotated[int, typer.Option(min=0, max=100_000, help="Tokens of the sample.")] = 200,
    split: Annotated[str, typer.Option(help="train or validation.")] = "train",
    start: Annotated[int, typer.Option(min=0, help="First token of the sample.")] = 0,
) -> None:
    """Show what a prepared folder holds, and a decoded sample of it."""
    with reported():
        from rich.markup import escape

        from siamesenorm.data.index import read_index
        from siamesenorm.data.tokenizer import load_tokenizer
        from siamesenorm.data.tokens import open_tokens

        index = read_index(folder)
        opened = open_tokens(folder, split=split)
        tokenizer = load_tokenizer(folder, index.tokenizer.eos_token)
        ids = opened.read(min(start, len(opened)), min(start + tokens, len(opened)))
        console = Console()
        show_splits(console, folder, index)
        console.print(f"settings   {escape(str(index.settings))}")
        for source in index.sources[:10]:
            console.print(f"source     {escape(source.name)} ({source.kind}, {source.bytes:,} bytes)", highlight=False)
        if len(index.sources) > 10:
            console.print(f"           and {len(index.sources) - 10:,} more")
        if ids.size:
            console.rule(f"{split}, tokens {start:,} to {start + ids.size:,}")
            for part in _documents(ids.tolist(), index.tokenizer.eos_id):
                console.print(tokenizer.decode(part), markup=False, highlight=False)
                console.print("·" * 8, style="dim")


def verify(
    folder: Folder,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Files read at a time.")] = 4,
) -> None:
    """Check the size and SHA-256 of every file of a prepared folder; damage ends with exit code 1."""
    with reported():
        from siamesenorm.data.index import damaged_files, read_index
        from siamesenorm.data.latents.index import is_latents, read_latent_index
        from siamesenorm.terminal import counting_bar

        files = list((read_latent_index if is_latents(folder) else read_index)(folder).files())
        with counting_bar(Console(stderr=True), "verifying", len(files)) as done:
            damaged = damaged_files(folder, files, workers=workers, done=lambda name, sound: done(1))
        for name in damaged:
            typer.echo(f"damaged or missing: {name}")
        if damaged:
            typer.echo(f"{folder}: {len(damaged)} of {len(files)} files are damaged; prepare it again to mend them")
            raise typer.Exit(EXIT_FAILED)
        typer.echo(f"{folder}: all {len(files)} files are sound")


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


def show_splits(console: Console, folder: Path, index: Index) -> None:
    """A row for every split, and the tokenizer."""
    from rich.markup import escape
    from rich.table import Table

    from siamesenorm.data.held_out import LEAST, NEEDED

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
    held_out = index.splits["validation"].tokens
    if index.settings.validation and held_out < LEAST:
        console.print(
            f"note       {held_out:,} tokens are held out, too few to measure on: it takes {LEAST:,}, "
            f"from {NEEDED:,} or more of different text"
        )
