"""Studies that are run: records as they come, nothing run twice, whatever machine it was on, and a page at any time."""

import json
import re
import shutil
import sys

import pytest
from tests.commands.refusals import one_sentence

from siamesenorm.cli import main
from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare.runner import ThisProcess
from siamesenorm.lab.study.page import write_results
from siamesenorm.lab.study.plan import parse_plan
from siamesenorm.lab.study.plots import DIFFERENCES, TRIED
from siamesenorm.lab.study.record import LEDGER, read_ledger, write_ledger
from siamesenorm.lab.study.running import challenge, merge_records, open_study, run_study, stage_progress
from siamesenorm.train.provenance import hash_of
from siamesenorm.train.yaml import read_yaml, write_yaml

from .study_records import plan_values

TEXT = "".join(f"line {number} of some text, and {number * 7919} more\n\n" for number in range(1500))
SHAPE = {"model.dim": 8, "model.blocks": 1, "model.heads": 2, "model.ffn_dim": 8, "model.max_length": 16}
TRAIN = {"data.sequence_length": 16, "train.batch_size": 2, "evaluation.sequences": 1024, "evaluation.every": 100}


def write_plan(folder, **changes):
    text = folder / "text.txt"
    if not text.is_file():
        text.write_text(TEXT, encoding="utf-8")
    part = {"name": "first", "corpus": "text", "size": "small", "configurations": 2, "seeds": 2}
    values = plan_values(
        arms={"pre": "pre", "siamese": "siamese"},
        corpora={"text": {"set": {"data.train": [str(text)]}, "sha256": {str(text): hash_of(str(text))}}},
        set={**SHAPE, **TRAIN, "evaluation.at_once": 512, "checkpoint.every": None},
        sizes={"small": {"set": {"train.steps": 8}}},
        parts=[part, {**part, "name": "second", "optimizer": "muon", "cut": "Whether Muon agrees."}],
        search={"space": {"optimizer.lr": {"low": 3e-2, "high": 1e-1}, "schedule.warmup": {"choices": [0, 1]}}},
    )
    (folder / "plan.yaml").write_text(write_yaml(values | changes), encoding="utf-8")
    return folder / "plan.yaml"


