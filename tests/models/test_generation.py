"""Generation: cached decoding is the full forward for every topology; batches, sampling, stopping, seeds."""

import pytest
import torch

from closeness import assert_same_but_for_rounding
from siamesenorm.models.lm import Sampling, generate, stream
from siamesenorm.models.lm.generation import ends_with

from .small import ALL, stirred

PROMPTS = [[3, 4, 5, 6, 7], [9], [1, 2]]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("topology", ALL)
def test_cached_decoding_is_the_full_forward(topology, window):
    model = stirred(topology, window=window)
    ids = torch.randint(0, 50, (2, 14), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        full, cache = model(ids).logits, model.new_cache(2, 14)
        pieces = [model(ids[:, a:b], cache=cache).logits for a, b in ((0, 6), (6, 9), (9, 10), (10, 11), (11, 14))]
    assert_same_but_for_rounding(torch.cat(pieces, 1), full, 1e-4)
    assert full.abs().max() > 0.1
    assert cache.length == 14


@pytest.mark.parametrize("topology", ALL)
def test_a_padded_batch_equals_single_prompts(topology):
    model = stirred(topology, window=4 if topology == "pre" else None)
    together = generate(model, PROMPTS, max_new_tokens=8)
    assert together == [generate(model, [prompt], max_new_tokens=8)[0] for prompt in PROMPTS]
    assert all(len(answer) == 8 for answer in together)


def test_greedy_is_argmax_of_the_full_forward():
    model, ids = stirred(), torch.tensor([PROMPTS[0]])
    (answer,) = generate(model, ids, max_new_tokens=6)
    for token in answer:
        assert model(ids).logits[0, -1].argmax().item() == token
        ids = torch.cat([ids, torch.tensor([[token]])], 1)


def test_stop_tokens_end_a_row_but_not_its_neighbours():
    model = stirred()
    free = generate(model, PROMPTS, max_new_tokens=8)
    stop = free[0][3]
    stopped = generate(model, PROMPTS, max_new_tokens=8, stop_tokens=[stop])
    for row, answer in zip(stopped, free, strict=True):
        assert row == (answer[: answer.index(stop)] if stop in answer else answer)


def test_a_stop_across_tokens_ends_a_row_at_once():
    model, asked = stirred(), []
    free = generate(model, PROMPTS, max_new_tokens=8)
    ended = ends_with(["", "".join(map(chr, free[0][2:5]))], lambda ids: "".join(map(chr, ids)))

    def counted(answer):
        asked.append(len(answer))
        return ended(answer)

    assert generate(model, PROMPTS[:1], max_new_tokens=8, stop_when=counted) == [free[0][:5]]
    assert asked == [1, 2, 3, 4, 5]
    assert generate(model, PROMPTS, max_new_tokens=8, stop_when=ended)[0] == free[0][:5]


def test_no_new_tokens_is_an_empty_answer():
    assert generate(stirred(), PROMPTS, max_new_tokens=0) == [[], [], []]


def test_extreme_settings_are_the_greedy_or_the_free_draw():
    model = stirred()
    greedy = generate(model, PROMPTS, max_new_tokens=4)
    for settings in ({"temperature": 1e-42}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-9}):
        assert generate(model, PROMPTS, max_new_tokens=4, seed=0, **settings) == greedy
    free = generate(model, PROMPTS, max_new_tokens=4, temperature=1.0, seed=0)
    for settings in ({"top_k": 10**6}, {"top_p": 1.0}):
        assert generate(model, PROMPTS, max_new_tokens=4, temperature=1.0, seed=0, **settings) == free


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nothing_is_chosen_by_what_is_no_number(temperature, wrong):
    with pytest.raises(ValueError, match="logits: the model's are not finite numbers"):
        Sampling(temperature).choose(torch.tensor([[0.0, 1.0], [0.0, wrong]]))
    assert Sampling(temperature).choose(torch.tensor([[0.0, -torch.inf]])).tolist() == [0]  # left out, as by a filter


def test_same_seed_same_draw():
    model = stirred()
    draw = [generate(model, PROMPTS, max_new_tokens=8, temperature=3.0, seed=seed) for seed in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]
    state = torch.get_rng_state()
    generate(model, PROMPTS, max_new_tokens=2, temperature=1.0, seed=1)
    assert torch.equal(state, torch.get_rng_state())


