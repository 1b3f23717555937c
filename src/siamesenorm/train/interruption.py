"""SIGTERM, SIGHUP and the first Ctrl-C ask a run to stop; it saves at the end of its step. A second Ctrl-C ends it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

ASKING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Interruption:
    """While entered, keeps the signal that asked to stop. Signals that were ignored before (nohup) stay so."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            before = self._before.get(signal.SIGINT)
            if callable(before):
                before(number, frame)  # the command's, or Python's own: an exception
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others get no signals
            for number in ASKING:
                if (before := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                    self._before[number] = before
                    signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
