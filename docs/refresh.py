"""Write the parts of docs/ that come from the code; ``--check`` only says whether they are current."""

from __future__ import annotations

import ast
import json
import re
import statistics
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

from siamesenorm.catalogue import TopologyFacts, catalogue

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import grafts  # noqa: E402
import tables  # noqa: E402


def table() -> str:
    """Every topology, one row each."""
    rows = ["| name | update | end | streams | extra parameters | arXiv |", "|---|---|---|---|---|---|"]
    for facts in catalogue():
        paper = "–" if facts.arxiv == "–" else f"[{facts.arxiv}](https://arxiv.org/abs/{facts.arxiv})"
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


def signal() -> str:
    """Signal propagation in the deepest stack measured, as ranges over its sublayers."""
    data = json.loads((ROOT / "docs/pictures/signal_propagation.json").read_text(encoding="utf-8"))
    depth = max(data["topologies"]["siamese"], key=int)
    rows = [
        f"| {depth} sublayers, {data['seeds']} seeds | variance of the stream(s) | gradient norm |",
        "|---|---|---|",
    ]
    for name in ("siamese", "pre", "post", "hybrid", "span", "hyper"):
        curves = data["topologies"][name][depth]
        lines = {line.split()[1]: values for line, values in curves.items() if line.startswith("variance ")}
        variance = ", ".join((f"{stream}: " if len(lines) > 1 else "") + _range(v) for stream, v in lines.items())
        rows.append(f"| `{name}` | {variance} | {_range(curves['gradient'])} |")
    return "\n".join(rows)


def _range(values: list[float]) -> str:
    return f"{min(values):.2g} to {max(values):.3g}"


FOLDERS = ("src/siamesenorm", "benchmarks", "scripts", "docs")


def source_map() -> str:
    """Every Python and C file with the first sentence of its docstring."""
    lines = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")) + sorted((ROOT / folder).rglob("*.c")):
            if path.name not in ("__init__.py", "__main__.py", "version.py"):
                lines.append((path.relative_to(ROOT), _first_sentence(path)))
    parents = dict.fromkeys(path.parent for path, _ in lines)
    return "\n\n".join(
        f"### {parent}/\n\n" + "\n".join(f"- `{path.name}`: {text}" for path, text in lines if path.parent == parent)
        for parent in parents
    )


