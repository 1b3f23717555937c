"""Several processes do what one does: the same losses, the same gradient norms."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from closeness import assert_same_but_for_rounding
from siamesenorm.errors import ConfigError
from siamesenorm.models.counts import size_of_sublayers
from siamesenorm.models.lm.generation import generate
from siamesenorm.residual import siamese
from siamesenorm.residual.kernels import native
from siamesenorm.train.activations import checkpoint_activations
from siamesenorm.train.distributed import World, check_group
from siamesenorm.train.parallel import apply_parallelism, clip_gradients, uniform_groups
from siamesenorm.train.parallel.gradients import gradient_sync
from siamesenorm.train.parallel.parallelize import LOWEST_TORCH
from siamesenorm.train.weights import gather_weights

from .tiny import CONFIGS, TinyRun, batch, tiny_model, watched_whole
from .worlds import Layout, run_world

STEPS = 2
CLOSE, EXACT = 1e-4, 1e-9
"""Of one forward and backward in float32, and of anything in float64."""
BY_BOTH, BY_MUON = ("siamese", "experts", "subln"), ("hyper", "wide_experts")
"""Models that are trained with either optimiser, and with Muon alone; the others with AdamW."""


def assert_close(ours, theirs, tolerance=CLOSE):
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=tolerance)


def train_all(world, names):
    return {name: results(name, world) for name in names}


def results(name, world=None):
    """A first step in float32; steps of the trainer's AdamW, Muon or both in float64, and the weights behind them.

    Adam divides gradients by their own size: one that is zero on paper moves its weight by the sign of its rounding.
    """
    rough = TinyRun(apply_parallelism(tiny_model(name), world or World()), world).steps(1)
    fine = {}
    for kind in ("adamw", "muon") if name in BY_BOTH else ("muon" if name in BY_MUON else "adamw",):
        model = apply_parallelism(tiny_model(name).double(), world or World())
        fine[kind] = TinyRun(model, world, kind=kind).steps(STEPS), gather_weights(model)
    return rough, fine


@pytest.mark.parametrize(
    ("mode", "size", "names"),
    [
        ("ddp", 2, ["siamese"]),
        ("fsdp", 2, ["siamese", "hyper", "experts", "completep"]),
        ("tp", 2, list(CONFIGS)),
        ("hsdp", 4, ["siamese"]),
        ("tp", 4, ["subln"]),  # groups of two, shards between them
    ],
)
def test_many_processes_train_as_one(mode, size, names):
    """Losses, gradient norms and final weights; the weights under their plain names, rows in the usual order."""
    found = run_world(size, train_all, names, mode=mode, group=2)
    for name in names:
        rough, fine = results(name)
        for one in found:
            assert_close(one[name][0], rough)
            assert one[name][1].keys() == fine.keys()
            for kind, (numbers, weights) in fine.items():
                assert_close(one[name][1][kind][0], numbers, EXACT)
                assert_same_but_for_rounding(one[name][1][kind][1], weights, EXACT)


def count_fused(world):
    calls, plain = [], siamese.siamese_step
    siamese.siamese_step = lambda *args: calls.append(1) or plain(*args)
    TinyRun(apply_parallelism(tiny_model(), world), world).step()
    siamese.siamese_step = plain
    return len(calls)


@pytest.mark.skipif(native.library() is None, reason="installed without the compiled kernels")
@pytest.mark.parametrize("mode", ["fsdp", "tp"])
def test_streams_stay_plain_so_that_fused_steps_run(pair, mode):
    """One at the start of each of the two blocks and one within."""
    assert pair[f"fused {mode}"] == [4, 4]


def shares(world):
    model = apply_parallelism(tiny_model(), world)
    full = sum(p.numel() for p in model.parameters())
    held = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters())
    return held / full


def test_sharding_divides_the_weights(pair):
    assert pair["shares fsdp"] == pytest.approx([0.5, 0.5], abs=0.01)
    model = tiny_model()
    divided = size_of_sublayers(model) + model.embedding.weight.numel() + model.head.weight.numel()
    everything = sum(p.numel() for p in model.parameters())
    assert pair["shares tp"] == pytest.approx([1 - divided / everything / 2] * 2)


def made_in_parts(world, names):
    """By name: numbers held whole, part by part, and the weights that came of it."""
    results = {}
    for name in names:
        with torch.device("meta"):
            model = tiny_model(name)
        with watched_whole() as held:
            results[name] = held, gather_weights(apply_parallelism(model, world, seed=0))
    return results


@pytest.mark.parametrize(
    ("mode", "size", "names"),
    [("fsdp", 2, ["siamese", "hyper"]), ("hsdp", 4, ["siamese"]), ("tp", 4, list(CONFIGS))],
)
def test_first_weights_are_those_of_one_process_though_none_holds_the_whole_model(mode, size, names):
    results = run_world(size, made_in_parts, names, mode=mode, group=2)
    for name in names:
        model = tiny_model(name)
        expected, whole = gather_weights(model), sum(p.numel() for p in model.parameters())
        largest = max(sum(p.numel() for p in block.parameters()) for block in model.blocks)
        embedding, last = model.embedding.weight.numel(), sum(p.numel() for p in model.residual.parameters())
        for held, weights in (result[name] for result in results):
            assert max(held) <= embedding + max(largest, embedding + last) < whole
            assert all(torch.equal(weights[key], value) for key, value in expected.items())


def accumulate(world):
    model = apply_parallelism(tiny_model(), world)
    ids = batch(0)[world.rank * 2 :][:2]
    for part in range(2):
        row = ids[part : part + 1]
        with gradient_sync(model, enabled=part == 1):
            (model(row[:, :-1], labels=row[:, 1:]).loss / 2).backward()
    return clip_gradients(model, 1.0).item()


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_accumulated_parts_add_up_to_the_batch(pair, mode):
    model, ids = tiny_model(), batch(0)
    model(ids[:, :-1], labels=ids[:, 1:]).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert pair[f"accumulated {mode}"] == pytest.approx([expected] * 2, rel=CLOSE)


def recompute(world, kind):
    model = tiny_model()
    checkpoint_activations(model, kind)
    return TinyRun(apply_parallelism(model, world), world).steps(2)


@pytest.mark.parametrize("kind", ["full", "sublayer"])
def test_sharded_blocks_can_be_computed_again(pair, kind):
    expected = TinyRun(tiny_model()).steps(2)
    for result in pair[f"{kind} again"]:
        assert_close(result, expected)


def low_precision(world):
    run = TinyRun(apply_parallelism(tiny_model(), world, dtype=torch.bfloat16), world)
    with torch.autocast("cpu", torch.bfloat16):
        losses = run.steps(2)
    return losses, {p.dtype for p in run.model.parameters()}


def test_blocks_are_gathered_in_low_precision_and_kept_in_full(pair):
    expected = TinyRun(tiny_model()).steps(2)
    for losses, dtypes in pair["low precision"]:
        assert dtypes == {torch.float32}
        assert losses[1][0] == pytest.approx(expected[1][0], rel=0.01)
        assert losses != expected


def test_clipping_is_torchs_own_on_one_process():
    ours, theirs, ids = tiny_model(), tiny_model(), batch(0)
    for model in (ours, theirs):
        model(ids[:, :-1], labels=ids[:, 1:]).loss.backward()
    norm = clip_gradients(ours, 0.1)
    assert norm == nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert clip_gradients(tiny_model(), 1.0) == 0  # no gradients yet


def words(world):
    return (
        world.mean({"a": float(world.rank), "b": 1.0}),
        world.any(world.rank == 1),
        world.any(False),
        world.gather(f"rank {world.rank}"),
        world.from_main(world.rank),
        math.isnan(world.mean({"a": math.nan if world.rank else 0.0})["a"]),
    )


QUESTIONS = {
    "fused fsdp": (count_fused, "fsdp"),
    "fused tp": (count_fused, "tp"),
    "shares fsdp": (shares, "fsdp"),
    "shares tp": (shares, "tp"),
    "accumulated ddp": (accumulate, "ddp"),
    "accumulated fsdp": (accumulate, "fsdp"),
    "full again": (recompute, "fsdp", "full"),
    "sublayer again": (recompute, "fsdp", "sublayer"),
    "low precision": (low_precision, "fsdp"),
    "words": (words, "ddp"),
}


def ask(world):
    return {name: work(Layout(mode).of(world), *more) for name, (work, mode, *more) in QUESTIONS.items()}


@pytest.fixture(scope="module")
def pair():
    """What each of two processes answers to all questions."""
    answers = run_world(2, ask)
    return {name: [answer[name] for answer in answers] for name in QUESTIONS}


def test_processes_agree(pair):
    expected = ({"a": 0.5, "b": 1.0}, True, False, ["rank 0", "rank 1"], 0, True)
    assert pair["words"] == [expected, expected]


def test_a_world_of_one_starts_nothing(monkeypatch):
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    world = World.start()
    assert (world.rank, world.size, world.mode, world.is_main) == (0, 1, "none", True)
    assert not torch.distributed.is_initialized()
    assert words(world)[:5] == ({"a": 0.0, "b": 1.0}, False, False, ["rank 0"], 0)
    model = tiny_model()
    assert apply_parallelism(model, world) is model
    world.close()


def test_what_cannot_be_divided_is_refused_in_one_sentence():
    assert check_group("hsdp", 8, 4, None) == 4
    with pytest.raises(ConfigError, match=r"parallel\.group: 3 is not allowed; with 4 processes it takes 1, 2, 4"):
        check_group("tp", 4, 4, 3)


def refuse(world):
    with pytest.raises(ConfigError) as caught:
        apply_parallelism(tiny_model("subln"), world)
    return str(caught.value)


def test_a_torch_that_is_too_old_is_refused_as_pyproject_has_it(monkeypatch):
    """Version 2.8 doubled gradients of sharded weights, silently."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, LOWEST_TORCH))}"' in project
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu128")
    world = World(0, 2, mode="fsdp")
    with pytest.raises(
        ConfigError, match=r"torch: 2\.8\.0\+cu128 is not allowed; several processes take 2\.12 or newer"
    ):
        apply_parallelism(tiny_model(), world)


