"""The language task: perplexity, arithmetic choices, likelihoods, frequencies, costs."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from siamesenorm.data import arithmetic_choices, score_choices
from siamesenorm.data.tokenizer import ByteTokenizer
from siamesenorm.errors import DataError
from siamesenorm.models.lm import count_lm, generate
from siamesenorm.tasks import TASKS, find_task
from siamesenorm.tasks.base import Ranks
from siamesenorm.tasks.harness import make_adapter
from siamesenorm.tasks.language import LanguageTask, perplexity
from siamesenorm.tasks.likelihood import log_likelihoods, score_rows
from train.small_runs import tiny

EVALUATED = ("evaluation.every=1", "evaluation.sequences=6")


def same(values: dict[str, float]) -> dict[str, float]:
    return values


def task(*overrides: str) -> LanguageTask:
    made = find_task("language")(tiny(*overrides))
    assert isinstance(made, LanguageTask)
    return made


def evaluate(t: LanguageTask, model: torch.nn.Module) -> dict[str, float]:
    return t.evaluate(model.eval(), Ranks(final=True))


def test_known_tasks():
    assert list(TASKS) == ["language", "classification", "diffusion"]
    with pytest.raises(ValueError, match="takes one of language, classification, diffusion"):
        find_task("speech")


def test_perplexity_is_that_of_all_scored_tokens():
    t = task(*EVALUATED)
    model = t.build_model()
    (data,) = t.held_out.values()
    nats, tokens = 0.0, 0
    with torch.no_grad():
        for batch in data.batches(1):
            logits = model.eval()(batch["input_ids"]).logits
            nats += float(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"))
            tokens += int((batch["labels"] >= 0).sum())
    assert tokens == 6 * 16
    got = evaluate(t, model)
    assert got["loss"] == pytest.approx(nats / tokens, rel=1e-6)
    assert got["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-6)


def test_ranks_together_measure_what_one_measures():
    t = task(*EVALUATED)
    model = t.build_model()
    whole = evaluate(t, model)
    parts: list[dict[str, float]] = []
    for rank in range(3):
        t.evaluate(model, Ranks(rank=rank, world_size=3, average=lambda v: parts.append(v) or v, final=True))
    nats, tokens = sum(part["nats"] for part in parts), sum(part["tokens"] for part in parts)
    assert nats / tokens == pytest.approx(whole["loss"], rel=1e-6)


def test_every_number_of_an_evaluation_is_the_same_from_one_rank_and_from_three():
    """Ranks know means of their sums alone: what is divided by a number of the whole text must not be one of these."""
    t = task("data.validation=[arithmetic:problems=240]", "evaluation.every=1")
    model = t.build_model()
    whole, parts = evaluate(t, model), []
    for rank in range(3):
        t.evaluate(model, Ranks(rank=rank, world_size=3, average=lambda v: parts.append(v) or v))
    means = {name: sum(part[name] for part in parts) / 3 for name in parts[0]}
    assert "bits_per_byte" in whole
    assert t.evaluate(model, Ranks(world_size=3, average=lambda v: means)) == pytest.approx(whole, rel=1e-6)


def test_several_corpora_are_measured_each_and_together():
    t = task("data.train=[python-docs, arithmetic]", "data.weights=[1, 1]", *EVALUATED)
    got = evaluate(t, t.build_model())
    assert {"perplexity", "perplexity/python-docs (validation)", "perplexity/arithmetic (validation)"} <= got.keys()


def test_bits_per_byte_of_a_byte_model_are_its_bits_per_token():
    t = task("data.validation=[arithmetic:problems=240]", "evaluation.every=1")
    got = evaluate(t, t.build_model())
    (data,) = t.held_out.values()
    per_token = got["loss"] / math.log(2)
    assert got["bits_per_byte"] == pytest.approx(per_token * len(data.tokens) / data.tokens.text_bytes)


def test_infinite_losses_have_infinite_perplexity():
    assert perplexity(1e4) == math.inf


# Likelihoods -----------------------------------------------------------------------------------------


def test_likelihood_is_the_sum_over_the_continuation():
    t, tokenizer = task(), ByteTokenizer()
    model = t.build_model().eval()
    pairs = [("1 + 1 =", " 2\n"), ("a much longer context than the other", "!"), ("", "xyz"), ("abc", "")]
    got = log_likelihoods(model, tokenizer, pairs, 512)
    for (context, continuation), total in zip(pairs, got, strict=True):
        ids = [tokenizer.eos_id, *tokenizer.encode(context + continuation)]
        with torch.no_grad():
            steps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        first = len(ids) - len(tokenizer.encode(continuation))
        expected = sum(float(steps[place - 1, ids[place]]) for place in range(first, len(ids)))
        assert total == pytest.approx(expected, abs=1e-4)


def test_a_continuation_may_fill_the_model_and_no_more():
    t = task()
    model, longest = t.build_model().eval(), t.model_config.max_length
    (found,) = log_likelihoods(model, ByteTokenizer(), [("a", "b" * longest)], longest)
    assert found < 0
    with pytest.raises(DataError, match=f"{longest + 1:,} tokens is not allowed; it takes up to .* = {longest:,}"):
        log_likelihoods(model, ByteTokenizer(), [("a", "b" * (longest + 1))], longest)


def test_of_a_long_context_the_end_is_seen():
    t, tokenizer = task("max_length=32"), ByteTokenizer()
    model = t.build_model().eval()
    (got,) = log_likelihoods(model, tokenizer, [("x" * 100 + "end", "ab")], 32)
    context = tokenizer.encode("x" * 100 + "end")[-31:]
    assert got == pytest.approx(score_rows(model, [(context, tokenizer.encode("ab"))])[0].total, abs=1e-5)


class Calculator(torch.nn.Module):
    """Gives the right answer of every problem it is asked, as logits."""

    def __init__(self, questions) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.right = {question.context: question.options[question.answer] for question in questions}

    def forward(self, input_ids, attention_mask=None, logits_to_keep=0):
        logits = torch.zeros(*input_ids.shape, 258)
        for row, ids in enumerate(input_ids.tolist()):
            start = max(place for place, token in enumerate(ids) if token == 256)  # padding lies before
            text = bytes(token for token in ids[start + 1 :]).decode()
            context = text[: text.index("=") + 1]
            for place, byte in enumerate((context + self.right[context]).encode()):
                if start + place < len(ids):
                    logits[row, start + place, byte] = 50.0
        return type("Output", (), {"logits": logits[:, -logits_to_keep:]})


def test_a_model_that_can_calculate_scores_1_and_one_that_cannot_a_quarter():
    questions = arithmetic_choices(40)
    tokenizer = ByteTokenizer()
    model = Calculator(questions)
    assert score_choices(questions, lambda pairs: log_likelihoods(model, tokenizer, pairs, 512)).accuracy == 1.0
    model.right = dict.fromkeys(model.right, " ?\n")
    untrained = score_choices(questions, lambda pairs: log_likelihoods(model, tokenizer, pairs, 512)).accuracy
    assert untrained < 0.6


def test_evaluation_reports_arithmetic_of_the_training_problems_kind():
    t = task("data.train=arithmetic:problems=2400,digits=1,product_digits=1", "evaluation.every=1", "arithmetic=10")
    got = evaluate(t, t.build_model())
    assert 0 <= got["arithmetic"] <= 1
    assert {name for name in got if name.startswith("arithmetic/")} == {"arithmetic/1_digits"}


class Request:
    """As the harness hands them over."""

    def __init__(self, *args: str) -> None:
        self.args = args


def test_the_harness_gets_likelihoods_whole_texts_and_what_greedy_decoding_says():
    t, tokenizer = task("max_length=32"), ByteTokenizer()
    model = t.build_model().eval()
    adapter = make_adapter(object, model, tokenizer, 32)
    ((total, greedy),) = adapter.loglikelihood([Request("abc", "de")])
    assert total == pytest.approx(log_likelihoods(model, tokenizer, [("abc", "de")], 32)[0])
    assert greedy is False
    scores = model(torch.tensor([[256, *b"abc"]])).logits[0, -1]
    best, worst = int(scores.argmax()), int(scores.argmin())
    assert [score_rows(model, [([256, *b"abc"], [token])])[0].greedy for token in (best, worst)] == [True, False]
    text = "a text of more than thirty-two bytes, in pieces"
    (rolling,) = adapter.loglikelihood_rolling([Request(text)])
    ids = tokenizer.encode(text)
    pieces = [([256], ids[:31]), ([ids[30]], ids[31:])]
    assert rolling == pytest.approx(sum(score_rows(model, [piece])[0].total for piece in pieces), abs=1e-3)
    assert adapter.loglikelihood_rolling([Request("short")])[0] == pytest.approx(
        log_likelihoods(model, tokenizer, [("", "short")], 32)[0], abs=1e-4
    )


def test_the_harness_gets_greedy_answers_up_to_a_stop():
    t, tokenizer = task("max_length=32"), ByteTokenizer()
    model = t.build_model().eval()
    adapter = make_adapter(object, model, tokenizer, 32)
    prompt = "a question of many more bytes than the model can take"
    (whole,) = adapter.generate_until([Request(prompt, {"max_gen_toks": 8})])
    ids = tokenizer.encode(prompt)[8 - 32 :]
    assert whole == tokenizer.decode(generate(model, [ids], max_new_tokens=8, stop_tokens=[256])[0])
    assert whole
    for until in (whole[1:], [whole[1:], "never said"]):
        assert adapter.generate_until([Request(prompt, {"until": until, "max_gen_toks": 8})]) == [whole[:1]]
    copied = torch.nn.Module()  # as DDP holds it
    copied.module = model
    adapter = make_adapter(object, copied, tokenizer, 32)
    assert adapter.generate_until([Request(prompt, {"max_gen_toks": 8})]) == [whole]


def test_a_mixture_of_experts_reports_its_balance_and_counts_active_experts():
    t = task("model.moe.experts=4", "model.moe.top_k=2", "model.moe.expert_dim=8")
    model = t.build_model()
    batch = next(t.loader(rank=0, world_size=1, sample=0, pin_memory=False))
    metrics = t.loss(model, batch).metrics
    assert metrics.keys() == {"loss", "balance_loss", "router_entropy"}
    assert 0.5 < float(metrics["balance_loss"]) < 2
    assert t.flops_per_sample(model) == pytest.approx(16 * count_lm(t.model_config, length=16).flops_training)


# Data ------------------------------------------------------------------------------------------------


def test_chance_loss_is_the_entropy_of_frequencies():
    t = task()
    counts = np.bincount(t.data.windows(np.arange(len(t.data))).ravel()[: 2**18])
    shares = counts[counts > 0] / counts.sum()
    assert t.chance_loss() == pytest.approx(float(-(shares * np.log(shares)).sum()), abs=0.02)
    assert 2.9 < t.chance_loss() < 3.4


BAD = {
    "data.train=nowhere": "neither a file nor a folder",
    "data.train=arithmetic:digit=3": "not an option",
    "vocab_size=100": "model.vocab_size = 100 is not allowed; it takes 258 or more",
    "data.tokenizer=nowhere.json": "tokenizer",
    "data.weights=[0]": "weights",
}


@pytest.mark.parametrize("override", BAD)
def test_data_that_cannot_be_used_is_one_sentence(override):
    with pytest.raises(DataError, match=BAD[override]) as caught:
        task(override)
    assert "\n" not in str(caught.value)


def test_arrays_without_held_out_text_ask_for_some(tmp_path):
    np.arange(4096, dtype="<u2").__mod__(250).astype("<u2").tofile(tmp_path / "part.npy")
    arrays = f"data.train={tmp_path / 'part.npy'}"
    with pytest.raises(DataError, match=r"data.validation: .* evaluation.every=null"):
        task(arrays, "evaluation.every=1")
    assert len(task(arrays).data) == 255
    assert evaluate(task(arrays, *EVALUATED, "data.validation=[python-docs]"), task().build_model())["loss"] > 0


@pytest.mark.parametrize("topology", ["siamese", "pre"])
def test_costs_are_those_of_the_counted_model(topology):
    t = task(f"topology={topology}", "dim=32", "blocks=3")
    model = t.build_model()
    counts = count_lm(t.model_config, length=16)
    assert t.flops_per_sample(model) == pytest.approx(16 * counts.flops_training)
    assert t.parameters == pytest.approx(counts.total, rel=0.05)
    assert 16 * 2 * 3 * 32 == t.least_activations(True) < t.least_activations(False)
    assert t.least_activations(False) == pytest.approx(16 * counts.activation_bytes / 4)
