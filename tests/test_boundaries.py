"""One boundary for every kind of input: what parses files of others stands in one place, and nothing goes past it."""

import ast
import functools
from pathlib import Path

import pytest

import siamesenorm

ROOT = Path(siamesenorm.__file__).parent
READERS = {
    "json.load": {},
    "json.loads": {"data/reading.py": "the boundary", "commands/completion.py": "the package's own file"},
    "JSONDecoder": {"data/reading.py": "the boundary"},
    "model_validate_json": {
        "data/reading.py": "the boundary",
        "lab/inspection/result.py": "for callers from Python, with a sentence of its own",
        "lab/prediction.py": "a header that the boundary of tensors has read",
        "tasks/fidelity/references.py": "a header that the boundary of tensors has read",
    },
    "yaml.load": {"train/yaml.py": "the boundary"},
    "yaml.safe_load": {},
    "pickle.load": {},
    "pickle.loads": {},
    "np.load": {},
    "np.fromfile": {},
    "np.memmap": {
        "data/arrays.py": "the boundary",
        "data/tokens.py": "raw arrays, whose size is that of their file",
        "data/images/idx.py": "a format of its own, whose header is checked against the file",
        "interop/gguf/reader.py": "a format of its own, whose every size is checked against the file",
        "data/images/cifar.py": "a format of its own, whose size is that of its file",
    },
    "zipfile.ZipFile": {"data/arrays.py": "the boundary", "lab/sample_files.py": "written, not read"},
    "safe_open": {"data/tensors.py": "the boundary"},
    "load_file": {},
    "torch.load": {"tasks/fidelity/inception_weights.py": "the published file of weights is a pickle; weights_only"},
    "read_text": {
        "data/images/cifar.py": "through the boundary",
        "commands/completion.py": "the package's own file",
        "lab/evaluation.py": "through the boundary",
        "lab/study/record.py": "through the boundary",
        "lab/grafting.py": "through the boundary",
        "lab/inspection/source.py": "the start of a text, through a limit of its own",
        "train/recipes.py": "through the boundary, and the package's own recipes",
        "data/chat.py": "through the boundary",
        "data/tokenizer.py": "through the boundary",
        "interop/huggingface/bundle.py": "the package's own source",
        "lab/drawing/page.py": "the script of plotly",
        "train/facts.py": "/proc",
        "train/provenance.py": "/proc",
        "train/memory.py": "/proc and control groups",
    },
    "read_bytes": {
        "data/reading.py": "the boundary",
        "data/stdlib.py": "the standard library",
        "lab/study/plan.py": "through the boundary",
        "lab/inspection/looking.py": "through the boundary",
        "data/images/image_folder.py": "bytes for a checksum",
        "train/folder.py": "bytes that are only compared",
        "data/replacement.py": "bytes that are kept aside",
    },
}
"""Calls that turn a file into values, and the only files that make them, each with its reason."""


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Every source file of the package."""
    found = sorted(ROOT.rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in found}


@functools.cache
def calls() -> list[tuple[str, ast.Call]]:
    """Every call, with the file that makes it."""
    return [(name, node) for name, tree in sources().items() for node in ast.walk(tree) if isinstance(node, ast.Call)]


def name_of(call: ast.Call) -> str:
    """``json.loads`` for a function of a module, ``read_text`` for a method of anything or a plain function."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        dotted = f"{function.value.id}.{function.attr}" if isinstance(function.value, ast.Name) else ""
        return dotted if dotted in READERS else function.attr
    return ""


def is_round_trip(call: ast.Call) -> bool:
    """``json.loads(json.dumps(value))``, which reads nothing from outside."""
    inner = call.args[0] if call.args else None
    return isinstance(inner, ast.Call) and ast.unparse(inner.func) == "json.dumps"


@pytest.mark.parametrize("reader", READERS)
def test_files_are_parsed_at_the_boundary_only(reader):
    found = {file for file, call in calls() if name_of(call) == reader and not is_round_trip(call)}
    allowed = set(READERS[reader])
    assert found <= allowed, f"{reader} goes past the boundary"
    if reader not in ("json.loads",):  # the boundary has decoders of its own
        assert allowed <= found, f"{reader} is no longer called there"


def test_other_libraries_read_folders_where_whatever_they_raise_becomes_a_sentence():
    met = 0
    for file, tree in sources().items():
        guarded = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.With) and "read_by_others" in ast.unparse(node.items[0].context_expr)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and name_of(node) == "from_pretrained":
                if "super()" in ast.unparse(node.func):
                    continue  # a class that is itself what others load by
                met += 1
                assert node in guarded, f"{file}:{node.lineno}"
    assert met >= 4


def test_every_command_has_its_arguments_checked():
    from siamesenorm.cli import app
    from siamesenorm.commands import data
    from siamesenorm.commands.arguments import checked

    registered = [*app.registered_commands, *data.app.registered_commands]
    assert len(registered) > 15
    code = checked(lambda: None).__code__
    assert all(command.callback.__code__ is code for command in registered)
