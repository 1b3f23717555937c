"""The grid while it runs: sparklines, the table, lines where there is no terminal, time left."""

import io
from pathlib import Path

from rich.console import Console

from siamesenorm.lab.compare.axes import parse_setting
from siamesenorm.lab.compare.grid import Grid
from siamesenorm.lab.compare.live import LiveTable, grid_table, outcome
from siamesenorm.lab.compare.runner import CellProgress
from siamesenorm.terminal import sparkline

OVERRIDES = ("train.steps=100", "schedule.warmup=4")


def make_plan(**wanted):
    grid = Grid("lm-tiny", **{"topologies": ("pre", "siamese"), "lrs": (1e-3, 1e-2), "overrides": OVERRIDES, **wanted})
    return [CellProgress(cell, Path("x") / cell.name) for cell in grid.cells()]


def drawn(renderable, width=110):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


def test_a_sparkline_falls_with_the_loss():
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)))) == 8


def test_the_table_has_loss_state_and_share_of_every_cell():
    plan = make_plan()
    for message in ({"kind": "started", "step": 0}, {"kind": "step", "step": 50, "loss": 2.345}):
        plan[0].update(message)
    plan[0].state = "running"
    plan[1].update({"kind": "evaluation", "step": 100, "metrics": {"loss": 1.5}})
    plan[1].update({"kind": "ended", "state": "finished"})
    plan[2].update({"kind": "failed", "message": "disk full"})
    plan[3].step, plan[3].state = 7, "diverged"
    text = drawn(grid_table(plan))
    for part in ("lr 0.001", "lr 0.01", "2.345 50%", "✓ 1.5000", "failed: disk full", "diverged at step 8"):
        assert part in text


def test_settings_and_seeds_have_rows_of_their_own():
    plan = make_plan(seeds=(0, 1), axes=(parse_setting("lm-tiny", "warmup=0,3"),))
    lines = drawn(grid_table(plan)).splitlines()
    assert len(lines) == 1 + 2 * 2 * 2
    assert sum("warmup=3" in line for line in lines) == 4


def test_a_low_terminal_shows_what_is_at_work():
    plan = make_plan(seeds=tuple(range(20)))
    plan[-1].state = "running"
    lines = drawn(grid_table(plan, rows=3)).splitlines()
    assert len(lines) == 4
    assert lines[1].split()[:2] == ["siamese", "19"]


def test_without_a_terminal_every_end_is_one_line():
    plan = make_plan()
    console = Console(file=io.StringIO(), width=110, force_terminal=False)
    with LiveTable(plan, console) as table:
        plan[0].update({"kind": "step", "step": 50, "loss": 2.0})
        table.changed(plan[0])
        plan[0].update({"kind": "ended", "state": "finished"})
        table.changed(plan[0])
        table.changed(plan[0])
    assert console.file.getvalue().splitlines() == ["[1/4] pre lr 0.001 seed 0: ✓ 2.0000"]


def test_time_left_counts_no_steps_of_cells_that_ended_early():
    plan = make_plan()
    table = LiveTable(plan, Console(file=io.StringIO()))
    assert table.seconds_left() is None
    table.began -= 60
    plan[0].step, plan[0].state = 100, "finished"
    plan[1].step, plan[1].state = 20, "diverged"
    left = table.seconds_left()
    assert left is not None
    assert 99 < left < 101  # 120 steps took a minute, 200 are to come


def test_a_cell_that_was_done_before_says_so():
    plan = make_plan()
    plan[0].state, plan[0].evaluation = "finished", {"loss": 1.25}
    assert outcome(plan[0]) == "✓ 1.2500"
