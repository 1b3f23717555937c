"""The language model's configuration: what it refuses, and its round trip."""

import pytest
from pydantic import ValidationError

from siamesenorm.field_errors import FieldError
from siamesenorm.models.lm import LMConfig, MoEConfig, preset

from .small import config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "heads = 5 is not allowed; it takes a divisor of dim = 32"),
        ({"kv_heads": 3}, "kv_heads = 3 is not allowed; it takes a divisor of heads = 4"),
        ({"head_dim": 7}, "head_dim = 7 is not allowed; rotary positions take an even number"),
        ({"topology": "siames"}, "unknown name 'siames'.*; did you mean siamese"),
        ({"topology": "siamese:form=x"}, "option form = 'x' is not allowed"),
        ({"topology": "siamese:x=pre"}, "x = 'pre' is not allowed, because it never normalises its stream"),
        ({"dropout": 1.0}, "dropout: 1.0 is not allowed; it takes a number from 0 and below 1"),
        ({"toplogy": "pre"}, "unknown field 'toplogy'.*; did you mean topology"),
        ({"moe": {"experts": 2, "top_k": 3, "expert_dim": 8}}, "top_k = 3 is not allowed"),
    ],
)
def test_wrong_fields_are_named(changes, message):
    with pytest.raises(FieldError, match=message):
        config(**changes)


def test_round_trip_frozen_and_documented():
    original = preset("moe-micro", topology="siamese:form=hybrid_pre")
    assert LMConfig.model_validate_json(original.model_dump_json()) == original
    with pytest.raises(ValidationError):
        original.dim = 3
    for model in (LMConfig, MoEConfig):
        assert all(field.description for field in model.model_fields.values())


def test_configurations_from_before_first_logits_keep_their_meaning():
    """Then every init made first logits small. What a program wrote names all fields, what people write does not."""
    for how in ("standard", "small"):
        now = preset("moe-micro", first_logits=how)
        assert LMConfig.model_validate_json(now.model_dump_json()).first_logits == how
        before = now.model_dump(mode="json", exclude={"first_logits"})
        assert LMConfig.model_validate(before).first_logits == "small"
        assert LMConfig(**before, first_logits=how) == now
    assert config(init="mitchell", init_std=0.02, window=3).first_logits == "standard"
