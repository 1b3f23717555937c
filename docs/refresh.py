"""Write the parts of README.md and docs/ that come from the code; ``--check`` only says whether they are current."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from siamesenorm.catalogue import TopologyFacts, catalogue

ROOT = Path(__file__).resolve().parent.parent


def table() -> str:
    """Every topology, one row each."""
    rows = ["| name | update | end | streams | extra parameters | arXiv |", "|---|---|---|---|---|---|"]
    for facts in catalogue():
        paper = f"[{facts.arxiv}](https://arxiv.org/abs/{facts.arxiv})"
        cells = (f"`{facts.name}`", _code(facts.equation), _code(facts.end), facts.streams, str(facts.per_block), paper)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def sections() -> str:
    """Every topology with its drawing and options."""
    return "\n\n".join(_section(facts) for facts in catalogue())


def _section(facts: TopologyFacts) -> str:
    needs = [f"{kind}: `{n.attention_norm}`" for kind, n in facts.needs.items() if n.attention_norm != "none"]
    needs += ["a norm before each output projection"] if any(n.output_norm for n in facts.needs.values()) else []
    lines = [
        f"### `{facts.name}`",
        facts.about,
        f"```text\n{facts.drawing}\n```",
        f"Start: {facts.start}. In a siamese pair: {facts.pairing}.",
    ]
    if needs:
        lines.append(f"Norms inside sublayers (`needs`): {'; '.join(needs)}.")
    if facts.options:
        rows = ["| option | default | takes | meaning |", "|---|---|---|---|"]
        rows += [f"| `{o.name}` | `{o.default or 'default'}` | {o.allowed} | {o.help} |" for o in facts.options]
        lines.append("\n".join(rows))
    return "\n\n".join(lines)


def _code(text: str) -> str:
    formula, note = re.fullmatch(r"(.*?)(  \(.*\))?", text).groups()  # type: ignore[union-attr]
    return (formula if formula == "–" else f"`{re.sub(' +', ' ', formula)}`") + (note or "").replace("  ", " ")


PARTS = {"README.md": {"topologies": table}, "docs/topologies.md": {"sections": sections}}


def refreshed(page: str) -> str:
    """A page's text with its generated parts written anew."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, make in PARTS[page].items():
        part = re.search(rf"<!-- {name}: [^\n]*-->\n(.*?)<!-- end -->", text, re.DOTALL)
        if part is None:
            raise SystemExit(f"{page} has no part {name!r}")
        text = f"{text[: part.start(1)]}{make()}\n{text[part.end(1) :]}"
    return text


def main() -> int:
    """Write or check all pages; 1 if a check finds an old one."""
    old = [page for page in PARTS if refreshed(page) != (ROOT / page).read_text(encoding="utf-8")]
    for page in old:
        if "--check" in sys.argv[1:]:
            print(f"{page} is out of date; run: make docs")
        else:
            (ROOT / page).write_text(refreshed(page), encoding="utf-8")
            print(f"wrote {page}")
    return int(bool(old) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
