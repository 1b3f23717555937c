"""The commands train, recipes, generate and export: what they print, write and return; bad input, by the hundred."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.run import get_args_parser

from siamesenorm.cli import main
from siamesenorm.train.fields import fields_of
from siamesenorm.train.recipes import config_class, recipe_names, resolve
from siamesenorm.train.session import folder_name
from siamesenorm.train.trained import open_language_model
from train.small_runs import SMALL, losses, weights

from .refusals import one_sentence


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", "lm-tiny", *SMALL, "evaluation.every=6", "sequences=2", "--run", str(folder)]) == 0
    return folder


def written(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


# What they do ----------------------------------------------------------------------------------------


def test_train_ends_with_its_folder_and_result(run, capsys):
    assert main(["train", "lm-tiny", *SMALL, "evaluation.every=6", "sequences=2", "--run", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}: finished already, at step 12; --restart begins anew\n"
    assert len(losses(run)) == 12


def test_train_takes_a_run_or_its_configuration_as_a_recipe(run, tmp_path, capsys):
    assert main(["train", str(run), "--run", str(tmp_path / "again")]) == 0
    assert losses(run) == losses(tmp_path / "again")
    err = capsys.readouterr().err
    assert "step 12/12" in err
    assert "tokens/s" in err
    assert "held out: loss" in err


def test_a_run_is_resumed_by_its_folder_with_other_fields_or_from_an_older_checkpoint(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "copy")
    assert main(["train", str(copy), "--at", "12", "logging.every=5"]) == 0
    assert "logging.every is 5 instead of" in (copy / "events.jsonl").read_text()
    assert "went back to step 12" in (copy / "events.jsonl").read_text()
    before = written(tmp_path)
    for arguments, said in {
        ("--at", "5"): "--at: 5 is not allowed",
        ("--resume", "lr=0.5"): "whose optimizer.lr is 0.01 instead of 0.5",
        ("--resume", "steps=20"): "the learning rates of 12 steps that are done depend on it (cosine)",
        ("--at", "12", "--restart"): "--at and --restart: both are given",
    }.items():
        assert said in one_sentence(["train", str(copy), *arguments], capsys)
    assert written(tmp_path) == before


def test_a_text_of_ones_own_is_trained_on_as_it_is(tmp_path, capsys):
    (tmp_path / "my.txt").write_text("".join(f"{n} bottles of beer on the wall, {n} of beer.\n" for n in range(700)))
    wanted = ["evaluation.every=12", f"data.train={tmp_path / 'my.txt'}", "--run", str(tmp_path / "run")]
    assert main(["train", "lm-tiny", *SMALL, *wanted]) == 0
    assert max(losses(tmp_path / "run").values()) < 6  # of 256 bytes, not of pairs of them
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["held_out"]["tokens"] >= 4096
    assert status["higher_is_better"] == {"loss": False, "perplexity": False}
    assert "too few to tell runs apart" not in capsys.readouterr().err
    text = open_language_model(tmp_path / "run").tokenizer.decode(list(b"beer"))
    assert text == "beer"


def test_a_text_of_which_nothing_can_be_held_out_is_refused(tmp_path, capsys):
    (tmp_path / "my.txt").write_text("Just this, and no more.")
    wanted = ["evaluation.every=12", f"data.train={tmp_path / 'my.txt'}", "--run", str(tmp_path / "run")]
    assert main(["train", "lm-tiny", *SMALL, *wanted]) == 2
    assert "holds out no text; name some to evaluate on, or take 20,480 tokens" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_few_held_out_tokens_are_warned_of(run, tmp_path, capsys):
    assert main(["train", str(run), "--run", str(tmp_path / "again")]) == 0
    assert "32 tokens to measure on are too few to tell runs apart; it takes 4,096" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("my.txt", "Größe\n".encode("latin-1") * 999, "is not UTF-8"),
        ("my.txt", "Größe\n".encode("utf-16") * 999, "is not UTF-8"),
        ("my.npy", b"Just this. " * 999, "is no array of uint16 tokens but looks like text"),
        ("my.npy", b"\x01\x00\xff\x7f" * 999, "holds id 32767; its vocabulary has 0 to 257"),
    ],
)
@pytest.mark.parametrize("field", ["train", "validation"])
def test_what_is_no_text_and_no_tokens_is_refused(tmp_path, name, content, told, field, capsys):
    (tmp_path / name).write_bytes(content)
    wanted = ["evaluation.every=12", f"data.{field}={tmp_path / name}", "--run", str(tmp_path / "run")]
    assert main(["train", "lm-tiny", *SMALL, *wanted]) == 2
    error = capsys.readouterr().err
    assert re.search(told, error)
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_diverged_run_has_an_exit_code_of_its_own(tmp_path, capsys):
    hot = ["topology=post", "lr=900", "warmup=0", "clip=null", "schedule.kind=constant", "steps=60", "history=4"]
    assert main(["train", "lm-tiny", *SMALL, *hot, "--run", str(tmp_path / "run")]) == 3
    assert "diverged at step" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "diverged"


def test_the_same_command_has_the_same_folder_and_another_one_another():
    commands = [
        ("lm-tiny", []),
        ("lm-tiny", ["lr=1e-3"]),
        ("lm-tiny", ["lr=1e-4"]),
        ("lm-tiny", ["topology=siamese:form=plain"]),
        ("lm-tiny", ["topology=siamese_form=plain"]),
        ("lm-tiny", ["about=" + "x" * 500]),
        ("lm-tiny", ["about=" + "x" * 501]),
        ("a/mine.yaml", []),
    ]
    names = [folder_name(*command) for command in commands]
    assert len(set(names)) == len(names)
    assert names[:2] == ["lm-tiny", "lm-tiny-lr=1e-3"]
    assert names[-1] == "mine"
    assert all(len(name) < 120 and "/" not in name for name in names)


def test_without_a_folder_runs_go_to_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "lm-tiny", *SMALL, "steps=1", "warmup=0"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("lm-tiny-data.train=python-docs")


def test_the_folder_of_a_run_goes_on_with_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "lm-tiny", *SMALL, "steps=1", "warmup=0", "--out", "my run"]) == 0
    assert main(["train", "my run"]) == 0
    assert "my run: finished already" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    assert main(["train", "my run", "seed=1"]) == 0  # with a change it is another run
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("my_run-seed=1")


def test_recipes_are_listed_with_what_they_are(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    for name in recipe_names():
        assert name in out
    assert out.index("lm-tiny") < out.index("classification") < out.index("deit-tiny") < out.index("diffusion")
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) < 4 * len(recipe_names())  # words stay together in a narrow window
    assert main(["recipes", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(recipe_names())


def test_one_recipe_is_shown_with_every_field(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["recipes", "lm-tiny", "lr=0.125"]) == 0
    out = capsys.readouterr().out
    for field in fields_of(config_class("language")):
        if field.section is None and "moe." not in field.path and "." in field.path:
            assert field.path in out
            assert (field.info.description or "").split(";")[0].split(":")[0][:40] in " ".join(out.split())
    assert "0.125" in out


def test_a_recipe_can_be_taken_away_as_yaml(tmp_path, capsys):
    assert main(["recipes", "lm-tiny", "lr=0.125", "--yaml"]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert resolve(str(tmp_path / "mine.yaml")) == resolve("lm-tiny", ["lr=0.125"])
    assert main(["recipes", "lm-tiny", "lr=0.125", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == resolve("lm-tiny", ["lr=0.125"]).as_dict()


def test_generate_goes_on_with_a_prompt(run, capsys):
    command = ["generate", str(run), "The ", "--tokens", "8", "--seed", "3"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert main(command) == 0
    assert capsys.readouterr().out == first
    assert first.startswith("The ")
    assert main(["generate", str(run), "--temperature", "0", "--tokens", "4", "--samples", "2"]) == 0
    one, two = capsys.readouterr().out.split("········\n")
    assert one == two


def test_a_run_without_exported_weights_gives_those_of_its_checkpoint(run, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "weights.safetensors").unlink()
    (copy / "tokenizer.json").unlink()
    exported, resumed = open_language_model(run), open_language_model(copy)
    assert exported.step == resumed.step == 12
    assert all(torch.equal(a, b) for a, b in zip(exported.model.parameters(), resumed.model.parameters(), strict=True))
    assert exported.tokenizer.fingerprint == resumed.tokenizer.fingerprint


def test_export_safetensors_has_weights_and_configuration(run, tmp_path):
    target = tmp_path / "model.safetensors"
    assert main(["export", str(run), str(target), "--to", "safetensors"]) == 0
    with safe_open(target, "pt") as file:
        assert json.loads(file.metadata()["config"]) == resolve(str(run)).as_dict()["model"]
        for name, tensor in weights(run).items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_export_to_hugging_face_calls_the_exporter_or_names_the_extra(run, tmp_path, capsys, monkeypatch):
    import sys
    import types

    monkeypatch.setitem(sys.modules, "siamesenorm.interop.huggingface", None)
    assert main(["export", str(run), str(tmp_path / "hf"), "--to", "hf"]) == 2
    assert "siamesenorm[hf]" in capsys.readouterr().err
    calls = []
    module = types.ModuleType("siamesenorm.interop.huggingface")
    module.export = lambda *args, **kwargs: calls.append((args, kwargs))
    monkeypatch.setitem(sys.modules, "siamesenorm.interop.huggingface", module)
    assert main(["export", str(run), str(tmp_path / "hf"), "--to", "hf", "--no-remote-code"]) == 0
    (((model, target), options),) = calls
    assert (model.config, target) == (resolve(str(run)).model, tmp_path / "hf")
    assert options["remote_code"] is False
    assert options["tokenizer"].vocab_size == 258


# Bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train", "lm-tinny"], "did you mean lm-tiny?"),
        (["train", "lm-tiny", "--resume", "--restart"], "both are given"),
        (["train", "lm-tiny", "topology=siamse"], "did you mean siamese?"),
        (["train", "lm-tiny", "precision=bf15"], "did you mean bf16?"),
        (["train", "lm-tiny", "dim=131072", "blocks=4096", "ffn_dim=1048576"], "GiB free"),
        (["train", "lm-tiny", "train.batch_size=16777216"], "GiB free"),
        (["train", "lm-tiny", "data.train=nowhere"], "nowhere"),
        (["train", "lm-1.3b"], "data/fineweb-edu"),
        (["train", "lm-tiny", "device=cuda"], "no GPU"),
        (["train", "lm-tiny", "--resume"], "no run to resume"),
        (["recipes", "nothing"], "known names"),
        (["recipes", "lm-tiny", "x=1"], "unknown field"),
        (["generate", "nowhere"], "it takes a run or an exported model"),
        (["export", "nowhere", "x", "--to", "safetensors"], "is not a run"),
        (["export", "nowhere", "x", "--to", "onnx"], "one of diffusers, gguf, hf, safetensors"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(arguments, part, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if torch.cuda.is_available() and "device=cuda" in arguments:
        pytest.skip("there is a GPU")
    assert part in one_sentence(arguments, capsys)
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ("WORLD_SIZE=two", "WORLD_SIZE: 'two' is not allowed; it takes a whole number"),
        ("WORLD_SIZE=0", "WORLD_SIZE: 0 is not allowed; it takes 1 or more"),
        ("RANK=1", "RANK: 1 is not allowed; with WORLD_SIZE = 1 it takes 0"),
        ("WORLD_SIZE=2 RANK=2", "RANK: 2 is not allowed; with WORLD_SIZE = 2 it takes 0 to 1"),
        ("WORLD_SIZE=2 RANK=-1", "RANK: -1 is not allowed; with WORLD_SIZE = 2 it takes 0 to 1"),
        ("WORLD_SIZE=2 RANK=", "MASTER_PORT"),
        ("WORLD_SIZE=2 LOCAL_RANK=2", "LOCAL_RANK: 2 is not allowed; it takes 0 to 1"),
        ("WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 LOCAL_RANK=2", "LOCAL_RANK: 2 is not allowed; with LOCAL_WORLD_SIZE = 2"),
        ("WORLD_SIZE=2 LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE: 4 is not allowed; with WORLD_SIZE = 2 it takes 1 to 2"),
        ("WORLD_SIZE=2 MASTER_PORT=99999", "MASTER_PORT: 99999 is not allowed; it takes 1 to 65535"),
        ("WORLD_SIZE=2 MASTER_PORT=0", "MASTER_PORT: 0 is not allowed; it takes 1 to 65535"),
        ("WORLD_SIZE=2 MASTER_PORT=http", "MASTER_PORT: 'http' is not allowed; it takes a whole number"),
    ],
)
def test_a_senseless_rendezvous_is_one_sentence(environment, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASTER_PORT", "none")
    for setting in environment.split():
        monkeypatch.setenv(*setting.split("=", 1))
    assert sentence in one_sentence(["train", "lm-tiny", *SMALL], capsys)
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [["--temperature", "-1"], ["--top-p", "0"], ["--top-k", "0"], ["--temperature", "nan"]],
)
def test_bad_sampling_is_one_sentence(run, options, capsys):
    one_sentence(["generate", str(run), "x", *options], capsys)


def test_a_prompt_that_is_too_long(run, capsys):
    assert "max_length = 512" in one_sentence(["generate", str(run), "x" * 600], capsys)


def test_damaged_weights_are_one_sentence(run, tmp_path, monkeypatch, capsys):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "weights.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    assert "has 10 bytes instead of" in one_sentence(["generate", str(copy), "x"], capsys)
    (copy / "status.json").write_text("{}")
    monkeypatch.setattr("siamesenorm.train.weights._warned", {copy.resolve()})
    assert "cannot be read" in one_sentence(["generate", str(copy), "x"], capsys)


@pytest.mark.parametrize("option", [["--out", "folder"], ["-o", "folder"], ["--resume"], ["--restart"]])
def test_torchrun_hands_options_on(option):
    """It takes any beginning of its own options for itself, wherever it stands: --run would be its --run-path."""
    ours = ["siamesenorm", "train", "lm-tiny", "seed=1", *option]
    taken = get_args_parser().parse_args(["--nproc-per-node", "2", "-m", *ours])
    assert [taken.training_script, *taken.training_script_args] == ours
