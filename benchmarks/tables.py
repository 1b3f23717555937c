"""Result files as tables for docs/costs.md, so that no figure is typed: `make docs` writes them.

Times are ratios: the median over rounds with its quartiles, the ratio of the fastest turns, and that of processor
time. What was not measured is a dash, and a table without its result file says which command makes it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from contestants import OURS, THEIRS, every_topology, ways
from race import RESULTS, compared, seconds

Rounds = Sequence[dict[str, Any]]
NAMES = {"llama": "Llama", "olmo2": "OLMo-2", "qwen3": "Qwen3"}


def grid(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def load(name: str) -> dict[str, Any] | None:
    """A result file, if it is there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def table(name: str, make: Callable[[dict[str, Any]], str], folder: str) -> str:
    """A table with its source behind it."""
    data = load(name)
    if data is None:
        return f"Not measured yet: `python benchmarks/{name}.py`."
    return f"{make(data)}\n\n{_origin(name, data, folder)}"


def _origin(name: str, data: dict[str, Any], folder: str) -> str:
    numbers = sorted({len(race["rounds"]) for race in data["races"].values()})
    rounds = f", {' to '.join({str(numbers[0]): 0, str(numbers[-1]): 0})} rounds" if numbers else ""
    threads = f"{data['threads']} thread{'s' if data['threads'] > 1 else ''}"
    file = f"[{name}.json]({folder}benchmarks/results/{name}.json)"
    warning = " **A quick run: these figures mean nothing.**" if data["quick"] else ""
    return f"`{data['command']}`{rounds}, {threads}, {data['cpu']}, torch {data['versions']['torch']}: {file}.{warning}"


def rounds_of(data: dict[str, Any], race: str, *contestants: str) -> Rounds:
    """The rounds of a race, none where one of the contestants was not in it."""
    rounds = data["races"].get(race, {}).get("rounds", [])
    return rounds if rounds and all(c in rounds[0] for c in contestants) else []


def ratio(data: dict[str, Any] | None, race: str, name: str, reference: str) -> str:
    """One cell: median (quartiles), fastest, processor time."""
    rounds = rounds_of(data, race, name, reference) if data else []
    if not rounds:
        return "–"
    r = compared(rounds, name, reference)
    return f"{r.median:.3f} ({r.low:.3f} to {r.high:.3f}), {r.fastest:.3f}, {r.processor:.3f}"


def best(data: dict[str, Any], race: str, model: str, among: Iterable[str]) -> str:
    """The fastest of a model's ways in a race, by its median; the first of them where the race was not run."""
    names = [f"{model}@{way}" for way in among]
    rounds = data["races"].get(race, {}).get("rounds", [])
    there = [name for name in names if rounds and name in rounds[0]]
    return min(there, key=lambda name: seconds(rounds, name)) if there else names[0]


def verdicts(folder: str) -> str:
    """What is claimed of training steps: ours beside theirs, `siamese` beside `pre`."""

    def make(data: dict[str, Any]) -> str:
        shapes = list(data["races"])
        rows = []
        for theirs in THEIRS:
            compiled = [best(data, shape, theirs, ("layers", "whole")) for shape in shapes]
            cells = [ratio(data, s, "pre@compiled", other) for s, other in zip(shapes, compiled, strict=True)]
            rows.append([f"`pre` compiled / {NAMES[theirs]} compiled", *cells])
            mine = [best(data, shape, "pre", ways("pre")) for shape in shapes]
            other = [best(data, shape, theirs, ways(theirs)) for shape in shapes]
            cells = [ratio(data, s, a, b) for s, a, b in zip(shapes, mine, other, strict=True)]
            rows.append([f"best of `pre` / best of {NAMES[theirs]}", *cells])
        for topology in OURS[1:]:
            for way in ways(topology):
                cells = [ratio(data, shape, f"{topology}@{way}", f"pre@{way}") for shape in shapes]
                rows.append([f"`{topology}` / `pre`, {way}", *cells])
        return grid(["", *shapes], rows)

    return table("lm", make, folder)


