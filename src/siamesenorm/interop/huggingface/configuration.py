"""The configuration that transformers knows, one to one with `LMConfig`.

Fields that every causal LM has carry the names that tools look for (``hidden_size``, ``num_hidden_layers``); the
others keep ours.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from siamesenorm.errors import InteropError
from siamesenorm.models.lm.config import LMConfig

# LMConfig's name to transformers'. What is not here has the same name in both.
NAMES = {
    "dim": "hidden_size",
    "blocks": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "tied": "tie_word_embeddings",
    "max_length": "max_position_embeddings",
    "window": "sliding_window",
    "rope_scaling": "rotary_scaling",  # transformers has a property of ours' name, which means something else
    "init_std": "initializer_range",
}


class SiameseNormConfig(PreTrainedConfig):
    """What `SiameseNormModel` is made from; ``SiameseNormConfig.from_lm_config`` and `to_lm_config` translate.

    Values are checked when a model is made, by `LMConfig`.
    """

    model_type: ClassVar[str] = "siamesenorm"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {
        "embed_tokens": "free_full_weight",
        "layers.*": "free_full_weight",
        "residual": "keep_full_weight",
    }

    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 2048
    activation: str = "swiglu"
    norm: str = "rms"
    norm_eps: float = 1e-5
    norm_affine: bool = True
    norm_bias: bool = False
    bias: bool = False
    qkv_bias: bool | None = None
    query_factor: float = 1.0
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = False
    topology: str = "siamese"
    qk_norm: str = "none"
    parametrization: str = "standard"
    base_width: int | None = None
    base_depth: int | None = None
    rope_theta: float = 10000.0
    rotary_scaling: dict[str, Any] | None = None
    rotary_dim: int | None = None
    learned_positions: bool = False
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    full_every: int | None = None
    window_rope_theta: float | None = None
    dropout: float = 0.0
    z_weight: float = 0.0
    init: str = "mitchell"
    first_logits: str | None = None
    """As in `LMConfig`; None is its default, or in a config.json from before this field what it was then: small."""
    initializer_range: float = 0.02
    moe: dict[str, Any] | None = None

    use_cache: bool = True
    training_logits: bool = True
    """Whether a training pass with labels returns logits too. False saves their memory, which a large vocabulary
    makes the largest of all: the loss is then computed a chunk of tokens at a time."""
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Resolve what follows from other fields; tools expect numbers here. Another model's fields are refused."""
        self.check_type(kwargs.get("model_type", self.model_type), "config")
        if self.first_logits is None:
            is_read = "model_type" in kwargs  # a config.json names it, Python code does not
            self.first_logits = "small" if is_read else "standard"
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.full_every is not None:  # caches ask for it; without it, all layers are alike
            kinds = ("sliding_attention", "full_attention")
            blocks = range(1, self.num_hidden_layers + 1)
            self.layer_types = [kinds[block % self.full_every == 0] for block in blocks]
        super().__post_init__(**kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json says: what differs from the defaults, and always how large the first logits are."""
        return {**super().to_diff_dict(), "first_logits": self.first_logits}

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The fields of a folder's config.json, which must be one of ours: others would give a fresh model."""
        found, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        cls.check_type(found.get("model_type"), repr(str(pretrained_model_name_or_path)))
        return found, rest

    @classmethod
    def check_type(cls, model_type: Any, source: str) -> None:
        """Raise where a configuration is that of another kind of model."""
        if model_type != cls.model_type:
            said = f"model_type {model_type!r}" if model_type is not None else "no model_type"
            raise InteropError(f"{source} has {said}; {cls.__name__} takes {cls.model_type!r}")

    @classmethod
    def from_lm_config(cls, config: LMConfig, **kwargs: Any) -> SiameseNormConfig:
        """The same model for transformers; kwargs are its other fields (``eos_token_id``, ``use_cache``)."""
        return cls(**{NAMES.get(name, name): value for name, value in config.model_dump().items()}, **kwargs)

    def to_lm_config(self) -> LMConfig:
        """The same model for `LanguageModel`, with every value checked. Widths that are the default are left out."""
        fields = {name: getattr(self, NAMES.get(name, name)) for name in LMConfig.model_fields}
        if fields["kv_heads"] == fields["heads"]:
            fields["kv_heads"] = None
        if fields["head_dim"] == fields["dim"] // fields["heads"]:
            fields["head_dim"] = None
        return LMConfig(**fields)
