"""Whole runs of several processes: the losses of one process, the same files, an end after a worker's death."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from siamesenorm.errors import ConfigError
from siamesenorm.tasks import find_task
from siamesenorm.train.divergence import Verdict, locate
from siamesenorm.train.engine import Engine
from siamesenorm.train.folder import RunFolder, read_metrics
from siamesenorm.train.loop import train
from siamesenorm.train.parallel import parallelize
from siamesenorm.train.parallel.experts import experts_of
from siamesenorm.train.recipes import resolve
from siamesenorm.train.yaml import write_yaml

from .elastic_worker import work
from .tiny import watched_whole
from .worlds import PATIENCE, PRELOADED, run_world

STEPS = 8
WORKER = Path(__file__).with_name("elastic_worker.py")


def tiny_config(folder, *changes):
    tokens = folder / "tokens.npy"
    np.random.default_rng(0).integers(0, 256, 5_000).astype(np.uint16).tofile(tokens)
    small = [
        "model.dim=16", "model.blocks=2", "model.heads=2", "model.ffn_dim=32", f"data.train={tokens}",
        "data.sequence_length=16", "train.batch_size=4", f"train.steps={STEPS}", "schedule.warmup=2",
        "checkpoint.every=2", "evaluation.every=null", "logging.tensorboard=false", "logging.peak_flops=1e9",
        "divergence.spike=null", "divergence.plateau=null", "parallel.device=cpu",
    ]  # fmt: skip
    return resolve("lm-tiny", [*small, *changes])


def run_in(world, config, folder):
    return train(config, folder, world=world).state


def gathered_in(world, config, folder):
    seen = set()
    shard = parallelize.fully_shard
    parallelize.fully_shard = lambda module, **options: (seen.add(dtype_of(options)), shard(module, **options))[1]
    seen.add(run_in(world, config, folder))
    return seen - {"None"}


def dtype_of(options):
    return str(options["mp_policy"].param_dtype if "mp_policy" in options else None)


def held_in(world, config, folder):
    with watched_whole() as held:
        run_in(world, config, folder)
    return max(held)


def located_in(world, config):
    """One process's part of the weights, or of the data, is broken; where all of them say it began."""
    engine = Engine(config, find_task(config.task)(config), world)
    engine.batch, parameters = next(engine.loader), dict(engine.model.named_parameters())
    verdict, found = Verdict("non_finite", "the loss is nan"), []
    if world.rank == 1:
        block = next(module for name, module in engine.model.named_modules() if name.endswith("blocks.0.ffn"))
        hook = block.register_forward_hook(lambda module, inputs, output: output * torch.nan)
    found.append(locate(engine.model, verdict, lambda: engine.gradients(1), world))
    if world.rank == 1:
        hook.remove()
        broken = next(p for name, p in parameters.items() if name.endswith("blocks.1.ffn.up.weight"))
        getattr(broken, "to_local", lambda: broken)().data.fill_(torch.nan)
    found.append(locate(engine.model, verdict, lambda: engine.gradients(1), world))
    engine.close()
    return found


def refused_in(world, config, folder):
    with pytest.raises(ConfigError) as refusal:
        run_in(world, config, folder)
    world.barrier()
    return str(refusal.value), folder.exists()


def locked_in(world, config, folder):
    with RunFolder(folder).locked() if world.is_main else contextlib.nullcontext():
        return refused_in(world, config, folder)[0]


def losses(folder):
    return [(record["loss"], record["grad_norm"]) for record in read_metrics(folder) if "loss" in record]


def test_what_does_not_fit_the_world_is_refused_by_all_and_leaves_nothing(tmp_path):
    config, run = tiny_config(tmp_path, "train.batch_size=1"), tmp_path / "run"
    reason = "train.batch_size: 1 is not allowed; 2 processes take 2 or more"
    assert run_world(2, refused_in, config, run) == [(reason, False)] * 2
    first, second = run_world(2, locked_in, tiny_config(tmp_path), run)
    assert first == second == f"run: another process is training in {str(run)!r}; wait or stop it"


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_all_processes_agree_on_where_a_divergence_began(tmp_path, mode):
    """What one of them sees alone neither hangs the others nor goes unsaid."""
    found = run_world(2, located_in, tiny_config(tmp_path), mode=mode)
    assert found == [["activation of blocks.0.ffn", "parameter blocks.1.ffn.up.weight"]] * 2


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "tp"])
def test_a_run_of_two_processes_is_the_run_of_one(tmp_path, mode):
    """With averaged weights, in micro-batches that do not divide evenly, down to the exported file and its names.

    Of 5 samples the processes have 3 and 2, and 2 at a time: the second one has a part less than the first.
    """
    uneven = ("train.batch_size=5", "train.micro_batch_size=2")
    config = tiny_config(tmp_path, "train.ema=0.5", *uneven, f"parallel.mode={mode}")
    assert train(config, tmp_path / "one").state == "finished"
    assert run_world(2, run_in, config, tmp_path / "two", mode=mode) == ["finished", "finished"]
    assert len(losses(tmp_path / "two")) == STEPS
    for ours, theirs in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    one, two = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)