def _first_sentence(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    about = (
        ast.get_docstring(ast.parse(text)) if path.suffix == ".py" else text.removeprefix("/*").replace("\n *", "\n")
    )
    return re.split(r"(?<=\.)\s|:?\n\s*\n", " ".join((about or "").split("\n\n")[0].split()))[0]


def served() -> str:
    """What vLLM answered, model by model: the largest difference of a log-probability, or why there is none."""
    results = json.loads((ROOT / "benchmarks/results/vllm.json").read_text(encoding="utf-8"))["results"]
    parts = [part for part in SERVED if any(part in found for found in results.values())]
    rows = [f"| model | {' | '.join(SERVED[part] for part in parts)} |", "|---|" + "---|" * len(parts)]
    for name, found in results.items():
        rows.append(f"| `{name}` | {' | '.join(_answered(found.get(part)) for part in parts)} |")
    return "\n".join(rows)


def study() -> str:
    """The language study, arm by arm, the best first: differences from ``pre`` in every part that is complete."""
    results = json.loads((ROOT / "docs/evidence/language/results.json").read_text(encoding="utf-8"))
    parts = [part for part in results["parts"] if part["done"] == part["of"] and len(part["arms"]) > 1]
    names = [part["part"]["name"] for part in parts]
    rows = [
        f"| topology | {' | '.join(names)} | lost at 4 × its best rate | time |",
        "|---|" + "---|" * (len(parts) + 2),
    ]
    for arm in sorted(parts[0]["arms"], key=_mean):
        found = [next((one for one in part["arms"] if one["arm"] == arm["arm"]), None) for part in parts]
        stress = next(stressed for stressed in arm["stress"] if stressed["factor"] == 4)
        cells = [_difference(one) if one else "–" for one in found]
        cells += [f"{stress['lost']} of {stress['runs']}", f"{arm['step_ratio']:.2f}×"]
        rows.append(f"| `{arm['topology']}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def _mean(arm: dict[str, Any]) -> float:
    """Of the fresh seeds."""
    return statistics.mean(arm["place"]["scores"].values())


def _difference(arm: dict[str, Any]) -> str:
    """From the baseline with its interval, bold where Holm's test tells it apart; of the baseline its loss."""
    comparison = arm["comparison"]
    if comparison is None:
        return f"{_mean(arm):.3f}"
    found = comparison["difference"]
    text = f"{found['mean']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})"
    return f"**{text}**" if comparison["corrected_p"] < 1 - comparison["confidence"] else text


SERVED = {
    "native": "plugin",
    "transformers": "Transformers backend",
    "tensor": "plugin, TP = 2",
    "pipeline": "plugin, PP = 2",
    "compiled": "plugin, compiled",
    "compiled pipeline": "plugin, PP = 2, compiled",
    "server": "plugin, server and `openai`",
}


def _answered(result: dict[str, object] | None) -> str:
    if result is None:
        return "not run"
    if "largest_difference" not in result:
        return "fails"
    return f"{result['largest_difference']:.0e}" if result["passed"] else "other tokens"


PARTS = {
    "README.md": {"study": study},
    "docs/concepts.md": {"signal": signal},
    "docs/costs.md": {name: partial(make, "../") for name, make in tables.PARTS.items()},
    "docs/plan.md": {"plan": partial(tables.plan, "../")},
    "docs/grafts.md": {"grafts": grafts.table_of_results},
    "docs/serving.md": {"served": served},
    "docs/topologies.md": {"topologies": table, "sections": sections},
    "docs/map.md": {"map": source_map},
}


COMPLETION = "src/siamesenorm/commands/completion.json"


def completion() -> str:
    """What shells complete, a line a word."""
    from siamesenorm.interop.pretrained.architectures import ARCHITECTURES
    from siamesenorm.lab.exporting import FORMATS
    from siamesenorm.models.families import FAMILIES
    from siamesenorm.tasks import TASKS
    from siamesenorm.train.fields import fields_of, values_of
    from siamesenorm.train.recipes import config_class, load_recipe, recipe_names

    def brief(text: str) -> str:
        return textwrap.shorten(text, 70, placeholder=" …")  # typer breaks what is wider than a terminal

    def choices(allowed: str) -> list[str]:
        words = allowed.removesuffix(", or default").removeprefix("one of ").replace(" or ", ", ").split(", ")
        return words if allowed.startswith(("one of ", "true or ")) else []

    recipes = {name: load_recipe(name) for name in recipe_names()}
    found = {
        "topologies": {
            facts.name: {
                "equation": brief(facts.equation),
                "options": {o.name: {"about": brief(o.help), "values": choices(o.allowed)} for o in facts.options},
            }
            for facts in catalogue()
        },
        "recipes": {
            name: {"task": values["task"], "about": brief(values["about"])} for name, values in recipes.items()
        },
        "models": {
            name: brief(preset.about) for family in FAMILIES.values() for name, preset in family.presets.items()
        },
        "exports": {**dict.fromkeys(FORMATS, ""), **dict.fromkeys(ARCHITECTURES, "an architecture of transformers")},
        "fields": {
            task: {
                field.path: {"about": brief(field.info.description or ""), "values": values_of(field)}
                for field in fields_of(config_class(task))
                if field.section is None
            }
            for task in TASKS
        },
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def refreshed(page: str) -> str:
    """A page's text with its generated parts written anew."""
    if page == COMPLETION:
        return completion()
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, make in PARTS[page].items():
        part = re.search(rf"<!-- {name}: [^\n]*-->\n(.*?)<!-- end -->", text, re.DOTALL)
        if part is None:
            raise SystemExit(f"{page} has no part {name!r}")
        text = f"{text[: part.start(1)]}{make()}\n{text[part.end(1) :]}"
    return text


def main() -> int:
    """Write or check all pages; 1 if a check finds an old one."""
    pages = {page: refreshed(page) for page in (*PARTS, COMPLETION)}
    old = [
        page for page, text in pages.items() if not (ROOT / page).exists() or text != (ROOT / page).read_text("utf-8")
    ]
    for page in old:
        if "--check" in sys.argv[1:]:
            print(f"{page} is out of date; run: make docs")
        else:
            (ROOT / page).write_text(pages[page], encoding="utf-8")
            print(f"wrote {page}")
    return int(bool(old) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