class Counting(ThisProcess):
    """Runs cells here, and counts them; stops behind some, as Ctrl-C would."""

    def __init__(self, stop=None):
        self.names, self.stop = [], stop

    def _run(self, progress, provenance, watcher):
        if self.stop is not None and len(self.names) >= self.stop:
            progress.state = "interrupted"
            return False
        self.names.append(progress.cell.title)
        return super()._run(progress, provenance, watcher)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A study whose first part was run: stopped once, and gone on with on a machine that has its records alone."""
    folder = tmp_path_factory.mktemp("study")
    plan, out = write_plan(folder), folder / "results"
    begun = Counting(stop=3)
    outcome = run_study(open_study(plan, out), begun, folder / "here", parts=["first"])
    assert not outcome.complete
    assert len(read_ledger(out)) == 3
    later = Counting()
    outcome = run_study(open_study(plan, out), later, folder / "elsewhere", parts=["first"])
    assert outcome.complete
    assert not outcome.failed
    return folder, begun.names, later.names


def test_nothing_is_run_twice_and_records_are_all_that_going_on_needs(first):
    folder, begun, later = first
    assert not {*begun} & {*later}
    titles = [record.cell for record in read_ledger(folder / "results").values()]
    assert titles == begun + later
    assert titles == [
        *(f"text/small/adamw/{arm}/search-{draw}" for draw in (0, 1) for arm in ("pre", "siamese")),
        *(f"text/small/adamw/{arm}/fresh-{seed}" for seed in (0, 1) for arm in ("pre", "siamese")),
    ]
    engine = Counting()
    run_study(open_study(folder / "plan.yaml", folder / "results"), engine, folder / "third", parts=["first"])
    assert engine.names == []
    assert not (folder / "third").exists()


def test_a_record_has_what_the_run_had(first):
    folder, *_ = first
    found = next(iter(read_ledger(folder / "results").values()))
    (run,) = (folder / "here" / "cells").glob("text-small-adamw-pre-search-0-*")
    status = json.loads((run / "status.json").read_text())
    assert found.score == pytest.approx(status["evaluation"]["loss"], rel=1e-5)
    assert found.parameters == status["parameters"]["of"]
    assert (found.step, found.steps, found.samples) == (8, 8, 8 * 2 * 16)
    assert found.seed == 1000
    assert found.machine
    assert not any(part in found.model_dump_json() for part in (str(folder), "here"))


def test_an_arm_that_is_added_runs_alone_and_the_change_is_said(first, tmp_path):
    folder, *_ = first
    shutil.copytree(folder / "results", tmp_path / "results")
    shutil.copy(folder / "text.txt", tmp_path)  # the same text in another place is the same data
    plan = write_plan(tmp_path, arms={"pre": "pre", "siamese": "siamese", "zaya": "zaya"})
    study, engine = open_study(plan, tmp_path / "results"), Counting()
    assert "arms.zaya: 'zaya' is new" in study.changed
    run_study(study, engine, tmp_path / "cells", parts=["first"])
    assert engine.names == [f"text/small/adamw/zaya/{last}" for last in ("search-0", "search-1", "fresh-0", "fresh-1")]
    page = write_results(study).read_text()
    assert "after 8 runs: " in page
    assert "arms.zaya: 'zaya' is new" in page
    assert open_study(plan, tmp_path / "results").changed == []


def test_the_page_says_what_has_not_been_run(first, tmp_path):
    folder, *_ = first
    shutil.copytree(folder / "results", tmp_path / "results")
    study = open_study(folder / "plan.yaml", tmp_path / "results")
    page = write_results(study).read_text()
    assert "**partial: 8 of 16 runs are done**" in page
    assert "Not run so far, “second”: Whether Muon agrees." in page
    assert "Not yet run: 0 of 8 runs." in page
    assert "| `siamese` | " in page
    empty = open_study(folder / "plan.yaml", tmp_path / "nothing")
    page = write_results(empty).read_text()
    assert "there is no result" in page
    assert page.count("not yet run") >= 2
    assert json.loads((tmp_path / "nothing" / "results.json").read_text())["parts"][0]["done"] == 0


def test_without_matplotlib_pictures_of_an_earlier_page_are_not_shown(first, tmp_path, monkeypatch):
    folder, *_ = first
    shutil.copytree(folder / "results", tmp_path / "results")
    for name in (DIFFERENCES, TRIED):
        (tmp_path / "results" / name).write_text("<svg/>")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = write_results(open_study(folder / "plan.yaml", tmp_path / "results")).read_text()
    assert ".svg" not in page


def test_lines_of_records_end_where_json_says(first, tmp_path):
    """A machine's name may hold what Python takes for the end of a line."""
    folder, *_ = first
    known = read_ledger(folder / "results")
    odd = {key: record.model_copy(update={"machine": "a\u2028b\x85c"}) for key, record in known.items()}
    write_ledger(tmp_path, odd)
    assert read_ledger(tmp_path) == odd


def test_what_is_left_is_counted_by_stage(first):
    folder, *_ = first
    found = stage_progress(open_study(folder / "plan.yaml", folder / "results"))
    counted = [(row.part, row.stage, row.done, row.of) for row in found]
    assert counted == [
        ("first", "search", 4, 4),
        ("first", "fresh", 4, 4),
        ("second", "search", 0, 4),
        ("second", "fresh", 0, 4),
    ]
    assert found[0].seconds == 0
    assert found[-1].seconds > 0


def other_number(line):
    """A line of records, of a run that came to another loss."""
    return line.replace('"score": ', '"score": 1').replace('"loss": ', '"loss": 1')


def test_records_of_several_machines_are_merged_and_disagreements_told(first, tmp_path):
    folder, *_ = first
    lines = (folder / "results" / LEDGER).read_text().splitlines()
    for name, some in (("one", lines[:5]), ("two", lines[3:])):
        (tmp_path / name).mkdir()
        (tmp_path / name / LEDGER).write_text("\n".join(some) + "\n")
    study = open_study(folder / "plan.yaml", tmp_path / "one")
    assert merge_records(study, [tmp_path / "two"]) == ["3 records were taken in, 8 are there now"]
    assert len(read_ledger(tmp_path / "one")) == 8
    (tmp_path / "two" / LEDGER).write_text(other_number(lines[4]))
    told = merge_records(study, [tmp_path / "two"])
    assert "the first one counts" in told[1]
    with pytest.raises(ConfigError, match="--merge"):
        merge_records(study, [tmp_path])


