"""The language model's configuration: typed, frozen, every field documented, round-trips through dict and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from siamesenorm.errors import FieldError
from siamesenorm.field_errors import PlainModel
from siamesenorm.layers.mlp import Activation
from siamesenorm.layers.rope_scaling import RopeKind, Scaling
from siamesenorm.layers.rotary import Rotary
from siamesenorm.models.stack_config import StackConfig
from siamesenorm.residual import NormSpec
from siamesenorm.residual.norms import NormKind


class MoEConfig(PlainModel):
    """A mixture of experts in place of every FFN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    experts: int = Field(ge=1, description="Number of experts in a layer.")
    top_k: int = Field(ge=1, description="Experts that each token is sent to.")
    expert_dim: int = Field(ge=1, description="Hidden width of one expert.")
    balance_weight: float = Field(default=0.01, ge=0, description="Weight of the load-balancing loss.")
    z_weight: float = Field(default=0.001, ge=0, description="Weight of the router's z-loss.")
    normalize_top_k: bool = Field(
        default=False, description="Whether the weights of a token's experts are divided by their sum."
    )

    @model_validator(mode="after")
    def _check(self) -> MoEConfig:
        if self.top_k > self.experts:
            raise FieldError.not_allowed("top_k =", self.top_k, f"a number from 1 to experts = {self.experts}")
        return self


