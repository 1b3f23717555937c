"""One step: micro-batches are one big batch, clipping, averaged weights, precision, recomputed activations."""

import copy
import math

import pytest
import torch

from siamesenorm.errors import ConfigError
from siamesenorm.tasks import find_task
from siamesenorm.train import memory, micro_batch
from siamesenorm.train.distributed import World
from siamesenorm.train.ema import WeightAverage, decay_at
from siamesenorm.train.micro_batch import MicroBatches
from siamesenorm.train.parallel.pipeline import check_pipeline
from siamesenorm.train.recipes import resolve

from .small_runs import engine, tiny


def gradients(*overrides: str) -> tuple[float, dict[str, torch.Tensor]]:
    e = engine("clip=null", *overrides)
    step = e.compute(1)
    e.close()
    return step.loss, {name: p.grad for name, p in e.model.named_parameters()}


@pytest.mark.parametrize("micro", [1, 3, "auto"])
def test_micro_batches_are_one_big_batch(micro):
    """Also where the last one is smaller than the others."""
    loss, whole = gradients()
    parts_loss, parts = gradients(f"micro_batch_size={micro}")
    assert parts_loss == pytest.approx(loss, rel=1e-6)
    for name, grad in whole.items():
        torch.testing.assert_close(parts[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_micro_batches_count_tokens_where_documents_are_masked():
    """Parts with fewer scored tokens count less: the mean is over tokens, not over parts."""
    e = engine("clip=null", "document_masking=true", "data.train=arithmetic:problems=240", "micro_batch_size=1")
    e.batch = next(e.loader)
    e.batch["labels"][0, :12] = -100  # 4 of 16 tokens are left in the first part
    step = e.gradients(1)
    parts = {name: p.grad.clone() for name, p in e.model.named_parameters()}
    e.model.zero_grad()
    output = e.model(e.batch["input_ids"], **{k: v for k, v in e.batch.items() if k != "input_ids"})
    output.loss.backward()
    assert float(step["loss"]) == pytest.approx(output.loss.item(), rel=1e-6)
    for name, parameter in e.model.named_parameters():
        torch.testing.assert_close(parts[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    e.close()


class Rank(World):
    """One of several processes, without the others."""

    def gather(self, value, group=None):
        return [value] * self.size


def micro_batches(rank, size, *overrides):
    config = tiny(*overrides)
    return MicroBatches(config, find_task(config.task)(config), Rank(rank, size, mode="ddp"))


def test_shares_differ_by_one_and_all_have_as_many_parts():
    """Ten samples of three processes, two at a time: what every process computes, and how much of it counts."""
    first = [0, 4, 7]
    seen = []
    for rank in range(3):
        micro = micro_batches(rank, 3, "batch_size=10", "micro_batch_size=2")
        batch = {"a": first[rank] + torch.arange(micro.rows).view(-1, 1)}
        parts, rows = micro.split(batch)
        seen.append([(part["a"].flatten().tolist(), count) for part, count in zip(parts, rows, strict=True)])
    assert seen == [
        [([0, 1], 2), ([2, 3], 2)],
        [([4, 5], 2), ([6], 1)],
        [([7, 8], 2), ([9], 1)],
    ]
    idle = micro_batches(1, 2, "batch_size=5", "micro_batch_size=2").split({"a": torch.tensor([3, 4])})
    assert ([part["a"].tolist() for part in idle[0]], idle[1]) == ([[3, 4], [3]], [2, 0])


def test_a_loader_gives_the_shares():
    config = tiny("batch_size=10", "data.prefetch=0")
    task = find_task(config.task)(config)
    whole = next(task.loader(rank=0, world_size=1, sample=0, pin_memory=False))["input_ids"]
    shares = [next(task.loader(rank=r, world_size=3, sample=0, pin_memory=False))["input_ids"] for r in range(3)]
    assert [len(share) for share in shares] == [4, 3, 3]
    assert torch.equal(torch.cat(shares), whole)


def test_auto_is_what_fits(monkeypatch):
    """As many samples as there is room for, in equal parts; one where there is none."""
    config = tiny("batch_size=24", "micro_batch_size=auto")
    task, sizes = find_task(config.task)(config), []
    for samples in (24, 13, 12, 3, 0):
        room = sum(memory.memory_need(config, task, World(), samples)) / micro_batch.FILLED + 1
        monkeypatch.setattr(micro_batch, "free_memory", lambda device, processes, room=room: memory.Room(room, ""))
        sizes.append(MicroBatches(config, task, World()).size)
    assert sizes == [24, 12, 12, 3, 1]


class Failing(World):
    """One of two processes; the other one says that it has failed."""

    def gather(self, value, group=None):
        return [value, "field: 'value' is not allowed"]


def test_an_error_while_auto_is_found_is_one_of_all_processes():
    config = tiny("batch_size=24", "micro_batch_size=auto")
    with pytest.raises(ConfigError, match=r"process 1.*field: 'value' is not allowed"):
        MicroBatches(config, find_task(config.task)(config), Failing(0, 2, mode="ddp"))


@pytest.mark.parametrize(
    ("schedule", "sizes"), [("1f1b", [6, 3, 1]), ("gpipe", [12, 4, 4]), ("interleaved_1f1b", [12, 3, 1])]
)
def test_auto_is_what_a_pipeline_takes(monkeypatch, schedule, sizes):
    """Equal parts, two at least for 1F1B; fewer samples where there is less room.

    GPipe holds all samples at once whatever its parts, and something beside for each: where parts of 3 fit, parts of 4
    do, and these need least where nothing fits.
    """
    world = Rank(0, 2, mode="ddp", pp=2)
    config = tiny("batch_size=12", "micro_batch_size=auto", f"parallel.schedule={schedule}", "parallel.pp=2")
    task, found = find_task(config.task)(config), []
    for samples in (12, 3, 0):
        room = sum(memory.memory_need(config, task, world, samples or 1)) / micro_batch.FILLED + 1 if samples else 0.0
        monkeypatch.setattr(micro_batch, "free_memory", lambda device, processes, room=room: memory.Room(room, ""))
        micro = MicroBatches(config, task, world)
        check_pipeline(config, world, micro.size, micro.count)
        found.append(micro.size)
    assert found == sizes


def test_clipping_scales_to_the_limit_and_reports_the_norm_before():
    loss, grads = gradients()
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    e = engine("clip=0.01")
    step = e.compute(1)
    e.close()
    assert (step.loss, step.grad_norm) == (loss, pytest.approx(float(norm), rel=1e-5))
    clipped = torch.stack([p.grad.norm() for p in e.model.parameters()]).norm()
    assert float(clipped) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("topology", ["siamese", "siamese:form=hybrid_pre", "pre", "hyper", "span"])
@pytest.mark.parametrize("kind", ["full", "sublayer"])
def test_recomputed_activations_change_no_gradient(topology, kind):
    loss, kept = gradients(f"topology={topology}")
    again_loss, again = gradients(f"topology={topology}", f"activation_checkpointing={kind}")
    assert again_loss == pytest.approx(loss, rel=1e-6)
    for name, grad in kept.items():
        torch.testing.assert_close(again[name], grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["full", "sublayer"])
def test_recomputing_draws_the_same_dropout(kind):
    loss, kept = gradients("model.dropout=0.3")
    again_loss, again = gradients("model.dropout=0.3", f"activation_checkpointing={kind}")
    assert again_loss == pytest.approx(loss, rel=1e-6)
    for name, grad in kept.items():
        torch.testing.assert_close(again[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def saved_bytes(kind: str) -> int:
    e = engine("blocks=6", "dim=32", f"activation_checkpointing={kind}")
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        alive.append(t)
        return t

    alive: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        e.task.loss(e.model, next(e.loader))
    e.close()
    return sum(kept.values())


def test_recomputing_keeps_less():
    none, sublayer, full = (saved_bytes(kind) for kind in ("none", "sublayer", "full"))
    assert full < sublayer < none


def test_average_has_its_closed_form():
    module = torch.nn.Linear(3, 2)
    first = copy.deepcopy(dict(module.named_parameters()))
    average, decay, values = WeightAverage(module, 0.9, warmup=False), 0.9, []
    for step in range(1, 6):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter))
        values.append({name: p.detach().clone() for name, p in module.named_parameters()})
        average.update(step)
    for name, start in first.items():
        expected = decay**5 * start + sum((1 - decay) * decay ** (4 - k) * v[name] for k, v in enumerate(values))
        torch.testing.assert_close(average.average[name], expected.detach())
    with average.applied():
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.detach(), average.average[name] * 0 + parameter.detach())
            assert not torch.equal(parameter, values[-1][name])
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, values[-1][name])


def drifting(average: WeightAverage, module: torch.nn.Linear, steps: int) -> list[torch.Tensor]:
    """The weights before the first step and behind each."""
    values = [module.weight.detach().clone()]
    for step in range(1, steps + 1):
        with torch.no_grad():
            module.weight.add_(torch.randn_like(module.weight))
        values.append(module.weight.detach().clone())
        average.update(step)
    return values


def test_average_with_warm_up_has_its_closed_form():
    """While the decay rises, step i counts C(i + 8, 8) / C(S + 9, 9): a power of i, so that first ones fade."""
    module = torch.nn.Linear(3, 2).double()
    average, steps = WeightAverage(module, 0.999), 40
    values = drifting(average, module, steps)
    shares = [math.comb(i + 8, 8) / math.comb(steps + 9, 9) for i in range(steps + 1)]
    assert sum(shares) == pytest.approx(1)
    expected = sum(share * value for share, value in zip(shares, values, strict=True))
    torch.testing.assert_close(average.average["weight"], expected)


def test_warm_up_ends_at_the_decay():
    assert [decay_at(step, 0.9, True) for step in (1, 9, 81, 82, 10**6)] == [0.1, 0.5, 0.9, 0.9, 0.9]
    assert decay_at(80, 0.9, True) < 0.9
    assert decay_at(1, 0.9, False) == 0.9


def test_the_decay_rises_with_the_steps_of_a_run():
    """A resumed or rolled back run goes on with the decay of its step, not of its updates since."""
    e = engine("ema=0.9")
    first = {name: value.clone() for name, value in e.average.average.items()}
    e.compute(9)
    e.apply(9)
    e.close()
    for name, parameter in e.model.named_parameters():
        expected = torch.lerp(first[name], parameter.detach(), 0.5)
        torch.testing.assert_close(e.average.average[name], expected)


@pytest.mark.parametrize(("recipe", "decay"), [("dit-b-2", 0.9999), ("dit-xl-2", 0.9999), ("deit-small", 0.99996)])
def test_official_recipes_keep_their_fixed_decay(recipe, decay):
    train = resolve(recipe).train
    assert (train.ema, train.ema_warmup) == (decay, False)


def test_bfloat16_computes_in_bfloat16_and_keeps_weights_in_float32():
    e = engine("precision=bf16")
    seen = []
    e.model.blocks[0].ffn.up.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    step = e.compute(1)
    e.apply(1)
    e.close()
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in e.model.parameters()} == {p.grad.dtype for p in e.model.parameters()} == {torch.float32}
    assert step.loss == pytest.approx(gradients()[0], rel=1e-2)


def test_float16_scales_the_loss_and_unscales_gradients():
    loss, plain = gradients()
    e = engine("precision=fp16", "clip=null")
    step = e.compute(1)
    assert e.precision.scaler.get_scale() > 1
    assert step.loss == pytest.approx(loss, rel=1e-2)
    for name, parameter in e.model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], rtol=0.1, atol=2e-3, msg=name)
    before = e.precision.scaler.get_scale()
    assert e.precision.lower_scale()
    assert e.precision.scaler.get_scale() == before / 2
    e.close()


