"""Call every command with senseless values and damaged files, thousands of times, and say what did not end well.

    python -m scripts.fuzz_commands --cases 3000 --seed 1
    python -m scripts.fuzz_commands --only 'train {half}' --file index.json --share 0 --cases 200

Each case is a process of its own, forked from this one so that nothing is imported twice, with a limit on memory and
time. It must end with exit code 0, or with 1 or 2 and one sentence on standard error; no trace of a stack, nothing left
behind by what was refused, no input changed. Half of the cases have a senseless value, half a damaged file. The summary
goes to standard output as JSON; the exit code is 1 if anything ended otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tests.commands.damage import copied, damaged
from tests.commands.senseless import bad_invocations
from tests.commands.sound_inputs import INVOCATIONS, WITH_DIFFUSERS, Invocation, make_inputs, make_surroundings
from tests.commands.verdict import snapshot, verdict

from siamesenorm.cli import main

SECONDS = 120
MEMORY = 6 * 2**30
"""Bytes a case may take on top of what the libraries have."""


def call(arguments: list[str], folder: Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a forked process; a negative code is a signal."""
    out, err = folder / ".stdout", folder / ".stderr"
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 70
        try:
            for place, number in ((out, 1), (err, 2)):
                os.dup2(os.open(place, os.O_WRONLY | os.O_CREAT, 0o644), number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
            sys.stdout.reconfigure(errors="strict")
            sys.stderr.reconfigure(errors="backslashreplace")
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
            os.chdir(folder / "here")
            os.setpgid(0, 0)
            signal.alarm(SECONDS)
            code = main(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it has started, where it was ended itself
    texts = [place.read_text(encoding="utf-8", errors="replace") for place in (out, err)]
    return os.waitstatus_to_exitcode(status), texts[0], texts[1]


def one_case(
    invocation: Invocation, inputs: dict[str, Path], chance: random.Random | None, folder: Path, part: str = ""
) -> Any:
    """Run one case in a folder of its own; what is wrong with how it ended, and what was done.

    chance: decides which file is damaged, among those with `part` in their names, and how; None: none is.
    """
    shutil.rmtree(folder, ignore_errors=True)
    make_surroundings(folder)
    places, said = dict(inputs), ""
    if chance is not None:
        name = chance.choice([n for n in invocation.inputs if n != "cache"])
        copy = copied(inputs[name], folder / inputs[name].name)
        files = sorted(path for path in copy.rglob("*") if path.is_file()) if copy.is_dir() else [copy]
        files = [path for path in files if part in path.name] or files
        file = chance.choice(files)
        said = f"{file.relative_to(folder)}: {damaged(file, chance)}"
        places[name] = copy
    elif "half" in invocation.inputs or "grid" in invocation.inputs:  # written to when it works
        places |= {n: copied(inputs[n], folder / n) for n in ("half", "grid") if n in invocation.inputs}
    before = snapshot(folder)
    arguments = invocation.filled(places, folder / "out")
    began = time.monotonic()
    code, out, err = call(arguments, folder)
    wrong = verdict(code, out, err, before, snapshot(folder), arguments if chance else ())
    return wrong, {
        "arguments": [
            argument if len(argument) < 200 else f"{argument[:60]}…({len(argument)})" for argument in arguments
        ],
        "damage": said,
        "code": code,
        "seconds": round(time.monotonic() - began, 1),
        "stdout": out[-300:],
        "stderr": err[-6000:],
    }


def campaign(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """All cases; what went wrong is printed at once."""
    inputs = make_inputs(folder / "inputs", diffusers=asked.diffusers)
    sound = [i for i in INVOCATIONS + WITH_DIFFUSERS * asked.diffusers if asked.only in " ".join(i.arguments)]
    readers = [i for i in sound if set(i.inputs) - {"cache"}]
    senseless = list(bad_invocations(sound))
    chance = random.Random(asked.seed)
    chance.shuffle(senseless)
    counts: Counter[str] = Counter()
    problems: list[Any] = []
    unchanged = snapshot(folder / "inputs")
    slowest: list[tuple[float, str]] = []
    for number in range(asked.cases):
        if chance.random() < asked.share and senseless:
            invocation, parameter, value = senseless.pop()
            wrong, facts = one_case(invocation, inputs, None, folder / "case")
            facts["parameter"] = f"{' '.join(parameter.command)} {parameter.name} = {value[:60]!r}"
        else:
            draw = random.Random(f"{asked.seed} {number}")
            wrong, facts = one_case(draw.choice(readers), inputs, draw, folder / "case", asked.file)
        if snapshot(folder / "inputs") != unchanged:
            wrong.append("an input was changed")
            unchanged = snapshot(folder / "inputs")
        counts[f"exit code {facts['code']}"] += 1
        slowest = sorted([*slowest, (facts["seconds"], " ".join(facts["arguments"])[:150])], reverse=True)[:8]
        if wrong:
            problems.append({"case": number, "wrong": wrong, **facts})
            print(json.dumps(problems[-1], indent=1, ensure_ascii=False), file=sys.stderr, flush=True)
            if len(problems) >= asked.keep:
                break
    return {"cases": sum(counts.values()), "ended": dict(counts), "slowest": slowest, "problems": len(problems)}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a sound invocation, such as 'train {half}'")
    parser.add_argument("--file", default="", help="part of the name of the files that are damaged")
    parser.add_argument("--share", type=float, default=0.5, help="of senseless values; the others have a damaged file")
    parser.add_argument("--diffusers", action="store_true", help="with the commands that need diffusers")
    parser.add_argument("--keep", type=int, default=50, help="problems after which it stops")
    return parser.parse_args()


if __name__ == "__main__":
    asked = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        found = campaign(Path(folder), asked)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    sys.exit(bool(found["problems"]))
