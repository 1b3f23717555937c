"""``siamesenorm topologies``: the table of all, and the explanation of one."""

from __future__ import annotations

import json
import re
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from siamesenorm.commands.completion import complete_topology
from siamesenorm.commands.options import Json
from siamesenorm.interrupts import loading

if TYPE_CHECKING:
    from siamesenorm.catalogue import LinkFact, TopologyFacts
    from siamesenorm.residual import InitRule, SublayerNeeds

WIDE = 110
"""Columns from which on an equation of several steps stays on one line."""

DRAWN = re.compile("[─│┌┐└┘├┤┬┴▶▼]")
"""Signs of a drawing, whose lines are never broken, also where the terminal is too narrow for them."""

ATTENTION_NORMS = {
    "none": "nothing inside",
    "qk_head": "a norm per head on Q and K, before RoPE",
    "qk_projection": "a norm over the whole of Q and of K, before RoPE",
    "qkv_head": "a norm per head on Q, K and V, before RoPE",
}


def topologies(
    topology: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME[:OPTION=VALUE,…]",
            help="Explain this one, such as siamese or siamese:form=plain; without it, all are listed.",
            autocompletion=complete_topology,
        ),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Blocks of the stack explained, 12 by default.")
    ] = None,
    dim: Annotated[
        int | None, typer.Option(min=1, max=2**20, help="Width of the stack explained, 768 by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List every residual topology, or explain one with its drawing, numbers and options."""
    if topology is None and (blocks is not None or dim is not None):
        raise typer.BadParameter("--blocks and --dim describe the stack of one topology; give its name")
    with loading():
        from siamesenorm import catalogue

    if topology is None:
        listed = catalogue.catalogue()
        if as_json:
            typer.echo(json.dumps([facts.as_json() for facts in listed], indent=2))
        else:
            show_table(Console(), listed)
        return
    width, found = dim or catalogue.DIM, catalogue.describe(topology, blocks or catalogue.BLOCKS)
    if as_json:
        typer.echo(json.dumps(found.as_json(width), indent=2))
    else:
        show_one(Console(), found, width)


def show_table(console: Console, listed: list[TopologyFacts]) -> None:
    """Every topology, one row each."""
    from siamesenorm.terminal import plain_table

    table = plain_table()
    table.add_column("name", style="bold cyan", no_wrap=True)
    table.add_column("update", overflow="fold", ratio=1)
    table.add_column("streams", overflow="fold", max_width=9 if console.width < WIDE else None)
    table.add_column("parameters", no_wrap=True, justify="right")
    table.add_column("arXiv", no_wrap=True)
    for facts in listed:
        table.add_row(
            facts.name,
            Text(_steps(facts.equation, console)),
            facts.streams,
            str(facts.per_block),
            _paper(facts.arxiv),
        )
    notes = (
        "F: a sublayer (attention, FFN).  N: a norm with its own gain.  l: block, of L.  d: width.\n"
        "parameters: extra, of one middle block (attention and FFN), with RMSNorm and default options.\n"
        "Drawing, numbers and options of one: siamesenorm topologies NAME"
    )
    console.print(table)
    console.print()
    console.print(Text(notes, style="dim"))


def show_one(console: Console, facts: TopologyFacts, dim: int) -> None:
    """One topology: what it is, its drawing, its numbers in a stack of given size, its options."""
    console.print(Text.assemble((facts.spec, "bold cyan"), "  arXiv ", _paper(facts.arxiv)), end="\n\n")
    console.print(Text(facts.about), end="\n\n")
    console.print(Text("\n".join(_fit(facts.drawing, console.width))), no_wrap=True, overflow="ignore", crop=False)
    console.print()
    console.print(_definitions(facts, console, dim))
    for title, part in (("Options", _options(facts)), ("Links", _links(facts))):
        console.print(Group(Text(f"\n{title}", style="bold"), Padding(part, (0, 0, 0, 2))))


def _definitions(facts: TopologyFacts, console: Console, dim: int) -> Table:
    default = "" if facts.spec == facts.name else " (default options)"
    rows = {
        f"update{default}": _steps(facts.equation, console),
        "start": facts.start,
        f"end{default}": facts.end,
        "streams": facts.streams,
        "in a siamese pair": facts.pairing,
        **{f"{kind} needs": _needs(needs) for kind, needs in facts.needs.items()},
        "initial weights": _init(facts.init_rule, facts.blocks),
        "learning rates": _rates(facts.learning_rates),
        "weight decay": _decay(facts.no_weight_decay),
        "extra parameters": f"{facts.per_block} per block, {facts.once} at start and end; "
        f"{facts.total(dim):,} in all at d = {dim}, L = {facts.blocks}",
    }
    return _grid([(Text(name, style="dim"), Text(text)) for name, text in rows.items()])


def _options(facts: TopologyFacts) -> RenderableType:
    if not facts.options:
        return Text("none")
    rows: list[tuple[Text, ...]] = []
    for option in facts.options:
        value = Text(option.value, style="bold" if option.value != option.default else "")
        about = Text.assemble(option.help, (f"\n{option.allowed}", "dim"))
        if option.default not in (None, option.value):
            about.append(f"; default: {option.default}", style="dim")
        rows.append((Text(option.name, style="cyan"), value, about))
    return _grid(rows)


def _links(facts: TopologyFacts) -> RenderableType:
    rows = [
        (
            Text(f"{link.first}" if link.first == link.last else f"{link.first}–{link.last}"),
            Text("\n".join(link.sublayers)),
            Text(link.equation),
            Text(str(link.parameters), justify="right"),
            Text(_factors(link)),
        )
        for link in facts.links
    ]
    heads = tuple(Text(head, style="dim") for head in ("blocks", "sublayer", "update", "parameters", "factor"))
    if not any(row[-1].plain for row in rows):
        return _grid([heads[:-1], *(row[:-1] for row in rows)])
    note = Text("factor: the update's own constant (a, 1/c, 1/sqrt(l+1)) in the first and the last block", style="dim")
    return Group(_grid([heads, *rows]), note)


def _factors(link: LinkFact) -> str:
    if link.factors is None or link.factors == (1, 1):
        return ""
    first, last = (f"{factor:.4g}" for factor in link.factors)
    return first if first == last else f"{first} … {last}"


def _needs(needs: SublayerNeeds) -> str:
    text = ATTENTION_NORMS[needs.attention_norm]
    if not needs.output_norm:
        return text
    output = "a norm before the output projection"
    return output if needs.attention_norm == "none" else f"{text}, and {output}"


def _init(rule: InitRule, blocks: int) -> str:
    if rule.is_neutral:
        return "as the model has them"
    parts = [f"std {rule.std:g} for all"] if rule.std is not None else []
    if rule.scale:
        by_factor: dict[float, list[str]] = {}
        for role, factor in rule.scale.items():
            by_factor.setdefault(factor, []).append(role)
        parts += [f"std × {factor:.4g} for {', '.join(roles)} (L = {blocks})" for factor, roles in by_factor.items()]
    if not rule.keeps_depth_factor:
        parts.append("no other depth factor")
    return "; ".join(parts)


def _rates(factors: dict[str, float]) -> str:
    parts = [f"× {factor:g} for {name}" for name, factor in factors.items()]
    return "; ".join(parts) + " (optimizer.lr_factors=false: × 1)" if parts else "as the optimiser has them"


def _decay(kept: tuple[str, ...]) -> str:
    return f"never of {', '.join(kept)}" if kept else "as the optimiser has it"


def _grid(rows: list[tuple[Text, ...]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for column in range(len(rows[0])):
        grid.add_column(overflow="fold", ratio=1 if column == len(rows[0]) - 1 and column < 3 else None)
    for row in rows:
        grid.add_row(*row)
    return grid


def _steps(equation: str, console: Console) -> str:
    return equation if console.width >= WIDE else equation.replace(";  ", ";\n")


def _paper(arxiv: str) -> Text:
    return Text(arxiv, style="" if arxiv == "–" else f"link https://arxiv.org/abs/{arxiv}")


def _fit(drawing: str, width: int) -> list[str]:
    """The drawing's lines; where one is too wide, its side note moves closer and, if it can, folds."""
    lines: list[str] = []
    folded, at = "", 0
    for line in [*drawing.splitlines(), ""]:
        if folded and (len(line) >= at or not line):  # no room beside the drawing, or no drawing
            lines.append(" " * at + folded)
            folded = ""
        if folded:
            line, folded = f"{line:<{at}}{folded}", ""
        if len(line) >= width:
            line = re.sub(r"(?<=\S) {3,}(?=\w)", "  ", line)
        if len(line) >= width:
            gaps = [gap.end() for gap in re.finditer(r"(?<=\S) {2,}(?=\w)", line)]
            beside = gaps[-1] if gaps and gaps[-1] < width * 0.7 else 0
            if beside or not DRAWN.search(line):
                at = beside or 2
                first, *rest = textwrap.wrap(line[at:], width - at - 1)
                line, folded = line[:at] + first, " ".join(rest)
        lines.append(line)
    return lines[:-1] if not lines[-1] else lines
