"""Runs that train a part of the parameters: what is chosen, what stays, how factors start, are kept and are merged."""

import shutil

import pytest
import torch

from siamesenorm.errors import ConfigError
from siamesenorm.layers.linear import Linear
from siamesenorm.layers.lora import LoraLinear
from siamesenorm.models.lm import LanguageModel
from siamesenorm.tasks import find_task
from siamesenorm.train.checkpoint.state import flatten
from siamesenorm.train.distributed import World
from siamesenorm.train.engine import Engine
from siamesenorm.train.folder import RunFolder
from siamesenorm.train.init_from import starting_weights
from siamesenorm.train.loop import train
from siamesenorm.train.parameters import choose_parameters
from siamesenorm.train.trained import open_language_model

from .small_runs import losses, tiny, train_until, weights
from .worlds import run_world

LORA = ("parameters=lora", "lora.rank=2")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "run"
    train(tiny("steps=2", "warmup=0"), folder)  # siamese
    return folder


def from_source(source, *changes):
    return tiny("steps=4", "warmup=0", f"init_from={source}", *changes)


def engine_of(config):
    task = find_task(config.task)(config)
    return Engine(config, task, World(), starting_weights(config, task))


@pytest.mark.parametrize(
    ("parameters", "trained"),
    [
        ("residual", lambda name: "links" in name or name.startswith("residual.")),
        ("norms", lambda name: "norm" in name),
        ("blocks.1.*+head.weight", lambda name: name.startswith("blocks.1.") or name == "head.weight"),
        ("lora+residual", lambda name: "lora" in name or "links" in name or name.startswith("residual.")),
    ],
)
def test_what_is_chosen_moves_and_nothing_else_does(source, parameters, trained):
    engine = engine_of(from_source(source, f"parameters={parameters}", "lora.rank=2"))
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    for step in (1, 2):
        engine.compute(step)
        engine.apply(step)
    moved = {name for name, tensor in engine.model.state_dict().items() if not torch.equal(tensor, before[name])}
    chosen = {name for name in before if trained(name)}
    assert moved == chosen
    held = {name.split("/")[1] for name in flatten(engine.state({})) if name.startswith("optimizer/")}
    assert held == chosen
    sizes = [before[name].numel() for name in chosen]
    assert engine.trained.trained == sum(sizes)
    assert engine.trained.of == sum(t.numel() for name, t in before.items() if "lora" not in name)


def test_factors_start_at_the_very_function_and_merge_to_it(source):
    trained = open_language_model(source)
    config, ids = from_source(source, *LORA, "train.seed=3"), torch.arange(12)[None]
    engine = engine_of(config)
    with torch.no_grad():
        assert torch.equal(engine.model(ids).logits, trained.model(ids).logits)
    layer = engine.model.blocks[0].attention.qkv
    assert isinstance(layer, LoraLinear)
    again = engine_of(config).model.blocks[0].attention.qkv
    other = engine_of(from_source(source, *LORA, "train.seed=4")).model.blocks[0].attention.qkv
    assert torch.equal(layer.lora_A, again.lora_A)
    assert not torch.equal(layer.lora_A, other.lora_A)
    assert not torch.equal(layer.lora_A, engine.model.blocks[1].attention.qkv.lora_A)


def test_a_layer_is_the_equation():
    torch.manual_seed(0)
    base = Linear(5, 7, bias=True).double()
    layer, x = LoraLinear(base, 3, 6.0).double(), torch.randn(2, 5, dtype=torch.float64)
    for factor in (layer.lora_A, layer.lora_B):
        torch.nn.init.normal_(factor)
    dense = base.weight + 6.0 / 3 * layer.lora_B @ layer.lora_A
    torch.testing.assert_close(layer(x), x @ dense.T + base.bias)