@pytest.mark.parametrize(
    ("change", "line", "heard"),
    [
        ({"metric": "perplexity"}, str, r"is not its perplexity, \S+; .* another metric takes a new --out"),
        ({"metric": "nothing"}, str, "is not its nothing, which it has not"),
        ({}, lambda line: line.replace('"score": ', '"score": 1'), "score = 1.* is not its loss"),
        (
            {},
            lambda line: line.replace('"higher": false', '"higher": true'),
            "higher: True is not allowed; it takes False, as loss has it",
        ),
    ],
    ids=["other metric", "unknown metric", "other score", "other direction"],
)
def test_scores_that_are_not_the_metric_of_the_plan_are_refused(first, tmp_path, capsys, change, line, heard):
    """A plan whose metric was changed would else show losses under its name."""
    folder, *_ = first
    out, sound = tmp_path / "out", (folder / "results" / LEDGER).read_text().splitlines(keepends=True)
    for name in ("out", "new"):
        (tmp_path / name).mkdir()
    shutil.copy(folder / "text.txt", tmp_path)
    values = read_yaml((folder / "plan.yaml").read_text(), "plan") | change
    (tmp_path / "plan.yaml").write_text(write_yaml(values))
    (out / LEDGER).write_text("".join([line(sound[0]), *sound[1:]]))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for asked in (
        ["-o", str(out), "--page"],
        ["-o", str(out), "--status"],
        ["-o", str(tmp_path / "new"), "--merge", str(out)],
    ):
        assert re.search(heard, one_sentence(["study", str(tmp_path / "plan.yaml"), *asked], capsys))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_merging_into_a_new_folder_leaves_word_of_the_plan_and_the_page_names_those_of_the_records(first, tmp_path):
    folder, *_ = first
    known = list(read_ledger(folder / "results").values())
    other = [record.model_copy(update={"plan": "ab" * 6, "when": "2020-01-01T00:00Z"}) for record in known[:3]]
    (tmp_path / "from").mkdir()
    write_ledger(tmp_path / "from", {record.key: record for record in [*other, *known[3:]]})
    study = open_study(folder / "plan.yaml", tmp_path / "new")
    merge_records(study, [tmp_path / "from"])
    assert (tmp_path / "new" / "plan.yaml").read_bytes() == (folder / "plan.yaml").read_bytes()
    again = open_study(folder / "plan.yaml", tmp_path / "new")
    assert [version.digest for version in again.history] == [study.file.digest]
    page = write_results(again).read_text()
    assert "first run 2020-01-01T00:00Z" in page
    assert f"`abababababab…`: 3 runs, `{study.file.digest[:12]}…` (this one): 5 runs" in page
    assert "abababababab" not in write_results(open_study(folder / "plan.yaml", folder / "results")).read_text()


def test_what_another_process_wrote_since_the_folder_was_read_is_kept(first, tmp_path):
    """Two studies are opened, then run or merged one after the other: neither undoes the other's records."""
    folder, *_ = first
    lines = (folder / "results" / LEDGER).read_text().splitlines(keepends=True)
    out = tmp_path / "out"
    shutil.copytree(folder / "results", out)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / LEDGER).write_text(lines[0])
    for late in (
        lambda study: merge_records(study, [tmp_path / "more"]),
        lambda study: run_study(study, Counting(stop=0), tmp_path / "cells", parts=["first"]),
    ):
        (out / LEDGER).write_text("".join(lines[:2]))
        study = open_study(folder / "plan.yaml", out)
        (out / LEDGER).write_text("".join(lines))
        late(study)
        assert len(study.records) == len(read_ledger(out)) == 8


def test_a_folder_of_something_else_is_refused_before_anything_is_written(first, tmp_path, capsys):
    folder, *_ = first
    (tmp_path / "README.md").write_text("mine")
    for more in ([], ["--page"], ["--merge", str(folder / "results")]):
        assert main(["study", str(folder / "plan.yaml"), "-o", str(tmp_path), *more]) == 2
        heard = capsys.readouterr().err
        assert "it takes a new or empty folder, or one with a study's records.jsonl" in heard
        assert heard.count("\n") == 1
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("README.md", "mine")]
    new = tmp_path / "new"
    for _ in range(2):  # a page of nothing is a study's folder too
        assert main(["study", str(folder / "plan.yaml"), "-o", str(new), "--page"]) == 0
    for option in ("--status", "--dry-run"):
        merge = ["--merge", str(folder / "results"), option]
        assert main(["study", str(folder / "plan.yaml"), "-o", str(tmp_path / "other"), *merge]) == 2
        assert f"--merge: is not allowed with {option}" in capsys.readouterr().err


def test_an_error_of_the_system_inside_a_run_is_not_one_of_the_results_folder(first, tmp_path):
    class Broken(Counting):
        def run(self, places, provenance, watcher):
            raise OSError(24, "Too many open files")

    folder, *_ = first
    with pytest.raises(OSError, match="Too many open files"):
        run_study(open_study(folder / "plan.yaml", tmp_path / "out"), Broken(), tmp_path / "cells", parts=["first"])


