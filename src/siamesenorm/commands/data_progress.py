"""Progress of data commands on a terminal: done, rate, time left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Display

from siamesenorm.data.workers import Progress


class ShownProgress(Progress):
    """A bar over the bytes of text, with bytes and tokens a second."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self.task: TaskID | None = None
        self.kept = 0
        self.started = time.monotonic()

    def stage(self, text: str) -> None:
        """A line that spins."""
        if self.task is not None:
            self.display.remove_task(self.task)
        self.task = self.display.add_task(text, total=None, tokens="")

    def begin(self, total: int, todo: int, kept: int) -> None:
        """The bar, with what an earlier run finished already on it."""
        self.stage(f"tokenising ({kept} chunks kept)" if kept else "tokenising")
        self.kept, self.started = total - todo, time.monotonic()
        if self.task is not None:
            self.display.update(self.task, total=total, completed=self.kept)

    def update(self, size: int, tokens: int) -> None:
        """Bytes and tokens of this run."""
        if self.task is not None:
            rate = tokens / max(time.monotonic() - self.started, 1e-3)
            text = f"{tokens:,} tokens, {rate / 1e6:.2f}M/s"
            self.display.update(self.task, completed=self.kept + size, tokens=text)


@contextlib.contextmanager
def shown_progress(console: Console) -> Iterator[ShownProgress]:
    """Show a preparation while it runs; on an output that is no terminal, nothing is drawn."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeRemainingColumn(),
        TimeElapsedColumn(),
    )
    with Display(*columns, console=console, transient=True, disable=not console.is_terminal) as display:
        yield ShownProgress(display)
