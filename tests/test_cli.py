"""The command line: what it lists and explains, and how it behaves on bad input, a closed pipe and an interrupt."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from siamesenorm import Residual, TopologyError, catalogue
from siamesenorm.cli import app, main
from siamesenorm.errors import InputError
from siamesenorm.interrupts import loading
from siamesenorm.residual import TOPOLOGIES, parse_topology
from siamesenorm.train.config import OptimizerConfig
from siamesenorm.train.optimizer import parameter_groups

NAMES = list(TOPOLOGIES)
SPECS = [*NAMES, "siamese:form=plain", "siamese:form=hybrid_pre", "siamese:x=deepnorm,y=sandwich", "mhc:rate=2"]


@functools.cache
def run(*arguments: str, width: int = 200) -> str:
    """What a command prints; the same every time."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.stdout


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "siamesenorm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)


# What it shows -------------------------------------------------------------------------------------


def test_no_arguments_show_help():
    assert "topologies" in run()


def test_table_has_one_row_for_every_topology():
    rows = {line.split()[0]: line for line in run("topologies").splitlines() if line.split()[:1]}
    for name, topology in TOPOLOGIES.items():
        for part in (topology.equation, topology.streams, topology.arxiv):
            assert part in rows[name]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_drawing_is_not_broken_in_a_narrow_terminal(name):
    shown = run("topologies", name, width=40).splitlines()
    for line in TOPOLOGIES[name].drawing.splitlines():
        drawn = re.match(r".*[─│┌┐└┘├┤┬┴▶▼]", line)
        assert drawn is None or any(other.startswith(drawn[0]) for other in shown), line


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off(width):
    table = run("topologies", width=width)
    assert max(map(len, table.splitlines())) <= width
    assert "…" not in table
    for topology in TOPOLOGIES.values():
        for word in topology.equation.split():
            assert word in table


@pytest.mark.parametrize("spec", SPECS)
def test_explanation_fits_80_columns_with_every_word(spec):
    text = run("topologies", spec, width=80)
    assert max(map(len, text.splitlines())) <= 80
    for word in TOPOLOGIES[parse_topology(spec)[0]].drawing.split():
        assert word in text


@pytest.mark.parametrize("name", NAMES)
def test_explanation_has_drawing_and_options(name):
    topology, text = TOPOLOGIES[name], run("topologies", name)
    assert topology.drawing.strip("\n") in text
    assert topology.equation in text
    assert topology.arxiv in text
    options = text.split("\nOptions\n")[1].split("\nLinks\n")[0]
    for field in fields(topology.options_class):
        assert f"  {field.name} " in options
        assert field.metadata["help"].split(";")[0] in options
    if not fields(topology.options_class):
        assert options.split() == ["none"]


def test_explanation_resolves_options():
    text = run("topologies", "siamese:form=hybrid_pre")
    item = json.loads(run("topologies", "siamese:form=hybrid_pre", "--json"))
    assert {option["name"]: option["value"] for option in item["options"]} == {
        "form": "hybrid_pre",
        "x": "hybrid",
        "y": "pre",
        "input_norm": "true",
        "depth_scaling": "sqrt(2(l+1))",
        "final_norm": "true",
        "prores": "0",
    }
    assert "a norm per head on Q, K and V" in text
    assert "5d per block" in text
    assert "F reads g * x + y" in text
    assert "false" in run("topologies", "siamese:form=plain").split("input_norm")[1].splitlines()[0]


def test_explanation_shows_the_numbers_of_the_stack_asked_for():
    text = run("topologies", "deepnorm", "--blocks", "8", "--dim", "10")
    assert "std × 0.3536" in text  # (8·8)^(-1/4)
    assert [line.split()[-1] for line in text.splitlines() if "0–7" in line] == ["2"]  # a = 16^(1/4)
    assert "160 in all at d = 10, L = 8" in text
    assert "0.7071 … 0.5" in run("topologies", "siamese", "--blocks", "2")


# The facts behind it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("blocks", [1, 5])
def test_total_is_what_a_real_stack_has(spec, blocks):
    facts = catalogue.describe(spec, blocks)
    real = sum(parameter.numel() for parameter in Residual(spec, 24, blocks).parameters())
    assert facts.total(24) == real


