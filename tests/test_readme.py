"""README.md and docs/: every Python block runs, generated parts are current, named files and links exist."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from siamesenorm.residual import TOPOLOGIES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")], ids=name_of
)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """One page is one session, read from top to bottom."""
    monkeypatch.chdir(tmp_path)
    known = set(TOPOLOGIES)
    session: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks(page.read_text(encoding="utf-8"), "python")):
        exec(compile(block, f"{name_of(page)}, block {number}", "exec"), session)
    for name in set(TOPOLOGIES) - known:  # what a page registers goes with it
        del TOPOLOGIES[name]


def test_readme_and_library_page_have_python_blocks():
    assert len(blocks(README, "python")) >= 1
    assert len(blocks((ROOT / "docs/library.md").read_text(encoding="utf-8"), "python")) >= 5


def load_refresh() -> Any:
    spec = importlib.util.spec_from_file_location("refresh", ROOT / "docs" / "refresh.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current():
    refresh = load_refresh()
    for page in refresh.PARTS:
        assert refresh.refreshed(page) == (ROOT / page).read_text(encoding="utf-8"), f"{page}: run make docs"


def test_topology_table_has_the_registrys_rows():
    part = (
        (ROOT / "docs/topologies.md").read_text(encoding="utf-8").split("<!-- topologies:")[1].split("<!-- end -->")[0]
    )
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", part, re.MULTILINE)
    assert [name for name, _ in rows] == list(TOPOLOGIES)
    for name, rest in rows:
        assert TOPOLOGIES[name].arxiv in rest


def test_every_folder_is_on_the_page_of_the_architecture():
    rooms = set(re.findall(r"^\| `(\w+)/` \|", (ROOT / "docs/architecture.md").read_text("utf-8"), re.MULTILINE))
    packages = {path.parent.name for path in (ROOT / "src/siamesenorm").glob("*/__init__.py")}
    assert rooms == packages


def test_the_readme_is_short():
    """One screen to the first result, one picture, one table of results; the rest stands in docs/, once."""
    assert len(README.splitlines()) <= 120
    assert README.count("![") == 1
    assert README.index("![") < README.index("```python")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target
