"""``siamesenorm graft``: another topology, the same function, with a certificate in words and as a file."""

import copy
import json
import math

import pytest
import torch

from siamesenorm.cli import main
from siamesenorm.interop.huggingface import SiameseNormForCausalLM, export
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.models.lm.grafting import compare_predictions
from siamesenorm.residual.grafts import graft_text
from siamesenorm.residual.ramp import ramps_of

SHAPE = {"vocab_size": 256, "dim": 32, "blocks": 3, "heads": 4, "ffn_dim": 48, "max_length": 64}
IDS = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))


def source(folder, **fields):
    model = LanguageModel(LMConfig(**{**SHAPE, "topology": "pre", "qk_norm": "head", **fields}), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    export(model, folder, tokenizer="byte", remote_code=False)
    return model.eval()


@pytest.mark.parametrize("topology", ["siamese", "attnres", "gr", "ihc", "hyper", "dense", "x0"])
def test_the_function_stays_and_the_certificate_says_so(topology, tmp_path, capsys):
    model = source(tmp_path / "pre")
    command = ["graft", str(tmp_path / "pre"), str(tmp_path / "out"), "--to", topology, "--tokens", "128"]
    assert main([*command, "--no-remote-code"]) == 0
    assert "fp32: KL" in capsys.readouterr().out
    certificate = json.loads((tmp_path / "out" / "graft.json").read_text())
    assert certificate["fp32"]["largest_kl"] < 1e-6
    assert certificate["fp32"]["top1_agreement"] == 1
    assert certificate["fp32"]["tokens"] == 128
    assert certificate["bf16"]["mean_kl"] < 0.05
    grafted = SiameseNormForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert grafted.config.topology == graft_text(topology)
    with torch.no_grad():
        expected = model(IDS).logits
        assert (grafted(IDS).logits - expected).abs().max() < 1e-3 * expected.abs().max()
    assert main([*command, "--no-remote-code"]) == 2  # not over another
    assert main([*command, "--no-remote-code", "--overwrite"]) == 0  # its own, certificate and all


def test_what_cannot_be_had_is_one_sentence(tmp_path, capsys):
    source(tmp_path / "pre")
    source(tmp_path / "post", topology="post")
    cases = {
        ("pre", "sandwich"): "nothing is written without --force; --ramp STEPS begins with",
        ("pre", "reordered"): "cannot become the norm that reordered has inside attention",
        ("pre", "nothing"): "unknown name",
        ("pre", "siamese:prores=9"): "prores is not allowed",
        ("post", "siamese"): "it takes a model of pre",
        ("absent", "siamese"): "absent",
    }
    for (folder, topology), words in cases.items():
        assert main(["graft", str(tmp_path / folder), str(tmp_path / "out"), "--to", topology]) == 2, topology
        said = capsys.readouterr().err
        assert words in said
        assert len([line for line in said.splitlines() if line.startswith("siamesenorm:")]) == 1
        assert not (tmp_path / "out").exists()


def test_above_the_bound_nothing_is_written_unless_told(tmp_path, capsys):
    source(tmp_path / "pre")
    command = ["graft", str(tmp_path / "pre"), str(tmp_path / "out"), "--to", "mhc", "--tokens", "64", "--bound", "0"]
    assert main(command) == 2
    assert "is above 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*command, "--force", "--no-remote-code"]) == 0
    assert (tmp_path / "out" / "graft.json").is_file()


def test_a_short_text_will_do_and_the_source_takes_nothing_in(tmp_path, capsys):
    source(tmp_path / "pre")
    (tmp_path / "text").write_text("a short text")
    (tmp_path / "shortest").write_text("a")
    command = ["graft", str(tmp_path / "pre"), "--to", "widen", "--no-remote-code", "--text"]
    assert main([*command, str(tmp_path / "text"), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "graft.json").read_text())["fp32"]["tokens"] == 12
    before = sorted((tmp_path / "pre").iterdir())
    for text, out, words in (
        ("shortest", "other", "1 tokens are too few"),
        ("text", "pre/inside", "it lies in the source"),
        ("text", "pre", "it lies in the source"),
    ):
        assert main([*command, str(tmp_path / text), str(tmp_path / out), "--overwrite"]) == 2
        assert words in capsys.readouterr().err
    assert sorted((tmp_path / "pre").iterdir()) == before
    assert main(["graft", str(tmp_path / "pre"), str(tmp_path / "other"), "--to", "siamese", "--at", "3"]) == 2
    assert "is a model and no run" in capsys.readouterr().err


@pytest.mark.parametrize("topology", ["sandwich", "siamese:form=hybrid_pre"])
def test_what_is_not_exact_comes_in_by_a_ramp_and_settles(topology, tmp_path, capsys):
    model = source(tmp_path / "pre")
    command = ["--tokens", "256", "--no-remote-code"]
    graft = ["graft", str(tmp_path / "pre"), str(tmp_path / "out"), "--to", topology, *command]
    assert main([*graft, "--ramp", "5"]) == 0
    said = capsys.readouterr().out
    assert all(f"{stage}: KL" in said for stage in ("copied", "calibrated", "regressed", "fp32"))
    certificate = json.loads((tmp_path / "out" / "graft.json").read_text())
    assert certificate["fp32"]["largest_kl"] < 1e-9
    stages = certificate["stages"]
    assert stages[certificate["kept"]]["mean_kl"] < stages["copied"]["mean_kl"]
    blended = SiameseNormForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(blended(IDS).logits, model(IDS).logits)
    settle = ["graft", str(tmp_path / "out"), str(tmp_path / "end"), "--to", topology, *command]
    assert main(settle) == 2
    assert "b = 0 only" in capsys.readouterr().err
    assert main([*graft, "--force", "--overwrite"]) == 0  # the topology alone, at once
    alone = SiameseNormForCausalLM.from_pretrained(tmp_path / "out")
    assert alone.config.topology == topology
    for ramp in ramps_of(blended):
        ramp.set_step(10)
    export(blended, tmp_path / "done", tokenizer="byte", remote_code=False)
    settle[1] = str(tmp_path / "done")
    assert main(settle) == 0
    ended = SiameseNormForCausalLM.from_pretrained(tmp_path / "end").eval()
    assert ended.config.topology == topology
    with torch.no_grad():
        torch.testing.assert_close(ended(IDS).logits, blended(IDS).logits)  # siamese has a fused step


def test_a_norm_on_queries_and_keys_grows_in(tmp_path, capsys):
    model = source(tmp_path / "pre", qk_norm="none")
    graft = ["graft", str(tmp_path / "pre"), str(tmp_path / "out"), "--to", "pre", "--tokens", "128"]
    assert main([*graft, "--qk-norm", "head", "--ramp", "5", "--no-remote-code"]) == 0
    grown = SiameseNormForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert grown.config.qk_norm == "head"
    with torch.no_grad():
        assert torch.equal(grown(IDS).logits, model(IDS).logits)
    assert main([*graft, "--qk-norm", "all"]) == 2
    assert "it takes head or projection" in capsys.readouterr().err
    assert main([*graft, "--overwrite", "--to", "siamese", "--ramp", "5"]) == 2
    assert "has the source's function at once" in capsys.readouterr().err


def test_a_model_whose_predictions_are_no_numbers_agrees_with_nothing():
    model = LanguageModel(LMConfig(**SHAPE, topology="pre"), seed=0).eval()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.residual.final_norm.weight[0] = math.nan
    found = compare_predictions(model, other, IDS)
    assert found.largest_kl == found.mean_kl == math.inf
