"""Plans: what is counted without values against real steps and real sharding, refusals, and commands of the docs."""

import contextlib
import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from siamesenorm.cli import main
from siamesenorm.errors import ConfigError
from siamesenorm.models.lm import LanguageModel
from siamesenorm.train.activations import checkpoint_activations
from siamesenorm.train.config import RunConfig
from siamesenorm.train.distributed import World
from siamesenorm.train.planning import plan as planning
from siamesenorm.train.planning.hardware import GPUS, Assumptions, assumptions, find_gpu
from siamesenorm.train.planning.layouts import Layout, given_layout, of_process, possible_layouts
from siamesenorm.train.planning.needs import at_depth, need_of, need_of_group, parts_of
from siamesenorm.train.planning.profile import Question, profile, traced, whole_model
from siamesenorm.train.planning.refusals import problem_of
from siamesenorm.train.planning.stages import gatherings, passes
from siamesenorm.train.planning.timing import sent_by, sent_by_group, work_of
from siamesenorm.train.planning.tracing import Ledger, shapes_alone, trace_step
from siamesenorm.train.recipes import resolve

from .worlds import run_world

MOE = "model.moe={experts: 4, top_k: 2, expert_dim: 8}"
ROOT = Path(__file__).parents[2]
SMALL = (
    "model.dim=32", "model.ffn_dim=64", "model.heads=4", "model.vocab_size=300", "model.max_length=16",
    "data.sequence_length=16", "train.batch_size=8",
)  # fmt: skip


def small(*overrides: str) -> RunConfig:
    return resolve("lm-tiny", [*SMALL, "blocks=5", *overrides])


