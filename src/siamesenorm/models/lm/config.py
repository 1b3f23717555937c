"""The language model's configuration: typed, frozen, every field documented, round-trips through dict and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from siamesenorm.layers.mlp import Activation
from siamesenorm.models.stack_config import StackConfig
from siamesenorm.residual import NormSpec
from siamesenorm.residual.norms import NormKind


class MoEConfig(BaseModel):
    """A mixture of experts in place of every FFN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    experts: int = Field(ge=1, description="Number of experts in a layer.")
    top_k: int = Field(ge=1, description="Experts that each token is sent to.")
    expert_dim: int = Field(ge=1, description="Hidden width of one expert.")
    balance_weight: float = Field(default=0.01, ge=0, description="Weight of the load-balancing loss.")
    z_weight: float = Field(default=0.001, ge=0, description="Weight of the router's z-loss.")

    @model_validator(mode="after")
    def _check(self) -> MoEConfig:
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k = {self.top_k} is not allowed; it takes a number from 1 to experts = {self.experts}"
            )
        return self


WRITTEN = {"kv_heads", "head_dim", "norm_affine", "rope_theta", "window", "z_weight", "init", "init_std", "moe"}
"""Fields that stand together only where a program wrote them: by hand, nobody names what is the default anyway."""


class LMConfig(StackConfig):
    """Everything that decides a language model's function and its first weights."""

    vocab_size: int = Field(ge=1, description="Rows of the embedding and of the head.")
    kv_heads: int | None = Field(default=None, ge=1, description="Heads of keys and values; default: as many as heads.")
    head_dim: int | None = Field(default=None, ge=2, description="Width of a head; default: dim / heads.")
    activation: Activation = Field(default="swiglu", description="swiglu (value and gate, each of ffn_dim) or gelu.")
    norm: NormKind = Field(
        default="rms", description="Kind of every norm: rms, layer, or gated (GatedNorm; norms in sublayers are rms)."
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="Added to the variance in every norm.")
    norm_affine: bool = Field(default=True, description="Whether norms have a gain.")
    norm_bias: bool = Field(default=False, description="Whether norms have a bias.")
    bias: bool = Field(default=False, description="Whether projections have a bias.")
    tied: bool = Field(default=False, description="Whether the head is the embedding's own matrix.")
    rope_theta: float = Field(default=10000.0, gt=0, description="Base of the rotary angles.")
    max_length: int = Field(default=2048, ge=1, description="Longest sequence, prompt and answer together.")
    window: int | None = Field(
        default=None, ge=1, description="Tokens that a token sees, itself included; default: all before it."
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
        if self.heads % self.key_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} is not allowed; it takes a divisor of heads = {self.heads}")
        if self.head_width % 2:
            raise ValueError(f"head_dim = {self.head_width} is not allowed; rotary positions take an even number")
        return self

    @property
    def key_heads(self) -> int:
        """Heads of keys and values, resolved."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of a head, resolved."""
        return self.head_dim or self.dim // self.heads

    @property
    def norm_spec(self) -> NormSpec:
        """What makes every norm of the model."""
        return NormSpec(self.norm, self.norm_eps, self.norm_affine, self.norm_bias)
