"""``siamesenorm export``: targets that are there, dtypes, and folders that transformers loads."""

import os
import shutil
import threading

import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from failing_files import contents
from siamesenorm.cli import main
from siamesenorm.train.trained import open_language_model

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
    reader.join()
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
