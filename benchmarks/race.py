"""Races: contestants that take turns in one process, every round written to a result file as soon as it is over.

A turn is timed by the clock on the wall and by the processor time of the whole process: other programs lengthen the
first more than the second. Ratios are taken within a round, so that both sides saw the same machine, and reported as
their median with quartiles, beside the ratio of the fastest turns of all rounds. Who begins changes from round to
round. A command that is called again takes up its file where it stands: ``--rounds`` is what shall be in it at the
end. A file is of one machine, versions, threads and settings, and all rounds of a race are of one source.
``--fresh`` begins the races of a command anew; the file's others stay, if they are of the same conditions.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import siamesenorm

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "timm", "diffusers")
QUICK_ROUNDS = 2
Turn = Callable[[], object]


class Ratio(NamedTuple):
    """A contestant's time over the reference's: median and quartiles of the rounds, the fastest, processor time."""

    median: float
    low: float
    high: float
    fastest: float
    processor: float


def compared(rounds: Sequence[dict[str, Any]], name: str, reference: str) -> Ratio:
    """The ratio of two contestants of a race's rounds, each ``{contestant: [wall, processor]}``."""
    mine, others = [r[name] for r in rounds], [r[reference] for r in rounds]
    wall = [a[0] / b[0] for a, b in zip(mine, others, strict=True)]
    processor = statistics.median(a[1] / b[1] for a, b in zip(mine, others, strict=True))
    low, middle, high = statistics.quantiles(wall, n=4, method="inclusive") if len(wall) > 1 else wall * 3
    fastest = min(a[0] for a in mine) / min(b[0] for b in others)
    return Ratio(middle, low, high, fastest, processor)


def seconds(rounds: Sequence[dict[str, Any]], name: str) -> float:
    """Median of a contestant's turns on the wall's clock."""
    return statistics.median(r[name][0] for r in rounds)


def arguments(about: str | None, name: str, *, rounds: int) -> argparse.ArgumentParser:
    """What every command takes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(name=name)
    parser.add_argument("--rounds", type=count, default=rounds, help="rounds in the file at the end (%(default)s)")
    parser.add_argument("--threads", type=count, default=1, help="threads of every contestant (%(default)s)")
    parser.add_argument("--out", type=Path, help=f"the result file (benchmarks/results/{name}.json)")
    parser.add_argument("--fresh", action="store_true", help="begin these races anew where a result file is")
    parser.add_argument("--quick", action="store_true", help="see that it runs: tiny sizes, figures mean nothing")
    return parser


def count(text: str) -> int:
    """A number of something, from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it takes a whole number from 1")
    return int(text)


