"""One model in two houses: the transformers model computes what `LanguageModel` computes, from the same weights."""

import copy
import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from closeness import assert_same_but_for_rounding, assert_same_gradients
from siamesenorm.interop.huggingface import (
    SiameseNormConfig,
    SiameseNormForCausalLM,
    SiameseNormModel,
    from_language_model,
    to_language_model,
)
from siamesenorm.interop.huggingface.blocks import eager_attention
from siamesenorm.models.lm import LanguageModel, LMConfig, generate
from siamesenorm.residual import TOPOLOGIES

from .huggingface_models import HYBRID, VOCABULARY, causal_lm, language_model, lm_config, tokens

SPECS = [*TOPOLOGIES, HYBRID, "siamese:form=plain"]
LABELS = {"labels": tokens()}


# Configs -----------------------------------------------------------------------------------------------

CHANGED = {
    "vocab_size": 71, "dim": 24, "blocks": 2, "heads": 6, "kv_heads": 3, "head_dim": 8, "ffn_dim": 20,
    "activation": "gelu", "norm": "layer", "norm_eps": 1e-6, "norm_affine": False, "norm_bias": True, "bias": True,
    "tied": True, "topology": "hyper:rate=3", "qk_norm": "head", "rope_theta": 5e5, "max_length": 99, "window": 7,
    "dropout": 0.25, "z_weight": 1e-4, "init": "megatron", "init_std": 0.01, "first_logits": "small",
    "moe": {"experts": 4, "top_k": 2, "expert_dim": 12, "balance_weight": 0.02, "z_weight": 0.002,
            "normalize_top_k": True},
    "qkv_bias": False, "query_factor": 1.5, "embedding_scale": 3.0, "rotary_dim": 4, "learned_positions": True,
    "full_every": 2, "window_rope_theta": 100.0, "parametrization": "completep", "base_width": 12, "base_depth": 1,
    "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_length": 48, "low": 2.0, "high": 32.0,
                     "attention_factor": 1.2, "whole_pairs": False},
}  # fmt: skip


def test_every_field_survives_the_round_trip_through_json(tmp_path):
    """A value other than the default in every field: none can be dropped or swapped unseen."""
    config = LMConfig(**CHANGED)
    assert set(CHANGED) == set(LMConfig.model_fields)
    assert all(value != LMConfig.model_fields[name].default for name, value in config.model_dump().items())
    SiameseNormConfig.from_lm_config(config, eos_token_id=3).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is SiameseNormConfig
    assert loaded.to_lm_config() == config
    assert loaded.eos_token_id == 3
    assert SiameseNormConfig.from_lm_config(lm_config()).to_lm_config() == lm_config()


@pytest.mark.parametrize("how", ["standard", "small"])
def test_first_logits_are_always_written_and_older_files_had_them_small(tmp_path, how):
    SiameseNormConfig.from_lm_config(lm_config(first_logits=how)).save_pretrained(tmp_path)
    for read in (AutoConfig, SiameseNormConfig):
        assert read.from_pretrained(tmp_path).first_logits == how
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    assert fields.pop("first_logits") == how
    file.write_text(json.dumps(fields))
    for read in (AutoConfig.from_pretrained, SiameseNormConfig.from_pretrained):
        assert read(tmp_path).to_lm_config() == lm_config(first_logits="small")
    assert SiameseNormConfig.from_json_file(file).first_logits == "small"
    assert SiameseNormConfig().first_logits == SiameseNormConfig().to_lm_config().first_logits == "standard"


def test_tools_find_the_usual_names():
    config = SiameseNormConfig.from_lm_config(LMConfig(vocab_size=50, dim=24, blocks=2, heads=4, ffn_dim=40))
    wanted = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    wanted |= {"head_dim": 6, "intermediate_size": 40, "vocab_size": 50, "max_position_embeddings": 2048}
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_wrong_values_are_refused_when_a_model_is_made():
    with pytest.raises(ValueError, match="unknown name 'siamse'"):
        SiameseNormModel(SiameseNormConfig(topology="siamse"))
    with pytest.raises(ValueError, match="divisor of heads"):
        SiameseNormModel(SiameseNormConfig(num_key_value_heads=5))


# The same function ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "tied"), [*((spec, False) for spec in SPECS), ("siamese", True), ("pre", True)])
def test_logits_loss_and_gradients_are_the_language_models(topology, tied):
    model, ids = language_model(topology, tied=tied), tokens()
    other = from_language_model(model)
    assert_same_but_for_rounding(other(ids).logits, model(ids).logits)
    loss = model(ids[:, :-1], labels=ids[:, 1:]).loss
    grads = torch.autograd.grad(loss, list(model.parameters()))
    output = other(ids, labels=ids)
    torch.testing.assert_close(output.loss, loss)
    other_grads = torch.autograd.grad(output.loss, list(model.parameters()))  # the same parameters
    assert_same_gradients(other_grads, grads)