def test_heads_must_be_a_multiple_of_the_group():
    expected = "parallel.group: 4 is not allowed for tp; model.kv_heads = 2 is no multiple"
    assert set(run_world(4, refuse, mode="tp", group=4)) == {expected}


def test_environment_that_is_no_number(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE: 'two' is not allowed"):
        World.start()


def test_groups_of_one_kind_stay_as_they_are():
    parameters = list(tiny_model().parameters())
    assert uniform_groups([{"params": parameters, "lr": 1}]) == [{"params": parameters, "lr": 1}]


DIVIDED = [
    {},
    {"loss_parallel": False},
    {"sequence_parallel": False},
    {"sequence_parallel": True, "loss_parallel": True},
]
KINDS = ("none", "full", "sublayer", "selective")


def packed(world=None, checkpointing="none", tied=False, **how):
    """Loss and gradient norm of packed documents with labels that do not count; logits; an answer; in float64."""
    model = tiny_model("siamese", tied=tied, z_weight=0.01).double()
    checkpoint_activations(model, checkpointing)
    model = apply_parallelism(model, world or World(), **how)
    rows = batch(0)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]]).expand(len(rows), -1)
    labels = rows[:, 1:].where(documents.diff(append=documents[:, -1:]) == 0, -100)
    loss = model(rows[:, :-1], labels=labels, document_ids=documents).loss
    loss.backward()
    norm = clip_gradients(model, math.inf)
    with torch.no_grad():
        logits = model(rows[:, :7]).logits  # seven tokens, which two processes do not divide
        hidden = model(rows[:, :6], logits_to_keep=0).hidden
    answer = generate(model, rows[:2, :3], max_new_tokens=5)
    return loss.item(), norm.item(), logits, hidden, answer