def contestants(folder: str) -> str:
    """Every contestant of the training races beside eager `pre`."""

    def make(data: dict[str, Any]) -> str:
        shapes = list(data["races"])
        names = dict.fromkeys(n for race in data["races"].values() for r in race["rounds"][:1] for n in r)
        return grid(["", *shapes], [[f"`{n}`", *(ratio(data, s, n, "pre@eager") for s in shapes)] for n in names])

    return table("lm", make, folder)


def topologies(folder: str) -> str:
    """Every topology beside `pre`: steps, and memory where it was measured."""
    memory = load("memory")

    def make(data: dict[str, Any]) -> str:
        shapes = list(dict.fromkeys(race.split(" ", 1)[0] for race in data["races"]))
        head = [f"{shape}, {way}" for shape in shapes for way in ways("pre")]
        rows = []
        for name in every_topology()[1:]:
            times = [
                ratio(data, f"{shape} {name}", f"{name}@{way}", f"pre@{way}") for shape in shapes for way in ways(name)
            ]
            kept = [memory_cell(memory, shapes, name, way, "saved_bytes") for way in ways(name)]
            peak = [memory_cell(memory, shapes, name, way, "peak_kib") for way in ways(name)]
            rows.append([f"`{name}`", *times, *kept, *peak])
        kinds = [f"{kind}, {way}" for kind in ("saved", "peak") for way in ways("pre")]
        return grid(["", *head, *kinds], rows)

    return table("topologies", make, folder)


def memory_cell(memory: dict[str, Any] | None, shapes: Iterable[str], name: str, way: str, field: str) -> str:
    """Memory beside that of `pre`, run in the same way, at each shape."""
    cells = []
    for shape in shapes:
        mine, pre = ((memory or {"facts": {}})["facts"].get(f"{shape} {n}@{way}") for n in (name, "pre"))
        cells.append(_over(mine, pre, field))
    return ", ".join(cells)


def _over(mine: dict[str, int] | None, pre: dict[str, int] | None, field: str) -> str:
    return f"{mine[field] / pre[field]:.2f}" if mine and pre and pre[field] else "–"


def memory(folder: str) -> str:
    """Memory of ours and theirs beside eager `pre`."""

    def make(data: dict[str, Any]) -> str:
        shapes = list(dict.fromkeys(fact.split(" ", 1)[0] for fact in data["facts"]))
        rows = []
        for name in (f"{model}@{way}" for model in (*OURS, *THEIRS) for way in ways(model)):
            cells = []
            for shape in shapes:
                mine, pre = (data["facts"].get(f"{shape} {n}") for n in (name, "pre@eager"))
                cells += [_over(mine, pre, field) for field in ("saved_bytes", "peak_kib")]
            if {*cells} != {"–"}:
                rows.append([f"`{name}`", *cells])
        return grid(["", *(f"{shape}, {kind}" for shape in shapes for kind in ("saved", "peak"))], rows)

    return table("memory", make, folder)


def share(folder: str) -> str:
    """Shares of the matrix-product peak, then where the time goes."""

    def make(data: dict[str, Any]) -> str:
        parts = []
        for shape, race in data["races"].items():
            rounds, facts = race["rounds"], data["facts"]
            names = list(rounds[0])[1:] if rounds else []
            rows = []
            for name in names:
                flops = facts[f"{shape} flops"]["pre" if name == "products of pre" else name.rsplit("@", 1)[0]]
                r = compared(rounds, name, "square products")
                scale = flops / facts[f"{shape} square flops"]
                shown = [f"{100 * scale / value:.1f} %" for value in (r.median, r.fastest, r.processor)]
                rows.append([f"`{name}`", *shown])
            peak = facts[f"{shape} square flops"] / seconds(rounds, "square products") / 1e9 if rounds else 0
            head = [f"{shape}: share of {peak:.0f} GFLOP/s", "median", "fastest", "processor"]
            parts.append(grid(head, rows))
            shares = {n: facts[f"{shape} breakdown {n}"] for n in names if f"{shape} breakdown {n}" in facts}
            kinds = [k for k in next(iter(shares.values()), {}) if any(s[k] > 0.002 for s in shares.values())]
            lines = [[kind, *(f"{100 * s[kind]:.1f} %" for s in shares.values())] for kind in kinds]
            if shares:  # a file that was cut short has none of a shape
                parts.append(grid([f"{shape}: where the time goes", *(f"`{name}`" for name in shares)], lines))
        return "\n\n".join(parts)

    return table("share", make, folder)