def kept_by_a_real_step(config: RunConfig, rows: int) -> int:
    """Bytes of all storages that autograd saves, weights left out, and of the loss's own gradients."""
    model = LanguageModel(config.model, seed=0)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}
    alive = []

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    ids = torch.zeros(rows, 16, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        alive.append(model(ids, labels=ids).loss)
    return sum(size for at, size in storages.items() if at not in weights)


@pytest.mark.parametrize("topology", ["pre", "siamese:form=hybrid_pre", "subln", "mhc", "gr", "attnres:blocks=1"])
def test_what_is_kept_is_what_autograd_saves(topology):
    """Five blocks from traces of two and three; norms inside sublayers, rows, and streams that grow with depth."""
    config = small(f"topology={topology}")
    found = profile(Question(config, 4, "cpu", "none"))
    assert found.kept == pytest.approx(kept_by_a_real_step(config, 4), rel=0.02)


def test_precision_counts():
    """Activations in bf16 take half, weights' casts included; streams and norms stay in fp32."""
    full = traced(Question(small("topology=pre"), 8, "cuda", "none"), 2)
    half = traced(Question(small("topology=pre", "precision=bf16"), 8, "cuda", "none"), 2)
    assert 0.4 * full.kept < half.kept < 0.8 * full.kept


def test_checkpointing_keeps_less_and_computes_more():
    kinds = [traced(Question(small("topology=pre"), 8, "cpu", kind), 3) for kind in ("none", "sublayer", "full")]
    assert kinds[0].kept > kinds[1].kept > kinds[2].kept
    assert kinds[0].flops < kinds[1].flops <= kinds[2].flops


@pytest.mark.parametrize(("kind", "every"), [("full", 2), ("sublayer", 3)])
def test_blocks_that_keep_everything_count(kind, every):
    """Six blocks of which some are computed again, counted from two and three, beside the step itself."""
    config = small("topology=pre", "blocks=6", f"checkpointed_every={every}")
    model = whole_model(config)
    checkpoint_activations(model, kind, every)
    with shapes_alone("cpu"):
        model.to_empty(device="cpu")
        ids = torch.zeros(8, 16, dtype=torch.long)
        step = trace_step(model, lambda model: model(ids, labels=ids).loss, contextlib.nullcontext())
    found = profile(Question(config, 8, "cpu", kind))
    assert found.kept == pytest.approx(step.kept, rel=0.02)
    assert found.flops == pytest.approx(step.flops, rel=0.02)
    fullest = max(moment.both for moment in step.stages.values())
    assert max(stage.alive + stage.gradients for stage in found.stages.values()) == pytest.approx(fullest, rel=0.05)


def sharded_trace(
    world: World, precision: str, device: str, blocks: int, mode: str = "fsdp", *changes: str
) -> tuple[dict[tuple[str, int], int], dict[str, float]]:
    """Stages and bytes of a step that is really spread, among processes of which only the first exists."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from siamesenorm.train.parallel import apply_parallelism

    size = 8 if mode == "fsdp" else 2  # both at once would make meshes of tensors without values
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    world = World(0, size, 0, size, mode=mode)
    config = small("topology=siamese", f"precision={precision}", f"blocks={blocks}", *changes)
    dtype = torch.bfloat16 if precision == "bf16" else None
    model = whole_model(config)
    assert world.meshes.data.size() == world.data_size
    with shapes_alone(device):
        model.to_empty(device="cpu")
        how = {name: getattr(config.parallel, name) for name in ("sequence_parallel", "loss_parallel")}
        spread = apply_parallelism(model, world, dtype=dtype, **how)
        ids = torch.zeros(4, 16, dtype=torch.long)
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None)
        trace = trace_step(spread, lambda model: model(ids, labels=ids).loss, autocast)
    dist.destroy_process_group()
    return {stage: moment.both for stage, moment in trace.stages.items()}, trace.sent


@pytest.mark.parametrize(("precision", "device"), [("fp32", "cpu"), ("bf16", "cpu"), ("bf16", "cuda")])
def test_what_sharding_adds_is_what_fsdp_does(precision, device):
    """The formulas against a step that is really sharded, in a world of fake processes.

    A CPU's kernels do not take gains that are gathered in bf16, and plain operators keep more; a GPU's take them.
    """
    ((stages, sent),) = run_world(1, sharded_trace, precision, device, 5)
    config = small("topology=siamese", f"precision={precision}", "micro_batch_size=4", "batch_size=32")
    layout = Layout(8, "fsdp", 4, shards=8)
    need = need_of(config, layout, device)
    assert need.peak - need.weights - need.optimizer == pytest.approx(max(stages.values()), rel=0.1)
    told = sent_by(config, layout)
    assert told.all_gather == pytest.approx(sent["all_gather"], rel=0.05)
    assert told.reduce_scatter == pytest.approx(sent["reduce_scatter"], rel=0.05)


@pytest.mark.parametrize(
    "changes", [(), ("parallel.loss_parallel=false",), ("parallel.sequence_parallel=false",)], ids=str
)
def test_tensor_groups_send_and_need_what_is_planned(changes):
    """Tokens and vocabulary divided or not, in a group of two."""
    changes = ("parallel.mode=tp", "vocab_size=3000", *changes)
    ((stages, sent),) = run_world(1, sharded_trace, "fp32", "cpu", 3, "tp", *changes)
    config = small("topology=siamese", "micro_batch_size=4", "batch_size=4", "blocks=3", *changes)
    layout = Layout(2, "tp", 4, tensor=2)
    need = need_of(config, layout, "cpu")
    assert need.peak - need.weights - need.optimizer == pytest.approx(max(stages.values()), rel=0.1)
    told = sent_by(config, layout)
    assert told.all == pytest.approx(sum(sent.values()), rel=0.05)


SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b")


def piped(schedule: str) -> RunConfig:
    return small("topology=siamese", "blocks=4", "micro_batch_size=2", "parallel.pp=2", f"parallel.schedule={schedule}")


def staged_traces(world: World) -> list[tuple[int, float]]:
    """By schedule: fullest moment and bytes sent of a second step, of this process of a real pipeline of two."""
    from siamesenorm.train.parallel import apply_parallelism

    found = []
    for schedule in SCHEDULES:
        model = apply_parallelism(LanguageModel(piped(schedule).model, seed=0), world, schedule=schedule, stages=2)
        ids = torch.zeros(8, 16, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids}
        model.gradients(batch, [0.25] * 4, lambda loss: loss)  # type: ignore[operator]  # makes buffers
        model.zero_grad()
        ledger = Ledger()
        ledger.leave_out([ids, *model.parameters(), *model.buffers()])
        with ledger:
            model.gradients(batch, [0.25] * 4, lambda loss: loss)  # type: ignore[operator]
        found.append((max(moment.both for moment in ledger.trace.stages.values()), ledger.trace.sent["send"]))
    return found


def test_stages_of_a_pipeline_need_and_send_what_is_planned():
    """Both groups, in every schedule, beside a step of two processes; buffers for what arrives are there before it."""
    for group, found in enumerate(run_world(2, staged_traces, pp=2)):
        for schedule, (fullest, sent) in zip(SCHEDULES, found, strict=True):
            config = piped(schedule)
            layout = given_layout(config, 2, 2)
            need = need_of_group(config, layout, at_depth(config, layout, "cpu"), group, "cpu")
            streams = 4 * 2 * (2 * 16 * 32) * 4  # micro-batches, X and Y, rows × tokens × width, bytes
            boundaries = {"interleaved_1f1b": 3}.get(schedule, 1)
            assert need.peak - need.weights - need.optimizer - boundaries * streams == pytest.approx(fullest, rel=0.05)
            told = sent_by_group(config, layout, group)
            assert told.pipeline == pytest.approx(boundaries * streams)
            assert told.pipeline == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize(("stages", "count"), [(1, 4), (2, 4), (2, 8), (3, 6)])
def test_passes_of_a_pipeline_come_in_torchs_order(stages, count):
    """Interleaved: forward of later micro-batches before the first backward, as torch has it."""
    theirs = object.__new__(ScheduleInterleaved1F1B)
    theirs.n_local_stages, theirs.pp_group_size, theirs._n_microbatches = stages, 2, count
    theirs.microbatches_per_round = count // max(1, count // 2)
    layout = Layout(2, "ddp", 1, pp=2, schedule="interleaved_1f1b", stages=stages)
    for group in range(2):
        actions = [action for action in theirs._calculate_single_rank_operations(group) if action is not None]
        order = [(a.stage_index // 2, a.computation_type.name == "FORWARD") for a in actions]
        assert list(passes(layout, count, group)) == order


def test_micro_batches_in_flight():
    """1F1B keeps as many as there are groups from here on, GPipe all; blocks are gathered once more than these."""
    layout = Layout(8, "fsdp", 1, pp=4, shards=2)
    for group in range(4):
        order = list(passes(layout, 6, group))
        ahead = next(n for n, one in enumerate(order) if not one.forward)
        assert (ahead, len(order), gatherings(order, 1)) == (4 - group, 12, [7])
    order = list(passes(dataclasses.replace(layout, schedule="gpipe"), 6, 0))
    assert [one.forward for one in order] == [True] * 6 + [False] * 6


def test_a_pipeline_waits_and_its_last_group_has_the_head():
    config = small("topology=pre", "blocks=8", "batch_size=8", "vocab_size=3000")
    layout = Layout(4, "ddp", 1, pp=4)
    assert problem_of(config, layout) is None
    work = work_of(config, layout, at_depth(config, layout, "cuda"))
    assert work.bubble == 3 / 8
    assert work.slowest > 1.5 * work.flops
    few = dataclasses.replace(layout, micro_batch=4)
    assert "1f1b takes 4 micro-batches or more" in problem_of(config, few)
    assert "model.tied = true" in problem_of(small("topology=pre", "blocks=8", "tied=true"), layout)
    assert problem_of(resolve("deit-digits", []), layout) is not None


def test_a_process_of_a_tensor_group_has_its_part():
    config = small("topology=pre", "model.heads=4")
    half = of_process(config, Layout(2, "tp", 1, tensor=2))
    assert (half.model.heads, half.model.ffn_dim, half.model.dim_per_head) == (2, 32, config.model.dim_per_head)
    assert parts_of(half).blocks < 0.6 * parts_of(config).blocks
    assert parts_of(half).embedding == parts_of(config).embedding / 2
    whole = of_process(small("topology=pre", "parallel.mode=tp", "loss_parallel=false"), Layout(2, "tp", 1, tensor=2))
    assert parts_of(whole).root == parts_of(config).root


def test_experts_by_hand():
    """A process gathers the experts that are its own, from fewer shards; state is divided as without."""
    config = small("topology=pre", MOE, "micro_batch_size=2", "batch_size=8", "blocks=3")
    plain, divided = Layout(4, "fsdp", 2, shards=4), Layout(4, "fsdp", 2, shards=4, ep=2)
    assert problem_of(config, divided) is None
    assert problem_of(config, dataclasses.replace(divided, ep=3)) is not None
    assert need_of(config, plain, "cpu").state == need_of(config, divided, "cpu").state
    model = LanguageModel(config.model)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".ffn.w_" in name)
    sent = [sent_by(config, layout) for layout in (plain, divided)]
    # There and back: 3/4 of all experts, against half of the two of four that are its own; and a router less.
    assert sent[0].all_gather - sent[1].all_gather == pytest.approx(2 * 4 * experts * (3 / 4 - 1 / 2 * 1 / 2), rel=0.05)
    tokens = 2 * 16 * 2 * config.model.dim * 4  # rows, top k, bytes; three blocks, there and back, forward and backward
    assert sent[1].all_to_all == pytest.approx(3 * 4 * tokens / 2)
    kept = [need_of(config, layout, "cpu").activations for layout in (plain, divided)]
    assert kept[0] < kept[1] < 2 * kept[0]  # rows that have travelled lie beside those that stayed


def test_state_by_hand():
    config = small("topology=pre", "ema=0.9")
    count = parts_of(config).all
    assert count == sum(p.numel() for p in LanguageModel(config.model).parameters())
    need = need_of(config, Layout(4, "hsdp", 1, shards=2), "cpu")
    assert (need.weights, need.gradients, need.optimizer) == (2 * count, 2 * count, 6 * count)
    muon = parts_of(small("topology=pre", "optimizer.kind=muon"))
    assert count < muon.moments < 2 * count


def test_layouts_and_why_others_are_not_there():
    config = small("model.heads=2", "kv_heads=2")
    assert {layout.mode for layout in possible_layouts(config, 16, 8)} == {"ddp", "fsdp", "hsdp", "tp"}
    assert problem_of(config, Layout(4, "tp", 1, tensor=4)) == "model.heads = 2 is no multiple of a tensor group of 4"
    assert problem_of(config, Layout(16, "ddp", 1)) == "train.batch_size = 8 is less than 16 processes"
    with pytest.raises(ConfigError, match="--gpus: 12 is not allowed; it takes up to 8 or whole machines of as many"):
        planning.make_plan(config, 12, GPUS["h100"])


def test_pairs_that_are_mixed_stay_together():
    """No odd micro-batch is advised, and no number of GPUs that train would refuse."""
    mixed, plain = (resolve("deit-digits", ["batch_size=24", change]) for change in ("mixup=0.8", "mixup=0"))
    parts = [
        {layout.micro_batch for layout in possible_layouts(config, 4, 8) if problem_of(config, layout) is None}
        for config in (mixed, plain)
    ]
    assert parts == [{2, 4}, {1, 2, 4}]
    whole = "samples are mixed in pairs, and train.batch_size = 24 is no multiple of 16"
    assert problem_of(mixed, Layout(8, "ddp", 2)) == whole
    assert planning.check_given(mixed, 8, GPUS["h100"], Assumptions()) is None


def test_the_command(capsys, monkeypatch):
    """One GPU: a verdict, a command that says what was chosen, and the run's own configuration beside it."""
    monkeypatch.setattr("siamesenorm.train.planning.layouts.CHECKPOINTING", ("none",))
    small_ones = [*SMALL, "blocks=4", "topology=pre"]
    assert main(["plan", "lm-tiny", *small_ones, "--gpus", "1", "--gpu", "L4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    best = told["layouts"][0]
    assert told["gpu"]["name"] == "l4"
    assert best["memory"]["peak"] >= best["memory"]["weights"] + best["memory"]["optimizer"]
    assert told["verdict"].startswith("fits on 1 × l4: one GPU with micro-batches of ")
    assert told["command"].startswith("siamesenorm train lm-tiny model.dim=32")
    assert told["as_configured"]["layout"]["micro_batch"] == 8
    assert main(["plan", "lm-tiny", *small_ones, "--gpus", "1", "--assume", "usable=0.00001"]) == 1
    assert "does not fit on 1 × h100: the smallest layout" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "h1000"], "--gpu: unknown name 'h1000'; known names: l4, rtx4090, l40s, .*; did you mean h100"),
        (["--gpus", "0"], "--gpus: 0 is not allowed; it takes 1 to 4096"),
        (["--gpus", "5000"], "--gpus: 5000 is not allowed; it takes 1 to 4096"),
        (["--assume", "matmul=2"], "--assume: matmul=2 is not allowed; it takes a number above 0 and up to 1"),
        (["--assume", "luck=1"], "--assume: unknown name 'luck'; known names: bandwidth, .*"),
        (["--topology", "siamise"], ".*siamise.*"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, capsys):
    assert main(["plan", "lm-tiny", *arguments]) == 2
    assert re.search(sentence, capsys.readouterr().err)


def test_assumptions_are_settable():
    assert assumptions(["matmul=0.5", "overlap=0"]) == dataclasses.replace(Assumptions(), matmul=0.5, overlap=0.0)
    assert find_gpu("H100", 4).machine == 4


# Commands that name a machine ---------------------------------------------------------------------------------

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = re.compile(r"^torchrun .*?--nproc-per-node (\d+) -m (?:-- )?siamesenorm train ([^\n#]+)", re.MULTILINE)


def commands_of_docs() -> set[tuple[int, str]]:
    """Processes and what is trained, of every torchrun command that trains."""
    text = "\n".join(page.read_text(encoding="utf-8").replace("\\\n", " ") for page in PAGES)
    return {(int(count), " ".join(words.split())) for count, words in NAMED.findall(text)}


def fits(gpus: int, recipe: str, overrides: list[str], gpu: str = "h100") -> bool:
    config = resolve(recipe, overrides)
    layout = given_layout(config, gpus, 8)
    need = need_of(config, layout, "cuda")
    return need.peak < GPUS[gpu].memory * Assumptions().usable


def test_commands_of_the_docs_fit_on_the_machine_that_they_name():
    """Eight GPUs of 80 GB where nothing else is said."""
    found = commands_of_docs()
    assert len(found) >= 3
    for gpus, words in found:
        recipe, *rest = shlex.split(words)
        overrides = [word for word in rest if "=" in word and not word.startswith("-")]
        assert fits(gpus, recipe, overrides), words


@pytest.mark.parametrize(("recipe", "gpus"), [("lm-1.3b", 32), ("moe-15b-a2b", 64)])
def test_recipes_fit_on_the_machine_that_they_name(recipe, gpus):
    assert fits(gpus, recipe, [])


def test_less_memory_is_too_little():
    """The check can fail: what fits into 80 GB does not fit into 24."""
    assert not fits(8, "lm-1.3b", [], "l4")