class RopeScaling(PlainModel):
    """Rotary angles of a model whose context was lengthened; see layers/rope_scaling.py."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: RopeKind = Field(description="linear, llama3 or yarn.")
    factor: float = Field(ge=1, description="How much longer the context became.")
    original_length: int = Field(default=8192, ge=1, description="Longest sequence before (llama3, yarn).")
    low: float = Field(default=1.0, gt=0, description="Rotations below which a pair is slowed fully (llama3, yarn).")
    high: float = Field(default=4.0, gt=0, description="Rotations from which on a pair is left alone (llama3, yarn).")
    attention_factor: float = Field(default=1.0, gt=0, description="On cosines and sines (yarn).")
    whole_pairs: bool = Field(default=True, description="Whether the ramp begins and ends at whole pairs (yarn).")

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} is not allowed; it takes a number below high = {self.high:g}")
        return self


WRITTEN = {"kv_heads", "head_dim", "norm_affine", "rope_theta", "window", "z_weight", "init", "init_std", "moe"}
"""Fields that stand together only where a program wrote them: by hand, nobody names what is the default anyway."""


class LMConfig(StackConfig):
    """Everything that decides a language model's function and its first weights."""

    vocab_size: int = Field(ge=1, description="Rows of the embedding and of the head.")
    kv_heads: int | None = Field(default=None, ge=1, description="Heads of keys and values; default: as many as heads.")
    head_dim: int | None = Field(default=None, ge=2, description="Width of a head; default: dim / heads.")
    activation: Activation = Field(
        default="swiglu", description="swiglu or geglu_tanh (value and gate, each of ffn_dim), gelu, gelu_tanh."
    )
    norm: NormKind = Field(
        default="rms", description="Kind of every norm: rms, layer, or gated (GatedNorm; norms in sublayers are rms)."
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="Added to the variance in every norm.")
    norm_affine: bool = Field(default=True, description="Whether norms have a gain.")
    norm_bias: bool = Field(default=False, description="Whether norms have a bias.")
    bias: bool = Field(default=False, description="Whether projections have a bias.")
    qkv_bias: bool | None = Field(
        default=None, description="Whether queries, keys and values have a bias; default: as other projections."
    )
    query_factor: float = Field(
        default=1.0, gt=0, description="What queries are multiplied by, beside the usual 1/sqrt(head_dim)."
    )
    embedding_scale: float = Field(default=1.0, gt=0, description="What the embedding is multiplied by.")
    tied: bool = Field(default=False, description="Whether the head is the embedding's own matrix.")
    rope_theta: float = Field(default=10000.0, gt=0, description="Base of the rotary angles.")
    rope_scaling: RopeScaling | None = Field(
        default=None, description="Rotary angles of a lengthened context; default: none."
    )
    rotary_dim: int | None = Field(
        default=None, ge=0, description="Features of a head that rotate, the first of each half; default: all."
    )
    learned_positions: bool = Field(
        default=False, description="Whether every position has a learned vector, added to the embedding."
    )
    max_length: int = Field(default=2048, ge=1, description="Longest sequence, prompt and answer together.")
    window: int | None = Field(
        default=None, ge=1, description="Tokens that a token sees, itself included; default: all before it."
    )
    full_every: int | None = Field(
        default=None, ge=1, description="One block in so many has no window; default: all blocks have it."
    )
    window_rope_theta: float | None = Field(
        default=None, gt=0, description="Base of unscaled rotary angles in blocks with a window; default: as others."
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout on the embedding and on every sublayer's update."
    )
    z_weight: float = Field(default=0.0, ge=0, description="Weight of the head's z-loss, the mean of log(Z)^2.")
    init: Literal["mitchell", "megatron", "normal"] = Field(
        default="mitchell",
        description="How weights start: by OLMo's rule, Megatron's, or all alike; see models/lm/init.py.",
    )
    first_logits: Literal["standard", "small"] = Field(
        default="standard",
        description="How large the first logits are: standard, as init has them; small, for a first loss of "
        "ln(vocabulary).",
    )
    init_std: float = Field(default=0.02, gt=0, description="Standard deviation of megatron and normal.")
    moe: MoEConfig | None = Field(default=None, description="Mixture of experts in place of the FFN; default: dense.")

    @model_validator(mode="before")
    @classmethod
    def _written_before(cls, fields: Any) -> Any:
        """Small first logits were once part of every `init`, which a written configuration without the field means."""
        if isinstance(fields, Mapping) and "first_logits" not in fields and WRITTEN.issubset(fields):
            return {**fields, "first_logits": "small"}
        return fields

    @model_validator(mode="after")
    def _check(self) -> LMConfig:
        if self.head_dim is None:
            self.check_heads(", or give head_dim")
        if self.heads % self.num_kv_heads:
            raise FieldError.not_allowed("kv_heads =", self.kv_heads, f"a divisor of heads = {self.heads}")
        if self.dim_per_head % 2:
            raise FieldError.refused("head_dim =", self.dim_per_head, "rotary positions take an even number")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or self.rotary_dim > self.dim_per_head):
            raise FieldError.not_allowed(
                "rotary_dim =", self.rotary_dim, f"an even number up to head_dim = {self.dim_per_head}"
            )
        for name in ("full_every", "window_rope_theta"):
            if self.window is None and getattr(self, name) is not None:
                raise FieldError.not_allowed(f"{name} =", getattr(self, name), "null without a window")
        return self

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values, resolved."""
        return self.kv_heads or self.heads

    @property
    def dim_per_head(self) -> int:
        """Width of a head, resolved."""
        return self.head_dim or self.dim // self.heads

    def is_windowed(self, block: int) -> bool:
        """Whether a block sees no more than the window."""
        return self.window is not None and (self.full_every is None or (block + 1) % self.full_every != 0)

    @property
    def rotary(self) -> Rotary:
        """Angles of positions."""
        scaling = None if self.rope_scaling is None else Scaling(**vars(self.rope_scaling))
        return Rotary(self.rope_theta, self.rotary_dim, scaling)

    @property
    def window_rotary(self) -> Rotary:
        """Angles of positions in blocks with a window."""
        return self.rotary if self.window_rope_theta is None else Rotary(self.window_rope_theta, self.rotary_dim)

    @property
    def norm_spec(self) -> NormSpec:
        """What makes every norm of the model."""
        return NormSpec(self.norm, self.norm_eps, self.norm_affine, self.norm_bias)
