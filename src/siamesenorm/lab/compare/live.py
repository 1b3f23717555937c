"""The grid while it runs: a table with loss, sparkline, state and time left; lines where there is no terminal."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from siamesenorm.lab.compare.runner import DONE, CellProgress, GridWatcher
from siamesenorm.terminal import plain_table, sparkline
from siamesenorm.train.display import clock, output_may_be_gone

STYLES = {"finished": "green", "diverged": "red", "failed": "bold red", "interrupted": "yellow", "waiting": "dim"}
REFRESH, PLAIN = 0.25, 10.0
"""Seconds between drawings, and between lines where there is no terminal."""
NOTEBOOK = '<pre style="line-height:1.3;white-space:pre;overflow-x:auto">{code}</pre>'
NOTEBOOK_WIDTH = 160
OTHER_ROWS = 6
"""Lines of the terminal that the table leaves free."""


class LiveTable(GridWatcher):
    """Shows a plan on a console while an engine works on it."""

    def __init__(self, plan: Sequence[CellProgress], console: Console) -> None:
        self.plan, self.console = plan, console
        self.began = self.shown = time.monotonic()
        self.first = sum(progress.step for progress in plan)
        self.live: Live | None = None
        self.announced: set[str] = set()

    def __enter__(self) -> LiveTable:
        if self.console.is_terminal:
            self.live = Live(console=self.console, auto_refresh=False, transient=True)
            with output_may_be_gone():
                self.live.start()
            self.draw()
        return self

    @property
    def drawn(self) -> bool:
        """Whether there is a table that is drawn anew."""
        return self.live is not None

    def __exit__(self, *problem: object) -> None:
        if self.live is not None:
            with output_may_be_gone():
                self.live.stop()
            self.live = None

    def changed(self, progress: CellProgress) -> None:
        """A line for every cell that ends, where there is no table."""
        ended = progress.state in (*DONE, "failed", "interrupted")
        if self.live is None and ended and progress.cell.name not in self.announced:
            self.announced.add(progress.cell.name)
            count = sum(p.state in DONE for p in self.plan)
            with output_may_be_gone():
                self.console.print(f"[{count}/{len(self.plan)}] {title(progress)}: {outcome(progress)}", markup=False)

    def tick(self) -> None:
        """Draw anew."""
        now = time.monotonic()
        if now - self.shown < (REFRESH if self.drawn else PLAIN):
            return
        self.shown = now
        if self.drawn:
            self.draw()
        else:
            with output_may_be_gone():
                self.console.print(self.summary())

    def draw(self) -> None:
        """The table and the line below it."""
        assert self.live is not None
        rows = self.console.size.height - OTHER_ROWS
        with output_may_be_gone():
            self.live.update(Group(grid_table(self.plan, rows), self.summary()), refresh=True)

    def summary(self) -> Text:
        """Cells done, and the time that is left."""
        done = sum(progress.state in DONE for progress in self.plan)
        running = sum(progress.state == "running" for progress in self.plan)
        left = self.seconds_left()
        parts = [
            f"{done} of {len(self.plan)} cells done, {running} running",
            f"{clock(time.monotonic() - self.began)} so far",
        ]
        if left is not None:
            parts.append(f"about {clock(left)} left")
        return Text(" · ".join(parts), style="dim")

    def seconds_left(self) -> float | None:
        """From the steps that were taken and those to come; a diverged cell has none to come."""
        taken = sum(progress.step for progress in self.plan) - self.first
        ahead = sum(p.steps - p.step for p in self.plan if p.state in ("waiting", "running"))
        return None if taken <= 0 else (time.monotonic() - self.began) / taken * ahead


class NotebookTable(LiveTable):
    """The same table as HTML, drawn anew in its place below a notebook's cell."""

    drawn = True

    def __init__(self, plan: Sequence[CellProgress], show: Callable[[str], None]) -> None:
        super().__init__(plan, Console(file=io.StringIO(), width=NOTEBOOK_WIDTH, record=True, force_jupyter=False))
        self.show = show

    def __enter__(self) -> NotebookTable:
        self.draw()
        return self

    def __exit__(self, *problem: object) -> None:
        self.draw()

    def changed(self, progress: CellProgress) -> None:
        """The table says it."""

    def draw(self) -> None:
        """The table and the line below it."""
        self.console.print(Group(grid_table(self.plan), self.summary()))
        self.show(self.console.export_html(inline_styles=True, code_format=NOTEBOOK))