def test_counts_per_block():
    counts = {facts.name: str(facts.per_block) for facts in catalogue.catalogue()}
    # By hand from the equations: gains of width d, and for hyper 2(6d + 2 + 2 + 4 + 2) at rate 2.
    assert counts["pre"] == "2d"
    assert counts["siamese"] == "6d"
    assert counts["hybrid"] == "d"
    assert counts["sandwich"] == "4d"
    assert counts["rezero"] == "2"
    assert counts["hyper"] == "12d + 20"


def test_spec_of_a_topology_makes_it_again():
    made = Residual("siamese:x=post:norm_at=end,depth_scaling=none", 8, 2)
    assert catalogue.spec_of(made) == "siamese:x=post:norm_at=end,depth_scaling=none"
    assert catalogue.spec_of(Residual("hyper", 8, 2, rate=3, dynamic=False)) == "hyper:rate=3,dynamic=false"
    assert Residual("hyper:rate=3,dynamic=false", 8, 2).options.dynamic is False


def test_json_of_all():
    listed = json.loads(run("topologies", "--json"))
    assert [item["name"] for item in listed] == NAMES
    for item in listed:
        assert item["equation"] == TOPOLOGIES[item["name"]].equation
        assert item["parameters"]["per_block"]["text"]


def test_json_of_one():
    item = json.loads(run("topologies", "hyper:rate=3", "--json", "--dim", "32", "--blocks", "4"))
    assert item["spec"] == "hyper:rate=3"
    assert item["options"][0] == {
        "name": "rate",
        "value": "3",
        "default": "2",
        "allowed": "a whole number from 1 to 64",
        "help": "n, the number of rows",
    }
    assert item["parameters"]["total"] == sum(p.numel() for p in Residual("hyper", 32, 4, rate=3).parameters())


# Bad input -------------------------------------------------------------------------------------------

BAD = {
    "siamse": ("unknown name 'siamse'", "did you mean siamese?"),
    "SIAMESE": ("unknown name 'SIAMESE'", "did you mean siamese?"),
    "nothing_like_it": ("unknown name", "residual_dual"),
    "": ("unknown name ''", "known names"),
    "siamese:frm=plain": ("unknown option 'frm'", "did you mean form?"),
    "siamese:form=plan": ("form = 'plan'", "did you mean plain?"),
    "siamese:form": ("is not an option", "name:option=value"),
    "siamese:form=plain,form=plain": ("twice",),
    "siamese:x=psot": ("unknown name 'psot'", "did you mean post?"),
    "siamese:x=pre": ("x = 'pre' is not allowed", "x takes post"),
    "siamese:y=siamese": ("several streams", "y takes pre"),
    "siamese:input_norm=maybe": ("'maybe'", "true or false"),
    "pre:rate=2": ("unknown option 'rate'", "its options are prores"),
    "hyper:rate=0": ("rate = '0'", "from 1 to 64"),
    "hyper:rate=1.5": ("rate = '1.5'", "whole number"),
    "mix:post_fraction=nan": ("'nan'", "from 0 to 1"),
    "siamese:x=hybrid,y=reordered": ("different norms",),
    "[red]x[/red]": ("unknown name '[red]x[/red]'",),
}