def test_z_loss_is_the_weighted_square_of_the_log_normaliser():
    e = engine("model.z_weight=0.5")
    batch = next(e.loader)
    e.close()
    e.model.train()
    with torch.no_grad():
        log_z = e.model(batch["input_ids"]).logits.logsumexp(-1)
        trained = e.task.loss(e.model, batch).total
        plain = e.task.loss(e.model.eval(), batch).total
    torch.testing.assert_close(trained - plain, 0.5 * log_z.square().mean())


def test_held_out_loss_is_without_z_loss():
    e = engine("model.z_weight=1.0")
    batch = next(e.loader)
    e.close()
    plain = engine()
    plain.close()
    e.model.eval()
    assert float(e.task.loss(e.model, batch).metrics["loss"]) == pytest.approx(
        float(plain.task.loss(plain.model, batch).metrics["loss"])
    )


def test_learning_rate_follows_the_schedule():
    e = engine("lr=0.01", "warmup=4", "steps=12", "schedule.kind=constant")
    assert [e.lr(step) for step in (1, 2, 4, 12)] == pytest.approx([0.0025, 0.005, 0.01, 0.01])
    e.compute(2)
    e.apply(2)
    e.close()
    assert {group["lr"] for group in e.optimizer.param_groups} == {0.005}
