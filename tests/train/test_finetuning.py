"""Runs on examples: the loss is of answers alone, in training and held out, for any number of processes, resumed."""

import json

import pytest
import torch

from siamesenorm.data import IGNORED
from siamesenorm.tasks import find_task
from siamesenorm.tasks.corpora import load_saved_tokenizer
from siamesenorm.train.folder import RunFolder
from siamesenorm.train.loop import train
from siamesenorm.train.trained import open_language_model

from .small_runs import evaluations, losses, tiny, train_until, weights
from .worlds import run_world


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Questions of very different lengths, so that batches have more and fewer answers."""
    file = tmp_path_factory.mktemp("examples") / "sums.jsonl"
    lines = [{"prompt": f"{n} + {n}?" * (1 + n % 3), "answer": f"{2 * n}" * (1 + n % 5)} for n in range(300)]
    lines.append({"messages": [{"role": "user", "content": "x" * 199}, {"role": "assistant", "content": "y"}]})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def on(examples, *changes):
    return tiny(
        f"data.train={examples}", "sequence_length=96", "document_masking=true", "steps=4", "warmup=0",
        "evaluation.every=4", "checkpoint.every=2", "logging.every=1", *changes,
    )  # fmt: skip


def test_the_loss_is_the_mean_over_answers(examples, tmp_path):
    config = on(examples, "steps=1", "lr=1e-30", "micro_batch_size=1")
    result = train(config, tmp_path / "run")
    task = find_task("language")(config)
    model = open_language_model(tmp_path / "run").model
    batch = next(task.loader(rank=0, world_size=1, sample=0, pin_memory=False))
    (held_out,) = task.held_out.values()
    for rows, found in ((batch, result.loss), (next(iter(held_out.batches(1000))), result.evaluation["loss"])):
        logits = model(rows["input_ids"], positions=rows["positions"], document_ids=rows["document_ids"]).logits
        nats = torch.nn.functional.cross_entropy(
            logits.double().flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        )
        assert found == pytest.approx(nats.item() / (rows["labels"] != IGNORED).sum().item(), rel=1e-5)
    said = (tmp_path / "run/events.jsonl").read_text()
    assert "longer than 96 tokens: 0 cut, 1 left out" in said
    assert RunFolder(tmp_path / "run").status()["held_out"]["tokens"] == held_out.scored()
    assert task.chance_loss() < 3  # ten digits and an end, not all that stands in questions


def run_in(world, config, folder):
    return train(config, folder, world=world).state


def test_processes_share_the_answers_and_a_stopped_run_resumes_bit_by_bit(examples, tmp_path):
    base = tmp_path / "base"
    train(tiny("steps=1", "warmup=0"), base)
    config = on(examples, f"init_from={base}", "parallel.device=cpu")
    train(config, tmp_path / "alone")
    train_until(4, config, tmp_path / "stopped")
    train(config, tmp_path / "stopped")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "alone")
    assert run_world(2, run_in, config, tmp_path / "two") == ["finished"] * 2
    for step, loss in losses(tmp_path / "alone").items():
        assert losses(tmp_path / "two")[step] == pytest.approx(loss, rel=1e-5)
    assert evaluations(tmp_path / "two")[4]["loss"] == pytest.approx(
        evaluations(tmp_path / "alone")[4]["loss"], rel=1e-5
    )
    assert weights(tmp_path / "two").keys() == weights(tmp_path / "alone").keys()


def test_a_run_carries_the_template_that_it_learnt(examples, tmp_path):
    for template, carried in (("auto", True), ("verbatim", False)):
        file = examples
        if not carried:
            file = tmp_path / "pairs.jsonl"
            file.write_text("\n".join(examples.read_text().splitlines()[:300]), encoding="utf-8")
        folder = tmp_path / template
        train(on(file, "steps=1", f"data.template={template}"), folder)
        said = json.loads((folder / "tokenizer_config.json").read_text())
        assert ("chat_template" in said) == carried
        assert load_saved_tokenizer(folder).eos_id == 256
    again = on(examples, "steps=1", f"data.tokenizer={tmp_path / 'auto'}", "data.template=chat")
    for first, second in zip(*(find_task("language")(c).data.corpora for c in (again, on(examples))), strict=True):
        assert first.read(0, len(first)).tolist() == second.read(0, len(second)).tolist()
    pytest.importorskip("transformers")
    from typer.testing import CliRunner

    from siamesenorm.cli import app

    result = CliRunner().invoke(app, ["export", str(tmp_path / "auto"), str(tmp_path / "hf"), "--to", "hf"])
    assert result.exit_code == 0, result.output
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    turns = [{"role": "user", "content": "7 + 7?7 + 7?"}, {"role": "assistant", "content": "141414"}]
    ids = theirs.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
    (corpus,) = find_task("language")(again).data.corpora
    learnt = corpus.read(0, len(corpus)).tolist()
    assert any(learnt[start : start + len(ids)] == ids for start in range(len(learnt)))


def test_named_examples_are_held_out_whole_and_the_others_learnt_whole(examples, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "what?", "answer": "that"}) + "\n", encoding="utf-8")
    task = find_task("language")(on(examples, f"data.validation={other}"))
    assert task.held_out_sizes() == {"tokens": len(" that") + 1}
    assert "300 examples" in task.notes()[0]
