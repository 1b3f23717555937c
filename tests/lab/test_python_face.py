"""The Python face: one call each, on a model of one's own or on a recipe, with results that show themselves."""

import json
import os
import signal
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import siamesenorm
from siamesenorm import Residual, TopologyError
from siamesenorm.cli import main
from siamesenorm.errors import ConfigError, DataError
from siamesenorm.lab.compare.live import NotebookTable, open_table
from siamesenorm.lab.compare.runner import GridWatcher
from siamesenorm.tasks.own import Given, OwnTask
from siamesenorm.train.folder import read_metrics

VOCABULARY, DIM, LENGTH = 17, 8, 16
RNG = np.random.default_rng(0)
TOKENS = np.tile(RNG.integers(0, VOCABULARY, 64), 400)
RUN = {"steps": 6, "batch_size": 4, "sequence_length": LENGTH, "lrs": [1e-2], "seeds": 2, "quiet": True}


class Model(nn.Module):
    """Two FFNs over embeddings: a user's own language model."""

    def __init__(self, topology):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.sublayers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.residual = Residual(topology, DIM, [("ffn",), ("ffn",)], needs="waived")

    def forward(self, ids):
        return self.head(self.residual(self.embedding(ids), self.sublayers))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return siamesenorm.compare(Model, TOKENS, topologies=["pre", "siamese"], folder=tmp_path_factory.mktemp("c"), **RUN)


def losses(folder):
    return [line["loss"] for line in read_metrics(folder) if "loss" in line]


def test_a_model_of_ones_own_has_verdict_table_figures_and_report(result):
    assert len(result.records.runs) == 4
    assert result.complete
    assert result.analysis.baseline == "pre"
    assert "held-out tokens, 2 seeds" in result.verdict
    assert list(result.table["topology"]) == ["pre", "siamese", "pre", "siamese"]
    assert {"learning-rate", "curves", "heat-map"} <= result.figures.keys()
    assert result.page.is_file()
    assert "<script" not in result._repr_html_()
    assert "siamese" in result._repr_html_()
    for run in result.records.runs:
        assert run.facts["processor_seconds"] > 0
        assert run.chance_loss == pytest.approx(np.log(VOCABULARY), abs=0.2)
        assert run.facts["versions"]["torch"]


def test_runs_of_a_seed_are_pairs_and_the_same_call_keeps_them(result):
    by_seed = {}
    for run in result.records.runs:
        by_seed.setdefault(run.seed, []).append(run)
    assert set(by_seed) == {0, 1}
    before = {run.folder: (run.folder / "metrics.jsonl").stat().st_mtime_ns for run in result.records.runs}
    again = siamesenorm.compare(Model, TOKENS, topologies=["pre", "siamese"], folder=result.folder, **RUN)
    assert {r.folder: (r.folder / "metrics.jsonl").stat().st_mtime_ns for r in again.records.runs} == before


def test_another_model_in_the_same_folder_is_refused(result):
    class Other(Model):
        def forward(self, ids):
            return 3 * super().forward(ids)

    Other.__qualname__ = Model.__qualname__
    with pytest.raises(ConfigError, match="another model, data or loss"):
        siamesenorm.compare(Other, TOKENS, topologies=["pre"], folder=result.folder, **RUN)


def seen_by(data, tmp_path, loss, **more):
    """The batches of two seeds under two topologies, by topology and seed."""
    seen = {}

    def noting(model, batch):
        if model.training:
            seen.setdefault((model.topology, torch.initial_seed()), batch)
        return loss(model, batch)

    def make(topology):
        model = nn.Linear(2, 2)
        model.topology = topology
        return model

    settings = {**RUN, "sequence_length": None, **more}
    found = siamesenorm.compare(make, data, loss=noting, topologies=["pre", "post"], folder=tmp_path, **settings)
    return found, seen


def test_a_dataset_and_any_loss(tmp_path):
    class Points(torch.utils.data.Dataset):
        def __len__(self):
            return 2400

        def __getitem__(self, number):
            if number >= 2400:
                raise IndexError
            return torch.tensor([number / 2400, torch.rand(()).item()]), number % 2

    def loss(model, batch):
        scores = model(batch[0])
        right = (scores.argmax(-1) == batch[1]).float().mean()
        return nn.functional.cross_entropy(scores, batch[1]), {"accuracy": right}

    found, _ = seen_by(Points(), tmp_path, loss)
    assert {run.held_out["samples"] for run in found.records.runs} == {120}
    assert all(0 <= run.evaluation["accuracy"] <= 1 for run in found.records.runs)
    one, other = (losses(run.folder) for run in found.records.runs[:2])
    assert one == other  # the same seed: the same data, whatever the topology is called
    assert losses(found.records.runs[2].folder) != one


