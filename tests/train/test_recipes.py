"""Recipes and overrides: every one resolves and round-trips; what is wrong is said in one sentence."""

import pickle
from pathlib import Path

import pytest
import yaml as plain_yaml
from hypothesis import example, given
from hypothesis import strategies as st

from siamesenorm.errors import ConfigError
from siamesenorm.models.lm import PRESETS
from siamesenorm.train.config import RunConfig
from siamesenorm.train.fields import default_of, describe_allowed, fields_of
from siamesenorm.train.folder import RunFolder
from siamesenorm.train.recipes import config_class, load_recipe, parse_config, recipe_names, resolve
from siamesenorm.train.resuming import differing_fields
from siamesenorm.train.yaml import read_yaml, write_yaml

NAMES = recipe_names()
FULL = [name for name in NAMES if name.startswith(("lm-", "moe-")) and not name.endswith("-tiny")]


@pytest.mark.parametrize("name", NAMES)
def test_recipe_resolves_and_round_trips(name):
    config = resolve(name)
    assert config.about
    assert parse_config(config.as_dict()) == config
    assert parse_config(read_yaml(write_yaml(config.as_dict()), name)) == config
    assert parse_config(plain_yaml.safe_load(write_yaml(config.as_dict()))) == config  # any YAML reader will do
    assert pickle.loads(pickle.dumps(config)) == config  # into another process


def test_every_language_recipe_of_the_paper_is_there_with_a_small_sibling():
    assert set(FULL) == {
        "lm-1.3b",
        "lm-390m-10x1280",
        "lm-390m-17x1024",
        "lm-390m-33x768",
        "lm-390m-80x512",
        "moe-15b-a2b",
    }
    assert {"lm-tiny", "lm-depth-tiny", "moe-tiny", "arithmetic-tiny"} <= set(NAMES)


@pytest.mark.parametrize("name", FULL)
def test_recipe_has_the_shape_of_its_preset(name):
    assert resolve(name).model == PRESETS[name].config


def test_the_papers_optimisation():
    for name in FULL:
        config = resolve(name)
        optimizer = config.optimizer
        assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay, optimizer.clip) == (0.9, 0.95, 0.1, 1.0)
        assert (config.schedule.kind, config.schedule.warmup, config.schedule.final) == ("cosine", 2000, 0.1)
        assert config.train.precision == "bf16"
        assert config.data.sequence_length == 2048
    tokens = {name: resolve(name).train.tokens for name in FULL}
    assert tokens["lm-1.3b"] == tokens["moe-15b-a2b"] == 100_000_000_000
    assert tokens["lm-390m-80x512"] == 12_000_000_000
    assert resolve("lm-1.3b").steps == 23842  # ceil(100e9 / (2048 · 2048))


@pytest.mark.parametrize("length", ["steps=10", "tokens=5000"])
def test_a_warmup_that_nobody_asked_for_fits_into_fewer_steps(length):
    config = resolve("lm-tiny", [length])
    assert 1 <= config.schedule.warmup <= config.steps < resolve("lm-tiny").schedule.warmup
    (note,) = config.notes
    assert f"schedule.warmup is {config.schedule.warmup} instead of the recipe's 30" in note
    with pytest.raises(ConfigError, match=r"schedule\.warmup = 30 is not allowed"):
        resolve("lm-tiny", [length, "warmup=30"])
    assert resolve("lm-tiny", ["steps=30"]).notes == ()


def test_tokens_are_rounded_up_to_whole_steps():
    assert resolve("lm-tiny", ["tokens=1025", "warmup=0"]).steps == 2
    assert resolve("lm-tiny", ["tokens=1024", "warmup=0"]).steps == 1


def test_every_field_is_described():
    for field in fields_of(config_class("language")):
        assert field.info.description, field.path
        assert describe_allowed(field)


def test_defaults_are_allowed_values():
    config = resolve("lm-tiny").as_dict()
    for field in fields_of(config_class("language")):
        default = default_of(field.info)
        if default is ... or "moe" in field.path or field.path.count(".") != 1:
            continue
        section, name = field.path.split(".")
        values = {**config, section: {**config[section], name: default}}
        if field.path not in ("train.steps",):
            parse_config(values)


# Overrides -------------------------------------------------------------------------------------------


def test_a_last_name_is_enough_where_it_is_the_only_one():
    config = resolve("lm-tiny", ["topology=pre", "lr=3e-3", "steps=77", "seed=5", "warmup=0", "final=0.5"])
    assert (config.model.topology, config.optimizer.lr, config.steps) == ("pre", 3e-3, 77)
    assert (config.train.seed, config.schedule.final) == (5, 0.5)
    assert resolve("lm-tiny", ["model.topology=pre"]) == resolve("lm-tiny", ["topology=pre"])


def test_later_overrides_go_before_earlier_ones():
    assert resolve("lm-tiny", ["lr=1", "lr=2e-3"]).optimizer.lr == 2e-3


def test_steps_and_tokens_take_each_others_place():
    by_tokens = resolve("lm-tiny", ["tokens=102400"])
    assert (by_tokens.train.steps, by_tokens.train.tokens, by_tokens.steps) == (None, 102400, 100)
    assert resolve("lm-1.3b", ["steps=5000"]).train.tokens is None


