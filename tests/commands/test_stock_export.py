"""Models to and from other people's forms on the command line, and `siamesenorm.load` of whatever came of it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import siamesenorm
from siamesenorm.cli import main
from siamesenorm.interop.huggingface import export
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.train.trained import open_language_model

from .refusals import one_sentence

SHAPE = {"vocab_size": 258, "dim": 32, "blocks": 2, "heads": 4, "ffn_dim": 48, "max_length": 64, "topology": "pre"}
IDS = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def ours(tmp_path):
    """A folder of a Pre-Norm model, and what it says."""
    model = LanguageModel(LMConfig(**SHAPE), seed=0).eval()
    export(model, tmp_path / "ours", tokenizer="byte", remote_code=False)
    with torch.no_grad():
        return tmp_path / "ours", model(IDS).logits


@torch.no_grad()
def test_a_folder_of_ours_goes_out_as_llama_and_comes_back_without_a_word(ours, tmp_path, capsys):
    folder, logits = ours
    capsys.readouterr()
    assert main(["export", str(folder), str(tmp_path / "llama"), "--to", "llama"]) == 0
    assert main(["import", str(tmp_path / "llama"), str(tmp_path / "back"), "--no-remote-code"]) == 0
    assert main(["graft", str(tmp_path / "llama"), str(tmp_path / "grafted"), "--to", "siamese", "--tokens", "64"]) == 0
    assert capsys.readouterr().err == ""  # no bar, no warning
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    assert type(stock) is LlamaForCausalLM
    torch.testing.assert_close(stock(IDS).logits, logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "llama")("The ").input_ids == list(b"The ")
    for name in ("ours", "llama", "back", "grafted"):
        model, tokenizer = siamesenorm.load(tmp_path / name)
        assert not model.training
        apart = (model(IDS).logits - logits).abs().max()
        assert apart < (1e-2 if name == "grafted" else 1e-5) * logits.abs().max()  # eps counts twice in siamese
        assert tokenizer is not None
        assert tokenizer.encode("The ") == list(b"The ")
    assert siamesenorm.load(tmp_path / "llama", dtype=torch.bfloat16).model.embedding.weight.dtype == torch.bfloat16


def test_a_run_is_loaded_with_its_tokenizer(language_run):
    model, tokenizer = siamesenorm.load(language_run)
    trained = open_language_model(language_run)
    torch.testing.assert_close(model(IDS).logits, trained.model(IDS).logits)
    assert tokenizer.encode("The ") == trained.tokenizer.encode("The ")


def test_what_is_no_model_is_one_sentence(tmp_path):
    (tmp_path / "file.gguf").write_text("no")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "bert"}')
    cases = {"nothing": "is no model; it takes a run", ".": "is no model", "file.gguf": "cannot be read as GGUF"}
    for name, sentence in {**cases, "other": "model_type 'bert' cannot be imported"}.items():
        with pytest.raises(ValueError, match=sentence) as refused:
            siamesenorm.load(tmp_path / name)
        assert "\n" not in str(refused.value)


def test_what_a_run_is_not_is_named(language_run, tmp_path, capsys):
    command = ["export", str(language_run), str(tmp_path / "out"), "--to"]
    said = one_sentence([*command, "llama"], capsys)
    assert "topology = 'siamese:form=hybrid_pre' cannot be carried by llama, which has 'pre'" in said
    assert "hf carries every model" in said
    assert "it takes one of diffusers, gguf, hf, safetensors, llama" in one_sentence([*command, "lama"], capsys)
    assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_gguf_on_the_command_line(ours, tmp_path, capsys):
    pytest.importorskip("gguf")
    folder, logits = ours
    command = ["export", str(folder), str(tmp_path / "model.gguf"), "--to", "gguf"]
    assert "--no-tokenizer leaves it behind" in one_sentence(command, capsys)
    command.append("--no-tokenizer")
    assert main(command) == 0
    assert "is there already" in one_sentence(command, capsys)
    assert main([*command, "--overwrite", "--dtype", "float16"]) == 0
    (tmp_path / "mine.gguf").write_text("mine")
    mine = [*command[:2], str(tmp_path / "mine.gguf"), *command[3:], "--overwrite"]
    assert "is not replaced; it is no file that an export wrote" in one_sentence(mine, capsys)
    assert main(["import", str(tmp_path / "model.gguf"), str(tmp_path / "imported"), "--no-remote-code"]) == 0
    for name in ("model.gguf", "imported"):
        model, tokenizer = siamesenorm.load(tmp_path / name)
        assert tokenizer is None
        torch.testing.assert_close(model(IDS).logits, logits, rtol=2e-2, atol=2e-2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imported", "mine.gguf", "model.gguf", "ours"]
