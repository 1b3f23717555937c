"""Damaged and forged files: for every kind of file that commands read, ways to spoil a sound one."""

import hashlib
import io
import json
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

NEST = 100_000
VALUES = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.5, 1e308, "", "x", "nan", "a" * 5000,
    "../../up", "/etc/passwd", "é\n\x1b[31m", "\ud800", [], {}, [[]], [None], {"": None}, ["x", 1], {"x": {"x": []}},
    float("nan"), float("inf"), -float("inf"),
]  # fmt: skip
"""Put in the place of any value of a JSON or YAML file."""
DOCUMENTS = [
    b"", b" ", b"null", b"[]", b"{}", b"1", b'"x"', b"NaN", b"true", b"[" * NEST, b'{"a":' * NEST, b"\xff\xfe\x00",
    b"\xef\xbb\xbf{}", b"{", b'{"a": 1, "a": 2}', b"1" + b"0" * 5000, b"1e999", b"[1e999]", b"\0" * 4096,
]  # fmt: skip
"""Whole JSON files."""
TAGS = [
    "!!bool maybe", "!!int ''", "!!int x", "!!float ''", "!!float x", "!!timestamp x", "!!null x", "!!binary '%'",
    "!!set [1]", "!!omap [1]", "!!pairs {a: 1}", "!!python/object/apply:os.system [ls]", "!!python/name:os.system",
    "!unknown x", "! x", "&a [*a]", "*missing", "2001-99-99", "0o9", "0x", "1:99", "'\\ud800'", '"\\ud800"',
    "[" * 3000, "{a: " * 3000, "? [1] : 2", "<<: {}", "|", "\t", "%YAML 9.9", "!!str", "!!map [1]", "!!seq {a: 1}",
    '"\\U7fffffff"', "@x", "`x`", "1e99999", "-1e99999", "9" * 5000, ".nan", "-.inf", "a" * 5000, "\x07", "--- ---",
]  # fmt: skip
"""Put in the place of a value of a YAML file."""
ARRAYS: list[tuple[str, Any, Any]] = [
    ("<u2", (2**44,), False), ("<u2", (2**62, 2**62), False), ("|u1", (2**40, 8, 8, 3), False), ("<u2", (-1,), False),
    ("|O", (3,), False), ("<f8", (4,), True), ("<U1000000000", (1,), False), ("|V0", (2**50,), False),
    ("<u2", (), False), ("<u2", (0,), False), ("<u2", "x", False), ("x", (1,), False), ("<u2", (1.5,), False),
    ("<u2", (10**30,), False), ([("a", "<u2")], (3,), False), ("<M8[s]", (3,), False), ("<c16", (3,), False),
    ("<u2", (True,), False), ("<f4", (3, 3), "x"), ("<u2", (1,) * 70, False), (None, None, None),
]  # fmt: skip
"""dtype, shape and order that a header of NumPy claims."""

Damage = Callable[[Path, random.Random], str]
"""Spoils the file at a path and says how."""


def nothing(path: Path, chance: random.Random) -> str:
    path.unlink()
    return "missing"


def empty(path: Path, chance: random.Random) -> str:
    path.write_bytes(b"")
    return "empty"