def test_values_are_yaml_and_text_stays_text():
    config = resolve("lm-tiny", ["clip=null", "data.train=[python-code, python-docs]", "data.weights=[3, 1]"])
    assert config.optimizer.clip is None
    assert config.data.train == ("python-code", "python-docs")
    assert config.data.weights == (3.0, 1.0)
    assert resolve("lm-tiny", ["topology=siamese:form=plain,x=post"]).model.topology == "siamese:form=plain,x=post"
    assert resolve("lm-tiny", ["about=123"]).about == "123"
    assert resolve("lm-tiny", ["wandb=null"]).logging.wandb is None


def test_overrides_leave_the_recipe_as_it_is():
    before = resolve("lm-tiny")
    resolve("lm-tiny", ["lr=1", "model.moe.experts=4", "model.moe.top_k=2", "model.moe.expert_dim=8"])
    assert resolve("lm-tiny") == before


BAD = {
    "lr=-1": ("optimizer.lr: -1 is not allowed", "above 0"),
    "lr=fast": ("optimizer.lr: 'fast' is not allowed", "a number"),
    "lr=.nan": ("optimizer.lr: nan is not allowed",),
    "lr=.inf": ("optimizer.lr: inf is not allowed",),
    "lr=": ("optimizer.lr: null is not allowed",),
    "steps=0": ("train.steps: 0 is not allowed", "from 1"),
    "steps=true": ("train.steps: true is not allowed", "whole number"),
    "steps=1.5": ("train.steps: 1.5 is not allowed",),
    "steps=null": ("takes one of the three",),
    "topology=siamse": ("model.topology: unknown name 'siamse'", "known names: siamese"),
    "topology=siamese:form=plan": ("form = 'plan' is not allowed", "plain"),
    "schedule.kind=cosin": ("schedule.kind: 'cosin' is not allowed", "one of cosine, wsd, constant"),
    "precision=bf17": ("train.precision: 'bf17'", "one of fp32, bf16, fp16"),
    "topolgy=pre": ("unknown field 'topolgy'", "did you mean model.topology?"),
    "optimiser.lr=1": ("unknown field 'optimiser.lr'", "did you mean optimizer.lr?"),
    "every=3": ("is not one field but 3", "checkpoint.every, evaluation.every, logging.every"),
    "nothing_like_it=1": ("unknown field 'nothing_like_it'", "model, data"),
    "lr": ("is not allowed", "key=value"),
    "=3": ("is not allowed", "key=value"),
    "model=3": ("model: 3 is not allowed", "vocab_size"),
    "model.moe=3": ("model.moe: 3 is not allowed", "experts"),
    "model.moe.experts=3": ("model.moe.top_k: is missing",),
    "heads=3": ("heads = 3 is not allowed", "divisor of dim = 64"),
    "blocks=99999": ("model.blocks = 99999 is not allowed", "4096"),
    "warmup=9999": ("schedule.warmup = 9999 is not allowed",),
    "sequence_length=4096": ("data.sequence_length = 4096 is not allowed", "model.max_length = 512"),
    "accumulation=3": ("accumulation", "train.micro_batch_size"),
    "micro_batch_size=0": ("train.micro_batch_size: 0 is not allowed", "from 1 to 16777216 or auto, or null"),
    "data.weights=[1,2]": ("data.weights = [1.0, 2.0] is not allowed", "one per corpus"),
    "data.train=[]": ("data.train: () is not allowed",),
    "data.train={a: 1}": ("data.train", "is not allowed"),
    "task=speech": ("task: 'speech' is not known", "language"),
    "rope_theta=.inf": ("model.rope_theta: inf is not allowed",),
    "lr=[1": ("optimizer.lr: is not YAML",),
    "lr={a: 1, a: 2}": ("is given twice",),
    "lr=*x": ("aliases",),
    "seed=99999999999999999999": ("train.seed", "is not allowed"),
    "steps=" + "9" * 5000: ("train.steps", "is not allowed"),
}


@pytest.mark.parametrize("override", BAD, ids=lambda text: text[:40])
def test_bad_override_is_one_sentence(override):
    with pytest.raises(ConfigError) as caught:
        resolve("lm-tiny", [override])
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    for part in BAD[override]:
        assert part in message


# Recipe files ----------------------------------------------------------------------------------------


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_a_recipe_says_only_what_differs_from_its_base(tmp_path):
    mine = write(tmp_path, "base: lm-tiny\nmodel: {topology: pre}\ntrain: {tokens: 2048}\nschedule: {warmup: 0}\n")
    config = resolve(mine)
    assert config.model == resolve("lm-tiny", ["topology=pre"]).model
    assert config.steps == 2
    further = write(tmp_path, "base: mine.yaml\noptimizer: {lr: 0.5}\n", "further.yaml")
    assert resolve(further).optimizer.lr == 0.5
    assert resolve(further).model.topology == "pre"


