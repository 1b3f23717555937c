"""Comparisons that go on from one trained model: arms that begin as the same function, in one report, made once."""

import json

import pytest
import torch

from siamesenorm.data import save_tokenizer, train_bpe
from siamesenorm.data.held_out import LEAST
from siamesenorm.data.tensors import read_tensors
from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare.axes import make_grid
from siamesenorm.lab.compare.cell import CellOrder, run_cell
from siamesenorm.lab.compare.grafts import BOUND, open_graft_source
from siamesenorm.lab.compare.preparation import prepare_grid
from siamesenorm.lab.report.outcome import Comparison
from siamesenorm.lab.report.records import find_runs, read_records
from siamesenorm.lab.report.sentences import notes
from siamesenorm.lab.report.statistics import analyse
from siamesenorm.models.lm import LanguageModel
from siamesenorm.tasks import find_task
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve
from siamesenorm.train.trained import open_language_model

SHAPE = ["dim=16", "model.blocks=2", "model.heads=2", "ffn_dim=32", "kv_heads=1", "topology=pre", "model.qk_norm=none"]
SHORT = ["steps=3", "warmup=0", "batch_size=2", "sequence_length=64", "evaluation.every=3", "evaluation.sequences=70"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "run"
    train(resolve("lm-tiny", [*SHAPE, *SHORT, "data.train=python-docs", "tensorboard=false"]), folder)
    return folder


@pytest.fixture(scope="module")
def compared(source, tmp_path_factory):
    """Unchanged, grafted, LoRA, and LoRA on the graft, trained in this process."""
    out = tmp_path_factory.mktemp("compared")
    opened = open_graft_source(source)
    grid = asked(opened, out)
    prepared = prepare_grid(grid, out, source=opened)
    for progress in prepared.plan:
        order = CellOrder(progress.cell.config.as_dict(), str(progress.folder), prepared.provenance)
        assert run_cell(order, lambda message: None) == "finished"
    return out


def asked(opened, out, **changes):
    wanted = {
        "topologies": ["pre,siamese"], "parameters": ["all,lora+residual"], "lrs": ["1e-3"], "seeds": ["0"],
        "sets": [*SHORT, "data.train=python-docs", "lora.rank=2"],
    }  # fmt: skip
    return make_grid(**{**wanted, **changes}, source=opened, out=out)


def test_every_arm_begins_with_the_same_function(source, compared):
    model = open_language_model(source).model
    starts = set()
    for folder in find_runs([compared]):
        config = json.loads(json.dumps(resolve(str(folder)).as_dict()))
        starts.add((config["model"]["topology"], config["train"]["init_from"], config["train"]["parameters"]))
    copy, graft = (compared.resolve() / "grafts" / name / "weights.safetensors" for name in ("pre", "siamese"))
    assert starts == {
        (topology, str(place), parameters)
        for topology, place in (("pre", copy), ("siamese", graft))
        for parameters in ("all", "lora+residual")
    }
    unchanged = read_tensors(copy, "graft")[0]
    assert all(torch.equal(tensor, unchanged[name]) for name, tensor in model.state_dict().items())
    certificate = json.loads((graft.parent / "graft.json").read_text())
    assert certificate["fp32"]["largest_kl"] <= BOUND
    assert certificate["fp32"]["perplexity_before"] == pytest.approx(certificate["fp32"]["perplexity_after"], rel=1e-3)
    (config,) = {run.config.model for run in read_records(find_runs([compared])).runs if run.topology == "siamese"}
    grafted = LanguageModel(config, seed=0)  # as runs have it: eps is the graft's, which counts in so small a model
    grafted.load_state_dict(read_tensors(graft, "graft")[0])
    ids = torch.arange(24)[None]
    theirs, ours = model(ids).logits, grafted(ids).logits
    assert (ours - theirs).abs().max() < 1e-5 * theirs.std()


def test_runs_have_the_fields_that_their_graft_changes(source, tmp_path):
    opened = open_graft_source(source)
    cells = asked(opened, tmp_path, topologies=["pre,siamese,attnres,widen"], parameters=["all"]).cells()
    fields = {cell.topology: (cell.config.model.norm_eps, cell.config.model.embedding_scale) for cell in cells}
    assert set(fields) == {"pre", "siamese", "attnres:sum=true", "widen"}
    eps = opened.fields["norm_eps"]
    assert fields["pre"] == fields["attnres:sum=true"] == (eps, 1.0)
    assert fields["siamese"][0] > 100 * eps
    assert fields["widen"][1] < 1


def test_the_report_pairs_the_arms_and_names_the_source_with_its_loss(source, compared):
    records = read_records(find_runs([compared]))
    assert records.groups == ["parameters=all", "parameters=lora+residual"]
    assert not [note for note in notes(records) if "differ in more" in note]
    found = Comparison(records, analyse(records), compared)
    assert [part.training for part in found.parts] == ["all parameters", "lora+residual"]
    for part in found.parts:
        (comparison,) = part.analysis.best_lr
        assert (comparison.topology, comparison.baseline, comparison.difference.count) == ("siamese", "pre", 1)
        assert "first weights: those of run" in part.sentences[-1]
    page = found.write().read_text()
    config = records.runs[0].config
    task = find_task("language").for_evaluation(config)
    before = task.evaluate(open_language_model(source).model)["loss"]
    assert f"held-out loss before training is {before:.4f} on python-docs" in page
    assert "Where they start" in page
    (share,) = {
        r.parameters["trained"] for r in records.runs if "lora" in r.config.train.parameters and r.topology == "pre"
    }
    assert f"lora+residual in pre: {share:,.0f} (" in page
    assert "largest KL" in page
    said = json.loads((compared / "report.json").read_text())
    (graft,) = said["grafts"]
    assert graft["source"] == str(source.resolve())
    assert {row["parameters"] for row in said["runs"]} == {"all", "lora+residual"}


def test_the_same_comparison_again_makes_nothing_anew_and_knows_another_source(source, compared, monkeypatch):
    opened = open_graft_source(source)
    weights = compared / "grafts" / "siamese" / "weights.safetensors"
    before = weights.stat().st_mtime_ns
    with monkeypatch.context() as patched:
        patched.setattr("siamesenorm.lab.compare.grafts.graft", None)
        prepared = prepare_grid(asked(opened, compared), compared, source=opened)
    assert all(progress.kept for progress in prepared.plan)
    assert weights.stat().st_mtime_ns == before
    other = open_graft_source(source)
    with torch.no_grad():
        next(other.model.parameters()).add_(1)
    with pytest.raises(ConfigError, match="is not what it was"):
        prepare_grid(asked(other, compared), compared, source=other)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"topologies": ["pre,post"]}, "--graft: .*post"),
        ({"topologies": ["pre,siamse"]}, "--topologies: .*'siamse'"),
        ({"topologies": ["pre,siamese:form=hybrid_pre"]}, "--graft: "),
        ({"sets": ["model.dim=32"]}, "--set: model.dim is not allowed with --graft"),
        ({"sets": ["init_model=true"]}, "--set: train.init_model is not allowed with --graft"),
        ({"depths": ["2,4"]}, "--depths: is not allowed with --graft"),
        ({"recipe": "dit-digits", "parameters": ()}, "a recipe of diffusion is not allowed"),
        ({"parameters": ["lora"]}, "--parameters: 'lora' is not allowed with a graft to siamese, .* lora.residual"),
        ({"parameters": ["heads"]}, "train.parameters: 'heads' is not allowed; it takes all, lora"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_written(source, tmp_path, changes, sentence):
    opened = open_graft_source(source)
    with pytest.raises(ConfigError, match=sentence) as refused:
        prepare_grid(asked(opened, tmp_path / "out", **changes), tmp_path / "out", source=opened)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_data_of_another_tokenizer_are_refused(source, tmp_path):
    save_tokenizer(train_bpe(["def " * 50], 258), tmp_path / "tokenizer.json")
    opened, sets = open_graft_source(source), [*SHORT, "data.train=python-docs", f"data.tokenizer={tmp_path}"]
    with pytest.raises(ConfigError, match=r"^data.tokenizer: it is another one than that of --graft"):
        prepare_grid(asked(opened, tmp_path / "out", sets=sets), tmp_path / "out", source=opened)


def test_a_source_that_is_none_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^--graft: .* is no folder"):
        open_graft_source(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"^--graft: .* is not there"):
        open_graft_source(tmp_path)


def test_what_is_trained_is_an_axis_beside_optimizers():
    cells = make_grid(
        topologies=["pre"], lrs=["1e-3"], seeds=["0"], optimizers=["adamw,muon"], parameters=["all,blocks.0.*"]
    ).cells()
    assert [cell.settings for cell in cells] == [
        (f"optimizer={kind}", f"parameters={what}") for kind in ("adamw", "muon") for what in ("all", "blocks.0.*")
    ]
    assert LEAST <= 70 * 64  # what the comparisons above are measured on
