"""Hundreds of bad values in overrides and recipes: each is refused in one sentence, and nothing is written."""

from pathlib import Path
from typing import Literal, get_origin

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from siamesenorm.train.fields import alternatives, fields_of
from siamesenorm.train.recipes import config_class, resolve
from siamesenorm.train.yaml import write_yaml

from .refusals import one_sentence

FIELDS = [field for field in fields_of(config_class("language")) if field.section is None]
NUMBERS = [field for field in FIELDS if {int, float} & {*alternatives(field.info.annotation)}]
CHOICES = [f for f in FIELDS if any(get_origin(kind) is Literal for kind in alternatives(f.info.annotation))]
SWITCHES = [field for field in FIELDS if bool in alternatives(field.info.annotation)]

WORDS = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=8).filter(
    lambda word: word.lower() not in ("true", "false", "null", "rms", "layer", "none", "head")
)
NOT_NUMBERS = st.one_of(
    WORDS,
    st.sampled_from(
        ["true", "false", "[1]", "[]", "{a: 1}", "'1'", "1 2", "0x10", "1,5", "nan", "inf", ".nan", ".inf"]
    ),
)
BELOW = st.integers(-(10**30), -1).map(str) | st.floats(-1e300, -1e-300, allow_nan=False).map(repr)


def refused(override: str, capsys, folder: Path) -> None:
    one_sentence(["train", "lm-tiny", override, "--run", str(folder / "run")], capsys)
    assert not (folder / "run").exists()


FUZZ = settings(max_examples=100, suppress_health_check=[*HealthCheck])  # capsys and the folder serve all examples


@FUZZ
@given(field=st.sampled_from(NUMBERS), value=NOT_NUMBERS | BELOW)
@example(field=NUMBERS[0], value="9" * 4301)
def test_numbers_that_are_none(field, value, capsys, tmp_path):
    refused(f"{field.path}={value}", capsys, tmp_path)


@FUZZ
@given(
    field=st.sampled_from(CHOICES + SWITCHES), value=NOT_NUMBERS.filter(lambda v: v not in ("true", "false")) | BELOW
)
def test_choices_that_are_none(field, value, capsys, tmp_path):
    if str not in alternatives(field.info.annotation):
        refused(f"{field.path}={value}", capsys, tmp_path)


@FUZZ
@given(key=st.text(max_size=20).filter(lambda k: "=" not in k), value=st.text(max_size=10))
def test_names_that_are_none(key, value, capsys, tmp_path):
    known = {field.path for field in fields_of(config_class("language"))}
    if key.strip() in known or any(path.endswith(f".{key.strip()}") for path in known) or key.startswith("-"):
        return
    refused(f"{key}={value}", capsys, tmp_path)


@FUZZ
@given(text=st.text(max_size=60) | st.from_regex(r"\A[a-z]{1,6}: [\[{]?[a-z0-9:, ]{0,12}[\]}]?\n?\Z"))
def test_recipes_that_are_none(text, capsys, tmp_path):
    (tmp_path / "fuzz.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    one_sentence(["train", str(tmp_path / "fuzz.yaml"), "--run", str(tmp_path / "run")], capsys)
    assert not (tmp_path / "run").exists()


@FUZZ
@given(data=st.data())
def test_recipes_with_one_wrong_value(data, capsys, tmp_path):
    """Any field of a whole recipe, replaced by something of another kind."""
    values = resolve("lm-tiny").as_dict()
    field = data.draw(st.sampled_from([f for f in FIELDS if f.path.count(".") == 1]))
    section, name = field.path.split(".")
    wrong: list = [{"a": 1}, [[1]], {"": None}]
    if not {int, float} & {*alternatives(field.info.annotation)}:
        wrong += [3, 2.5]
    if bool not in alternatives(field.info.annotation):
        wrong += [True, False]
    values[section][name] = data.draw(st.sampled_from(wrong))
    (tmp_path / "fuzz.yaml").write_text(write_yaml(values))
    err = one_sentence(["train", str(tmp_path / "fuzz.yaml"), "--run", str(tmp_path / "run")], capsys)
    assert section in err
    assert not (tmp_path / "run").exists()


def test_the_fuzzed_fields_are_many():
    assert len(NUMBERS) > 35
    assert len(CHOICES) + len(SWITCHES) > 15
