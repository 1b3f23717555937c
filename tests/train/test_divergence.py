"""Divergence: what is seen as one, where it is said to begin, and what each policy does about it."""

import json

import pytest
import torch

from siamesenorm.train.config import DivergenceConfig
from siamesenorm.train.divergence import DivergenceMonitor, Verdict, locate
from siamesenorm.train.engine import Engine
from siamesenorm.train.folder import read_metrics
from siamesenorm.train.loop import train

from .small_runs import engine, losses, tiny, train_until, weights


def monitor(losses=(), *, warmup=0, chance=None, **fields) -> DivergenceMonitor:
    made = DivergenceMonitor(DivergenceConfig(**{"history": 10, **fields}), warmup, chance)
    for loss in losses:
        made.accept(loss, None)
    return made


def kind(verdict: Verdict | None) -> str | None:
    return None if verdict is None else verdict.kind


# What is seen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_losses_and_gradients_that_are_no_numbers(value):
    assert kind(monitor().judge(1, value, 1.0)) == "non_finite"
    assert kind(monitor().judge(1, 1.0, value)) == "non_finite"
    assert monitor().judge(1, 1.0, 1.0) is None


def test_a_spike_is_measured_from_the_recent_median():
    steady = monitor([3.0] * 10, spike=2.0)
    assert steady.judge(11, 4.9, 1.0) is None
    assert kind(steady.judge(11, 5.1, 1.0)) == "spike"
    assert monitor([3.0] * 10, spike=None).judge(11, 100.0, 1.0) is None


def test_the_first_steps_have_no_spikes():
    assert monitor([5.0] * 9, spike=2.0).judge(10, 50.0, 1.0) is None


def test_spikes_do_not_lift_the_median():
    m = monitor([3.0] * 10, spike=2.0)
    for _ in range(10):
        verdict = m.judge(11, 9.0, 1.0)
        assert kind(verdict) == "spike"
        m.accept(9.0, verdict)


def test_a_plateau_at_the_level_of_frequencies():
    flat = [3.1, 3.12, 3.08, 3.1] * 10
    assert kind(monitor(flat, chance=3.1).judge(60, 3.1, 1.0)) == "plateau"
    assert kind(monitor(flat, chance=3.15, plateau=0.1).judge(60, 3.1, 1.0)) == "plateau"
    assert monitor(flat, chance=3.5, plateau=0.1).judge(60, 3.1, 1.0) is None  # well below: it has learnt something
    assert monitor(flat, chance=3.1, plateau=None).judge(60, 3.1, 1.0) is None
    assert monitor(flat, chance=None).judge(60, 3.1, 1.0) is None
    assert monitor(flat, warmup=30, chance=3.1).judge(60, 3.1, 1.0) is None  # its warm-up is not long over
    falling = [3.3 - 0.005 * step for step in range(40)]
    assert monitor(falling, chance=3.1).judge(60, 3.1, 1.0) is None  # still learning


def test_a_plateau_is_looked_for_in_the_part_of_the_loss_that_has_a_trivial_level():
    m = monitor(chance=1.0)
    for step in range(40):
        m.accept(3.0 - 0.05 * step, None, level=1.01)  # the rest of the loss still falls
    assert kind(m.judge(60, 1.0, 1.0)) == "plateau"
    copy = monitor(chance=1.0)
    copy.load(m.state())
    assert kind(copy.judge(60, 1.0, 1.0)) == "plateau"
    assert "1.000 is what knowing nothing gives" in m.judge(60, 1.0, 1.0).message
    old = {name: value for name, value in m.state().items() if name != "levels"}
    copy.load(old)  # as checkpoints were written before
    assert copy.judge(60, 1.0, 1.0) is None


def test_state_brings_back_every_verdict():
    m = monitor([3.0] * 30, policy="rollback", spike_steps=3)
    m.act(Verdict("spike", ""))
    m.act(Verdict("non_finite", ""))
    other = monitor(policy="rollback", spike_steps=3)
    other.load(json.loads(json.dumps(m.state())))
    assert other.state() == m.state()
    assert [other.act(Verdict("spike", "")) for _ in range(2)] == [m.act(Verdict("spike", "")) for _ in range(2)]