class Results:
    """The result file of one command."""

    def __init__(self, parser: argparse.ArgumentParser, args: argparse.Namespace, **setting: Any) -> None:
        torch.set_num_threads(args.threads)
        self.rounds = QUICK_ROUNDS if args.quick else args.rounds
        folder = Path(tempfile.mkdtemp(prefix="quick-")) if args.quick and args.out is None else RESULTS
        self.path: Path = args.out or folder / f"{args.name}.json"
        self.failed: list[str] = []
        self.fresh, self.source = args.fresh, source()
        conditions = {**environment(), "threads": args.threads, "quick": args.quick, "setting": setting}
        conditions = json.loads(json.dumps(conditions))  # as it is read back: tuples are lists
        self.data: dict[str, Any] = {"command": "", **conditions, "races": {}, "facts": {}, "sources": {}}
        if self.path.exists():
            try:
                data = json.loads(self.path.read_text(encoding="utf-8"))
                data["races"], data["facts"], data["command"], data["sources"]
            except (OSError, ValueError, LookupError, TypeError):
                parser.error(f"--out: {self.path} is no result file; name another one")
            other = [key for key, value in conditions.items() if data.get(key) != value]
            if other and not args.fresh:
                parser.error(
                    f"--out: {self.path} holds rounds of another {' and '.join(other)}; "
                    "add --fresh to throw them away, or name another file"
                )
            self.data = self.data if other else data
        command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
        self.data["command"] = "; ".join(dict.fromkeys([*filter(None, self.data["command"].split("; ")), command]))

    def write(self) -> None:
        """Write the file, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)

    def race(self, name: str, line_up: Callable[[], dict[str, Turn]], **facts: Any) -> list[dict[str, Any]]:
        """Run the rounds of a race that are missing; the first contestant is the reference of what is printed.

        A race that fails is named at the end, after the others.
        """
        races = self.data["races"]
        missing = self.fresh or len(races.get(name, {"rounds": []})["rounds"]) < self.rounds
        if missing and self._is_other(name):
            races.pop(name, None)
        race = races.setdefault(name, {"facts": {}, "rounds": [], "load": []})
        race["facts"].update(facts)
        if missing:
            self.data["sources"][name] = self.source
            try:
                self._run(name, race, line_up())
            except Exception:  # hours of other races are worth more than this one
                traceback.print_exc()
                self.failed.append(name)
            forget()
        if race["rounds"]:
            print(describe(name, race["rounds"]), flush=True)
        return race["rounds"]

    def _run(self, name: str, race: dict[str, Any], turns: dict[str, Turn]) -> None:
        for contestant, turn in turns.items():
            began = time.perf_counter()
            turn()  # compiles
            turn()
            print(f"{name}: {contestant} is warm after {time.perf_counter() - began:.1f} s", file=sys.stderr)
        names = list(turns)
        gc.collect()
        gc.freeze()  # what lives as long as the race need not be looked through in every turn
        while len(race["rounds"]) < self.rounds:
            first = len(race["rounds"]) % len(names)
            times: dict[str, list[float]] = {}
            for contestant in names[first:] + names[:first]:
                times[contestant] = timed(turns[contestant])
            race["rounds"].append({contestant: times[contestant] for contestant in names})
            race["load"].append(os.getloadavg()[0])
            self.write()

    def _is_other(self, name: str) -> bool:
        """Whether what the file has under a name is to be thrown away, or of another source than this one."""
        return self.fresh or self.data["sources"].get(name) != self.source

    def measure(self, name: str, of: Callable[[], Any]) -> Any:
        """A fact that needs no rounds, measured once."""
        if name not in self.data["facts"] or self.fresh:
            try:
                self.data["facts"][name] = of()
                self.data["sources"][name] = self.source
                self.write()
            except Exception:
                traceback.print_exc()
                self.failed.append(name)
                return None
        return self.data["facts"][name]

    def close(self) -> int:
        """Say where the file is and what failed; the exit code."""
        self.write()
        print(self.path)
        if self.failed:
            print(f"failed: {', '.join(self.failed)}", file=sys.stderr)
        return int(bool(self.failed))


def timed(turn: Turn) -> list[float]:
    """Seconds of a turn by the wall's clock and of the processor."""
    gc.collect()
    gc.disable()  # a collection would be counted to whoever runs when it comes
    try:
        wall, processor = time.perf_counter(), time.process_time()
        turn()
        return [time.perf_counter() - wall, time.process_time() - processor]
    finally:
        gc.enable()


def repeated(turn: Turn, times: int) -> Turn:
    """A turn of several calls, for what is too short to be timed."""

    def turns() -> None:
        for _ in range(times):
            turn()

    return turns if times > 1 else turn


def describe(name: str, rounds: Sequence[dict[str, Any]]) -> str:
    """A race as a table of ratios to its first contestant."""
    reference = next(iter(rounds[0]))
    lines = [f"\n{name}: {len(rounds)} rounds, times as ratios to {reference}"]
    lines.append(f"  {'':40s} {'median':>6s} {'quartiles':>14s} {'fastest':>7s} {'processor':>9s} {'ms':>9s}")
    for contestant in rounds[0]:
        r = compared(rounds, contestant, reference)
        lines.append(
            f"  {contestant:40s} {r.median:6.3f} {f'{r.low:.3f}..{r.high:.3f}':>14s} {r.fastest:7.3f} "
            f"{r.processor:9.3f} {1e3 * seconds(rounds, contestant):9.2f}"
        )
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    """The machine and the code: what rounds must share to stand in one race."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)}
    return {
        "versions": {"siamesenorm": siamesenorm.__version__, "python": platform.python_version(), **versions},
        "cpu": processor(),
    }


def source() -> str:
    """A digest of the package's code."""
    digest = hashlib.sha256()
    folder = Path(siamesenorm.__file__).parent
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".c", ".h")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def processor() -> str:
    """Name and number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


def forget() -> None:
    """Give back what the last race's models and graphs hold."""
    gc.unfreeze()
    if "torch._dynamo" in sys.modules:  # else nothing was compiled, and the import takes seconds
        torch.compiler.reset()
    gc.collect()
