"""Our language model, on any topology, in torchtitan 0.3: FSDP, HSDP and our tensor parallelism.

    torchrun --nproc-per-node 8 -m torchtitan.train --module siamesenorm_titan --config small

with this folder on PYTHONPATH. `small` is a configuration to copy: model, data and length are in it. What is sharded is
the model itself; first weights are those that our own trainer gives, made part by part while it is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from siamesenorm.data import BatchLoader, TrainingData
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.models.lm.counts import flops_of_token
from siamesenorm.tasks.corpora import open_corpus
from siamesenorm.tasks.language_config import TextDataConfig
from siamesenorm.train.activations import checkpoint_activations
from siamesenorm.train.distributed import Meshes
from siamesenorm.train.parallel.parallelize import Spreading, clip

SEED = 0


class TitanLM(BaseModel):
    """`LanguageModel` as torchtitan builds, shards and calls a model."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """Fields of `LMConfig`."""

        lm: dict[str, Any] = field(default_factory=dict)

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Nothing of the run changes the model."""

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            """Of a token, forward and backward."""
            return sum(p.numel() for p in model.parameters()), int(3 * flops_of_token(model.lm, seq_len))

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.lm = LanguageModel(LMConfig(**config.lm))
        if self.lm.config.moe is not None:
            raise ValueError("model.moe: experts are not allowed here; torchtitan's loss does not know routers' losses")
        self.dtype = torch.float32

    def forward(self, tokens: torch.Tensor, **positions: torch.Tensor) -> torch.Tensor:
        """Logits, which torchtitan makes its loss of."""
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.lm(tokens, **positions).logits

    def verify_module_protocol(self) -> None:
        """Our modules are plain ones."""

    def to_empty(self, **options: Any) -> TitanLM:
        """Weights are there since the model was sharded."""
        return super().to_empty(**options) if next(self.parameters()).is_meta else self

    def init_weights(self, **options: Any) -> None:
        """Nor is anything left to draw."""


def parallelize(model: TitanLM, *, parallel_dims: Any, training: Any, compile_config: Any, ac_config: Any, **_: Any):
    """Shard and split the model, and give it its first weights on the way."""
    if parallel_dims.cp_enabled or parallel_dims.ep_enabled or parallel_dims.pp_enabled:
        raise ValueError("parallelism: context, expert and pipeline parallelism are not allowed here; see our trainer")
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    shards, tensors = parallel_dims.get_mesh(names), parallel_dims.get_mesh("tp") if parallel_dims.tp_enabled else None
    checkpoint_activations(model.lm, "none" if ac_config is None else "full")
    model.dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    gathered = None if model.dtype == torch.float32 else model.dtype
    compiled = compile_config.enable and "model" in compile_config.components
    meshes = Meshes(data=shards, shards=shards, tensors=tensors)
    spreading = Spreading(model.lm, meshes, torch.device(device_type), gathered, compiled)
    model.lm.init_weights(SEED, part_context=spreading.materialized)
    spreading.finish()
    disable_fsdp_gradient_division(model)  # losses are sums over the batch's number of tokens
    for module in model.modules():
        if isinstance(module, FSDPModule) and device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo scales nothing
    return model


def clip_grad_norm(parameters: Any, max_norm: float, **_: Any) -> torch.Tensor:
    """In place of torchtitan's, which takes parameters of one mesh: we split matrices only."""
    return clip(parameters, max_norm)


dist_utils.clip_grad_norm_ = clip_grad_norm
if not hasattr(torch.distributed, "set_timeout"):  # torchtitan calls it behind the first step; torch 2.13 hides it
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout


class Tokens(BaseDataLoader):
    """Corpora of ours: token shards, text files, or what is embedded."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """`dataset` is the corpus."""

    def __init__(
        self, config: Any, *, dp_rank: int, dp_world_size: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        data = TextDataConfig(train=(config.dataset,), sequence_length=seq_len)
        sequences = TrainingData([open_corpus(config.dataset, data, "train")], seq_len, seed=SEED)
        self.loader = BatchLoader(sequences, local_batch_size * dp_world_size, rank=dp_rank, world_size=dp_world_size)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self.loader:
            yield {"input": batch["input_ids"]}, batch["labels"]

    def state_dict(self) -> dict[str, Any]:
        """Samples given so far."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.loader.load_state_dict(state_dict)


class NoTokenizer(BaseTokenizer):
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to say."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    encode = decode = get_vocab_size = lambda self, *args, **kwargs: NotImplemented


def small(topology: str = "siamese") -> Trainer.Config:
    """A byte-level model on the standard library's code; a configuration for GPUs has other sizes, and bf16."""
    lm = {"vocab_size": 258, "dim": 32, "blocks": 3, "heads": 4, "ffn_dim": 64, "topology": topology, "max_length": 64}
    return Trainer.Config(
        model_spec=ModelSpec("siamesenorm", topology, TitanLM.Config(lm=lm), parallelize, None, None, None),
        loss=CrossEntropyLoss.Config(global_vocab_size=lm["vocab_size"]),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=4, seq_len=32, steps=4, mixed_precision_param="float32", disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        dataloader=Tokens.Config(dataset="python-code"),
        tokenizer=NoTokenizer.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=None,
    )
