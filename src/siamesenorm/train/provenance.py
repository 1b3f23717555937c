"""What someone needs to make the same runs again: versions, machine, command, and hashes of the data."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from siamesenorm.data.atomic import sha256_of
from siamesenorm.data.images.opening import DIGITS, FASHION_MNIST, open_images
from siamesenorm.data.index import INDEX
from siamesenorm.data.listing import files_below
from siamesenorm.data.sources import EMBEDDED, find_sources
from siamesenorm.data.workers import available_cores
from siamesenorm.train.config import RunConfig
from siamesenorm.version import __version__

PACKAGES = ("torch", "numpy", "pydantic", "safetensors", "tokenizers")


def machine_facts() -> dict[str, Any]:
    """Versions and the machine, by name."""
    versions = {"siamesenorm": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "machine": {"system": platform.platform(), "processor": processor(), "cores": available_cores()},
    }


def threads_asked_for() -> int | None:
    """Threads of a process by OMP_NUM_THREADS, whose first number counts; None where it says nothing sensible."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) else None


@functools.lru_cache(maxsize=1)
def processor() -> str:
    """The processor's name, or its architecture where the system does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def command() -> str:
    """The command line as a person would type it again."""
    return shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "siamesenorm"), *sys.argv[1:]])


def origin(config: RunConfig | None = None) -> dict[str, Any]:
    """Versions, machine and command of this process, and the hashes of a configuration's data."""
    return {**machine_facts(), "command": command(), "data": {} if config is None else data_hashes(config)}


def data_hashes(config: RunConfig, without: Collection[str] = ()) -> dict[str, str]:
    """SHA-256 of every corpus that a configuration names, without those that nobody asks for."""
    found: dict[str, str] = {}
    for value in config.as_dict()["data"].values():
        for name in value if isinstance(value, list) else [value]:
            asked_for = isinstance(name, str) and name and name not in without
            if asked_for and (digest := hash_of(name)) is not None:
                found[name] = digest
    return found


def hash_of(name: str) -> str | None:
    """Of an embedded corpus its texts, of a prepared folder its index, of a file its bytes, of a folder its listing."""
    path = Path(name)
    looked_at = path / INDEX if (path / INDEX).is_file() else path
    state = looked_at.stat() if looked_at.exists() else None
    return _hash_of(name, None if state is None else (state.st_ino, state.st_size, state.st_mtime_ns))


@functools.lru_cache(maxsize=64)
def _hash_of(name: str, state: tuple[int, int, int] | None) -> str | None:
    """state: of the file or folder, so that a hash is that of what lies there now."""
    path = Path(name)
    if not path.exists():
        if name in (DIGITS, FASHION_MNIST):
            return open_images(name).fingerprint
        if name.partition(":")[0] not in EMBEDDED:
            return None
        (source,) = find_sources([name])
        return source.sha256()
    if path.is_file():
        return sha256_of(path)
    if (path / INDEX).is_file():
        return sha256_of(path / INDEX)
    digest = hashlib.sha256()
    for file in files_below(path):
        digest.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode())
    return digest.hexdigest()
