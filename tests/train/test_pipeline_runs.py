"""Whole runs of a pipeline: those of one process, and what pipelines and expert parallelism do not take."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from siamesenorm.errors import ConfigError
from siamesenorm.tasks import find_task
from siamesenorm.train.config import ParallelConfig
from siamesenorm.train.distributed import World
from siamesenorm.train.divergence import Verdict, locate
from siamesenorm.train.engine import Engine
from siamesenorm.train.folder import RunFolder
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve
from siamesenorm.train.tensor_layout import plain_name

from .test_distributed_runs import losses, tiny_config
from .worlds import run_world

MOE = "model.moe={experts: 4, top_k: 2, expert_dim: 8}"
ALIKE = [
    MOE,
    "train.micro_batch_size=2",
    "train.ema=0.5",
    "evaluation.every=4",
    "train.steps=4",
    "evaluation.sequences=6",
]
REFUSED = {
    "parallel.pp: 3 is not allowed; with 2 processes it takes 1, 2": ["parallel.pp=3"],
    "parallel.pp: 2 is not allowed with model.tied = true; the first stage has the embedding and the last one the "
    "head": ["parallel.pp=2", "train.micro_batch_size=2", "model.tied=true"],
    "parallel.pp: 2 is not allowed; 4 stages take as many blocks, model.blocks = 2": [
        "parallel.pp=2", "train.micro_batch_size=2", "parallel.schedule=interleaved_1f1b"
    ],
    "train.micro_batch_size: 4 is not allowed with parallel.pp = 2; 1f1b takes 2 micro-batches or more of the 4 "
    "samples that a process has": ["parallel.pp=2"],
    "train.micro_batch_size: 3 is not allowed with parallel.pp = 2; micro-batches of a pipeline are equal, and 4 "
    "samples on 1 processes of a stage are no multiple": ["parallel.pp=2", "train.micro_batch_size=3"],
    "parallel.pp: 2 is not allowed with train.parameters = 'norms'; it takes all": [
        "parallel.pp=2", "train.micro_batch_size=2", "train.parameters=norms"
    ],
    "train.precision: 'fp16' is not allowed with parallel.pp = 2; only the last stage knows the loss and its scale; a "
    "pipeline takes fp32 or bf16": ["parallel.pp=2", "train.micro_batch_size=2", "train.precision=fp16"],
    "parallel.pp: 2 is not allowed with evaluation.arithmetic; a pipeline gives losses only": [
        "parallel.pp=2", "train.micro_batch_size=2", "evaluation.arithmetic=4"
    ],
    "parallel.ep: 2 is not allowed with ddp; it takes fsdp, hsdp or tp": ["parallel.ep=2", MOE],
    "parallel.ep: 2 is not allowed for a model without experts; it takes 1": ["parallel.ep=2", "parallel.mode=fsdp"],
    "parallel.ep: 2 is not allowed; model.moe.experts = 3 is no multiple": [
        "parallel.ep=2", "parallel.mode=fsdp", "model.moe={experts: 3, top_k: 2, expert_dim: 8}"
    ],
    "parallel.ep: 4 is not allowed; with 2 processes that share the weights it takes 1, 2": [
        "parallel.ep=4", "parallel.mode=fsdp", MOE
    ],
}  # fmt: skip


def as_asked(world: World, parallel: ParallelConfig) -> World:
    places = (world.rank, world.size, world.local_rank, world.local_size)
    return World(*places, None, parallel.mode, parallel.group, ep=parallel.ep, pp=parallel.pp)


def refusal(world, config, folder):
    with pytest.raises(ConfigError) as caught:
        train(config, folder, world=as_asked(world, config.parallel))
    world.barrier()
    return str(caught.value)


def located(world, config):
    """The first stage's activations are broken, then the last one's weights; where all say that it began."""
    engine = Engine(config, find_task(config.task)(config), world)
    engine.batch, verdict, found = next(engine.loader), Verdict("non_finite", "the loss is nan"), []
    modules = {plain_name(name): module for name, module in engine.model.named_modules()}
    if world.stage == 0:
        hook = modules["blocks.0.attention"].register_forward_hook(lambda module, inputs, output: output * torch.nan)
    found.append(locate(engine.model, verdict, lambda: engine.gradients(1), world))
    if world.stage == 0:
        hook.remove()
    else:
        modules["blocks.1.ffn"].w_in.data.fill_(torch.nan)
    found.append(locate(engine.model, verdict, lambda: engine.gradients(1), world))
    engine.close()
    return found


def go_through(world, config, folder, refused, images):
    state = train(config, folder / "two", world=world).state
    sentences = [refusal(world, one, folder / "refused") for one in [*refused, images]]
    return state, sentences, (folder / "refused").exists(), located(world, config)


def test_a_pipeline_of_two_processes_runs_as_one(tmp_path):
    """Losses, evaluation, averaged weights in the exported file; where a divergence began; what is refused by name."""
    config = tiny_config(tmp_path, *ALIKE, f"data.validation={tmp_path / 'tokens.npy'}")
    assert train(config, tmp_path / "one").state == "finished"
    piped = tiny_config(tmp_path, *ALIKE, f"data.validation={tmp_path / 'tokens.npy'}", "parallel.pp=2")
    refused = [tiny_config(tmp_path, *changes) for changes in REFUSED.values()]
    images = resolve(
        "deit-digits", ["parallel.pp=2", "parallel.device=cpu", "train.batch_size=4", "train.micro_batch_size=2"]
    )
    for state, sentences, there, broken in run_world(2, go_through, piped, tmp_path, refused, images, pp=2):
        assert state == "finished"
        expected = "parallel.pp: 2 is not allowed for VisionTransformer; pipelines take language models"
        assert sentences == [*REFUSED, expected]
        assert not there
        assert broken == ["activation of blocks.0.attention", "parameter blocks.1.ffn.w_in"]
    assert len(losses(tmp_path / "two")) == 4
    for ours, theirs in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    one, two = (RunFolder(tmp_path / name).status()["evaluation"] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)
    one, two = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)


def test_context_parallelism_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"parallel\.cp"):
        tiny_config(tmp_path, "parallel.cp=2")
