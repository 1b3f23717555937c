"""Using trained models: precision, devices, and work that processes share."""

from __future__ import annotations

import pytest
import torch

from siamesenorm.errors import ConfigError, DataError
from siamesenorm.models.dit import DiT, DiTConfig
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.models.vit import VisionTransformer, ViTConfig
from siamesenorm.tasks.sharing import Sharing
from siamesenorm.train.inference import cast_matrices, find_device, inference
from siamesenorm.train.torchrun import ProcessPlace

SHAPE = {"dim": 16, "blocks": 2, "heads": 2, "ffn_dim": 24}
WORDS = {**SHAPE, "vocab_size": 32, "max_length": 16}
IMAGE = {"patch_size": 2, "channels": 1, "classes": 4}
IDS, IMAGES = torch.randint(0, 32, (2, 7)), torch.randn(2, 1, 8, 8)
MODELS = {
    "dense": (lambda: LanguageModel(LMConfig(**WORDS, topology="siamese"), seed=0), (IDS,)),
    "tied": (lambda: LanguageModel(LMConfig(**WORDS, tied=True, topology="gr"), seed=0), (IDS,)),
    "experts": (
        lambda: LanguageModel(LMConfig(**WORDS, moe={"experts": 4, "top_k": 2, "expert_dim": 8}), seed=0),
        (IDS,),
    ),
    "vit": (lambda: VisionTransformer(ViTConfig(**SHAPE, **IMAGE, image_size=8), seed=0), (IMAGES,)),
    "dit": (
        lambda: DiT(DiTConfig(**SHAPE, **IMAGE, input_size=8), seed=0),
        (IMAGES, torch.tensor([3, 900]), torch.tensor([0, 4])),
    ),
}


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_cast_matrices_give_the_numbers_of_autocast_in_less_memory(name, precision):
    make, inputs = MODELS[name]
    model = make().requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))  # no head or gate is zero
    with torch.autocast("cpu", dtype=precision):
        found = model(*inputs)
        before = sum(parameter.nbytes for parameter in model.parameters())
        cast_matrices(model, precision)
        again = model(*inputs)
    assert torch.equal(getattr(again, "logits", again), getattr(found, "logits", found))
    assert getattr(found, "logits", found).abs().max() > 0
    blocks = sum(p.numel() for n, p in model.named_parameters() if "blocks." in n and p.dtype == precision)
    assert before - sum(parameter.nbytes for parameter in model.parameters()) == 2 * blocks > 0


def shared(size, parts, work, together=False):
    """What every one of several processes gets, each played in turn: first what they tell, then what they are told."""
    told, done = [[None] * size for _ in range(len(parts) + 1)], []

    def play(rank, final):
        calls = iter(range(len(told)))

        def gather(value):
            row = told[next(calls)]
            row[rank] = value
            return list(row) if final else [(None, None)] * size

        def counted(part):
            if final:
                done.append((rank, part))
            return work(part)

        return list(Sharing(rank, size, gather, together).each(parts, counted))

    for rank in range(size):
        play(rank, final=False)
    return [play(rank, final=True) for rank in range(size)], done


def test_parts_are_worked_on_once_and_come_in_order():
    results, done = shared(3, list(range(7)), lambda part: part * part)
    assert results == [[0, 1, 4, 9, 16, 25, 36]] * 3
    assert done == [(0, 0), (0, 3), (0, 6), (1, 1), (1, 4), (2, 2), (2, 5)]


def test_models_in_parts_are_passed_equally_often():
    results, done = shared(3, list(range(7)), lambda part: part * part, together=True)
    assert results == [[0, 1, 4, 9, 16, 25, 36]] * 3
    assert [sum(rank == each for each, _ in done) for rank in range(3)] == [3, 3, 3]


def test_lists_are_dealt_out_and_put_together_again():
    parts = [(["aa", "cc", "ee"], None), (["bb", "dd"], None)]
    for rank in range(2):
        told = []
        sharing = Sharing(rank, 2, lambda value, told=told: told.append(value) or parts)
        assert sharing.split("abcde", lambda mine: [letter * 2 for letter in mine]) == ["aa", "bb", "cc", "dd", "ee"]
        assert told == [parts[rank]]


def test_what_one_process_cannot_do_ends_all():
    def gather(value):
        return [value, (None, "a file is missing")]

    with pytest.raises(DataError, match="process 1: a file is missing"):
        list(Sharing(0, 2, gather).each([1, 2], lambda part: part))
    with pytest.raises(ZeroDivisionError):
        list(Sharing(0, 2, gather).each([0, 2], lambda part: 1 / part))


def test_devices_and_precisions_that_are_not_there():
    assert find_device("cpu", ProcessPlace(rank=1, size=2, local_rank=1, local_size=2)) == torch.device("cpu")
    for name, size, words in (("abacus", 1, "'abacus' cannot be used here"), ("cuda:0", 2, "'cuda:0' is one device")):
        with pytest.raises(ConfigError, match=words):
            find_device(name, ProcessPlace(size=size))
    with (
        pytest.raises(ConfigError, match="precision: 'int8' is not allowed; it takes one of fp32, bf16, fp16"),
        inference("cpu", "int8"),
    ):
        pass
