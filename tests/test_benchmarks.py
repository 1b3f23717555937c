"""benchmarks/: rounds are fair, kept and never mixed; every command runs; tables say what the files hold."""

import importlib
import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch

from siamesenorm.residual import TOPOLOGIES
from siamesenorm.residual.kernels import native

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.append(str(FOLDER))
contestants, kernels, memory, race, tables = map(
    importlib.import_module, ("contestants", "kernels", "memory", "race", "tables")
)


@pytest.fixture(autouse=True)
def _threads_stay():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_collections(monkeypatch):
    """Nothing is timed here, and a test's process has much to look through."""
    rest = types.SimpleNamespace(**dict.fromkeys(("collect", "freeze", "unfreeze", "disable", "enable"), lambda: None))
    monkeypatch.setattr(race, "gc", rest)


def opened(out, *options, **setting):
    parser = race.arguments("about", "some", rounds=3)
    return race.Results(parser, parser.parse_args(["--out", str(out), *options]), **setting)


def run(monkeypatch, script, out, *options):
    monkeypatch.setattr(sys, "argv", [script, "--quick", "--out", str(out), *options])
    assert importlib.import_module(script).main() == 0
    return json.loads(out.read_text())


def test_ratios_are_taken_within_rounds():
    rounds = [{"a": [1.0, 1.0], "b": [2.0, 3.0]}, {"a": [10.0, 1.0], "b": [30.0, 3.0]}, {"a": [2.0, 1.0], "b": [2, 3]}]
    assert race.compared(rounds, "b", "a") == race.Ratio(2.0, 1.5, 2.5, 2.0, 3.0)


def test_contestants_take_turns_and_another_begins_each_round(tmp_path):
    order = []
    results = opened(tmp_path / "some.json")
    results.race("first", lambda: {name: lambda name=name: order.append(name) for name in "abc"})
    assert "".join(order) == "aabbcc" + "abc" + "bca" + "cab"


def test_a_second_call_adds_the_missing_rounds_alone(tmp_path):
    out, calls = tmp_path / "some.json", []
    opened(out, "--rounds", "2").race("first", lambda: {"a": lambda: None})
    before = json.loads(out.read_text())["races"]["first"]["rounds"]
    opened(out, "--rounds", "2").race("first", lambda: calls.append(1) or {})
    assert not calls  # nobody is built for a race that is over
    results = opened(out, "--rounds", "5")
    assert results.race("first", lambda: {"a": lambda: None})[:2] == before
    assert len(json.loads(out.read_text())["races"]["first"]["rounds"]) == 5


def test_rounds_of_other_conditions_are_not_mixed(tmp_path, capsys):
    out = tmp_path / "some.json"
    opened(out, size=1).race("first", lambda: {"a": lambda: None})
    held = out.read_bytes()
    for options, setting in ((["--threads", "2"], {"size": 1}), ([], {"size": 2})):
        with pytest.raises(SystemExit) as ended:
            opened(out, *options, **setting)
        assert ended.value.code == 2
    assert "of another setting" in capsys.readouterr().err
    assert out.read_bytes() == held
    assert opened(out, "--fresh", size=2).data["races"] == {}


def test_a_race_is_of_one_source(tmp_path, monkeypatch):
    """One that is over stays when the code changes; one that needs more rounds begins anew."""
    out = tmp_path / "some.json"
    results = opened(out)
    for name in ("over", "cut", "again"):
        results.race(name, lambda: {"a": lambda: None})
    results.measure("fact", lambda: 1)
    del results.data["races"]["cut"]["rounds"][2:]
    results.write()
    before = json.loads(out.read_text())["races"]
    monkeypatch.setattr(race, "source", lambda: "other code")
    results = opened(out)
    assert results.race("over", lambda: {"a": lambda: None}) == before["over"]["rounds"]
    assert results.race("cut", lambda: {"a": lambda: None})[:2] != before["cut"]["rounds"]
    assert results.measure("fact", lambda: 2) == 1
    again = opened(out, "--fresh")
    assert again.race("again", lambda: {"a": lambda: None}) != before["again"]["rounds"]
    assert again.measure("fact", lambda: 2) == 2
    assert again.data["races"]["over"] == before["over"]
    others = {name for name, source in again.data["sources"].items() if source == "other code"}
    assert others == {"cut", "again", "fact"}


def test_what_is_no_result_file_is_left_alone(tmp_path, capsys):
    out = tmp_path / "some.json"
    for text in ("", "[]", "{}", "not JSON"):
        out.write_text(text)
        with pytest.raises(SystemExit) as ended:
            opened(out)
        assert ended.value.code == 2
        assert "is no result file" in capsys.readouterr().err
        assert out.read_text() == text


def test_a_race_that_fails_is_named_and_the_others_stay(tmp_path):
    def broken():
        raise RuntimeError("no such model")

    results = opened(tmp_path / "some.json")
    assert results.race("bad", broken) == []
    assert results.measure("fact", broken) is None
    assert len(results.race("good", lambda: {"a": lambda: None})) == 3
    assert results.close() == 1
    assert results.failed == ["bad", "fact"]