def test_every_challenge_is_a_run_of_its_own_and_a_failure_is_told(first, tmp_path):
    folder, *_ = first
    study, engine = open_study(folder / "plan.yaml", folder / "results"), Counting()
    cell = study.cells(study.file.plan.parts[0])[1]
    for _ in range(2):
        challenge(study, cell, engine, tmp_path / "cells")
    assert engine.names == [cell.title] * 2
    challenge(study, cell, Counting(stop=0), tmp_path / "cells")  # stopped: the next one goes on with it
    challenge(study, cell, engine, tmp_path / "cells")
    assert sorted(path.name for path in (tmp_path / "cells" / "challenges").iterdir()) == ["1", "2", "3"]

    class Failing(Counting):
        def run(self, places, provenance, watcher):
            places[0].state, places[0].message = "failed", "no memory left"
            return True

    with pytest.raises(ConfigError, match=r"search-0' failed: no memory left"):
        challenge(study, cell, Failing(), tmp_path / "cells")


def test_a_challenge_runs_one_cell_again_and_leaves_the_records_alone(first, tmp_path):
    folder, *_ = first
    study = open_study(folder / "plan.yaml", folder / "results")
    before = (folder / "results" / LEDGER).read_bytes()
    cell = study.cells(study.file.plan.parts[0])[1]
    known, now = challenge(study, cell, Counting(), tmp_path / "cells")
    assert known.score == now.score
    assert (folder / "results" / LEDGER).read_bytes() == before


def test_data_that_are_not_those_of_the_plan_are_refused(tmp_path):
    plan = write_plan(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT + "x", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sha256: .* it takes the data that were planned with"):
        run_study(open_study(plan, tmp_path / "results"), Counting(), tmp_path / "cells")
    assert not (tmp_path / "results").exists()


def test_the_command_says_how_far_a_study_is_and_refuses_in_one_sentence(first, capsys, tmp_path, monkeypatch):
    folder, *_ = first
    monkeypatch.chdir(tmp_path)
    plan, out = str(folder / "plan.yaml"), str(folder / "results")
    assert main(["study", plan, "-o", out, "--status"]) == 0
    assert "8 of 16 cells have a record" in capsys.readouterr().out
    assert main(["study", plan, "-o", out, "--dry-run"]) == 0
    assert "Nothing was written" in capsys.readouterr().out
    for more, words in (
        (["--only", "nobody"], "--only: 'nobody' is not in the plan"),
        (["--part", "third"], "--part: 'third' is not in the plan; it takes one of first, second"),
        (["--challenge", "x"], "--challenge: 'x' is no cell"),
        (["--engine", "x"], "--engine: 'x' is not known"),
    ):
        assert main(["study", plan, "-o", str(tmp_path / "new"), *more]) == 2
        heard = capsys.readouterr()
        assert heard.err.startswith(f"siamesenorm: {words}")
        assert heard.err.count("\n") == 1
        assert not (tmp_path / "new").exists()


def test_what_a_plan_draws_and_a_folder_of_runs_that_is_none_are_refused_before_anything_is_written(tmp_path, capsys):
    """The first draw is allowed; a later one is not."""
    values = plan_values(configurations=8)
    values["search"]["space"]["optimizer.lr"]["high"] = 1e9
    assert parse_plan(values).search.draw(0)["optimizer.lr"] < 1000
    (tmp_path / "wide.yaml").write_text(write_yaml(values))
    (tmp_path / "plan.yaml").write_text(write_yaml(plan_values()))
    (tmp_path / "file").write_text("a file")
    before = sorted(tmp_path.iterdir())
    for words, *command in (
        ("optimizer.lr: ", "wide.yaml", "--out", "out"),
        ("--cells: ", "plan.yaml", "--out", "out", "--cells", "file"),
        ("--cells: ", "plan.yaml", "--out", "out", "--cells", "file/inside"),
    ):
        said = one_sentence(["study", *(str(tmp_path / part) if part[0] != "-" else part for part in command)], capsys)
        assert words in said
        assert sorted(tmp_path.iterdir()) == before


def test_two_records_of_one_run_are_refused_where_they_differ(first, tmp_path):
    folder, *_ = first
    record = next(iter(read_ledger(folder / "results").values()))
    lines = [json.dumps(r.model_dump(mode="json")) for r in (record, record.model_copy(update={"first_loss": 9.0}))]
    (tmp_path / LEDGER).write_text("\n".join([lines[0], lines[0]]) + "\n")
    assert read_ledger(tmp_path) == {record.key: record}  # said twice, but the same
    (tmp_path / LEDGER).write_text("\n".join([lines[0], "", lines[1]]) + "\n")
    with pytest.raises(ConfigError, match=r"lines 1 and 3: both are '.*' and say different things"):
        read_ledger(tmp_path)