def test_bases_in_a_circle_are_refused(tmp_path):
    write(tmp_path, "base: b.yaml\n", "a.yaml")
    write(tmp_path, "base: a.yaml\n", "b.yaml")
    with pytest.raises(ConfigError, match="in a circle"):
        load_recipe(tmp_path / "a.yaml")


FILES = {
    "": "is no recipe",
    "3": "is no recipe",
    "[1, 2]": "is no recipe",
    "task: language": "is missing",
    "task: speech": "'speech' is not known",
    "modle: {}\nbase: lm-tiny": "unknown field 'modle'",
    "base: lm-tiny\nmodel: {dmi: 3}": "unknown field 'dmi'",
    "base: lm-tinny": "unknown name 'lm-tinny'",
    "base: 3": "base: 3 is not allowed",
    "a: b: c": "is not YAML",
    "a: 1\na: 2": "is given twice",
    "1: 2": "is not allowed as a name",
    "a: &x [1]\nb: *x": "aliases",
    "a: !!python/object/apply:os.system [ls]": "tags (tag:yaml.org,2002:python/object/apply:os) are not allowed",
    "a: !!bool maybe": "tags (tag:yaml.org,2002:bool) are not allowed",
    "a: !!int ''": "tags",
    "a: !!float x": "tags",
    "a: !!timestamp x": "tags",
    "a: !!binary '%'": "tags",
    "!!omap [1]": "tags",
    "!!set {x}": "tags",
    "? !!map []\n: 1": "tags",
    "a: ! x": "tags",
    "[" * 5000: "nested too deeply",
    "\x00": "is not YAML",
    "base: lm-tiny\noptimizer: {lr: no}": "'no' is not allowed",
    "base: lm-tiny\noptimizer: {lr: 2026-01-01}": "'2026-01-01' is not allowed",
}


@pytest.mark.parametrize("text", FILES, ids=lambda text: repr(text[:30]))
def test_bad_recipe_file_is_one_sentence(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        resolve(write(tmp_path, text))
    assert "\n" not in str(caught.value)
    assert FILES[text] in str(caught.value)


def test_files_that_cannot_be_recipes(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        resolve(str(tmp_path / "binary.yaml"))
    (tmp_path / "long.yaml").write_text("#" * 2**21)
    with pytest.raises(ConfigError, match="too large; it takes up to 1048576 bytes"):
        resolve(str(tmp_path / "long.yaml"))
    with pytest.raises(ConfigError, match="unknown name"):
        resolve(str(tmp_path))
    with pytest.raises(ConfigError):
        resolve("a\0b")


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.text(max_size=12)) | st.floats(
    allow_nan=False, allow_infinity=False
)


TWICE = ["the same list"]


@example({"0E0": None, "1e5": "1e5", "": "null", "~": "True"})
@example({"\x85": "\u2028", "\n a": " \n", "\ufeff": "\t", "\xa0": "\r"})
@example([TWICE, TWICE])
@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)))
def test_written_yaml_reads_back(value):
    assert read_yaml(write_yaml(value), "x") == value


def test_numbers_as_people_write_them():
    assert read_yaml("[1e-3, 1E3, .5, -2., 1_000, 0, no, on, 1:30]", "x") == [
        1e-3,
        1e3,
        0.5,
        -2.0,
        1000,
        0,
        "no",
        "on",
        "1:30",
    ]


def test_difference_names_the_first_field():
    one, other = resolve("lm-tiny"), resolve("lm-tiny", ["lr=1e-3", "logging.every=3"])
    assert next(differing_fields(one.decisive(), other.decisive())) == ("optimizer.lr", 0.01, 0.001)
    assert not list(differing_fields(one.as_dict()["model"], other.as_dict()["model"]))


def test_configuration_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        resolve("lm-tiny").optimizer.lr = 3  # type: ignore[misc]
    assert isinstance(resolve("lm-tiny"), RunConfig)


def test_runs_from_before_first_logits_keep_their_meaning(tmp_path):
    """As folders to open and as recipes to take up; a recipe that says nothing has the published rule."""
    values = resolve("lm-1.3b").as_dict()
    assert values["model"].pop("first_logits") == "standard"
    (tmp_path / "config.yaml").write_text(write_yaml(values), encoding="utf-8")
    assert RunFolder(tmp_path).config().model.first_logits == "small"
    assert resolve(str(tmp_path)).model.first_logits == "small"
    assert resolve(str(tmp_path), ["first_logits=standard"]) == resolve("lm-1.3b")
    with pytest.raises(ConfigError, match=r"model\.first_logits is 'small' instead of 'standard'"):
        RunFolder(tmp_path).check(resolve("lm-1.3b"), "auto")


def test_what_a_recipe_says_of_itself_is_not_said_of_another_run():
    """Its corpus, size and time; another topology, seed or learning rate is still the recipe."""
    words = resolve("lm-tiny").about
    assert "standard library" in words
    for same in (["topology=pre"], ["lr=3e-3"], ["seed=4"]):
        assert resolve("lm-tiny", same).about == words
    for other in (["data.train=corpus"], ["model.blocks=2"], ["train.steps=40"]):
        assert resolve("lm-tiny", other).about == ""
    assert resolve("lm-tiny", ["model.blocks=2", "about=mine"]).about == "mine"
