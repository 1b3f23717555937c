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
    assert len(blocks(README, "python")) >= 2
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
    part = README.split("<!-- topologies:")[1].split("<!-- end -->")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", part, re.MULTILINE)
    assert [name for name, _ in rows] == list(TOPOLOGIES)
    for name, rest in rows:
        assert TOPOLOGIES[name].arxiv in rest


def mapped_files() -> list[str]:
    """Paths in the README's map, from its indentation."""
    (text,) = [block for block in blocks(README, "text") if block.startswith("src/")]
    folders: list[str] = []
    paths = []
    for line in text.splitlines():
        depth, entry = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders = folders[:depth]
        paths.append("".join(folders) + entry)
        if entry.endswith("/"):
            folders.append(entry)
    return paths


def test_every_file_of_the_map_exists():
    for path in mapped_files():
        assert (ROOT / path).exists(), path


def test_every_folder_is_in_the_map():
    packages = {f"{path.relative_to(ROOT)}/" for path in (ROOT / "src/siamesenorm").iterdir() if path.is_dir()}
    assert {path for path in packages if "__pycache__" not in path} <= set(mapped_files())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target
