"""``siamesenorm export``: targets that are there, dtypes, and folders that transformers loads."""

import os
import shutil
import threading

import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from failing_files import contents
from siamesenorm.cli import main
from siamesenorm.train.folder import RunFolder
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve
from siamesenorm.train.trained import open_language_model, open_stored
from siamesenorm.train.yaml import write_yaml

from .refusals import one_sentence


def test_a_run_becomes_a_folder_that_transformers_loads(language_run, tmp_path, capsys):
    target = tmp_path / "with space" / "hf"
    assert main(["export", str(language_run), str(target), "--to", "hf"]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    trained, ids = open_language_model(language_run), tokenizer("The ", return_tensors="pt").input_ids
    assert ids[0].tolist() == trained.tokenizer.encode("The ")
    torch.testing.assert_close(model(ids).logits, trained.model(ids).logits)
    assert (target / "modeling_siamesenorm.py").is_file()


def test_a_target_that_is_there_stays_unless_told_otherwise(language_run, tmp_path, capsys):
    for to, target in (("safetensors", tmp_path / "model.safetensors"), ("hf", tmp_path / "hf")):
        command = ["export", str(language_run), str(target), "--to", to]
        assert main(command) == 0
        before = sorted(path.stat().st_mtime_ns for path in (target, *target.rglob("*")))
        assert "is there already" in one_sentence(command, capsys)
        assert sorted(path.stat().st_mtime_ns for path in (target, *target.rglob("*"))) == before
        assert main([*command, "--overwrite"]) == 0
        assert sorted(path.stat().st_mtime_ns for path in (target, *target.rglob("*"))) != before
    wrong = ["export", str(language_run), str(tmp_path / "hf"), "--to", "safetensors", "--overwrite"]
    assert "is there already" in one_sentence(wrong, capsys)


def test_only_what_an_export_made_is_replaced(language_run, tmp_path, capsys, monkeypatch):
    """Not a folder with a note in it, not one that was edited since, not the current one, not somebody's model."""
    target = tmp_path / "hf"
    command = ["export", str(language_run), str(target), "--to", "hf", "--overwrite"]
    target.mkdir()
    (target / "config.json").write_text('{"model_type": "llama"}')
    (target / "model.safetensors").write_text("mine")
    assert "config.json' was not made by this program; move it away" in one_sentence(command, capsys)
    assert (target / "model.safetensors").read_text() == "mine"
    for path in target.iterdir():
        path.unlink()
    assert main(command) == 0
    made = contents(target)
    (target / "notes").mkdir()
    (target / "notes" / "mine.txt").write_text("mine")
    assert "notes/mine.txt' was not made by this program" in one_sentence(command, capsys)
    (target / "notes" / "mine.txt").unlink()
    (target / "notes").rmdir()
    (target / "generation_config.json").write_text("{}")
    assert "generation_config.json' was changed after the export" in one_sentence(command, capsys)
    (target / "generation_config.json").write_bytes(made["generation_config.json"])
    (target / "export.json").write_text("{}")
    assert "is no record of an export" in one_sentence(command, capsys)
    (target / "export.json").write_bytes(made["export.json"])
    monkeypatch.chdir(target)
    assert "the current folder" in one_sentence([*command[:2], ".", *command[3:]], capsys)
    monkeypatch.chdir(tmp_path)
    assert contents(tmp_path) == {f"hf/{name}": content for name, content in made.items()}
    (target / "model.safetensors").unlink()  # what is gone is in nobody's way
    (tmp_path / "link").symlink_to("hf")
    assert main([*command[:2], "link", *command[3:]]) == 0
    assert contents(target).keys() == made.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "link"]


