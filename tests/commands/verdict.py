"""Whether a command ended well: how, with which words, and what it left behind."""

import os
from collections.abc import Sequence
from pathlib import Path

LONGEST = 1000
"""Characters of a sentence."""
LONG_WORK = ("train", "encode-images")
"""Commands that may find a damaged file when they have begun, and are gone on with by the same command."""
OWN = (".stdout", ".stderr")


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder below one, with size and time."""
    found = {}
    for place, inner, files in os.walk(folder):
        for name in (*inner, *files):
            if name not in OWN:
                state = os.lstat(os.path.join(place, name))
                is_file = not os.path.isdir(os.path.join(place, name))
                found[os.path.relpath(os.path.join(place, name), folder)] = (
                    (state.st_size, state.st_mtime_ns) if is_file else (0, 0)
                )
    return found


def verdict(code: int, out: str, err: str, before: dict, after: dict, spoilt: Sequence[str] = ()) -> list[str]:
    """What is wrong, if anything: a refusal is one sentence, and leaves everything as it was.

    spoilt: the command, where it was given a damaged file: one may be passed over, or found when the work has begun.
    """
    wrong = []
    if code not in (0, 1, 2, 3):
        wrong.append(f"exit code {code}")
    if "Traceback" in out + err or "panicked" in err:
        wrong.append("a trace")
    if code not in (1, 2):
        return wrong
    began = any(word in LONG_WORK for word in spoilt[:2])
    lines = [line for line in err.splitlines() if not (spoilt and line.startswith("damaged checkpoint: "))]
    said = [line for line in lines if line.startswith("siamesenorm: ")]
    if len(said) != 1 and "damaged or missing" not in out:
        wrong.append(f"{len(said)} sentences")
    if len(lines) != len(said) and not began:
        wrong.append(f"{len(lines)} lines")
    wrong += [f"a sentence of {len(line)} characters" for line in said if len(line) > LONGEST]
    wrong += ["a sign that does not print" for line in said if not line.isprintable()]
    if code == 2 and out:
        wrong.append("something on standard output")
    if code == 2 and before != after and not began:
        changes = sorted(set(before.items()) ^ set(after.items()))
        wrong.append(f"left behind: {sorted({name for name, _ in changes})[:5]}")
    return wrong
