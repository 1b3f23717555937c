"""A quiet end to an interrupt while libraries load."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

EXIT_INTERRUPTED = 130


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Ctrl-C ends the process at once: as an exception, some imports of torch swallow it and go on."""
    replaceable = threading.current_thread() is threading.main_thread()
    if not replaceable or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # somebody else decides, or interrupts are ignored as under nohup
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
