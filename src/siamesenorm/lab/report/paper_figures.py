"""The plots of a comparison as PNG or SVG for papers, drawn by matplotlib (extra: plot)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siamesenorm.data.atomic import whole_file
from siamesenorm.errors import ConfigError
from siamesenorm.lab.report.figures import by_settings, colours, short_text
from siamesenorm.lab.report.records import Records
from siamesenorm.lab.report.statistics import Analysis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg", "pdf")
FOLDER = "figures"
LINES = ("-", "--", ":", "-.")
MARKERS = "osD^*pHP"


def parse_formats(text: str) -> tuple[str, ...]:
    """``png,svg`` as names of formats."""
    names = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    for name in names:
        if name not in FORMATS:
            raise ConfigError(f"--figures: {name!r} is not known; it takes {', '.join(FORMATS)}")
    check_matplotlib()
    return names


def check_matplotlib() -> None:
    """Raise if it is not installed."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError.missing_package("--figures:", "matplotlib", "plot")


def export_figures(records: Records, analysis: Analysis, out: Path, formats: Iterable[str]) -> list[Path]:
    """Draw every plot into ``figures/`` of a report's folder."""
    from matplotlib.figure import Figure

    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    drawings = {
        "curves": curves,
        "learning_rate": learning_rate,
        "settings": settings,
        "differences": differences,
        "heat_map": heat_map,
        "cost": cost,
    }
    written = []
    for name, draw in drawings.items():
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        if not draw(figure.subplots(), records, analysis):
            continue
        for kind in formats:
            path = folder / f"{name}.{kind}"
            # No date inside: the same runs give the same file.
            with whole_file(path) as file:
                figure.savefig(file, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
            written.append(path)
    return written


def curves(axes: Axes, records: Records, analysis: Analysis) -> bool:
    """Training loss over steps, each topology at its best learning rate, a line a seed."""
    best = {(r.topology, r.setting): r.best for r in analysis.ranges}
    named: set[tuple[str, str]] = set()
    for run in records.runs:
        key = (run.topology, records.setting(run))
        if best.get(key) not in (run.lr, None) or not run.curve:
            continue
        style: dict[str, Any] = {"color": colours(records)[run.topology], "linewidth": 1.2}
        style["linestyle"] = LINES[records.groups.index(key[1]) % len(LINES)]
        name = None if key in named else plain(", ".join(filter(None, (*key, f"lr {run.lr:g}"))))
        named.add(key)
        axes.plot([step for step, _ in run.curve], [loss for _, loss in run.curve], label=name, **style)
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    axes.legend(frameon=False, fontsize=8)
    return bool(named)


def learning_rate(axes: Axes, records: Records, analysis: Analysis) -> bool:
    """The held-out metric over learning rates; crosses at the top where runs diverged."""
    if by_settings(records):
        return False
    for number, found in enumerate(analysis.ranges):
        places = [p for p in analysis.places if (p.topology, p.setting) == (found.topology, found.setting)]
        ends = [p for p in places if p.mean is not None]
        colour = colours(records)[found.topology]
        axes.errorbar(
            [p.lr for p in ends],
            [mean for p in ends if (mean := p.mean) is not None],
            yerr=[p.spread or 0.0 for p in ends],
            color=colour,
            marker=MARKERS[number % len(MARKERS)],
            linestyle=LINES[records.groups.index(found.setting) % len(LINES)],
            capsize=2,
            label=plain(", ".join(filter(None, (found.topology, found.setting)))),
        )
        failed = [p.lr for p in places if p.failed]
        top = axes.get_xaxis_transform()
        axes.plot(failed, [0.97] * len(failed), "x", color=colour, transform=top, markersize=8, markeredgewidth=2)
    axes.set(xlabel="peak learning rate (crosses: diverged)", ylabel=f"held-out {plain(analysis.metric)}", xscale="log")
    axes.set_xticks(records.lrs, [f"{lr:g}" for lr in records.lrs])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    return True


def settings(axes: Axes, records: Records, analysis: Analysis) -> bool:
    """The held-out metric over settings, where there is one learning rate."""
    if not by_settings(records):
        return False
    for number, topology in enumerate(records.topologies):
        places = [p for p in analysis.places if p.topology == topology and p.mean is not None]
        axes.errorbar(
            [records.groups.index(p.setting) for p in places],
            [mean for p in places if (mean := p.mean) is not None],
            yerr=[p.spread or 0.0 for p in places],
            color=colours(records)[topology],
            marker=MARKERS[number % len(MARKERS)],
            capsize=2,
            label=plain(topology),
        )
    axes.set_xticks(range(len(records.groups)), list(map(plain, records.groups)), fontsize=8)
    axes.set_ylabel(f"held-out {plain(analysis.metric)}")
    axes.legend(frameon=False, fontsize=8)
    return True


def differences(axes: Axes, records: Records, analysis: Analysis) -> bool:
    """Paired differences with their confidence intervals."""
    rows = [(c, "each at its best") for c in analysis.best_lr] + [(c, f"lr {c.lr:g}") for c in analysis.same_lr]
    for height, (c, _) in enumerate(rows):
        reach = 0.0 if c.difference.high is None else c.difference.high - c.difference.mean
        axes.errorbar(c.difference.mean, height, xerr=reach, fmt="o", capsize=3, color=colours(records)[c.topology])
    names = [plain(", ".join(filter(None, (c.topology, c.setting, where)))) for c, where in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_xlabel(plain(f"{analysis.metric} minus {analysis.baseline}'s"))
    return bool(rows)


def heat_map(axes: Axes, records: Records, analysis: Analysis) -> bool:
    """A row for every topology and setting, a column for every learning rate."""
    rows = [(r.topology, r.setting) for r in analysis.ranges]
    places = [[analysis.place(*row, lr) for lr in records.lrs] for row in rows]
    means = [[math.nan if p is None or p.mean is None else p.mean for p in row] for row in places]
    axes.imshow(means, aspect="auto", cmap="viridis" if analysis.higher_is_better else "viridis_r")
    for y, row in enumerate(places):
        for x, place in enumerate(row):
            box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1.5}
            axes.text(x, y, plain(short_text(place)), ha="center", va="center", fontsize=8, bbox=box)
    axes.set_xticks(range(len(records.lrs)), [f"{lr:g}" for lr in records.lrs])
    axes.set_yticks(range(len(rows)), [plain(", ".join(filter(None, row))) for row in rows], fontsize=8)
    axes.set_xlabel("peak learning rate")
    return bool(rows)


def cost(axes: Axes, records: Records, analysis: Analysis) -> bool:
    """Time and memory of every topology, the baseline being 100 %."""
    kinds = {"processor_ratio": "processor time a step", "step_ratio": "time a step", "memory_ratio": "memory"}
    names = [plain(", ".join(filter(None, (c.topology, c.setting)))) for c in analysis.costs]
    for number, (field, name) in enumerate(kinds.items()):
        shares = [100 * (getattr(c, field) or 0.0) for c in analysis.costs]
        axes.bar([place + 0.27 * (number - 1) for place in range(len(names))], shares, 0.25, label=name)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel(plain(f"% of {analysis.baseline}"))
    axes.legend(frameon=False, fontsize=8)
    return bool(names)


def plain(text: str) -> str:
    """Text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")
