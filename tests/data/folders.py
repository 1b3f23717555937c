"""Sources and comparisons for the tests of preparation."""

import json
import random
from pathlib import Path


def write_sources(root: Path, seed: int = 0) -> list[str]:
    """A folder of texts, a JSONL file with odd lines, and an empty file: small, but of several chunks."""
    chance = random.Random(seed)
    words = ["alpha", "beta", "gamma", "δέλτα", "\n", "12", "+", "é", "😀", "  "]

    def text(count):
        return " ".join(chance.choice(words) for _ in range(count))

    folder = root / "texts"
    folder.mkdir(parents=True)
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(text(chance.randrange(1, 400)), encoding="utf-8")
    (folder / "empty.txt").write_text("")
    (folder / "blank.txt").write_text(" \n\t ")
    with open(root / "lines.jsonl", "w", encoding="utf-8") as file:
        for _ in range(300):
            file.write(json.dumps({"text": text(chance.randrange(0, 60)), "other": 1}) + "\n")
    return [str(folder), str(root / "lines.jsonl")]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