def test_filters_keep_what_they_say():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()[None]
    torch.testing.assert_close(Sampling(1.0).probabilities(logits), logits.exp())
    torch.testing.assert_close(Sampling(0.5).probabilities(logits), (2 * logits).softmax(-1))
    torch.testing.assert_close(
        Sampling(1.0, top_k=2).probabilities(logits), torch.tensor([[4 / 7, 3 / 7, 0.0, 0.0, 0.0]])
    )
    for top_p, kept in ((0.39, 1), (0.41, 2), (0.71, 3), (0.95, 4), (0.97, 5), (1.0, 5)):
        assert (Sampling(1.0, top_p=top_p).probabilities(logits) > 0).sum() == kept, top_p
    drawn = torch.stack([Sampling(1.0, top_k=2).choose(logits) for _ in range(200)])
    assert set(drawn.flatten().tolist()) == {0, 1}


def test_training_mode_is_given_back_and_streams_can_be_left():
    model = stirred(dropout=0.5).train()
    for count, tokens in enumerate(stream(model, PROMPTS, max_new_tokens=20), 1):
        assert tokens.shape == (3,)
        if count == 2:
            break
    assert model.training


def test_bfloat16_decodes():
    model = stirred().bfloat16()
    assert len(generate(model, PROMPTS, max_new_tokens=4)[0]) == 4
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert len(generate(stirred(), PROMPTS, max_new_tokens=4)[0]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, r"temperature: -1\.0 is not allowed; it takes a number from 0"),
        ({"temperature": float("inf")}, "temperature: inf is not allowed"),
        ({"top_k": 0}, "top_k: 0 is not allowed"),
        ({"top_p": 0.0}, r"top_p: 0\.0 is not allowed"),
        ({"prompts": [[1], []]}, "prompts: row 1 is not allowed"),
        ({"prompts": []}, "prompts: at least one row"),
        ({"prompts": [[1], [50]]}, "prompts: token 50 is not allowed; it takes 0 to 49"),
        ({"prompts": [[-1]]}, "prompts: token -1 is not allowed"),
        ({"max_new_tokens": -1}, "max_new_tokens: -1 is not allowed"),
        ({"max_new_tokens": 60}, "max_new_tokens: 60 after a prompt of 5 tokens is not allowed"),
    ],
)
def test_bad_input_is_named(arguments, message):
    prompts = arguments.pop("prompts", PROMPTS)
    with pytest.raises(ValueError, match=message):
        generate(stirred(), prompts, **{"max_new_tokens": 4, **arguments})


def test_a_full_cache_and_packed_decoding_are_refused():
    model = stirred()
    cache = model.new_cache(1, 3)
    with pytest.raises(ValueError, match="cache: 4 tokens do not fit into max_length = 3"):
        model(torch.ones(1, 4, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match="document_ids: packed documents cannot be decoded"):
        model(torch.ones(1, 2, dtype=torch.long), cache=model.new_cache(1), document_ids=torch.zeros(1, 2))


def test_a_row_with_a_seed_of_its_own_is_drawn_by_it_alone():
    model, prompts = stirred().double(), [[1, 2], [3, 4], [5, 6]]
    drawn = {"max_new_tokens": 6, "temperature": 1.0}
    together = generate(model, prompts, seed=[7, 8, 9], **drawn)
    assert together == [
        generate(model, [row], seed=[seed], **drawn)[0] for row, seed in zip(prompts, (7, 8, 9), strict=True)
    ]
    assert together != generate(model, prompts, seed=[7, 8, 10], **drawn)
    with pytest.raises(ValueError, match="seed: 2 of them for 3 rows"):
        generate(model, prompts, seed=[7, 8], **drawn)


def test_rows_with_generators_of_their_own_are_drawn_from_the_probabilities():
    logits = torch.log(torch.tensor([[0.0, 0.5, 0.2, 0.3, 0.0]])).expand(4000, -1)
    generators = [torch.Generator().manual_seed(seed) for seed in range(4000)]
    shares = torch.bincount(Sampling(1.0).choose(logits, generators), minlength=5) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.0, 0.5, 0.2, 0.3, 0.0]), rtol=0, atol=0.03)
