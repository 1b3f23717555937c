"""A quiet end to Ctrl-C, whenever and however often it comes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPTED = 130
SHOW_CURSOR = "\x1b[?25h"


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Ctrl-C ends the process at once: as an exception, some imports of torch swallow it and go on."""
    before = signal.getsignal(signal.SIGINT)
    replaceable = threading.current_thread() is threading.main_thread()
    if not replaceable or (before is not signal.default_int_handler and not isinstance(before, Interrupts)):
        yield  # another handler decides, or interrupts are ignored as under nohup
        return
    signal.signal(signal.SIGINT, lambda *_: end_at_once())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Interrupts:
    """What Ctrl-C does in a command: the first is an exception, the second ends the process at once.

    Files are whole or absent, so that no moment is a bad one. What an exception cannot end, because it came where
    Python lets none through or while the interpreter was ending, is ended at once too instead of showing a trace.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a signal, as a handler does."""
        if self.came:
            end_at_once()
        self.came = True
        raise KeyboardInterrupt

    def install(self) -> None:
        """From now on, to the end of the process; nothing where interrupts are ignored, as under nohup."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        signal.signal(signal.SIGINT, self)
        plain = sys.unraisablehook

        def unraisable(problem: sys.UnraisableHookArgs) -> None:
            if problem.exc_type is KeyboardInterrupt:
                end_at_once()
            plain(problem)

        sys.unraisablehook = unraisable

    def ending(self, code: int) -> None:
        """The command is done; whatever comes now changes nothing about it."""
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, lambda *_: end_at_once(code))


def end_at_once(code: int = EXIT_INTERRUPTED) -> NoReturn:
    """Without a word, and with the cursor that a live display may have hidden."""
    with contextlib.suppress(OSError):
        for descriptor in (1, 2):
            if os.isatty(descriptor):
                os.write(descriptor, SHOW_CURSOR.encode())
    os._exit(code)