def packed_in(world, cases):
    found = [packed(world, *case[:2], **case[2]) for case in cases]
    with pytest.raises(ConfigError) as caught:
        apply_parallelism(tiny_model(), world)(batch(0)[:, :7], labels=batch(0)[:, 1:8])
    with pytest.raises(ConfigError) as small:
        apply_parallelism(tiny_model(vocab_size=1), world, loss_parallel=True)
    model = apply_parallelism(tiny_model(), world, loss_parallel=False)
    plain = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.residual.named_parameters()}
    with pytest.raises(ConfigError, match="functional_call gives them; it takes the model's own"):
        functional_call(model, {f"residual.{name}": p for name, p in plain.items()}, (batch(0)[:, :8],))
    return found, str(caught.value), str(small.value)


def test_tokens_and_vocabulary_are_divided_as_if_they_were_not():
    """Packed documents, ignored labels, all kinds of checkpointing; whoever wants logits or an answer has all of it."""
    cases = [("none", False, how) for how in DIVIDED]
    cases += [("none", True, how) for how in DIVIDED[:2]]  # tied weights are those of the vocabulary
    cases += [(kind, False, {}) for kind in KINDS[1:]]
    expected = {tied: packed(tied=tied) for tied in (False, True)}
    for found, odd, small in run_world(2, packed_in, cases, mode="tp"):
        for case, (loss, norm, logits, hidden, answer) in zip(cases, found, strict=True):
            assert (loss, norm) == pytest.approx(expected[case[1]][:2], rel=EXACT), case
            assert_same_but_for_rounding({"": logits}, {"": expected[case[1]][2]}, EXACT)
            assert_same_but_for_rounding({"": hidden}, {"": expected[case[1]][3]}, EXACT)
            assert answer == expected[case[1]][4], case
        assert odd == (
            "parallel.sequence_parallel: true is not allowed for sequences of 7 tokens; "
            "2 processes of a tensor group take multiples of 2"
        )
        assert small == (
            "parallel.loss_parallel: true is not allowed; "
            "model.vocab_size = 1 leaves one of the 2 processes of a tensor group without a token"
        )
