"""What the site has beyond docs/: linked files of the repository, notebooks as pages, and links that fit both places.

A page links as GitHub wants it, relative to itself. In the site the repository's other files lie under repository/.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = "repository"
"""Where files that do not lie in docs/ are in the site."""
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/, every file that a page links to, and the notebooks' pages."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            text = notebook_page(json.loads(file.content_string), PurePosixPath(file.src_uri).name)
            files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=text))
    for path in PAGES:
        files.append(outside(path, config))
    for page in files.documentation_pages():
        for path in sorted(linked(page.content_string, in_repository(page.src_uri))):
            if not path.startswith("docs/") and (ROOT / path).is_file() and f"{OUTSIDE}/{path}" not in files.src_uris:
                files.append(outside(path, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page's text with links to where things lie in the site."""
    here = in_repository(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        uri = in_site(resolved(link[1], here))
        return os.path.relpath(uri, PurePosixPath(page.file.src_uri).parent) if uri in files.src_uris else link[1]

    return "".join(part if FENCE.fullmatch(part) else LINK.sub(moved, part) for part in FENCE.split(markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Bars in a table's code, which GitHub wants escaped, are bars; a docstring's double colon is no text."""
    html = re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace(r"\|", "|"), html)
    if not page.file.src_uri.startswith("api/"):
        return html
    return re.sub(r"<p>::</p>\n?", "", html).replace("::</p>", ":</p>")


def outside(path: str, config: MkDocsConfig) -> File:
    """A file of the repository as a file of the site."""
    return File.generated(config, f"{OUTSIDE}/{path}", abs_src_path=str(ROOT / path))


def in_repository(uri: str) -> str:
    """Where a page of the site lies in the repository."""
    return uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(f"{OUTSIDE}/") else f"docs/{uri}"


def in_site(path: str) -> str:
    """Where a file of the repository lies in the site; of a notebook, its page."""
    uri = path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"
    return re.sub(r"\.ipynb$", ".md", uri)


def resolved(target: str, page: str) -> str:
    """A link's target as a path from the repository's root."""
    return os.path.normpath(PurePosixPath(page).parent / target)


def linked(text: str, page: str) -> set[str]:
    """What a page links to, as paths from the repository's root."""
    return {resolved(target, page) for target in LINK.findall(FENCE.sub("", text))}


def notebook_page(notebook: dict[str, Any], name: str) -> str:
    """A notebook's cells as Markdown, and the notebook itself to download."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join([*parts, f'<p><a href="{name}" download>Download this notebook</a></p>']) + "\n"