@pytest.mark.parametrize("name", ["pre", "llama"])
def test_all_ways_of_a_model_share_its_weights(name):
    shape = contestants.SHAPES["d64x12"].quick()
    model = contestants.build(name, shape)
    for way in contestants.ways(name):
        other = contestants.in_way(lambda: contestants.build(name, shape), model, way, lambda m: m.model.layers)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert mine is theirs


def test_ours_and_llama_have_the_same_products():
    shape = contestants.SHAPES["d256x8"].quick()
    counted = importlib.import_module("share").counted
    assert counted("pre", shape) == counted("llama", shape)
    assert contestants.next_token_loss("pre", shape)(contestants.build("pre", shape)).isfinite()


def test_every_topology_is_measured():
    assert set(TOPOLOGIES) <= set(contestants.every_topology())


def test_saved_bytes_count_every_storage_once_and_no_parameter():
    model = torch.nn.Linear(3, 3, bias=False)
    x = torch.randn(5, 3)
    assert memory.saved_bytes(model, model, lambda run: (run(x) * run(x)).sum()) == 3 * x.nbytes


@pytest.mark.skipif(not native.enabled(), reason="no compiled kernels")
@pytest.mark.parametrize("kernel", [kernel for kernel in kernels.WITHOUT if kernel != "all"])
def test_a_kernel_left_out_does_not_run(kernel, monkeypatch):
    shape = contestants.SHAPES["d64x12"].quick()
    turn, called, call = kernels.operations(shape, 1)[kernel], [], native.call
    monkeypatch.setattr(native, "call", lambda name, arguments: called.append(name) or call(name, arguments))
    turn()
    own = set(called)
    assert own
    called.clear()
    kernels.within(kernels.WITHOUT[kernel], turn)()
    assert not own & set(called)
    called.clear()
    kernels.within(native.disabled, turn)()
    assert not called


@pytest.mark.parametrize("script", ["lm", "topologies", "share", "vision", "decoding", "optimizers", "kernels"])
def test_every_command_runs(script, tmp_path, monkeypatch):
    if script == "kernels" and not native.enabled():
        pytest.skip("no compiled kernels")
    data = run(monkeypatch, script, tmp_path / f"{script}.json", *([] if script == "kernels" else ["--ways", "eager"]))
    assert data["races"]
    assert all(len(race["rounds"]) == 2 for race in data["races"].values())
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    texts = [part("../") for part in tables.PARTS.values()]
    assert any(f"(../benchmarks/results/{script}.json)" in text for text in texts)
    for text in texts:
        if f"{script}.json" in text:
            assert "mean nothing" in text
            assert all(race.split()[0] in text for race in data["races"])
        else:
            assert "Not measured yet" in text


def test_memory_and_first_steps_are_measured(tmp_path, monkeypatch):
    figures = memory.measure_here("pre@eager", "d256x8", True)
    assert figures["saved_bytes"] > 0
    monkeypatch.setitem(contestants.SHAPES, "d256x8", contestants.SHAPES["d256x8"].quick())
    module = importlib.import_module("compile_time")
    for script, facts in (
        (memory, {"d256x8 pre@eager": figures, "d256x8 siamese@eager": {"saved_bytes": 1, "peak_kib": 2}}),
        (module, {"pre@compiled 2 #0": module.first_steps("pre@eager", 2)}),
    ):
        left = iter(facts.values())
        monkeypatch.setattr(script, "measured", lambda *_, left=left: next(left))
        name = script.__name__
        data = run(monkeypatch, name, tmp_path / f"{name}.json", *(["--ways", "eager"] if script is memory else []))
        assert data["facts"] == facts
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "| `pre@eager` | 1.00 | " in tables.memory("")
    assert "| `pre@compiled` | " in tables.compile_time("")


def test_grafts_are_measured_stage_by_stage(monkeypatch, tmp_path, capsys):
    found = run(monkeypatch, "grafts", tmp_path / "grafts.json")["grafts"]
    assert list(found["siamese"]) == ["exact"]
    assert list(found["post"]) == ["copied", "calibrated", "regressed", "ramp"]
    assert found["siamese"]["exact"]["mean_kl"] < 1e-6
    assert found["post"]["ramp"]["largest_kl"] < 1e-9
    assert "| `post` | – |" in capsys.readouterr().out


def test_the_best_rate_is_a_parabolas_and_a_base_counts_for_both_parametrisations():
    transfer = importlib.import_module("lr_transfer")
    runs = list(transfer.runs(2))
    assert len({run.key for run in runs}) == 2 * 2 * 2 * 7 * (1 + 2 * 4)  # a base is trained once
    found = {}
    for run in runs:
        best = 8e-3 / (run.width if run.parametrization == "standard" else 1)
        found[run.key] = {"loss": 2 + 0.1 * math.log2(run.lr / best) ** 2}
    rows = {(row["parametrization"], row["width"], row["depth"]): row for row in transfer.tables(found)}
    assert rows["standard", 4, 1]["best_lr"] == pytest.approx(2e-3, rel=0.01)
    assert rows["standard", 4, 1]["above_best_at_base_lr"] == pytest.approx(0.4)
    assert rows["completep", 4, 1]["best_lr"] == rows["completep", 1, 1]["best_lr"] == pytest.approx(8e-3)
