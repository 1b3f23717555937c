"""Holding out: by size, with a least, long documents in parts, copies on one side, never nearly everything."""

import json
import random

import numpy as np
import pytest

from siamesenorm.data import ByteTokenizer, DataError, prepare, train_bpe
from siamesenorm.data import held_out as rule
from siamesenorm.data.documents import Document, Reading
from siamesenorm.data.held_out import AIM, LEAST, NEEDED, hold_out, parts_of, split_document
from siamesenorm.data.sources import find_sources, read_documents
from siamesenorm.data.texts import LARGEST, is_text, text_tokens
from siamesenorm.data.tokens import open_tokens

WORDS = ["the", "of", "to", "in", "is", "it", "you", "that", "was", "for", "on", "are", "with", "as", "his", "they"]


def prose(count: int, seed: int = 0, paragraph: int = 60) -> str:
    """So many words in lines and paragraphs."""
    chance = random.Random(seed)
    ends = {0: ".\n\n", 20: ".\n", 40: ".\n"}
    return "".join(chance.choice(WORDS) + ends.get(number % paragraph, " ") for number in range(1, count + 1))


def one_file(folder):
    (folder / "a.txt").write_text(prose(7500))


def one_line(folder):
    (folder / "a.txt").write_text(prose(7500).replace("\n", " "))


def one_word(folder):
    (folder / "a.txt").write_text(prose(9000).replace("\n", "").replace(" ", ""))


def many_files(folder):
    for number in range(90):
        (folder / f"{number}.txt").write_text(prose(10 + 5 * number % 200, number))


def a_giant_and_dwarfs(folder):
    (folder / "giant.txt").write_text(prose(40_000))
    for number in range(20):
        (folder / f"{number}.txt").write_text(prose(50, number))


def rows(folder):
    lines = (json.dumps({"text": prose(12, number)}) + "\n" for number in range(900))
    (folder / "a.jsonl").write_text("".join(lines))


def greek(folder):
    (folder / "a.txt").write_text(prose(7500).translate(str.maketrans("aeiouthsn", "αειουθησν")), encoding="utf-8")


KINDS = [one_file, one_line, one_word, many_files, a_giant_and_dwarfs, rows, greek]


def splits(folder, share=0.05, seed=0, tokenizer=None):
    sources = find_sources([folder])
    reading = hold_out(sources, Reading(validation=share, seed=seed), tokenizer or ByteTokenizer())
    documents = list(read_documents(sources, reading))
    return {
        side: [document.text for document in documents if document.split == side] for side in ("train", "validation")
    }, documents


def size(texts):
    return sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("kind", KINDS)
def test_enough_is_held_out_of_any_shape_of_text_with_any_seed(tmp_path, kind):
    kind(tmp_path)
    for seed in range(8):
        found, _ = splits(tmp_path, seed=seed)
        held_out, total = size(found["validation"]), size(found["train"]) + size(found["validation"])
        wanted = max(AIM, 0.05 * total)
        assert wanted <= held_out <= 1.2 * wanted + 300
        assert held_out >= LEAST
        assert held_out <= total / 4


@pytest.mark.parametrize("kind", KINDS)
def test_every_character_is_on_one_side_in_order(tmp_path, kind):
    kind(tmp_path)
    _, documents = splits(tmp_path)
    whole, _ = splits(tmp_path, share=0.0)
    assert whole["validation"] == []
    assert "".join(document.text for document in documents) == "".join(whole["train"])


def test_a_share_is_one_of_the_text_not_of_the_documents(tmp_path):
    a_giant_and_dwarfs(tmp_path)
    for share in (0.1, 0.3, 0.5):
        found, _ = splits(tmp_path, share)
        total = size(found["train"]) + size(found["validation"])
        assert share <= size(found["validation"]) / total <= share * 1.08


def test_what_is_held_out_comes_from_many_places(tmp_path):
    one_file(tmp_path)
    found, documents = splits(tmp_path)
    assert max(map(len, found["validation"])) < size(found["validation"]) / 3
    assert len({document.place for document in documents}) == len(documents)


def test_copies_never_lie_on_both_sides(tmp_path):
    text = prose(12_000)
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(text)
    found, _ = splits(tmp_path)
    held = [part for text in found["validation"] for part in text.split("\n\n") if len(part) > 100]
    assert held
    assert not [part for part in held if any(part in text for text in found["train"])]


def test_large_sources_go_by_the_share_alone(tmp_path, monkeypatch):
    many_files(tmp_path)
    (tmp_path / "long.txt").write_text(prose(60_000))
    monkeypatch.setattr(rule, "SMALL", 0)
    shares = []
    for seed in range(12):
        found, _ = splits(tmp_path, 0.1, seed)
        shares.append(size(found["validation"]) / (size(found["train"]) + size(found["validation"])))
    assert np.mean(shares) == pytest.approx(0.1, abs=0.02)
    assert min(shares) > 0.03