# What the policies do --------------------------------------------------------------------------------


def test_actions():
    broken, spike, flat = Verdict("non_finite", ""), Verdict("spike", ""), Verdict("plateau", "")
    assert monitor(policy="stop").act(broken) == "stop"
    assert [monitor(policy="stop", spike_steps=3).act(spike)] == ["go_on"]
    m = monitor(policy="stop", spike_steps=3)
    assert [m.act(spike) for _ in range(3)] == ["go_on", "go_on", "stop"]
    m = monitor(policy="skip", attempts=2)
    assert [m.act(broken) for _ in range(3)] == ["skip", "skip", "stop"]
    m = monitor(policy="skip", attempts=2)
    assert [m.act(spike), m.act(spike), m.accept(3.0, None), m.act(spike)] == ["skip", "skip", None, "skip"]
    m = monitor(policy="rollback", attempts=2)
    assert [m.act(broken), m.accept(1.0, None), m.act(broken), m.act(broken)] == ["rollback", None, "rollback", "stop"]
    assert all(monitor(policy=policy).act(flat) == "stop" for policy in ("stop", "skip", "rollback"))


def poison(monkeypatch, samples: set[int], loss: float = float("nan")) -> None:
    """Batches that start at these samples give a loss that is no number, or another one."""
    plain = Engine.gradients

    def gradients(self, step):
        metrics = plain(self, step)
        if self.loader.sample - self.config.train.batch_size in samples:
            metrics["loss"] = torch.full_like(metrics["loss"], loss)
        return metrics

    monkeypatch.setattr(Engine, "gradients", gradients)


def events(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_stop_ends_as_diverged_and_stays_so(tmp_path, monkeypatch):
    poison(monkeypatch, {20})  # step 6
    result = train(tiny(), tmp_path / "run")
    assert (result.state, result.step) == ("diverged", 5)
    assert "diverged at step 6: the loss is nan" in result.message
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    assert train(tiny(), tmp_path / "run").state == "diverged"


def test_skip_leaves_the_step_out(tmp_path, monkeypatch):
    plain = Engine.apply
    applied = []
    monkeypatch.setattr(Engine, "apply", lambda self, step: (applied.append(step), plain(self, step)))
    poison(monkeypatch, {20})
    result = train(tiny("policy=skip"), tmp_path / "run")
    assert result.state == "finished"
    assert applied == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]
    records = {record["step"]: record for record in read_metrics(tmp_path / "run")}
    assert (records[6]["loss"], records[6]["skipped"]) == (None, "non_finite")
    assert "skipped" not in records[7]


def test_rollback_goes_back_and_on_with_other_data(tmp_path, monkeypatch):
    poison(monkeypatch, {28})  # step 8, samples 28 to 31
    seen: list[tuple[int, int]] = []
    plain = Engine.apply
    monkeypatch.setattr(
        Engine, "apply", lambda self, step: (seen.append((step, self.loader.sample - 4)), plain(self, step))
    )
    result = train(tiny("policy=rollback", "checkpoint.every=3"), tmp_path / "run")
    assert result.state == "finished"
    first = [(step, 4 * (step - 1)) for step in range(1, 8)]
    assert seen == first + [(step, 4 * step + 4) for step in range(7, 13)]  # from step 6's checkpoint, at sample 32
    assert list(losses(tmp_path / "run")) == list(range(1, 13))
    assert any(event["event"] == "rollback" for event in events(tmp_path / "run"))


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("value", ["nan", "99"])
def test_a_step_that_is_not_taken_leaves_the_scale_of_float16_alone(tmp_path, monkeypatch, policy, value):
    """Twice, so that one also follows the other; a spike's gradients are finite, those of no number are not."""
    poison(monkeypatch, {44, 48}, float(value))  # steps 12 and 13
    scales = []
    plain = Engine.compute
    monkeypatch.setattr(
        Engine, "compute", lambda self, step: (scales.append(self.precision.scaler.get_scale()), plain(self, step))[1]
    )
    config = tiny("precision=fp16", f"policy={policy}", "checkpoint.every=3", "history=4", "spike_steps=1", "steps=15")
    assert train(config, tmp_path / "run").state == "finished"
    kinds = [event["event"] for event in events(tmp_path / "run")]
    assert kinds.count("non_finite" if value == "nan" else "spike") == 2
    assert kinds.count("rollback") == (2 if policy == "rollback" else 0)
    assert set(scales) == {2.0**16}
    assert list(losses(tmp_path / "run")) == list(range(1, 16))