def beside_first(name: str, reference: str) -> Callable[[str], str]:
    """A table of every contestant of every race of a file beside one of them."""

    def make(data: dict[str, Any]) -> str:
        names = dict.fromkeys(n for race in data["races"].values() for r in race["rounds"][:1] for n in r)
        races = list(data["races"])
        return grid(["", *races], [[f"`{n}`", *(ratio(data, race, n, reference) for race in races)] for n in names])

    return lambda folder: table(name, make, folder)


def compile_time(folder: str) -> str:
    """Seconds of the first step by depth, median over processes, with the number of graphs."""

    def make(data: dict[str, Any]) -> str:
        found: dict[tuple[str, int], list[dict[str, float]]] = {}
        for fact, figures in data["facts"].items():
            contestant, depth, _ = fact.rsplit(" ", 2)
            found.setdefault((contestant, int(depth)), []).append(figures)
        depths = sorted({depth for _, depth in found})
        rows = []
        for contestant in dict.fromkeys(contestant for contestant, _ in found):
            cells = []
            for depth in depths:
                runs = found.get((contestant, depth), [])
                first = statistics.median(run["first"] for run in runs) if runs else 0.0
                cells.append(f"{first:.1f} s, {runs[0]['graphs']:.0f} graphs" if runs else "–")
            rows.append([f"`{contestant}`", *cells])
        return grid(["first step", *(f"{depth} blocks" for depth in depths)], rows)

    return table("compile_time", make, folder)


def kernels(folder: str) -> str:
    """What each kernel saves: time without it over time with it."""

    def make(data: dict[str, Any]) -> str:
        races = [race for race in data["races"] if not race.startswith("operation ")]
        rows = []
        for race in (race for race in data["races"] if race.startswith("operation ")):
            kernel = race.removeprefix("operation ")
            whole = [ratio(data, step, f"without {kernel}", "with all") for step in races]
            rows.append([f"`{kernel}`", ratio(data, race, "plain", "kernel"), *whole])
        rows.append(["all", "–", *(ratio(data, step, "without all", "with all") for step in races)])
        return grid(["time without / with", "operation", *races], rows)

    return table("kernels", make, folder)


def plan(folder: str) -> str:
    """What the plan predicts beside what was measured: MiB of a process, and their ratio."""

    def cell(case: dict[str, Any], key: str) -> tuple[str, str]:
        told, took = case["predicted"][key], case["measured"][key]
        return f"{told / 2**20:.1f} / {took / 2**20:.1f}", f"{told / took:.2f}"

    def make(data: dict[str, Any]) -> str:
        rows = [
            (name + " †" * case.get("buffers", False), *cell(case, "peak"), *cell(case, "sent"))
            for name, case in data["facts"].items()
        ]
        near = [sum(abs(float(row[at]) - 1) <= 0.1 for row in rows) for at in (2, 4)]
        head = ("run", "peak, MiB: predicted / measured", "ratio", "sent, MiB", "ratio")
        words = f"Within 10 %: {near[0]} of {len(rows)} peaks, {near[1]} of {len(rows)} of the bytes sent."
        return f"{words}\n\n{grid(head, rows)}"

    return table("plan", make, folder)


vision = beside_first("vision", "pre@eager")
decoding = beside_first("decoding", "pre@eager")
optimizers = beside_first("optimizers", "adamw@eager")
PARTS = {
    "verdicts": verdicts,
    "contestants": contestants,
    "cost-topologies": topologies,
    "memory": memory,
    "share": share,
    "vision": vision,
    "decoding": decoding,
    "optimizers": optimizers,
    "compile-time": compile_time,
    "kernels": kernels,
}
