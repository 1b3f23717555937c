"""A real browser for tests: headless Chromium, driven through its DevTools protocol with the standard library."""

import base64
import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
PATIENCE = 120.0


def find_chromium() -> str:
    """The browser's path. Without one, tests are skipped on a person's machine and fail in CI."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        reason = f"no Chromium is installed (looked for {', '.join(NAMES)}); Debian: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


class Browser:
    """One page of one browser with a profile of its own."""

    def __init__(self) -> None:
        self.profile = tempfile.mkdtemp(prefix="siamesenorm-chromium-")
        command = [find_chromium(), *FLAGS, f"--user-data-dir={self.profile}", "about:blank"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = self._port()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as answer:
                page = next(target for target in json.load(answer) if target["type"] == "page")
            self.socket = connect(page["webSocketDebuggerUrl"])
            self.events: list[dict[str, Any]] = []
            self.number = 0
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def _port(self) -> int:
        file, end = Path(self.profile, "DevToolsActivePort"), time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with contextlib.suppress(OSError, ValueError, IndexError):
                return int(file.read_text().splitlines()[0])
            assert self.process.poll() is None, "Chromium ended at once"
            time.sleep(0.05)
        raise TimeoutError("Chromium does not answer")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its answer; events that come in between are kept."""
        self.number += 1
        send(self.socket, json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = json.loads(receive(self.socket))
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def evaluate(self, expression: str) -> Any:
        """A JavaScript expression's value, waited for if it is a promise."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, path: Path, *, width: int = 1200, dark: bool = False) -> None:
        """Show a file and wait until its plots are drawn."""
        self.events.clear()
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + PATIENCE
        while self.evaluate("document.readyState") != "complete" or not self.evaluate(DRAWN):
            assert time.monotonic() < end, "the plots are not drawn"
            time.sleep(0.1)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    @property
    def problems(self) -> list[str]:
        """Everything that a console would show in red or yellow, and uncaught exceptions."""
        found = []
        for event in self.events:
            values = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(values["exceptionDetails"].get("text")))
            elif event["method"] == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                found.append(values["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
                found.append(str(values["args"]))
            elif event["method"] == "Page.javascriptDialogOpening":
                found.append(f"dialog: {values['message']}")
        return found

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for, without data in addresses themselves."""
        sent = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith(("data:", "blob:"))]

    def close(self) -> None:
        """End the browser and remove its profile."""
        with contextlib.suppress(AttributeError, OSError):
            self.socket.close()
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
        shutil.rmtree(self.profile, ignore_errors=True)


DRAWN = "[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('svg.main-svg'))"


# The websocket that the protocol speaks (RFC 6455), as much of it as is needed --------------------------------


def connect(url: str) -> socket.socket:
    """An open websocket."""
    host, _, path = url.removeprefix("ws://").partition("/")
    name, _, port = host.partition(":")
    connection = socket.create_connection((name, int(port)), timeout=PATIENCE)
    key = base64.b64encode(os.urandom(16)).decode()
    lines = [f"GET /{path} HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade"]
    lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
    connection.sendall("\r\n".join(lines).encode())
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += connection.recv(1)
    assert answer.startswith(b"HTTP/1.1 101"), answer
    return connection


def send(connection: socket.socket, text: str) -> None:
    """One text frame, masked as clients must."""
    data, mask = text.encode(), os.urandom(4)
    size = len(data)
    if size < 126:
        head = struct.pack("!BB", 0x81, 0x80 | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", 0x81, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", 0x81, 0x80 | 127, size)
    connection.sendall(head + mask + bytes(byte ^ mask[place % 4] for place, byte in enumerate(data)))


def receive(connection: socket.socket) -> str:
    """One message, whatever the frames it comes in."""
    message = b""
    while True:
        first, second = _exactly(connection, 2)
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack("!H", _exactly(connection, 2))
        elif size == 127:
            (size,) = struct.unpack("!Q", _exactly(connection, 8))
        data = _exactly(connection, size)
        kind = first & 0x0F
        if kind == 8:
            raise ConnectionError("Chromium closed the connection")
        if kind in (0, 1, 2):
            message += data
            if first & 0x80:
                return message.decode()


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise ConnectionError("Chromium closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
