"""Tutorials: the change that one shows to a GPT keeps its function, and notebooks run from top to bottom."""

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

DOCS = Path(__file__).resolve().parent.parent / "docs"
NANOGPT = (DOCS / "tutorials" / "nanogpt.md").read_text(encoding="utf-8")
GPT = (DOCS / "examples" / "gpt.py").read_text(encoding="utf-8")
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def patched(text: str, diff: str) -> str:
    """A text after a unified diff; what the diff says was there must be there."""
    lines, behind = text.split("\n"), 0
    for start, body in re.findall(r"^@@ -(\d+),\d+ \+\d+,\d+ @@\n((?:[ +-].*\n|\n)+)", diff, re.MULTILINE):
        signs = [(line[:1] or " ", line[1:]) for line in body.removesuffix("\n").split("\n")]
        old, new = ([line for sign, line in signs if sign in kept] for kept in (" -", " +"))
        at = int(start) - 1 + behind
        assert lines[at : at + len(old)] == old
        lines[at : at + len(old)] = new
        behind += len(new) - len(old)
    return "\n".join(lines)


def made(text: str) -> ModuleType:
    module = ModuleType("gpt")
    exec(compile(text, "gpt.py", "exec"), module.__dict__)
    return module


(DIFF,) = re.findall(r"^```diff\n(.*?)^```$", NANOGPT, re.MULTILINE | re.DOTALL)


def changed_lines(sign: str) -> int:
    return sum(line.startswith(sign) and line[:3] != 3 * sign for line in DIFF.splitlines())


@pytest.mark.parametrize("bias", [False, True])
def test_the_changed_gpt_on_pre_is_the_old_one_bit_for_bit(bias, monkeypatch):
    assert changed_lines("+") == changed_lines("-") == 9
    session: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", NANOGPT, re.MULTILINE | re.DOTALL):
        exec(block, session)
    monkeypatch.setitem(__import__("sys").modules, "gpt", ModuleType("gpt"))  # dataclasses look their module up
    before, after = made(GPT), made(patched(GPT, DIFF))
    old = before.GPT(before.GPTConfig(bias=bias))
    with torch.no_grad():
        for parameter in old.parameters():
            parameter += torch.randn_like(parameter) / 10  # gains and biases that are not 1 and 0
    new = after.GPT(after.GPTConfig(bias=bias, topology="pre"))
    new.load_state_dict(session["renamed"](old.state_dict(), blocks=4))
    ids = torch.randint(0, 256, (2, 32))
    assert torch.equal(new(ids), old(ids))
    for model in (old, new):
        model(ids).square().mean().backward()
    gradients = session["renamed"]({name: p.grad for name, p in old.named_parameters()}, blocks=4)
    assert gradients.keys() == dict(new.named_parameters()).keys()
    assert all(torch.equal(p.grad, gradients[name]) for name, p in new.named_parameters())
    assert after.GPT(after.GPTConfig(bias=bias))(ids).isfinite().all()  # siamese


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    session: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(cells(path)):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), session)
    said = capsys.readouterr().out
    if path.stem == "compare":
        assert len(list((tmp_path).glob("*/report/report.html"))) == 1
        assert len(re.findall(r"(?:pre|siamese) +lr .* finished", said)) == 8
    else:
        assert len(re.findall(r"^block \d: ", said, re.MULTILINE)) == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs_and_their_links_lead_somewhere(path):
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells(path))
    text = "\n".join("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "markdown")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (path.parent / target).exists(), target


def test_there_are_two_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["compare", "inspect"]
