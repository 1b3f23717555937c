"""The page of a study, from its records alone: what to take away first, what it cannot say beside it, then the rest.

Every row of the plan stands there from the beginning; what has not been run says so.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from siamesenorm.data.atomic import whole_file, write_json
from siamesenorm.lab.study.analysis import PartResult, StudyResult, analyse_study
from siamesenorm.lab.study.plan import StudyPlan
from siamesenorm.lab.study.plots import DIFFERENCES, TRIED, draw_pictures
from siamesenorm.lab.study.record import LEDGER, PLAN_DIGITS
from siamesenorm.lab.study.running import COPY, HISTORY, Study, writing
from siamesenorm.lab.study.sections import judged, main_table, not_run, not_yet, sensitivity, speedups, stress, tried

PAGE, RESULTS = "README.md", "results.json"


def write_results(study: Study) -> Path:
    """Write results.json, the pictures and the page; where the page is."""
    result, folder = analyse_study(study.file, study.records), study.folder
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LEDGER).touch()  # the page refers to it, and it marks the folder as a study's
        write_json(folder / RESULTS, {"plan": study.file.digest, **result.as_dict()})
        drawn = draw_pictures(study.file.plan, result, folder)
        with whole_file(folder / PAGE) as file:
            file.write(page_of(study, result, drawn).encode())
    return folder / PAGE


def page_of(study: Study, result: StudyResult, drawn: Sequence[str] = ()) -> str:
    """The page as Markdown."""
    plan = study.file.plan
    done, of = sum(part.done for part in result.parts), sum(part.of for part in result.parts)
    first = next((part for part in result.parts if part.done < part.of), None)
    state = "complete" if done == of else f"**partial: {done:,} of {of:,} runs are done**"
    origin = f"This page is {state}; `siamesenorm study` writes it from [its records]({LEDGER})."
    if first is not None:
        origin += f" The part that comes next is “{first.part.name}”, {first.done} of {first.of} runs."
    lines = [f"# Study: {plan.name}", "", plan.about, "", _sentence(plan, result.parts[0]), "", origin, ""]
    lines += [f"## {result.parts[0].part.name}", "", *main_table(plan, result.parts[0]), ""]
    alt = {DIFFERENCES: "Differences from the baseline with intervals", TRIED: "Best number by configurations tried"}
    lines += [f"![{alt[name]}]({name})\n" for name in drawn]
    if any(arm.comparison is not None for arm in result.parts[0].arms):
        lines += [
            "Judged (bold, blue) by Holm's chances. The intervals hold for all arms at once and are somewhat wider "
            "than that test: one may just reach zero where the verdict is clear.",
            "",
        ]
    lines += ["**What it cannot say.**", "", *(f"- {sentence}" for sentence in plan.cannot_say)]
    lines += [f"- {sentence}" for sentence in not_yet(result)]
    for part in result.parts[1:]:
        lines += ["", f"## {part.part.name}", "", *(main_table(plan, part) if part.begun else [f"{not_run(part)}"])]
    lines += ["", "## Tuning: best number by configurations tried", "", *tried(result)]
    lines += ["", "## Learning-rate sensitivity", "", *sensitivity(plan, result)]
    lines += ["", "## Stress: constant rates above the best", "", *stress(plan, result)]
    lines += ["", "## Effective speed-up", "", *speedups(plan, result)]
    lines += ["", "## How it was done", "", *_method(study, result)]
    lines += ["", "## Challenge a result", "", *_challenge(study)]
    return "\n".join(lines) + "\n"


def _sentence(plan: StudyPlan, part: PartResult) -> str:
    """What the first part says in one sentence."""
    clear = [arm for arm in part.arms[1:] if judged(part, arm) and arm.comparison and arm.comparison.clear]
    open_ = [arm for arm in part.arms if not judged(part, arm)]
    if len(open_) == len(part.arms):
        return "**No arm has all its fresh seeds yet: there is no result.**"
    sign = -1 if part.higher else 1
    better = [arm.arm for arm in clear if sign * arm.comparison.difference.mean < 0]  # type: ignore[union-attr]
    worse = [arm.arm for arm in clear if arm.arm not in better]
    parts = [
        f"better than `{plan.baseline}`: {_names(better)}",
        f"worse: {_names(worse)}",
        f"not told apart: {_names([a.arm for a in part.arms[1:] if judged(part, a) and a not in clear])}",
    ]
    if open_:
        parts.append(f"not yet complete: {_names([arm.arm for arm in open_])}")
    return f"**{part.part.name}: {'; '.join(parts)}.**"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _method(study: Study, result: StudyResult) -> list[str]:
    plan, digest = study.file.plan, study.file.digest
    begun = [*(version.when for version in study.history[:1]), *(record.when for record in study.records.values())]
    first = min(begun, default="")
    space = "; ".join(
        f"`{name}` from {draw.low:g} to {draw.high:g} ({draw.scale})"
        if draw.choices is None
        else f"`{name}` one of {', '.join(map(str, draw.choices))}"
        for name, draw in plan.search.space.items()
    )
    machines = sorted({re.sub(r"[^\w .@()+-]+", " ", record.machine)[:80] for record in study.records.values()})
    lines = [
        f"- The plan was written before the runs: [{COPY}]({COPY}), SHA-256 of its content "
        f"`{digest[:16]}…`, {f'first run {first}' if first else 'not run yet'}.",
        *_plans(study),
        f"- Every arm gets the same draws: {space}; trained with seed {plan.search.run_seed}, which is none of those "
        f"compared ({', '.join(map(str, plan.seeds))}).",
        "- Pairs share seed, first weights as far as shapes agree, and order of data. A run that diverged or learnt "
        "nothing counts as the worst of its part; none is dropped.",
        "- Chances are Holm's over all comparisons that a part has in the plan, made or not; intervals are "
        "Bonferroni's, so that those of the differences of a part hold together; those of speed-ups hold each alone. "
        "Nothing is judged before all its seeds are there.",
        f"- Machines: {', '.join(machines) or 'none yet'}. Times are processor seconds of a run a step, the median; "
        "other programs on the machine lengthen them, so that those of a few runs say little. Ratios are of runs on "
        "the same machine with the same versions and threads; of several such settings, the last.",
        *(f"- Corpus `{name}`: {corpus.about}" for name, corpus in plan.corpora.items() if corpus.about),
        f"- All figures: [{RESULTS}]({RESULTS}); every run: [{LEDGER}]({LEDGER}); "
        f"plans so far: [{HISTORY}]({HISTORY}).",
    ]
    later = study.history[1:]
    if not later and not study.changed:
        return [*lines, "- Nothing was changed in the plan since."]
    for version in later:
        lines += [f"- Changed {version.when}, after {version.records} runs: {'; '.join(version.changed)}."]
    lines += [f"- Changed since cells were last run: {sentence}." for sentence in study.changed]
    if study.beyond:
        lines += [f"- {len(study.beyond)} records are of cells that the plan no longer has."]
    return lines


def _plans(study: Study) -> list[str]:
    """Which plans records were made under, where it was not this one alone."""
    counts = Counter(record.plan for record in study.records.values())
    if {*counts} <= {study.file.digest[:PLAN_DIGITS]}:
        return []
    runs = (f"`{plan}…`" + (" (this one)" if study.file.digest.startswith(plan) else "") for plan in counts)
    listed = ", ".join(f"{name}: {count} runs" for name, count in zip(runs, counts.values(), strict=True))
    return [f"- Plans that the records were made under, by their SHA-256: {listed}."]


def _challenge(study: Study) -> list[str]:
    cell = next(iter(study.records.values())).cell if study.records else "CORPUS/SIZE/OPTIMIZER/ARM/fresh-0"
    return [
        "Any line of the records can be run again by its `cell`; both numbers are then printed side by side:",
        "",
        "```bash",
        f"siamesenorm study {Path(os.path.relpath(study.path)).as_posix()} --challenge {cell}",
        "```",
        "",
        "If yours differs by more than the spread of seeds, open an issue with what the command printed: the line of "
        "JSON has versions, machine and hashes of the data. To add an arm, write it under `arms` of the plan and run "
        "`siamesenorm study` again: only its cells are run.",
    ]
