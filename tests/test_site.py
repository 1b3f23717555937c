"""The documentation site: it builds without a warning, its links lead somewhere, it fetches nothing from elsewhere."""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import siamesenorm
import siamesenorm.residual

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: path.read_text(encoding="utf-8") for path in out.rglob("*.html") if path.name != "404.html"}


def test_links_of_built_pages_lead_somewhere(site):
    """Also those to headings, of whatever mkdocs does not look at itself: HTML, docstrings, navigation."""
    names = {path: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for path, text in site.items()}
    lost = []
    for path, text in site.items():
        for link in re.findall(r'\b(?:href|src)="([^"]+)"', text):
            parts = urlsplit(unescape(link))
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = target.exists() and (not parts.fragment or unquote(parts.fragment) in names.get(target, {"__skip"}))
            if not there and parts.fragment != "__skip":
                lost.append(f"{path.name}: {link}")
    assert lost == []


def test_nothing_is_fetched_from_elsewhere(site):
    for path, text in site.items():
        fetched = re.findall(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(https?:)?//', text)
        fetched += re.findall(r'<link\b[^>]*\bhref="(?:https?:)?//[^"]*"', text)
        assert fetched == [], path.name


def test_every_public_name_is_in_the_reference(site):
    names = {name for text in site.values() for name in re.findall(r'id="(siamesenorm[\w.]*)"', text)}
    homes = {"train": "train.session.train_recipe"}  # the package, which can be called
    wanted = {f"siamesenorm.{homes.get(name, name)}" for name in siamesenorm.__all__ if not name.startswith("_")}
    elsewhere = {name for name in siamesenorm.residual.__all__ if name in siamesenorm.__all__}
    wanted |= {f"siamesenorm.residual.{name}" for name in siamesenorm.residual.__all__ if name not in elsewhere}
    assert wanted - names == set()


def test_bars_that_github_wants_escaped_are_bars(site):
    assert [path.name for path, text in site.items() if re.search(r"<code>[^<]*\\\|[^<]*</code>", text)] == []