@pytest.mark.parametrize("topology", ["siamese", HYBRID, "hyper", "span"])
def test_there_and_back_shares_every_weight(topology):
    model = language_model(topology)
    other = from_language_model(model)
    back = to_language_model(other)
    assert {name: id(p) for name, p in back.named_parameters()} == {n: id(p) for n, p in model.named_parameters()}
    assert len(list(other.parameters())) == len(list(model.parameters()))
    assert back.config == model.config
    model.embedding.weight.requires_grad_(False)
    assert not to_language_model(from_language_model(model)).embedding.weight.requires_grad


OPTIONS = [
    {"window": 4},
    {"norm": "layer", "bias": True, "norm_bias": True},
    {"activation": "gelu"},
    {"qk_norm": "head"},
    {"qk_norm": "projection"},
    {"rope_theta": 500.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_reach_the_function(options):
    model, plain, ids = language_model(**options), language_model(), tokens()
    logits = from_language_model(model)(ids).logits
    assert_same_but_for_rounding(logits, model(ids).logits)
    assert not torch.allclose(logits, plain(ids).logits, atol=1e-4)


@pytest.mark.parametrize("init", ["mitchell", "megatron", "normal"])
@pytest.mark.parametrize("tied", [False, True])
def test_first_weights_are_the_language_models(init, tied):
    """post_init draws by our law of depth and topology, not by transformers' one std for all."""
    config = lm_config("deepnorm", init=init, tied=tied)
    torch.manual_seed(5)
    model = LanguageModel(config)
    torch.manual_seed(5)
    other = SiameseNormForCausalLM(SiameseNormConfig.from_lm_config(config))
    for name, parameter in to_language_model(other).named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name


def test_base_model_is_the_stack():
    model, ids = language_model(HYBRID), tokens()
    other = from_language_model(model).model
    assert_same_but_for_rounding(other(ids).last_hidden_state, model(ids).hidden)


@pytest.mark.parametrize("training", [True, False])
def test_z_loss_counts_in_training_and_label_masks_always(training):
    model, ids = language_model(z_weight=0.1).train(training), tokens()
    labels = ids.clone()
    labels[0, :6] = -100
    expected = model(ids[:, :-1], labels=labels[:, 1:]).loss
    other = from_language_model(model).train(training)
    torch.testing.assert_close(other(ids, labels=labels).loss, expected)
    assert not torch.isclose(expected, model(ids[:, :-1], labels=ids[:, 1:]).loss)


@pytest.mark.parametrize("z_weight", [0.0, 0.1])
def test_training_without_logits_gives_the_same_loss_and_gradients(z_weight):
    """The chunked loss, the loss from logits, and the Trainer's sum over a given number of labels agree."""
    model, ids = causal_lm(z_weight=z_weight).train(), tokens()
    with_logits = model(ids, labels=ids)
    grads = torch.autograd.grad(with_logits.loss, list(model.parameters()))
    counted = (ids.shape[1] - 1) * ids.shape[0]
    by_sum = model(ids, labels=ids, num_items_in_batch=2 * counted).loss
    model.config.training_logits = False
    lean = model(ids, labels=ids)
    assert with_logits.logits is not None
    assert lean.logits is None
    torch.testing.assert_close(lean.loss, with_logits.loss)
    torch.testing.assert_close(by_sum, with_logits.loss / 2)
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=2 * counted).loss, by_sum)
    assert_same_gradients(torch.autograd.grad(lean.loss, list(model.parameters())), grads)
    assert model.eval()(ids, labels=ids).logits is not None


def test_labels_shifted_beforehand_replace_labels():
    model, ids = causal_lm(), tokens()
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, model(ids, labels=ids).loss)


def test_the_trainers_label_smoothing_shifts_labels(tmp_path):
    model, ids = causal_lm(), tokens()
    arguments = TrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=0.2, report_to=[], use_cpu=True)
    found = Trainer(model=model, args=arguments).compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.2)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_of_experts_are_in_the_loss(checkpointing):
    moe = {"experts": 4, "top_k": 2, "expert_dim": 12, "balance_weight": 0.5, "z_weight": 0.1}
    model, ids = language_model(moe=moe).train(), tokens()
    expected = model(ids[:, :-1], labels=ids[:, 1:])
    grads = torch.autograd.grad(expected.loss, list(model.parameters()))
    assert expected.loss > expected.cross_entropy + 0.4
    other = from_language_model(model)
    if checkpointing:
        other.gradient_checkpointing_enable({"use_reentrant": False})
    loss = other(ids[:, :-1], shift_labels=ids[:, 1:], use_cache=False).loss
    torch.testing.assert_close(loss, expected.loss)
    assert_same_gradients(torch.autograd.grad(loss, list(model.parameters())), grads)
    assert other.eval().generate(ids, max_new_tokens=4, do_sample=False)[:, 11:].tolist() == generate(
        model.eval(), ids, max_new_tokens=4
    )


