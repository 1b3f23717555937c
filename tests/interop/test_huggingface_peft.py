"""LoRA by peft on our projections: it changes the output, trains, saves and merges."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from siamesenorm.interop.huggingface import LORA_TARGET_MODULES

from .huggingface_models import HYBRID, causal_lm, tokens


def adapted(topology="siamese", **options):
    model = causal_lm(topology)
    chosen = {"target_modules": LORA_TARGET_MODULES, **options}
    return model, get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **chosen))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("topology", ["siamese", HYBRID, "hyper"])
def test_adapters_train_and_merge(topology, checkpointing):
    model, ids = causal_lm(topology), tokens(4)
    before = model(ids).logits
    model, lora = adapted(topology)
    torch.testing.assert_close(lora(ids).logits, before)  # at start an adapter adds nothing
    trained = [parameter for parameter in lora.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 4 * 3  # A and B on four projections of three blocks
    if checkpointing:
        lora.gradient_checkpointing_enable()
        lora.enable_input_require_grads()
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    losses = []
    lora.train()
    for _ in range(20):
        loss = lora(input_ids=ids, labels=ids, use_cache=False).loss
        losses.append(loss.item())
        loss.backward()
        assert all(parameter.grad is not None for parameter in trained)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.3
    lora.eval()
    after = lora(ids).logits
    assert not torch.allclose(after, before, atol=0.1)
    with lora.disable_adapter():
        torch.testing.assert_close(lora(ids).logits, before)
    merged = lora.merge_and_unload()
    assert merged is model
    torch.testing.assert_close(merged(ids).logits, after, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merged.to_language_model()(ids).logits, after, rtol=1e-4, atol=1e-4)


def test_all_linear_layers_are_found():
    _, lora = adapted(target_modules="all-linear")
    names = {name.split(".")[-1] for name, module in lora.named_modules() if hasattr(module, "lora_A")}
    assert names == set(LORA_TARGET_MODULES)


def test_adapter_on_the_head_is_in_the_loss():
    """A loss computed from the head's bare weight would not see it."""
    _, lora = adapted(target_modules=["lm_head"])
    lora.train()
    lora.config.training_logits = False
    ids = tokens()
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    loss = lora(input_ids=ids, labels=ids).loss
    with lora.disable_adapter():
        assert not torch.isclose(loss, lora(input_ids=ids, labels=ids).loss)


def test_adapter_is_saved_and_loaded(tmp_path):
    _, lora = adapted()
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    expected = lora.eval()(tokens()).logits
    lora.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(causal_lm(), tmp_path).eval()
    torch.testing.assert_close(loaded(tokens()).logits, expected)


def test_an_adapted_model_is_not_taken_for_a_plain_one():
    model, _ = adapted()
    with pytest.raises(ValueError, match="merge adapters"):
        model.to_language_model()
