"""``siamesenorm export``: targets that are there, dtypes, and folders that transformers loads."""

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

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