def folder(path: Path, chance: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "a folder"


def nested(path: Path, chance: random.Random) -> str:
    path.write_bytes(b"[" * NEST)
    return "nested"


def dangling(path: Path, chance: random.Random) -> str:
    path.unlink()
    path.symlink_to("nowhere")
    return "a link to nothing"


def cut(path: Path, chance: random.Random) -> str:
    content = path.read_bytes()
    keep = chance.randrange(len(content)) if content else 0
    path.write_bytes(content[:keep])
    return f"cut at {keep}"


def noise(path: Path, chance: random.Random) -> str:
    path.write_bytes(chance.randbytes(chance.choice([1, 7, 8, 100, 5000])))
    return "noise"


def flipped(path: Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    places = [chance.randrange(len(content)) for _ in range(chance.choice([1, 1, 4, 64]))] if content else []
    for place in places:
        content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"flipped at {places[:4]}"


def longer(path: Path, chance: random.Random) -> str:
    with open(path, "ab") as file:
        file.write(chance.choice([b"\0" * 10, b"x" * 999, b"\n{}", b"\xff"]))
    return "longer"


def json_document(path: Path, chance: random.Random) -> str:
    content = chance.choice(DOCUMENTS)
    path.write_bytes(content)
    return f"whole file {content[:20]!r}"


def json_value(path: Path, chance: random.Random) -> str:
    """One value, somewhere inside, becomes another, is taken away or is nested without end."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text("utf-8")]
        number = chance.randrange(len(lines))
        value, said = changed(json.loads(lines[number]), chance)
    except (ValueError, IndexError):
        return noise(path, chance)
    lines[number] = json.dumps(value)
    if said == "nested":
        lines[number] = lines[number].replace('"NEST"', "[" * NEST + "]" * NEST)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return said


def changed(value: Any, chance: random.Random) -> tuple[Any, str]:
    """A JSON value with one part of it replaced, and which."""
    places: list[tuple[Any, Any, str]] = []

    def walk(part: Any, name: str) -> None:
        items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        for key, inner in list(items)[:40]:
            places.append((part, key, f"{name}.{key}"))
            walk(inner, f"{name}.{key}")

    walk(value, "")
    if not places:
        return chance.choice(VALUES), "all"
    part, key, name = chance.choice(places)
    way = chance.random()
    if way < 0.1:
        del part[key]
        return value, f"{name} taken away"
    if way < 0.15:
        part[key] = "NEST"
        return value, "nested"
    part[key] = chance.choice(VALUES)
    return value, f"{name} = {str(part[key])[:40]!r}"


def yaml_value(path: Path, chance: random.Random) -> str:
    """A value of a line becomes a strange one, or the whole file does."""
    lines, strange = path.read_text(encoding="utf-8").splitlines(), chance.choice(TAGS)
    if chance.random() < 0.1 or not lines:
        path.write_text(strange, encoding="utf-8")
        return f"whole file {strange[:40]!r}"
    number = chance.randrange(len(lines))
    name, colon, _ = lines[number].partition(":")
    if chance.random() < 0.3:
        strange = json.dumps(chance.choice(VALUES))
    lines[number] = f"{name}: {strange}" if colon else strange
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{name.strip()}: {strange[:40]}"


def forged_header(chance: random.Random) -> tuple[bytes, str]:
    """An array whose header promises what does not follow."""
    dtype, shape, order = chance.choice(ARRAYS)
    text = repr({"descr": dtype, "fortran_order": order, "shape": shape})
    text = chance.choice([text] * 12 + ["{", "x", "(" * 200 + ")" * 200, "{'a': " * 3000, "__import__('os')", ""])
    version = chance.choice([b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"])
    size = "<H" if version == b"\x01\x00" else "<I"
    length = min(len(text), 65535) if chance.random() < 0.9 else chance.choice([0, 65535])
    body = b"\x93NUMPY" + version + struct.pack(size, length) + text.encode() + chance.randbytes(chance.choice([0, 24]))
    return body, f"header {text[:60]}"


def forged_array(path: Path, chance: random.Random) -> str:
    content, said = forged_header(chance)
    path.write_bytes(content)
    return said


def forged_archive(path: Path, chance: random.Random) -> str:
    """One array of an .npz becomes another."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = chance.choice(list(members))
    way = chance.random()
    if way < 0.5:
        members[name], said = forged_header(chance)
    elif way < 0.6:
        del members[name]
        said = "taken away"
    elif way < 0.7:
        members[name], said = chance.randbytes(100), "noise"
    else:
        wrong = chance.choice([np.zeros((0,)), np.full((3, 3), np.nan), np.array("x"), np.zeros((2, 2, 2), np.int64)])
        held = io.BytesIO()
        np.save(held, wrong)
        members[name], said = held.getvalue(), f"{wrong.dtype}{wrong.shape}"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, content in members.items():
            archive.writestr(key, content)
    return f"{name}: {said}"


def forged_tensors(path: Path, chance: random.Random) -> str:
    """The header of a safetensors file says something else."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    try:
        header, said = changed(json.loads(content[8 : 8 + size]), chance)
    except ValueError:
        return noise(path, chance)
    text = json.dumps(header).replace('"NEST"', "[" * NEST + "]" * NEST).encode()
    if chance.random() < 0.1:
        text, said = chance.choice(DOCUMENTS), "another header"
    promised = len(text) if chance.random() < 0.9 else chance.choice([0, 2**40, 2**63, len(text) - 1])
    path.write_bytes(struct.pack("<Q", promised) + text + content[8 + size :])
    return said


ANY: list[Damage] = [nothing, empty, folder, nested, dangling, cut, noise, flipped, longer]
OF_KIND: dict[str, list[Damage]] = {
    ".json": [json_value] * 8 + [json_document] * 3,
    ".jsonl": [json_value] * 8 + [json_document] * 3,
    ".yaml": [yaml_value] * 12,
    ".npy": [forged_array] * 6,
    ".npz": [forged_archive] * 8,
    ".safetensors": [forged_tensors] * 6,
}


def damaged(path: Path, chance: random.Random) -> str:
    """Spoil a file in one of the ways that its kind knows; a fair share of them leaves it readable but senseless."""
    said = chance.choice([*OF_KIND.get(path.suffix, []), *ANY])(path, chance)
    return f"{said}, and its checksum" if chance.random() < 0.6 and path.is_file() and agreeing(path) else said


def agreeing(path: Path) -> bool:
    """Forge the checksums of a spoilt file too, where the folder has some; whether it had."""
    digest, size = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size
    found = False
    for name in ("manifest.json", "index.json"):
        sums = path.parent / name
        if sums == path or not sums.is_file():
            continue
        value = json.loads(sums.read_text(encoding="utf-8"))
        for entry in _entries(value):
            for named, summed in (("file", "sha256"), ("labels", "labels_sha256"), ("boundaries", "boundaries_sha256")):
                if entry.get(named) == path.name and summed in entry:
                    entry[summed], found = digest, True
        if isinstance(value.get("files"), dict) and path.name in value["files"]:
            value["files"][path.name], found = {"size": size, "sha256": digest}, True
        sums.write_text(json.dumps(value), encoding="utf-8")
    return found


def _entries(value: Any) -> Iterator[dict[str, Any]]:
    """Every object within a JSON value."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _entries(part)


def copied(source: Path, target: Path) -> Path:
    """A copy of a file or folder, to be spoilt."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copyfile(source, target)
    return target