def test_a_file_is_replaced_if_an_export_wrote_it(language_run, tmp_path, capsys):
    shutil.copytree(language_run, tmp_path / "other run")
    (tmp_path / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    for target in ("other run/weights.safetensors", "notes.txt", "other run/config.yaml"):
        command = ["export", str(language_run), str(tmp_path / target), "--to", "safetensors", "--overwrite"]
        assert "it is no file that an export wrote" in one_sentence(command, capsys)
    assert contents(tmp_path) == before


def test_pipes_and_devices_take_weights(language_run, tmp_path, capfd):
    os.mkfifo(tmp_path / "pipe")
    command = ["export", str(language_run), str(tmp_path / "pipe"), "--to", "safetensors"]
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    assert main(command) == 0
    reader.join(60)
    assert load(got[0]).keys() == load_file(language_run / "weights.safetensors").keys()
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"{tmp_path / 'pipe'}\n")  # what it wrote to may be the output itself
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert "No space left on device" in one_sentence([*command[:2], "/dev/full", *command[3:]], capfd)
    refused = ["export", str(language_run), str(tmp_path / "pipe"), "--to", "hf", "--overwrite"]
    assert "is there already" in one_sentence(refused, capfd)


def test_a_run_is_not_replaced_by_its_own_export(language_run, capsys):
    for target in (language_run, language_run.parent):
        command = ["export", str(language_run), str(target), "--to", "hf", "--overwrite"]
        assert "the run lies in it" in one_sentence(command, capsys)


def test_weights_take_the_dtype_asked_for(language_run, tmp_path, capsys):
    file, folder = tmp_path / "model.safetensors", tmp_path / "hf"
    assert main(["export", str(language_run), str(file), "--to", "safetensors", "--dtype", "bfloat16"]) == 0
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
    assert main(["export", str(language_run), str(folder), "--to", "hf", "--dtype", "float16"]) == 0
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float16
    refused = ["export", str(language_run), str(tmp_path / "x"), "--to", "hf", "--dtype", "int8"]
    assert "it takes one of float32, bfloat16, float16" in one_sentence(refused, capsys)
    assert "a pipeline keeps" in one_sentence([*refused[:3], "--to", "diffusers", "--dtype", "float32"], capsys)
    assert not (tmp_path / "x").exists()


def test_a_run_is_exported_tensor_by_tensor_in_shards_that_everybody_may_read(language_run, tmp_path):
    """The same folder as that of a model in memory, file by file; in shards, the same weights."""
    from siamesenorm.interop.huggingface import export

    opened = open_language_model(language_run)
    export(opened.model, tmp_path / "memory", opened.tokenizer)
    command = ["export", str(language_run), "--to", "hf"]
    umask = os.umask(0o027)
    try:
        assert main([*command, str(tmp_path / "whole")]) == 0
        assert main([*command, str(tmp_path / "shards"), "--shard-size", "20KB", "--no-remote-code"]) == 0
    finally:
        os.umask(umask)
    assert contents(tmp_path / "whole") == contents(tmp_path / "memory")
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "shards").iterdir()}
    assert modes == {0o640}
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 2
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "shards").state_dict()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    assert loaded.keys() == whole.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("changes", [["train.ema=0.5"], ["train.parameters=lora+norms", "init_from={run}", "lr=1"]])
def test_the_weights_of_a_checkpoint_are_read_one_by_one(language_run, tmp_path, changes):
    """Averaged ones, and matrices with their factors in them."""
    config = RunFolder(language_run).config().as_dict()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(write_yaml(config))
    train(resolve(str(recipe), [word.format(run=language_run) for word in changes]), tmp_path / "run")
    finished = load_file(tmp_path / "run" / "weights.safetensors")
    (tmp_path / "run" / "weights.safetensors").unlink()
    stored = open_stored(tmp_path / "run")
    assert stored.weights.kinds.keys() == finished.keys()
    for name, tensor in finished.items():
        assert torch.equal(stored.weights.read(name), tensor), name
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "w.safetensors"), "--to", "safetensors"]) == 0
    assert all(torch.equal(tensor, finished[name]) for name, tensor in load_file(tmp_path / "w.safetensors").items())


def test_a_size_of_shards_is_for_folders(language_run, tmp_path, capsys):
    command = ["export", str(language_run), str(tmp_path / "x"), "--to"]
    assert "with --to safetensors; it takes a Hugging Face folder" in one_sentence(
        [*command, "safetensors", "--shard-size", "1GB"], capsys
    )
    assert "--shard-size: 'much' is not allowed" in one_sentence([*command, "hf", "--shard-size", "much"], capsys)
    assert list(tmp_path.iterdir()) == []