def test_rollback_ends_where_every_batch_is_bad(tmp_path, monkeypatch):
    poison(monkeypatch, set(range(16, 1000)))
    result = train(tiny("policy=rollback", "checkpoint.every=3", "attempts=3"), tmp_path / "run")
    assert result.state == "diverged"
    assert sum(event["event"] == "rollback" for event in events(tmp_path / "run")) == 3


def test_rollback_without_a_checkpoint_stops(tmp_path, monkeypatch):
    poison(monkeypatch, {4})
    assert train(tiny("policy=rollback"), tmp_path / "run").state == "diverged"


def test_a_rolled_back_run_resumes_to_the_same_weights(tmp_path, monkeypatch):
    from .test_loop import same_weights

    poison(monkeypatch, {28})
    config = tiny("policy=rollback", "checkpoint.every=3")
    train(config, tmp_path / "whole")
    for step in (8, 11):
        train_until(step, config, tmp_path / "killed")
    assert train(config, tmp_path / "killed").state == "finished"
    assert same_weights(tmp_path / "whole", tmp_path / "killed")
    assert weights(tmp_path / "whole")


def test_a_learning_rate_far_too_high_is_noticed(tmp_path):
    """For real: no batch is tampered with."""
    hot = ("topology=post", "lr=30", "warmup=0", "steps=150", "clip=null", "history=10", "schedule.kind=constant")
    config = tiny(*hot)
    result = train(config, tmp_path / "run")
    assert result.state == "diverged"
    assert result.step < 149


# Where it begins -------------------------------------------------------------------------------------


def located(prepare) -> str | None:
    e = engine()
    e.batch = next(e.loader)
    e.close()
    prepare(e.model)
    return locate(e.model, Verdict("non_finite", ""), lambda: e.gradients(1))


def test_a_parameter_that_is_no_number_is_named():
    def prepare(model):
        with torch.no_grad():
            model.blocks[1].ffn.up.weight[3, 3] = float("nan")

    assert located(prepare) == "parameter blocks.1.ffn.up.weight"


def test_the_first_activation_that_overflows_is_named():
    def prepare(model):
        with torch.no_grad():
            model.blocks[1].attention.out.weight.fill_(3e38)

    assert located(prepare) == "activation of blocks.1.attention.out"


def test_the_gradient_nearest_the_loss_is_named():
    def prepare(model):
        model.blocks[1].ffn.down.weight.register_hook(lambda grad: grad * float("inf"))
        model.blocks[0].ffn.down.weight.register_hook(lambda grad: grad * float("inf"))

    assert located(prepare) == "gradient of blocks.1.ffn.down.weight"


def test_a_spike_names_the_largest_gradient():
    e = engine("clip=null")
    e.compute(1)
    e.close()
    e.model.blocks[0].attention.qkv.weight.grad.mul_(1e6)
    found = locate(e.model, Verdict("spike", ""), lambda: None)
    assert found == "largest gradient: blocks.0.attention.qkv.weight"


def test_the_layer_is_logged_with_the_step(tmp_path, monkeypatch):
    plain = Engine.compute

    def compute(self, step):
        if step == 4:
            with torch.no_grad():
                self.model.blocks[0].attention.qkv.weight[0, 0] = float("inf")
        return plain(self, step)

    monkeypatch.setattr(Engine, "compute", compute)
    train(tiny(), tmp_path / "run")
    (event,) = [event for event in events(tmp_path / "run") if event["event"] == "non_finite"]
    assert event["step"] == 4
    assert "parameter blocks.0.attention.qkv.weight" in event["message"]