def test_no_process_of_a_sharded_run_holds_the_whole_model(tmp_path):
    config = tiny_config(tmp_path, "train.steps=1", "schedule.warmup=0", "model.blocks=6", "parallel.mode=fsdp")
    assert train(config, tmp_path / "one").state == "finished"
    whole = sum(tensor.numel() for tensor in load_file(tmp_path / "one" / "weights.safetensors").values())
    assert max(run_world(2, held_in, config, tmp_path / "two", mode="fsdp")) < whole / 2


def test_shards_are_gathered_in_the_precision_of_the_run(tmp_path):
    """Half the bytes between processes, and the losses of one process up to bf16's rounding."""
    config = tiny_config(tmp_path, "train.precision=bf16", "train.steps=3", "parallel.mode=fsdp")
    assert train(config, tmp_path / "one").state == "finished"
    assert run_world(2, gathered_in, config, tmp_path / "two", mode="fsdp") == [{"finished", "torch.bfloat16"}] * 2
    for ours, theirs in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=0.02)


def agents_of(agent, *arguments):
    """Processes of torchrun's agents, from the server that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return [context.Process(target=agent, args=given) for given in arguments]


def command_line(*arguments):
    os.environ["OMP_NUM_THREADS"] = "1"
    from torch.distributed.run import main

    main(arguments)


def two_workers(*arguments):
    """What ``torchrun --standalone --nproc-per-node=2 --max-restarts=1`` does, with workers from a fork server."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    rendezvous = {"run_id": "run", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    config = LaunchConfig(1, 1, 2, **rendezvous, max_restarts=1, monitor_interval=0.1, start_method="forkserver")
    elastic_launch(config, work)(*arguments)


def test_a_worker_dies_and_the_run_comes_to_the_same_end(tmp_path):
    """torchrun restarts both processes; they find each other again, resume, and end with bitwise the same weights."""
    config = tiny_config(tmp_path, "parallel.mode=ddp", "model.dropout=0.1")
    assert run_world(2, run_in, config, tmp_path / "alone") == ["finished", "finished"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(write_yaml(config.as_dict()))
    (process,) = agents_of(two_workers, (str(recipe), str(tmp_path / "killed"), "1:6"))
    process.start()
    try:
        process.join(PATIENCE)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
    assert len((tmp_path / "killed.workers").read_text().split()) == 4  # one did die, and both began again
    assert losses(tmp_path / "killed") == losses(tmp_path / "alone")
    killed, alone = ((tmp_path / name / "weights.safetensors").read_bytes() for name in ("killed", "alone"))
    assert killed == alone


def test_an_agent_dies_and_no_worker_waits_for_its_workers(tmp_path):
    """Two machines, one of which loses its agent: all workers save the step they are at, and end."""
    config = tiny_config(tmp_path, "checkpoint.every=100", "train.steps=20")
    assert train(config, tmp_path / "alone").state == "finished"
    (tmp_path / "recipe.yaml").write_text(write_yaml(config.as_dict()))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    commands = []
    for host, deaths in ((1, []), (0, ["agent:5"])):
        command = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=run"]
        command += [f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf=is_host={host}"]
        command += [str(WORKER), str(tmp_path / "recipe.yaml"), str(tmp_path / "run"), *deaths]
        commands.append(command)
    agents = agents_of(command_line, *commands)
    for process in agents:
        process.start()
    try:
        agents[1].join(PATIENCE)
        assert agents[1].exitcode == -signal.SIGKILL
        workers = [int(line) for line in (tmp_path / "run.workers").read_text().split()]
        assert len(workers) == 2
        assert all(map(ended, workers))
        assert agents[0].is_alive()  # waits for another machine, to go on with
    finally:
        for process in agents:
            process.kill()
            process.join()
    status = RunFolder(tmp_path / "run").status()
    assert status["state"] == "interrupted"
    assert status["step"] >= 5
    assert train(config, tmp_path / "run").state == "finished"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [status["step"]]  # nothing is lost
    for ours, theirs in zip(losses(tmp_path / "run"), losses(tmp_path / "alone"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)  # two processes add in another order


def ended(process):
    """Whether a process that is no child of this one has ended, or does so soon."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], PATIENCE)[0])
    finally:
        os.close(descriptor)


def balances(world, config):
    """Of every part of a step: the load-balancing loss as it was, and that of the same tokens by themselves."""
    engine = Engine(config, find_task(config.task)(config), world)
    moe = next(experts_of(engine.model))
    seen = []
    hook = moe.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].detach(), output[1])))
    engine.batch = next(engine.loader)
    engine.gradients(1)
    hook.remove()
    moe.mean = None
    found = [(float(stats.balance_loss), float(moe(tokens)[1].balance_loss)) for tokens, stats in seen]
    engine.close()
    return found


def test_a_part_that_does_not_count_adds_nothing_to_the_balance_of_others(tmp_path):
    """Three samples of two processes, one at a time: the second process repeats one, for which no slots count."""
    moe = "model.moe={experts: 4, top_k: 2, expert_dim: 8}"
    config = tiny_config(tmp_path, moe, "train.batch_size=3", "train.micro_batch_size=1", "parallel.mode=ddp")
    first, _ = run_world(2, balances, config)
    (shared, alone), (last, last_alone) = first
    assert shared != pytest.approx(alone, rel=1e-4)
    assert last == pytest.approx(last_alone, rel=1e-6)