def test_the_least_is_counted_in_the_tokenizers_own_tokens(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text(prose(30_000))
    tokenizer = train_bpe([prose(3000)], 300)
    found, _ = splits(tmp_path, 0.01, tokenizer=tokenizer)
    tokens = sum(len(tokenizer.encode(text)) for text in found["validation"])
    assert AIM <= tokens < 1.2 * AIM
    assert size(found["validation"]) > 2 * tokens


def test_a_text_as_short_as_is_said_suffices_and_a_shorter_one_gives_a_quarter_at_most(tmp_path):
    text = prose(20_000)
    (tmp_path / "a.txt").write_text(text[: NEEDED + 300])
    assert size(splits(tmp_path)[0]["validation"]) >= LEAST
    (tmp_path / "a.txt").write_text(text[: NEEDED // 2])
    assert 0 < size(splits(tmp_path)[0]["validation"]) <= NEEDED / 8
    (tmp_path / "a.txt").write_text("Just this.")
    assert splits(tmp_path)[0] == {"train": ["Just this."], "validation": []}


def test_a_document_that_names_its_split_keeps_it():
    document = Document("x" * 9999, "0", "validation")
    assert list(split_document(document, Reading(longest=300, validation=0.0))) == [document]


def test_blank_stretches_have_no_side_of_their_own():
    reading = Reading(longest=256, validation=0.5)
    parts = list(split_document(Document("a" * 256 + " \n" * 2000 + "b" * 256, "0"), reading))
    assert all(part.text.strip() for part in parts)


@pytest.mark.parametrize("mark", ["\n\n", "\n", " ", ""])
def test_texts_are_cut_where_it_hurts_least(mark):
    text = mark.join(f"word{number:03}" for number in range(400))
    parts = list(parts_of(text, 300))
    assert "".join(parts) == text
    assert all(150 <= len(part) <= 300 for part in parts[:-1])
    assert all(part.endswith(mark) for part in parts[:-1])


def test_preparing_one_file_leaves_most_of_it_to_learn_from(tmp_path):
    one_file(tmp_path)
    for seed in range(5):
        out = tmp_path / "out" / str(seed)
        index = prepare([tmp_path / "a.txt"], out, validation=0.05, seed=seed, workers=1)
        assert index.splits["validation"].tokens >= LEAST
        assert index.splits["train"].tokens > 3 * index.splits["validation"].tokens


# Text to train on as it is -----------------------------------------------------------------------------------


def test_text_is_told_from_arrays_of_tokens(tmp_path):
    one_file(tmp_path)
    np.arange(9000, dtype="<u2").__mod__(200).tofile(tmp_path / "tokens")
    np.arange(9000, dtype="<u2").tofile(tmp_path / "tokens.npy")
    (tmp_path / "plain").write_text(prose(100))
    (tmp_path / "windows.txt").write_bytes(prose(100).encode("utf-16"))
    told = {path.name: is_text(path) for path in tmp_path.iterdir()}
    assert told == {"a.txt": True, "tokens": False, "tokens.npy": False, "plain": True, "windows.txt": True}
    assert not is_text(tmp_path)  # it holds arrays
    (tmp_path / "tokens.npy").unlink()
    assert is_text(tmp_path)
    assert not is_text(tmp_path / "nowhere")


def test_text_tokens_are_those_of_a_preparation(tmp_path):
    one_file(tmp_path)
    prepare([tmp_path / "a.txt"], tmp_path / "out", validation=0.05, workers=1)
    for split in ("train", "validation"):
        direct, prepared = text_tokens(str(tmp_path / "a.txt"), split), open_tokens(tmp_path / "out", split=split)
        assert np.array_equal(direct.read(0, len(direct)), prepared.read(0, len(prepared)))
        assert direct.text_bytes == prepared.text_bytes
    whole = text_tokens(str(tmp_path / "a.txt"), None)
    assert bytes(whole.read(0, len(whole) - 1).astype("u1")) == (tmp_path / "a.txt").read_bytes()


def test_a_text_that_changed_is_read_again(tmp_path):
    one_file(tmp_path)
    before = len(text_tokens(str(tmp_path / "a.txt"), None))
    (tmp_path / "a.txt").write_text(prose(500))
    assert len(text_tokens(str(tmp_path / "a.txt"), None)) < before


def test_text_that_is_too_much_or_no_utf8_is_one_sentence(tmp_path):
    (tmp_path / "a.txt").write_bytes("Größe\n".encode("latin-1") * 5000)
    with pytest.raises(DataError, match=r"byte 2 \(0xf6\) is not UTF-8"):
        text_tokens(str(tmp_path / "a.txt"), "train")
    with open(tmp_path / "b.txt", "wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(DataError, match=r"is text of 67,108,865 bytes; .* siamesenorm data prepare .*b\.txt -o FOLDER"):
        text_tokens(str(tmp_path / "b.txt"), "train")


@pytest.mark.parametrize("name", ["a.npy", "a.bin"])
def test_text_under_the_name_of_an_array_is_refused(tmp_path, name):
    (tmp_path / name).write_text(prose(2000))
    with pytest.raises(DataError, match="is no array of uint16 tokens but looks like text; siamesenorm data prepare"):
        open_tokens(tmp_path / name)