# What transformers asks for ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "wanted"),
    [
        (0, lambda full: full),
        (1, lambda full: full[:, -1:]),
        (3, lambda full: full[:, -3:]),
        (torch.tensor([0, 4, 10]), lambda full: full[:, [0, 4, 10]]),
        (torch.tensor([[0, 4], [2, 10]]), lambda full: torch.stack([full[0, [0, 4]], full[1, [2, 10]]])),
        (torch.arange(22).view(2, 11) % 3 == 0, lambda full: full.flatten(0, 1)[::3]),
    ],
)
@pytest.mark.parametrize("topology", ["siamese", HYBRID, "residual_dual", "mhc"])
def test_logits_to_keep_keeps_the_right_rows_of_all_streams(topology, keep, wanted):
    model, ids = from_language_model(language_model(topology)), tokens()
    full = model(ids).logits
    kept = model(ids, logits_to_keep=keep).logits
    torch.testing.assert_close(kept, wanted(full))


def test_embeddings_in_place_of_ids():
    model, ids = causal_lm(), tokens()
    embedded = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embedded).logits, model(ids).logits)
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": embedded}):
        with pytest.raises(ValueError, match="exactly one"):
            model(**wrong)


def test_left_padding_changes_nothing_for_what_it_pads():
    model, ids = causal_lm(HYBRID), tokens(1, 7)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(11) >= 4).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = model(ids).logits
    for extra in ({}, {"position_ids": positions}):  # rotary positions are relative
        found = model(padded, attention_mask=mask, **extra).logits[:, 4:]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_positions_that_start_again_pack_documents():
    model, first, second = causal_lm(), tokens(1, 5), tokens(1, 6, seed=1)
    packed, positions = torch.cat([first, second], dim=1), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]])
    found = model(packed, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found[:, 5:], model(second).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_eager_and_sdpa_agree_and_eager_shows_its_weights(window):
    model, ids = causal_lm(window=window), tokens()
    expected = model(ids).logits
    model.set_attn_implementation("eager")
    output = model(ids, output_attentions=True)
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-5)
    assert len(output.attentions) == 3
    for weights in output.attentions:
        assert weights.shape == (2, 4, 11, 11)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 11))
        seen = torch.ones(11, 11).tril() if window is None else torch.ones(11, 11).tril().triu(1 - window)
        assert (weights[..., seen == 0] == 0).all()
        assert (weights[..., seen == 1] > 0).all()


@pytest.mark.parametrize("topology", ["siamese", "pre", "hyper"])
def test_hidden_states_are_the_logit_lens(topology):
    """Entry l is the output of the same model cut after block l, the last one the output itself."""
    model, ids = language_model(topology), tokens()
    output = from_language_model(model)(ids, output_hidden_states=True)
    assert len(output.hidden_states) == 4
    assert torch.equal(output.hidden_states[0], model.embedding(ids))
    streams = model.residual.open(model.embedding(ids))
    for block, state in zip(model.blocks, output.hidden_states[1:], strict=True):
        streams, _ = block(streams, model.context(ids))
        assert_same_but_for_rounding(state, model.residual.close(streams))
    last = from_language_model(model).model(ids, output_hidden_states=[1])
    assert [state is not None for state in last.hidden_states] == [False, True, False]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("topology", ["siamese", HYBRID, "hyper", "span"])
def test_checkpointed_blocks_give_the_same_gradients(topology, reentrant):
    model, ids = causal_lm(topology).train(), tokens()
    grads = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    model.model.layers[1].attention.register_forward_hook(lambda *_: calls.append(1))
    if reentrant:
        model.enable_input_require_grads()
    model(ids, labels=ids, use_cache=False).loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert_same_gradients(found, list(grads))
    assert len(calls) == 2  # forward, and again in backward


def test_dropout_has_one_draw_for_a_checkpointed_block():
    model, ids = causal_lm(dropout=0.3).train(), tokens()
    losses = []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        losses.append(model(ids, labels=ids, use_cache=False).loss)
    assert torch.equal(*losses)
    assert not torch.equal(model(ids, labels=ids, use_cache=False).loss, losses[0])