@pytest.mark.parametrize("changes", [(), ("optimizer.kind=muon", "ema=0.5", "activation_checkpointing=full")])
def test_a_run_resumes_bit_by_bit_and_ends_as_a_plain_model(source, tmp_path, changes):
    config = from_source(source, *LORA, *changes, "checkpoint.every=2", "logging.every=1", "evaluation.every=4")
    left_alone, stopped = tmp_path / "left_alone", tmp_path / "stopped"
    train(config, left_alone)
    train_until(4, config, stopped)
    half = open_language_model(stopped).model  # its factors lie in a checkpoint
    assert type(half.blocks[0].attention.qkv) is Linear
    assert train(config, stopped).state == "finished"
    assert losses(stopped) == losses(left_alone)
    first, last = weights(source), weights(stopped)
    assert last.keys() == first.keys()  # no factors are left
    assert all(torch.equal(tensor, weights(left_alone)[name]) for name, tensor in last.items())
    changed = {name.split(".")[-2] for name, tensor in last.items() if not torch.equal(tensor, first[name])}
    assert changed == {"qkv", "out", "up", "down"}
    there = half.state_dict()
    assert {n.split(".")[-2] for n, t in there.items() if not torch.equal(t, first[n])} == changed
    facts = RunFolder(stopped).status()["parameters"]
    assert 0 < facts["trained"] < facts["of"]
    assert f"trains lora: {facts['trained']:,} parameters" in (stopped / "events.jsonl").read_text()


def test_merged_weights_give_the_loss_that_was_measured(source, tmp_path):
    config = from_source(source, *LORA, "lr=0.1", "evaluation.every=4", "evaluation.sequences=4")
    measured = train(config, tmp_path / "run").evaluation["loss"]
    task = find_task("language").for_evaluation(config)
    model = open_language_model(tmp_path / "run").model
    found = task.evaluate(model)["loss"]
    assert found == pytest.approx(measured, rel=1e-5)
    start = task.evaluate(open_language_model(source).model)["loss"]
    assert abs(start - found) > 1e-2  # the factors did something


def run_in(world, config, folder):
    return train(config, folder, world=world).state


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_several_processes_make_the_same_steps(source, tmp_path, mode):
    config = from_source(
        source, "parameters=lora+residual", "lora.rank=2", "optimizer.kind=muon", "parallel.device=cpu"
    )
    train(config, tmp_path / "alone")
    assert run_world(2, run_in, config, tmp_path / mode, mode=mode) == ["finished"] * 2
    alone, together = weights(tmp_path / "alone"), weights(tmp_path / mode)
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["parameters=all+lora"], "it takes all, or words and patterns"),
        (["parameters=lora+lora"], "each once"),
        (["parameters=lora", "init_from=null"], "is not allowed without init_from"),
        (["parameters=blocks.7.*"], "'blocks.7.*' is not allowed; it takes all, lora, residual, norms, or a pattern"),
        (["parameters=lora", "lora.rank=17"], "lora.rank: 17 is not allowed; blocks.0.attention.qkv is 48 × 16"),
        (["parameters=lora", "lora.targets=[gate]"], "'gate' is no linear layer of LanguageModel; it has qkv, out"),
        (["parameters=norms", "optimizer.kind=muon"], "'muon' is not allowed with this train.parameters"),
        (["parameters=lora", "init_vocab=resize"], "add embedding.weight"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(source, tmp_path, changes, sentence):
    with pytest.raises(ConfigError) as refused:
        train(from_source(source, *changes), tmp_path / "run")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def tensor_parallel_in(world, config, folder):
    try:
        train(config, folder, world=world)
    except ConfigError as error:
        return str(error)
    return "trained"


def test_factors_refuse_tensor_parallelism_which_other_choices_take(source, tmp_path):
    config = from_source(source, *LORA, "parallel.device=cpu")
    for said in run_world(2, tensor_parallel_in, config, tmp_path / "lora", mode="tp"):
        assert "'tp' is not allowed with factors of LoRA" in said
    config = from_source(source, "parameters=residual", "parallel.device=cpu")
    assert run_world(2, tensor_parallel_in, config, tmp_path / "residual", mode="tp") == ["trained"] * 2


def test_memory_is_asked_for_what_is_trained(source):
    from siamesenorm.train.memory import least_memory

    config = from_source(source)
    task = find_task("language")(config)
    whole = least_memory(config, task, World()).state
    part = least_memory(from_source(source, "parameters=residual"), task, World()).state
    assert part < 0.5 * whole


def test_experts_have_no_linear_layers_to_put_factors_around(source):
    moe = "model.moe={experts: 2, top_k: 1, expert_dim: 8}"
    config = from_source(source, "parameters=lora", moe)
    with torch.device("meta"), pytest.raises(ConfigError, match="'up' is no linear layer"):
        choose_parameters(LanguageModel(config.model), config)


def test_a_source_that_goes_away_is_not_missed(source, tmp_path):
    here = shutil.copytree(source, tmp_path / "source")
    config = from_source(here, *LORA)
    train(config, tmp_path / "run")
    shutil.rmtree(here)
    assert open_language_model(tmp_path / "run").model is not None
