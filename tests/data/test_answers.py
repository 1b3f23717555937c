"""Examples to fine-tune on: what is learnt of them, how they are packed and held out, what is wrong with a line."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siamesenorm.data import (
    IGNORED,
    ByteTokenizer,
    DataError,
    TrainingData,
    ValidationData,
    tokens_in_memory,
    train_bpe,
)
from siamesenorm.data.answers import answer_tokens, best_fit
from siamesenorm.data.chat import PLAIN
from siamesenorm.data.examples import is_examples
from siamesenorm.data.tokenizer import END_OF_DOCUMENT

BYTE = ByteTokenizer()
TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "It is fünf."},
    {"role": "user", "content": "And 4?"},
    {"role": "assistant", "content": "9"},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(path, *examples):
    path.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
    return str(path)


def learnt(batch, row=0):
    labels = batch["labels"][row].numpy()
    return labels[labels != IGNORED].tolist()


def pairs(count, size=20):
    return [{"prompt": f"question {n}", "answer": f"{n}" * size} for n in range(count)]


@pytest.mark.parametrize("name", ["answer", "completion", "response"])
def test_only_answers_and_their_ends_are_learnt_each_behind_its_prompt(tmp_path, name):
    file = write(tmp_path / "a.jsonl", {"prompt": "ab", name: "xyz"}, {"prompt": "cd", name: "uv"})
    tokens = answer_tokens(file, None, template="verbatim", sequence_length=12)
    batch = TrainingData(tokens, 12, document_masking=True).batch(np.arange(1))
    assert batch["input_ids"][0].tolist() == [*b"abxyz", 256, *b"cduv", 256, 256]
    assert batch["labels"][0].tolist() == [-100, *b"xyz", 256, -100, -100, *b"uv", 256, -100, -100]
    assert batch["document_ids"][0].tolist() == [0] * 6 + [1] * 5 + [2]
    assert batch["positions"][0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0]
    held_out = ValidationData(tokens, 12, document_masking=True)
    (rows,) = held_out.batches(1)
    assert learnt(rows) == learnt(batch) == [*b"xyz", 256, *b"uv", 256]
    assert held_out.scored() == 7
    within = rows["document_ids"][0].tolist()
    assert within == [0] + [1] * 6 + [2] * 5  # an example sees itself alone there too


def test_every_answer_of_a_conversation_is_learnt_and_turns_see_each_other(tmp_path):
    file = write(tmp_path / "a.jsonl", {"messages": [*TURNS, {"role": "user", "content": "unanswered"}]})
    tokens = answer_tokens(file, None, sequence_length=128)
    batch = TrainingData(tokens, 128, document_masking=True).batch(np.arange(1))
    assert learnt(batch) == [*" It is fünf.".encode(), 256, *b" 9", 256]
    text = BYTE.decode(batch["input_ids"][0].tolist())
    assert text.startswith(
        "System: Be short.\n\nUser: 2 + 3?\n\nAssistant: It is fünf.\n\nUser: And 4?\n\nAssistant: 9"
    )
    ids = batch["document_ids"][0].numpy()
    scored = np.flatnonzero(batch["labels"][0].numpy() != IGNORED)
    assert set(ids[scored].tolist()) == {0}  # the end of an answer is no border between documents


def test_the_plain_template_is_the_one_that_runs_carry(tmp_path):
    from transformers.utils.chat_template_utils import render_jinja_template

    file = write(tmp_path / "a.jsonl", {"messages": TURNS})
    ids = answer_tokens(file, None, sequence_length=128).read(0, 128)
    words = {"chat_template": PLAIN, "eos_token": END_OF_DOCUMENT}
    text = render_jinja_template([TURNS], **words)[0][0]
    whole = BYTE.encode_with_special(text)[0]
    assert np.array_equal(ids[: len(whole)], whole)
    assert (ids[len(whole) :] == 256).all()
    prompt = render_jinja_template([TURNS[:2]], add_generation_prompt=True, **words)[0][0]
    assert text.startswith(prompt)


def tokenizer_folder(tmp_path, **settings):
    """A byte-level BPE with the tokens of ChatML."""
    text = json.loads(train_bpe(["User: Assistant: answer " * 9], 300).to_json())
    for word in ("<|im_start|>", "<|im_end|>"):
        number = max(token["id"] for token in text["added_tokens"] + [{"id": max(text["model"]["vocab"].values())}]) + 1
        text["added_tokens"].append({**text["added_tokens"][0], "id": number, "content": word})
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(text), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.mark.parametrize("end", ["<|im_end|>", END_OF_DOCUMENT])
def test_a_chat_template_makes_the_tokens_that_transformers_makes(tmp_path, end):
    from transformers import PreTrainedTokenizerFast

    folder = tokenizer_folder(tmp_path, chat_template=CHATML, eos_token=end)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token=end)
    theirs.chat_template = CHATML
    expected = theirs.apply_chat_template(TURNS, tokenize=True, return_dict=True)["input_ids"]
    file = write(tmp_path / "a.jsonl", {"messages": TURNS})
    tokens = answer_tokens(file, None, str(folder), sequence_length=96)
    assert tokens.eos_id == theirs.convert_tokens_to_ids(end)
    ids = tokens.read(0, 96).tolist()
    assert ids[: len(expected)] == expected
    kept = learnt(TrainingData(tokens, 96, document_masking=True).batch(np.arange(1)))
    ends = "<|im_end|>" if end == "<|im_end|>" else "<|im_end|>\n"
    told = theirs.decode(kept, skip_special_tokens=False)
    assert told == f"It is fünf.{ends}9{ends}" + ("" if end == "<|im_end|>" else end)


def test_templates_that_hide_the_answer_or_refuse_are_named(tmp_path):
    for template, sentence in (
        ("{{ messages | length }}", "writes messages"),
        ("{{ raise_exception('no system') }}", "does not take these messages: no system"),
    ):
        (tmp_path / "tokenizer.json").write_text(BYTE.to_json(), encoding="utf-8")
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
        file = write(tmp_path / "a.jsonl", *pairs(1))
        with pytest.raises(DataError, match=f"a.jsonl, line 1: .*{sentence}"):
            answer_tokens(file, None, str(tmp_path), sequence_length=64 + len(template))
    with pytest.raises(DataError, match="no chat template"):
        answer_tokens(file, None, "byte", "chat", sequence_length=64)


@given(st.lists(st.integers(1, 30), max_size=60))
def test_items_are_packed_once_and_no_two_places_could_be_one(sizes):
    places = best_fit(sizes, 30)
    assert sorted(item for place in places for item in place) == list(range(len(sizes)))
    filled = sorted(sum(sizes[item] for item in place) for place in places)
    assert all(1 <= size <= 30 for size in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > 30


def test_long_examples_are_cut_or_left_out_and_counted(tmp_path):
    file = write(
        tmp_path / "a.jsonl", {"prompt": "ab", "answer": "x" * 50}, {"prompt": "a" * 40, "answer": "y"}, *pairs(1, 2)
    )
    tokens = answer_tokens(file, None, template="verbatim", sequence_length=16)
    assert "2 examples in 2 sequences" in tokens.note
    assert "longer than 16 tokens: 1 cut, 1 left out" in tokens.note
    assert learnt(TrainingData(tokens, 16).batch(np.arange(2)), 0) in ([*b"x" * 14], [*b"00", 256])
    with pytest.raises(DataError, match="no answer in their first 2 tokens"):
        answer_tokens(file, None, template="verbatim", sequence_length=2)


def test_examples_are_held_out_whole_and_by_their_prompt(tmp_path):
    twice = [{"prompt": f"q {n % 200}", "answer": f"{n:05d}" * 20} for n in range(400)]
    file = write(tmp_path / "a.jsonl", *twice)
    sides = {}
    for split in ("train", "validation"):
        tokens = answer_tokens(file, split, sequence_length=256)
        text = BYTE.decode(tokens.read(0, len(tokens)))
        sides[split] = {part.partition("\n\n")[0] for part in text.split("User: ")[1:]}
        assert text.count("Assistant:") == 2 * len(sides[split])
    assert len(sides["train"]) + len(sides["validation"]) == 200
    assert not sides["train"] & sides["validation"]
    assert ValidationData(tokens, 256).scored() >= 5120


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "a"}', "the fields are prompt; it takes prompt and one of answer, completion, response"),
        ('{"prompt": "a", "answer": "b", "response": "c"}', "it takes prompt and one of"),
        ('{"prompt": 3, "answer": "b"}', "field 'prompt' is '3'; it takes text"),
        ('{"prompt": "a", "answer": " "}', "field 'answer' is empty"),
        ('{"messages": "hi"}', "field 'messages' is no list of objects"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "has no message of role 'assistant'"),
        ('{"messages": [{"role": "assistant"}]}', r"no field 'messages\[0\].content'"),
        (
            '{"messages": [{"role": "user", "content": [1]}]}',
            r"field 'messages\[0\].content' is '\[1\]'; it takes text",
        ),
        ('{"messages": [], "prompt": "a"}', "both there"),
        ("[1]", "is no JSON object"),
        ('{"prompt": ', "not valid JSON"),
        ('{"prompt": "\\ud800", "answer": "b"}', "half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named_by_file_line_and_field(tmp_path, line, sentence):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(pairs(1)[0]) + "\n\n" + line + "\n", encoding="utf-8")
    assert is_examples(file)
    with pytest.raises(DataError, match=f"^a.jsonl, line 3: .*{sentence}"):
        answer_tokens(str(file), None, sequence_length=64)


def test_other_jsonl_is_text_as_before(tmp_path):
    assert not is_examples(tmp_path / "none.jsonl")
    for line in ('{"text": "a", "prompt": "b"}', '{"question": "a"}', "no json", ""):
        (tmp_path / "a.jsonl").write_text(line, encoding="utf-8")
        assert not is_examples(tmp_path / "a.jsonl")


def test_beside_examples_text_is_learnt_as_ever(tmp_path):
    tokens = answer_tokens(write(tmp_path / "a.jsonl", *pairs(9)), None, sequence_length=64)
    text = tokens_in_memory(["some text", "and more of it"] * 40, BYTE, "text")
    for masking in (False, True):
        both = TrainingData([tokens, text], 64, document_masking=masking)
        alone = {
            name: TrainingData(corpus, 64, document_masking=masking) for name, corpus in (("a", tokens), ("t", text))
        }
        rows = {name: data.batch(np.arange(len(data))) for name, data in alone.items()}
        expected = sorted(str(row) for batch in rows.values() for row in batch["labels"].tolist())
        assert sorted(map(str, both.batch(np.arange(len(both)))["labels"].tolist())) == expected