def notebook() -> Callable[[str], None] | None:
    """What shows HTML in one place below the running cell of a notebook; None elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if type(shell).__name__ != "ZMQInteractiveShell" and type(shell).__module__ != "google.colab._shell":
        return None
    shown = importlib.import_module("IPython.display")
    handle = shown.display(shown.HTML(""), display_id=True)
    return lambda text: handle.update(shown.HTML(text))


def open_table(plan: Sequence[CellProgress], console: Console | None) -> contextlib.AbstractContextManager[GridWatcher]:
    """Shows a plan in a notebook, on a console, or (None) nowhere."""
    if console is None:
        return contextlib.nullcontext(GridWatcher())
    show = notebook()
    return LiveTable(plan, console) if show is None else NotebookTable(plan, show)


def grid_table(plan: Sequence[CellProgress], rows: int | None = None) -> Table:
    """Topologies, settings and seeds down, learning rates across; where rows do not suffice, those at work."""
    lrs = sorted({progress.cell.lr for progress in plan})
    lines: dict[tuple[str, str, int], dict[float, CellProgress]] = {}
    cells = [progress.cell for progress in plan]
    topologies = list(dict.fromkeys(cell.topology for cell in cells))
    settings = list(dict.fromkeys(" ".join(cell.settings) for cell in cells))
    for progress in sorted(
        plan,
        key=lambda p: (settings.index(" ".join(p.cell.settings)), topologies.index(p.cell.topology), p.cell.seed),
    ):
        cell = progress.cell
        lines.setdefault((" ".join(cell.settings), cell.topology, cell.seed), {})[cell.lr] = progress
    shown = list(lines)
    if rows is not None and len(shown) > max(rows, 1):
        shown.sort(key=lambda key: not any(p.state == "running" for p in lines[key].values()))
        shown = shown[: max(rows, 1)]
    table = plain_table()
    if settings != [""]:
        table.add_column("setting", no_wrap=True)
    table.add_column("topology", style="bold cyan", no_wrap=True)
    table.add_column("seed", justify="right", style="dim")
    for lr in lrs:
        table.add_column(f"lr {lr:g}", no_wrap=True, min_width=20)
    for setting, topology, seed in shown:
        row = lines[setting, topology, seed]
        texts = [Text(topology), Text(str(seed)), *(_cell_text(row.get(lr)) for lr in lrs)]
        table.add_row(*([Text(setting)] if settings != [""] else []), *texts)
    return table


def _cell_text(progress: CellProgress | None) -> Text:
    if progress is None:
        return Text("")
    if progress.state == "running":
        loss = "" if progress.loss is None else f" {progress.loss:.3f}"
        share = progress.step / max(progress.steps, 1)
        return Text.assemble((sparkline(progress.losses), "cyan"), loss, (f" {share:.0%}", "dim"))
    text = Text(sparkline(progress.losses), style="dim")
    if text.plain:
        text.append(" ")
    return text.append(outcome(progress), style=STYLES.get(progress.state, ""))


def title(progress: CellProgress) -> str:
    """Which cell it is, in a few words."""
    cell = progress.cell
    return " ".join([cell.topology, f"lr {cell.lr:g}", *cell.settings, f"seed {cell.seed}"])


def outcome(progress: CellProgress) -> str:
    """How a cell stands or ended, in a few words."""
    if progress.state == "finished":
        loss = progress.evaluation.get("loss", progress.loss)
        accuracy = progress.evaluation.get("accuracy")
        right = "" if accuracy is None else f", {accuracy:.1%} right"
        return "✓" if loss is None else f"✓ {loss:.4f}{right}"
    if progress.state == "diverged":
        return f"✗ diverged at step {progress.step + 1}"
    if progress.state == "failed":
        return f"✗ failed: {progress.message}"
    if progress.state == "interrupted":
        return f"stopped at step {progress.step}"
    return progress.state
