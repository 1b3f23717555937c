"""Generation through transformers: every cache, search and batch gives what the model's own logits say."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from closeness import assert_same_but_for_rounding
from siamesenorm.interop.huggingface import SiameseNormForCausalLM
from siamesenorm.residual import TOPOLOGIES

from .huggingface_models import HYBRID, VOCABULARY, causal_lm, tokens

SPECS = [*TOPOLOGIES, HYBRID, "siamese:form=plain"]
NEW = 7


def scattered(topology: str = "siamese", **fields) -> SiameseNormForCausalLM:
    """A model whose likeliest tokens are far apart, so that rounding does not decide."""
    model = causal_lm(topology, **fields)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
    return model


def greedy(model, ids):
    """The definition: the likeliest next token of a full pass, again and again."""
    for _ in range(NEW):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def run(model, ids, **options):
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, **options})


@pytest.mark.parametrize("topology", SPECS)
def test_cached_decoding_is_a_full_pass(topology):
    model, ids = scattered(topology), tokens()
    full = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    pieces = [model(part, past_key_values=cache).logits for part in ids.split([5, 1, 4, 1], dim=1)]
    assert cache.get_seq_length() == ids.shape[1]
    assert_same_but_for_rounding(torch.cat(pieces, dim=1), full, 1e-4)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_cache_gives_the_same_tokens(attention, window):
    model, ids = scattered(HYBRID, window=window), tokens()
    model.set_attn_implementation(attention)
    expected = greedy(model, ids)
    assert len(set(expected[0, 11:].tolist())) > 1
    assert torch.equal(run(model, ids), expected)
    assert torch.equal(run(model, ids, use_cache=False), expected)
    assert torch.equal(run(model, ids, cache_implementation="static"), expected)
    room = StaticCache(config=model.config, max_cache_len=ids.shape[1] + NEW)
    assert torch.equal(run(model, ids, past_key_values=room), expected)


def test_rows_padded_on_the_left_are_decoded_as_if_alone():
    model, long, short = scattered(), tokens(1, 11), tokens(1, 6, seed=3)
    batch = torch.cat([long, torch.cat([torch.zeros(1, 5, dtype=torch.long), short], dim=1)])
    mask = torch.ones_like(batch)
    mask[1, :5] = 0
    found = run(model, batch, attention_mask=mask)
    assert torch.equal(found[:1], greedy(model, long))
    assert torch.equal(found[1:, 5:], greedy(model, short))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_beams_carry_their_own_past(cache):
    """The best of all sequences of three tokens: beams as many as the vocabulary search them nearly all."""
    model, ids = scattered(HYBRID), tokens(1, 5)
    options = {"num_beams": VOCABULARY, "max_new_tokens": 3, "length_penalty": 0.0}
    with_cache = run(
        model, ids, cache_implementation=cache, return_dict_in_generate=True, output_scores=True, **options
    )
    without = run(model, ids, use_cache=False, **options)
    assert torch.equal(with_cache.sequences, without)
    logs = model(with_cache.sequences).logits.log_softmax(-1)[:, 4:-1]
    score = logs.gather(-1, with_cache.sequences[:, 5:, None]).sum()
    torch.testing.assert_close(with_cache.sequences_scores[0], score, rtol=1e-4, atol=1e-4)
    greedily = run(model, ids, max_new_tokens=3)
    logs = model(greedily).logits.log_softmax(-1)[:, 4:-1]
    assert score >= logs.gather(-1, greedily[:, 5:, None]).sum() - 1e-4


def test_generation_goes_on_from_a_past():
    model, ids = scattered(), tokens()
    whole = run(model, ids)
    first = run(model, ids, max_new_tokens=3, return_dict_in_generate=True)
    rest = run(model, first.sequences, max_new_tokens=NEW - 3, past_key_values=first.past_key_values)
    assert torch.equal(rest, whole)


def test_prompt_as_embeddings():
    model, ids = scattered(), tokens()
    found = run(model, None, inputs_embeds=model.get_input_embeddings()(ids))
    assert torch.equal(found, run(model, ids)[:, ids.shape[1] :])


def test_sampling_follows_the_seed_and_the_end_token_stops():
    model, ids = causal_lm(), tokens()
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(
            model.generate(ids, do_sample=True, top_k=20, temperature=0.9, max_new_tokens=12, eos_token_id=None)
        )
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    model = scattered()
    end = greedy(model, ids[:1])[0, 11].item()
    assert run(model, ids[:1], eos_token_id=end).shape == (1, 12)


def test_outputs_of_every_step():
    model, ids = scattered(), tokens()
    model.set_attn_implementation("eager")
    options = {"output_attentions": True, "output_hidden_states": True, "output_logits": True}
    found = run(model, ids, return_dict_in_generate=True, **options)
    assert len(found.logits) == len(found.hidden_states) == len(found.attentions) == NEW
    assert [state[-1].shape for state in found.hidden_states] == [(2, 11, 16), *[(2, 1, 16)] * (NEW - 1)]
    assert [layer[0].shape[-2:] for layer in found.attentions] == [(11, 11), *[(1, 12 + k) for k in range(NEW - 1)]]
    assert_same_but_for_rounding(found.logits[-1], model(found.sequences[:, :-1]).logits[:, -1])


def test_a_draft_model_changes_nothing():
    model, draft, ids = scattered(), scattered("pre"), tokens(1)
    assert torch.equal(run(model, ids, assistant_model=draft), run(model, ids))


@pytest.mark.parametrize("topology", ["siamese", HYBRID, "post:norm_at=end", "hyper"])
def test_the_first_blocks_may_draft_for_all(topology):
    """Early exit: after block l the stack gives what its hidden state l is."""
    model, ids = scattered(topology), tokens(1)
    assert torch.equal(run(model, ids, assistant_early_exit=2), greedy(model, ids))
    states = model.model(ids, output_hidden_states=True).hidden_states
    model.config.num_hidden_layers = 2
    torch.testing.assert_close(model.model(ids).last_hidden_state, states[2])


def test_exported_with_a_static_cache_it_decodes_the_same():
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    model, ids = causal_lm(HYBRID, blocks=1), tokens(1, 5)
    expected = model(ids).logits
    room = {"batch_size": 1, "max_cache_len": 8}
    model.generation_config.update(cache_implementation="static", cache_config=room, use_cache=True)
    exporter = TorchExportableModuleForDecoderOnlyLM(model, **room)
    program = exporter.export(input_ids=ids[:, :1], cache_position=torch.tensor([0]), strict=False).module()
    for step in range(5):
        found = program(input_ids=ids[:, step : step + 1], cache_position=torch.tensor([step]))
        assert_same_but_for_rounding(found[:, -1], expected[:, step])


def test_contract_of_the_mixin():
    model = causal_lm()
    assert model.can_generate()
    assert model.base_model is model.model
    assert model.base_model_prefix == "model"
    assert model.main_input_name == "input_ids"
    assert model.get_output_embeddings() is model.lm_head