@pytest.mark.parametrize("spec", BAD)
@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_bad_topology_is_one_sentence_and_exit_code_2(spec, extra, capsys):
    assert main(["topologies", spec, *extra]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for part in BAD[spec]:
        assert part in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["topology"],
        ["--nope"],
        ["topologies", "--nope"],
        ["topologies", "pre", "post"],
        ["topologies", "pre", "--blocks", "0"],
        ["topologies", "pre", "--blocks", "many"],
        ["topologies", "pre", "--dim", "9" * 30],
        ["topologies", "--dim", "8"],
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(arguments, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("siamesenorm: ")
    assert err.endswith("--help says more\n")
    if "--blocks" in arguments:
        assert f"--blocks: '{arguments[-1]}' is not allowed" in err


def test_no_suggestion_where_nothing_is_near(capsys):
    main(["topologies", "zzzzzz"])
    assert "did you mean" not in capsys.readouterr().err


def test_a_suggestion_is_a_value_and_stands_at_the_end():
    assert str(InputError.not_allowed("-o", "afolder", "a new folder")).endswith("it takes a new folder")
    error = InputError.not_allowed("kind", "swiglo", ("swiglu", "gelu"))
    assert str(error).endswith("; did you mean swiglu?")
    nested = str(InputError(f"{error.sentence}; others carry it"))
    assert nested.endswith("; others carry it; did you mean swiglu?")


def test_only_the_librarys_own_errors_are_bad_input(monkeypatch):
    def fail() -> None:
        raise ValueError("a defect")

    monkeypatch.setattr("siamesenorm.catalogue.catalogue", fail)
    with pytest.raises(ValueError, match="a defect"):
        main(["topologies", "--json"])


def test_error_class_is_a_value_error():
    assert issubclass(TopologyError, ValueError)


# As a process ----------------------------------------------------------------------------------------


def test_process_bad_name():
    result = start("topologies", "siamse")
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("siamesenorm: topology: unknown name 'siamse'")


def test_process_on_an_ascii_output():
    result = start("topologies", "siamese", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert result.returncode == 0, result.stderr
    assert "(+)--> N_in --> F --> O -+" in result.stdout


@pytest.mark.parametrize("arguments", [["topologies"], ["topologies", "--json"]])
def test_closed_pipe_is_quiet(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "siamesenorm", *arguments]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writing)
    assert result.stderr == ""


def test_interrupt_is_quiet(monkeypatch, capsys):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("siamesenorm.catalogue.catalogue", interrupt)
    assert main(["topologies", "--json"]) == 130
    assert "".join(capsys.readouterr()).strip() == ""


@pytest.mark.parametrize("swallows", [False, True])
def test_interrupt_while_loading_is_quiet(swallows):
    """Also where an import swallows the exception, as some of torch's do."""
    code = "import os, signal\nfrom siamesenorm.interrupts import loading\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a parent may have it ignored
    code += "with loading():\n"
    body = "os.kill(os.getpid(), signal.SIGINT)"
    code += f"    try:\n        {body}\n    except BaseException: pass\n" if swallows else f"    {body}\n"
    result = subprocess.run([sys.executable, "-c", code + "print('went on')"], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_interrupts_are_exceptions_again_after_loading():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), loading():
        1 / 0  # noqa: B018
    assert signal.getsignal(signal.SIGINT) is before


def test_models_lists_every_preset_and_explains_one():
    from siamesenorm.models.families import FAMILIES

    listed = CliRunner().invoke(app, ["models"]).stdout.split()
    names = [name for family in FAMILIES.values() for name in family.presets]
    assert [word for word in listed if word in names] == names
    one = json.loads(CliRunner().invoke(app, ["models", "lm-nano", "--json"]).stdout)
    assert one["name"] == "lm-nano"
    explained = CliRunner().invoke(app, ["models", "lm-nano"])
    assert explained.exit_code == 0
    assert "FLOPs per token" in explained.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["lm-nano", "--topology", "siamse"], "did you mean siamese?"), (["lm-nan"], "did you mean lm-nano?")],
)
def test_models_refuses_unknown_names_in_one_sentence(arguments, said, capsys):
    assert main(["models", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize("spec", [*NAMES, "siamese:x=post,y=rezero"])
def test_one_topology_says_what_the_optimizer_does_with_its_parameters(spec):
    """Factors on learning rates and what is never decayed: as the groups of parameters have them."""
    groups = parameter_groups(Residual(spec, 8, 2), OptimizerConfig(lr=1.0, decay_vectors=True))
    names = {(re.sub(r"^links\.\d+\.", "", name)): group for group in groups for name in group["names"]}
    item, text = json.loads(run("topologies", spec, "--json")), run("topologies", spec, width=300)
    assert item["learning_rates"] == {n: g["lr_factor"] for n, g in names.items() if g["lr_factor"] != 1}
    assert item["no_weight_decay"] == sorted(n for n, g in names.items() if not g["weight_decay"])
    rates = "; ".join(f"× {factor:g} for {name}" for name, factor in item["learning_rates"].items())
    kept = ", ".join(item["no_weight_decay"])
    assert re.search(rf"learning rates +{re.escape(rates) or 'as the optimiser'}", text)
    assert re.search(rf"weight decay +{'never of ' + re.escape(kept) if kept else 'as the optimiser'}", text)
