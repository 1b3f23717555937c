"""Imports point one way: a room looks at rooms below it, never up."""

import ast
from pathlib import Path

import pytest

import siamesenorm

SOURCE = Path(siamesenorm.__file__).parent
BELOW = {
    "residual": set(),
    "layers": {"residual"},
    "models": {"layers", "residual"},
    "data": set(),
    "tasks": {"data", "layers", "models", "residual"},
    "train": {"tasks", "data", "layers", "models", "residual"},
    "interop": {"tasks", "data", "layers", "models", "residual"},
    "lab": {"interop", "train", "tasks", "data", "layers", "models", "residual"},
    "commands": {"lab", "interop", "train", "tasks", "data", "layers", "models", "residual"},
}
"""Which rooms a room may import from, beside itself and the few files that lie outside of any."""


def rooms_named_in(file):
    """Rooms that a file imports from or names as modules in a text, with the line."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "siamesenorm":
                names = [f"siamesenorm.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if node.value.replace(".", "").replace("_", "").isalnum() else []
        for name in names:
            package, _, rest = name.partition(".")
            if package == "siamesenorm" and rest.partition(".")[0] in BELOW:
                yield rest.partition(".")[0], node.lineno


def test_every_room_has_its_place():
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == set(BELOW)


@pytest.mark.parametrize("room", BELOW)
def test_no_import_points_upward(room):
    files = [file for file in (SOURCE / room).rglob("*.py") if "lm_eval_tasks" not in file.parts]
    upward = [
        f"{file.relative_to(SOURCE)}:{line} looks at {other}"
        for file in files
        for other, line in rooms_named_in(file)
        if other != room and other not in BELOW[room]
    ]
    assert not upward


def test_no_command_imports_another():
    """What two commands share is the library's, or one of the few files that are no command."""
    folder = SOURCE / "commands"
    shared = {"arguments", "completion", "data_folder", "data_progress", "findings", "options"}
    commands = {file.stem for file in folder.glob("*.py")} - shared - {"__init__"}
    assert "compare" in commands
    between = [
        f"{file.name} imports {alias}"
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("siamesenorm.commands")
        for alias in ([node.module.rpartition(".")[2]] if node.module.count(".") > 1 else [a.name for a in node.names])
        if alias in commands
    ]
    assert not between


LAB = {
    "drawing": set(),
    "compare": set(),
    "report": {"compare", "drawing", "inspection"},
    "inspection": {"compare", "drawing"},
    "study": {"compare", "report", "inspection"},
}
"""Which rooms of the laboratory a room of it looks into."""


@pytest.mark.parametrize("room", LAB)
def test_rooms_of_the_laboratory_look_one_way(room):
    names = {
        node.module.split(".")[2]
        for file in (SOURCE / "lab" / room).glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("siamesenorm.lab.")
    }
    assert names - {room} <= LAB[room]


def test_gguf_words_know_nothing_of_imported_models():
    """Who imports models reads GGUF by these words; looking back, neither could be imported first."""
    named = {
        node.module
        for node in ast.walk(ast.parse((SOURCE / "interop" / "gguf" / "translation.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
    }
    assert not [name for name in named if name and "pretrained" in name]