# Weights on disk and on devices --------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_saved_in_shards_and_loaded_by_the_auto_classes(tmp_path, tied):
    model, ids = from_language_model(language_model(HYBRID, tied=tied)), tokens()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert ("lm_head.weight" in index["weight_map"]) == (not tied)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is SiameseNormForCausalLM
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is SiameseNormModel
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_loaded_in_another_dtype(tmp_path):
    model, ids = causal_lm(), tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(loaded(ids).logits.float(), model(ids).logits, rtol=0.05, atol=0.05)


def test_missing_weights_are_drawn_and_the_others_kept(tmp_path):
    model = causal_lm()
    states = {name: value for name, value in model.state_dict().items() if "layers.1.ffn" not in name}
    model.save_pretrained(tmp_path, state_dict=states)
    torch.manual_seed(9)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]) == ("layers.1.ffn" not in name), name
        if name.endswith("layers.1.ffn.down.weight"):  # mitchell's law at block 1: 1/sqrt(24) · 1/sqrt(4)
            assert parameter.std().item() == pytest.approx(24**-0.5 / 2, rel=0.15)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [VOCABULARY + 5, VOCABULARY - 9])
def test_vocabulary_is_resized(tied, size):
    model, ids = causal_lm(tied=tied), tokens() % (VOCABULARY - 10)
    before = model(ids).logits
    model.resize_token_embeddings(size)
    logits = model(ids, labels=ids).logits
    assert logits.shape[-1] == model.config.vocab_size == model.to_language_model().config.vocab_size == size
    kept = min(size, VOCABULARY)
    torch.testing.assert_close(logits[..., :kept], before[..., :kept])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("topology", ["siamese", HYBRID, "hyper", "mhc", "layerscale"])
def test_weights_that_accelerate_keeps_elsewhere(topology):
    """Links hold parameters outside of any forward, and fused steps reach into norms: both must be brought."""
    from accelerate import cpu_offload

    model, ids = causal_lm(topology), tokens()
    expected = model(ids, output_hidden_states=True)
    moved = copy.deepcopy(model)
    cpu_offload(moved, execution_device=torch.device("cpu"))
    for _ in range(2):
        found = moved(ids, output_hidden_states=True)
        assert_same_but_for_rounding(found.logits, expected.logits)
        assert_same_but_for_rounding(found.hidden_states, expected.hidden_states)
        assert {parameter.device.type for parameter in moved.parameters()} == {"meta"}


def test_a_model_is_made_in_a_context_that_keeps_parameters_on_meta():
    """As accelerate and vLLM make models whose weights come later."""
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights(include_buffers=False):
        model = SiameseNormForCausalLM(causal_lm("siamese").config)
    assert sum(p.numel() for p in model.parameters()) > 0


def test_device_map_cuts_between_blocks(tmp_path):
    model, ids = causal_lm(HYBRID), tokens()
    model.save_pretrained(tmp_path / "model")
    devices = {f"model.layers.{block}": "disk" if block == 1 else "cpu" for block in range(3)}
    devices |= {"model.embed_tokens": "cpu", "model.residual": "cpu", "model.hidden_state": "cpu", "lm_head": "cpu"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=devices, offload_folder=tmp_path / "disk"
    )
    assert {p.device.type for p in loaded.model.layers[1].parameters()} == {"meta"}
    assert_same_but_for_rounding(loaded(ids).logits, model(ids).logits)
    assert model._no_split_modules == {"SiameseNormBlock"}


def test_a_deep_copy_stands_alone():
    model, ids = causal_lm(HYBRID), tokens()
    copied, before = copy.deepcopy(model), model(ids).logits
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.5)
    assert torch.equal(model(ids).logits, before)
    assert not torch.allclose(copied(ids).logits, before)


def test_compiles_without_a_break():
    model, ids = causal_lm(HYBRID, blocks=1), tokens()
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_generate_is_the_librarys_generate():
    model, ids = language_model(HYBRID), tokens()
    expected = generate(model, ids, max_new_tokens=8)
    found = from_language_model(model).generate(ids, max_new_tokens=8, do_sample=False)
    assert found[:, ids.shape[1] :].tolist() == expected


def test_an_attention_that_gives_rows_of_tokens_is_taken(monkeypatch):
    """As vLLM's does in its Transformers backend."""

    def rows_of_tokens(module, query, key, value, mask, **options):
        out, weights = eager_attention(module, query, key, value, mask, options["scaling"])
        return out.flatten(2).squeeze(0), weights

    model, ids = causal_lm(), tokens(batch=1)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids).logits
        monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_: rows_of_tokens)
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=0)