def test_a_function_that_draws_its_batches_gives_pairs(tmp_path):
    def get_batch(split):
        rows = torch.randn(8, 2)
        return rows, (rows.sum(-1) > (0 if split == "train" else 0.1)).long()

    found, _ = seen_by(get_batch, tmp_path, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    runs = {(run.topology, run.seed): losses(run.folder) for run in found.records.runs}
    assert runs["pre", 0] == runs["post", 0] != runs["pre", 1]
    assert found.records.runs[0].config.train.batch_size == 8
    assert {run.held_out["samples"] for run in found.records.runs} == {160}


def test_an_interrupted_call_goes_on_as_if_it_had_not_been(tmp_path):
    steps = []

    def loss(model, batch):
        steps.append(model.training)
        if sum(steps) == 6:  # one to look at the model, four of the first run
            os.kill(os.getpid(), signal.SIGINT)
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    settings = {**RUN, "seeds": 1, "topologies": ["siamese"], "loss": loss}
    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        siamesenorm.compare(Model, TOKENS, folder=tmp_path / "one", **settings)
    (cell,) = (tmp_path / "one" / "cells").iterdir()
    assert len(losses(cell)) < RUN["steps"]
    done = siamesenorm.compare(Model, TOKENS, folder=tmp_path / "one", **settings)
    whole = siamesenorm.compare(Model, TOKENS, folder=tmp_path / "two", **settings)
    assert losses(cell) == losses(whole.records.runs[0].folder)
    assert done.records.runs[0].evaluation == whole.records.runs[0].evaluation
    assert torch.equal(torch.get_rng_state(), state)


class Items(torch.utils.data.Dataset):
    """2400 of a kind."""

    def __init__(self, item, count=2400):
        self.item, self.count = item, count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return self.item(number)


IDS = torch.arange(LENGTH) % VOCABULARY
DRAWN = iter([(torch.stack([IDS] * 8),) * 2] * 5)
COUNTED = iter(range(1000))


def same(topology, made=Model("pre")):  # noqa: B008
    return made


@pytest.mark.parametrize(
    ("model", "data", "more", "words"),
    [
        (lambda topology: 3, TOKENS, {}, "gave a int for 'pre'"),
        (same, TOKENS, {}, "gives the same model at every call"),
        (lambda topology: nn.Embedding(VOCABULARY, 4), TOKENS % 9 + 1.5, {}, "whole numbers in one row"),
        (Model, TOKENS[:100], {}, "too few to hold some out"),
        (Model, 3.5, {}, "data: a float is not allowed"),
        (Model, [(torch.ones(2), 1), (torch.ones(3), 2)], {}, "no array of tokens"),
        (Model, TOKENS, {"validation": lambda split: 0}, "validation: a function is not allowed"),
        (Model, TOKENS, {"train.micro_batch_size": 2}, "micro_batch_size = 2 is not allowed for a model of your own"),
        (Model, TOKENS, {"seeds": 0}, "seeds: 0 is not allowed"),
        (Model, TOKENS, {"steps": 0}, "steps: 0 is not allowed"),
        (Model, TOKENS, {"baseline": "post"}, "'post' is not compared"),
        (Model, TOKENS, {"warmpu": 2}, r"did you mean schedule\.warmup"),
        (
            Model,
            TOKENS,
            {"loss": lambda model, batch: model(batch[0])},
            r"gave a Tensor of shape \(4, 16, 17\)",
        ),
        (Model, TOKENS, {"topologies": 5}, "topologies: 5 is not allowed"),
        (Model, TOKENS, {"topologies": ["pre", "sandwhich"]}, "unknown name 'sandwhich'.*did you mean sandwich"),
        (3, TOKENS, {}, "model: a int is not allowed"),
        (Model, {"train": TOKENS}, {}, "data: a dict is not allowed"),
        (Model, Items(None, 0), {}, "a Dataset of 0 items is too small"),
        (Model, Items(lambda number: (IDS[: 4 + number % 3],) * 2), {}, "of the Dataset cannot be put together"),
        (Model, Items(lambda number: (IDS, IDS / 2)), {}, "labels are a tensor of torch.float32"),
        (Model, Items(lambda number: (IDS, IDS + 90)), {}, "The model gives 17 scores; labels are 0 to 16"),
        (Model, TOKENS + 90, {}, "the largest of which is 10[56]"),
        (Model, lambda split: next(DRAWN), {}, "no further batch for 'val'"),
        (Model, lambda: None, {}, "cannot be given a split"),
        (
            Model,
            lambda split: (torch.stack([IDS] * 8), (torch.stack([IDS] * 8) + next(COUNTED)) % VOCABULARY),
            {},
            "two different batches for 'train'",
        ),
        ("lm-tiny", None, {"loss": lambda model, batch: 0}, "a recipe has its own"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence_and_writes_nothing(tmp_path, model, data, more, words):
    folder = tmp_path / "none"
    with pytest.raises((ConfigError, DataError, TopologyError), match=words):
        siamesenorm.compare(model, data, folder=folder, **{**RUN, "topologies": ["pre"], **more})
    assert not folder.exists()


def test_labels_of_any_whole_numbers_are_taken(tmp_path):
    data = Items(lambda number: (IDS, IDS.int()))
    found = siamesenorm.compare(Model, data, topologies=["pre"], folder=tmp_path, **{**RUN, "seeds": 1})
    assert found.complete


@pytest.mark.parametrize("named", [False, True])
def test_a_held_out_loss_is_the_mean_over_labels_that_count(named):
    """However they lie in batches; one without any does not make it no number."""
    model, ids = Model("pre"), torch.randint(0, VOCABULARY, (5, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1).masked_fill(torch.arange(LENGTH) >= torch.tensor([16, 16, 3, 1, 0])[:, None], -100)
    parts = [(ids[:2], labels[:2]), (ids[2:4], labels[2:4]), (ids[4:], labels[4:])]
    batches = [dict(zip(("input_ids", "labels"), part, strict=True)) for part in parts] if named else parts
    task = object.__new__(OwnTask)
    task.given, task.batch_size = Given(Model), 2
    task.source = types.SimpleNamespace(held_out=lambda size: iter(batches))
    expected = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    assert task.evaluate(model)["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_names_are_shown_and_never_run(tmp_path):
    """In a notebook and in the report: names of topologies, of metrics, of a model, of whatever could not be run."""
    bad = "<img src=x onerror=alert(1)>"

    def make(topology):
        return nn.Linear(2, 2)

    def loss(model, batch):
        return model(batch).square().mean(), {bad: torch.zeros(())}

    make.__qualname__ = bad
    settings = {**RUN, "seeds": 1, "sequence_length": None, "title": bad}
    found = siamesenorm.compare(
        make, lambda split: torch.ones(8, 2), loss=loss, topologies=["pre", bad], folder=tmp_path, **settings
    )
    shown = replace(found, failed=(f"{bad}: no",))._repr_html_()
    assert shown.count("&lt;img src=x onerror=alert(1)&gt;") >= 2
    assert bad not in shown
    assert bad not in found.page.read_text(encoding="utf-8")
    model = type(bad, (Model,), {})("pre")
    assert "<img" not in siamesenorm.inspect(model, IDS[None])._repr_html_()


def test_the_table_is_drawn_in_a_notebook(result, monkeypatch):
    shown = []

    class ZMQInteractiveShell:
        pass

    class Handle:
        def update(self, html):
            shown.append(html)

    display = types.SimpleNamespace(HTML=str, display=lambda html, display_id: Handle())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=ZMQInteractiveShell))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    from rich.console import Console

    table = open_table([], Console())
    assert isinstance(table, NotebookTable)
    with table:
        table.tick()
    assert "0 of 0 cells done" in shown[-1]
    assert isinstance(open_table([], None).__enter__(), GridWatcher)


FILE = """
import torch
from torch import nn

def make_model(topology):
    torch.manual_seed(7)
    return nn.Sequential(nn.Embedding(257, 8), nn.Linear(8, 257))

broken = 3
"""


def test_the_command_takes_a_model_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    out = tmp_path / "out"
    arguments = ["--topologies", "pre", "--seeds", "0", "--jobs", "1", "-o", str(out), "steps=3", "warmup=0"]
    data = ["data.train=arithmetic", "sequence_length=64", "batch_size=64"]
    assert main(["compare", "--model", f"{file}:make_model", *arguments, *data]) == 0
    found = json.loads((out / "report.json").read_text())
    assert [run["topology"] for run in found["runs"]] == ["pre"]
    assert len(found["provenance"]["data"]["arithmetic"]) == 64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}/none.py:make_model", "is not a file"),
        ("{}/mine.py:make_modle", "'make_modle' is not there in"),
        ("{}/mine.py:broken", "'broken' is no function"),
        ("{}/mine.py", "it takes FILE.py:NAME"),
        ("{}/bad.py:make_model", "cannot be imported: SyntaxError"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, capsys, text, words):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "bad.py").write_text("def (")
    assert main(["compare", "--model", text.format(tmp_path), "-o", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_inspect_takes_a_model_of_ones_own():
    model = Model("siamese")
    ids = torch.as_tensor(TOKENS[:32]).reshape(2, 16)
    found = siamesenorm.inspect(model, ids, loss=lambda model, ids: model(ids).logsumexp(-1).mean())
    assert len(found.rms["x"]) == 3
    assert found.gradients is not None
    assert found.plot("rms")["data"]
    assert "<table>" in found._repr_html_()
    with pytest.raises(ValueError, match="plot: 'rmz' is not known"):
        found.plot("rmz")
    with pytest.raises(ValueError, match="batch: is missing"):
        siamesenorm.inspect(model)


def test_train_is_one_call_and_carries_what_a_cell_does(tmp_path):
    small = {"model.dim": 16, "model.blocks": 1, "model.heads": 2, "model.ffn_dim": 16, "sequence_length": 16}
    fields = {**small, "data.train": "arithmetic", "batch_size": 2, "steps": 2, "warmup": 0, "sequences": 256}
    done = siamesenorm.train("lm-tiny", folder=tmp_path / "run", quiet=True, topology="siamese", **fields)
    assert done.state == "finished"
    facts = json.loads((tmp_path / "run" / "cell.json").read_text())
    assert facts["processor_seconds"] > 0
    assert facts["memory_bytes"] >= 0
    assert len(facts["data"]["arithmetic"]) == 64
    assert {"versions", "machine", "command", "threads"} <= facts.keys()
    with pytest.raises(ConfigError, match=r"did you mean optimizer\.lr"):
        siamesenorm.train("lm-tiny", folder=tmp_path / "no", **{"optimizer.lrr": 3})


@pytest.mark.parametrize(
    "command",
    ["train RUN", "export RUN --out OUT", "evaluate RUN", "generate RUN", "inspect RUN", "predict RUN no.png",
     "sample RUN", "graft RUN OUT --to siamese", "branch RUN --at 2", "train lm-tiny init_from=RUN"],
)  # fmt: skip
def test_no_command_runs_code_that_a_folder_names(command, result, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = {"RUN": str(result.records.runs[0].folder), "OUT": "out"}
    words = [place.get(word, word.replace("=RUN", f"={place['RUN']}")) for word in command.split()]
    code = main(words)
    said = capsys.readouterr()
    assert code == (0 if command == "train RUN" else 2), said  # which is finished already
    assert said.err.count("\n") <= 1


def test_what_cannot_make_models_is_named(tmp_path):
    """A model instead of a function, and a function that takes no topology."""
    for wrong, words in (
        (nn.Linear(2, 2), "a Linear is not allowed; it takes a function that is given a topology"),
        (lambda: nn.Linear(2, 2), "cannot be given a topology"),
    ):
        with pytest.raises(DataError, match=words):
            siamesenorm.compare(wrong, np.arange(30_000) % 7, folder=tmp_path / "out", steps=2, quiet=True)
    assert not (tmp_path / "out").exists()


def test_recorded_numbers_are_numbers(tmp_path):
    with siamesenorm.record(tmp_path / "run", topology="pre", lr=1e-3, seed=0) as run:
        with pytest.raises(ConfigError, match="loss: 'low' is not allowed; it takes a number"):
            run.step(loss="low")
        with pytest.raises(ConfigError, match="grad_norm: None is not allowed"):
            run.step(loss=2.0, grad_norm=None)
        run.step(loss=torch.tensor(2.0))
    assert run.number == 1
