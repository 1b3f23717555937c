"""What a person sees of a run: one live line on a terminal, plain lines elsewhere, nothing from other processes."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from siamesenorm.terminal import with_unit

PLAIN_SECONDS = 5.0
"""Between lines on an output that is no terminal."""


class Display:
    """Shows nothing: for processes that are not the main one, and for library use."""

    def start(self, step: int, steps: int) -> None:
        """The run begins or goes on."""

    def step(self, record: dict[str, Any], unit: str, rate: float) -> None:
        """A step was taken; `record` is its line in metrics.jsonl."""

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Held-out data was measured."""

    def note(self, kind: str, message: str) -> None:
        """Something happened that people should know."""

    def stop(self) -> None:
        """The run is over."""


class ConsoleDisplay(Display):
    """A line with loss, learning rate, gradient norm, throughput, utilisation and time left."""

    def __init__(self, console: Console, title: str = "") -> None:
        self.console, self.title = console, title
        self.live: Live | None = None
        self.last: Text | None = None
        self.began = self.shown = 0.0
        self.first = self.steps = 0

    def start(self, step: int, steps: int) -> None:
        """Begin to count time from here."""
        self.first, self.steps, self.began = step, steps, time.monotonic()
        if self.title:
            self._print(Text(self.title, style="dim"))
        if self.console.is_terminal:
            self.live = Live(console=self.console, auto_refresh=False, transient=True)
            with output_may_be_gone():
                self.live.start()

    def _print(self, text: Text) -> None:
        with output_may_be_gone():
            self.console.print(text, soft_wrap=True)

    def step(self, record: dict[str, Any], unit: str, rate: float) -> None:
        """Redraw the line, or print one from time to time."""
        now, step = time.monotonic(), record["step"]
        if self.live is not None:
            self.last = self._line(record, unit, rate, now)
            with output_may_be_gone():
                self.live.update(self.last, refresh=True)
        elif now - self.shown >= PLAIN_SECONDS or step == self.steps:
            self.shown = now
            self._print(self._line(record, unit, rate, now))

    def _line(self, record: dict[str, Any], unit: str, rate: float, now: float) -> Text:
        step = record["step"]
        left = (now - self.began) / max(step - self.first, 1) * (self.steps - step)
        parts = [
            (f"step {step}/{self.steps}", "bold"),
            (f"loss {record['loss']:.4f}", "cyan"),
            (f"lr {record['lr']:.2e}", ""),
            (f"gradient {record['grad_norm']:.2f}", ""),
            (f"{with_unit(rate)} {unit}/s", ""),
        ]
        if record.get("mfu") is not None:
            parts.append((f"MFU {100 * record['mfu']:.0f} %", ""))
        ended = step == self.steps
        parts.append((f"in {clock(now - self.began)}" if ended else f"{clock(left)} left", "dim"))
        line = Text()
        for number, (text, style) in enumerate(parts):
            line.append("  " if number else "").append(text, style=style)
        return line

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """A line that stays."""
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if "/" not in name)
        self._print(Text.assemble(f"step {step}  held out: ", (shown, "green")))

    def note(self, kind: str, message: str) -> None:
        """A line that stays; how a run ended is said by the command."""
        if kind in ("finished", "diverged", "interrupted"):
            return
        style = "yellow" if kind in ("spike", "non_finite", "plateau", "checkpoint", "rollback") else "dim"
        self._print(Text(message, style=style))

    def stop(self) -> None:
        """Take the live line away; what it said last stays."""
        if self.live is not None:
            with output_may_be_gone():
                self.live.stop()
            self.live = None
            if self.last is not None:
                self._print(self.last)


def output_may_be_gone() -> contextlib.AbstractContextManager[None]:
    """Around what is shown: a run outlives the terminal or pipe that it is shown on, where rich would exit."""
    return contextlib.suppress(OSError, SystemExit)


def clock(seconds: float) -> str:
    """h:mm:ss, or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
