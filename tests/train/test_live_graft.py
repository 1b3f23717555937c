"""Grafts of live runs: the same loss at the next step, moments of what goes on, bitwise resumption in any world."""

import json
import shutil

import pytest
import torch

from siamesenorm.cli import main
from siamesenorm.residual.ramp import ramps_of
from siamesenorm.train.folder import RunFolder
from siamesenorm.train.live_graft import open_live
from siamesenorm.train.loop import train
from siamesenorm.train.optimizer import LR_FACTORS

from .small_runs import engine, losses, tiny, weights
from .worlds import run_world

RUN = [
    "topology=pre", "checkpoint.every=3", "checkpoint.keep=9", "train.ema=0.9", "norm_eps=1e-12",
    "divergence.spike=null", "divergence.plateau=null", "parallel.device=cpu",
]  # fmt: skip


@pytest.fixture(scope="module", params=["adamw", "muon"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "run"
    train(tiny(*RUN, f"optimizer.kind={request.param}"), folder)
    return folder


def graft(run, out, *options, to="siamese"):
    return main(["graft", str(run), str(out), "--to", to, "--at", "6", "--tokens", "64", *options])


def test_the_next_step_has_the_loss_of_the_source_and_it_goes_on_to_the_end(run, tmp_path, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert graft(run, tmp_path / "out") == 0
    assert f"siamesenorm train {tmp_path / 'out'} goes on" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    certificate = json.loads((tmp_path / "out" / "graft.json").read_text())
    assert certificate["step"] == 6
    assert certificate["fp32"]["largest_kl"] < 1e-9
    shutil.copytree(tmp_path / "out", tmp_path / "again")
    result = train(RunFolder(tmp_path / "out").config(), tmp_path / "out", mode="resume")
    assert (result.state, result.step) == ("finished", 12)
    ours, theirs = losses(tmp_path / "out"), losses(run)
    assert list(ours) == list(theirs)  # earlier steps are there too
    assert ours[7] == pytest.approx(theirs[7], rel=1e-5)
    assert ours[12] != theirs[12]  # X has woken up
    train(RunFolder(tmp_path / "again").config(), tmp_path / "again")
    assert losses(tmp_path / "again") == ours
    first, second = weights(tmp_path / "out"), weights(tmp_path / "again")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_goes_on_keeps_its_moments_and_what_is_new_has_none(run, tmp_path):
    assert graft(run, tmp_path / "out") == 0
    before, after = open_live(run, 6), open_live(tmp_path / "out")
    assert (after.step, after.progress) == (6, before.progress)
    source, kept, fresh = dict(before.model.named_parameters()), 0, 0
    for name, parameter in after.model.named_parameters():
        state = after.optimizer.state[parameter]
        then = name.replace(".input_norm.", ".norm.") if name not in source else name
        if then in source:
            kept += 1
            assert torch.equal(parameter, source[then])
            assert torch.equal(after.averaged[name], before.averaged[then])
            there = before.optimizer.state[source[then]]
            assert state.keys() == there.keys()
            assert all(torch.equal(state[key], there[key]) for key in there)
        else:
            fresh += 1
            assert not any(value.any() for value in state.values())
    assert kept == len(source)
    assert fresh


def test_of_a_run_that_trains_a_part_the_rest_is_the_runs_own_in_the_averaged_model_too(tmp_path, capsys):
    plain = [*RUN, "steps=6"]
    train(tiny(*plain), tmp_path / "first")
    start = f"init_from={tmp_path / 'first'}"
    train(tiny(*plain, start, "train.parameters=norms"), tmp_path / "run")
    live = open_live(tmp_path / "run", 3)
    averaged = dict(live.averaged_model().named_parameters())
    assert live.averaged
    assert live.averaged.keys() < averaged.keys()
    for name, parameter in live.model.named_parameters():
        assert torch.equal(averaged[name], live.averaged.get(name, parameter)), name
    train(tiny(*plain, start, "train.parameters=lora"), tmp_path / "lora")
    assert main(["graft", str(tmp_path / "lora"), str(tmp_path / "out"), "--to", "siamese", "--at", "3"]) == 2
    assert "factors of LoRA go on in no other topology" in capsys.readouterr().err


def test_learning_rates_of_the_new_topology_are_in_effect(run, tmp_path):
    if "muon" in str(run):
        return
    assert graft(run, tmp_path / "out", to="x0") == 0
    config = RunFolder(tmp_path / "out").config()
    made = engine(*RUN, f"topology={config.model.topology}")
    assert len(set(getattr(made.optimizer, LR_FACTORS))) > 1
    made.close()
    assert train(config, tmp_path / "out").state == "finished"
    assert losses(tmp_path / "out")[7] == pytest.approx(losses(run)[7], rel=1e-5)


def go_on(world, folder):
    return train(RunFolder(folder).config(), folder, world=world).state


def test_several_processes_go_on_from_it(run, tmp_path):
    mode = "fsdp" if "muon" in str(run) else "ddp"
    assert graft(run, tmp_path / "out") == 0
    shutil.copytree(tmp_path / "out", tmp_path / "one")
    assert run_world(2, go_on, tmp_path / "out", mode=mode) == ["finished"] * 2
    train(RunFolder(tmp_path / "one").config(), tmp_path / "one")
    ours, alone = losses(tmp_path / "out"), losses(tmp_path / "one")
    assert [ours[step] for step in ours] == pytest.approx([alone[step] for step in alone], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--at", "5"], "has no sound checkpoint of that step; it takes one of 3, 6, 9, 12"),
        (["--bound", "0"], "is above 0"),
        (["--to", "sandwich", "--regress", "0"], "--ramp STEPS begins with the source's function"),
    ],
)
def test_what_cannot_be_had_leaves_nothing(run, tmp_path, capsys, options, words):
    assert graft(run, tmp_path / "out", *options) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unfinished_run_goes_on_and_a_finished_one_becomes_a_model(run, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(run, half)
    for name in ("weights.safetensors", "status.json"):
        (half / name).unlink()
    command = ["--to", "hyper", "--tokens", "64", "--no-remote-code"]
    assert main(["graft", str(half), str(tmp_path / "live"), *command]) == 0
    assert RunFolder(tmp_path / "live").status()["step"] == 12
    assert main(["graft", str(run), str(tmp_path / "model"), *command]) == 0
    assert (tmp_path / "model" / "config.json").is_file()
    assert main(["graft", str(half), str(tmp_path / "live"), *command]) == 2  # never over another


def test_another_topology_comes_in_over_steps_and_settles_in_a_run_that_goes_on(run, tmp_path, capsys):
    half = tmp_path / "half"
    assert graft(run, half, "--ramp", "3", "--regress", "1", to="hybrid") == 0
    certificate = json.loads((half / "graft.json").read_text())
    assert list(certificate["stages"]) == ["copied", "calibrated", "regressed"]
    assert certificate["fp32"]["largest_kl"] < 1e-12
    assert train(RunFolder(half).config(), half).state == "finished"
    ours, theirs = losses(half), losses(run)
    assert ours[7] == pytest.approx(theirs[7], rel=1e-6)  # b = 0
    assert ours[8] != pytest.approx(theirs[8], rel=1e-6)
    shares = [float(ramp.value) for ramp in ramps_of(open_live(half, 9).model)]
    assert shares == pytest.approx([2 / 3] * len(shares))
    assert graft(half, tmp_path / "early", "--at", "9", to="hybrid") == 2
    assert "b = 0.666667 only" in capsys.readouterr().err
    assert graft(half, tmp_path / "settled", "--at", "12", to="hybrid") == 0
    blended, settled = open_live(half, 12), open_live(tmp_path / "settled")
    assert settled.config.model.topology == "hybrid"
    moments = [state["exp_avg"].any() for state in settled.optimizer.state.values() if "exp_avg" in state]
    assert all(moments)
    assert settled.averaged["head.weight"].equal(blended.averaged["head.weight"])
