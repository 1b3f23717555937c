"""The ``siamesenorm`` command. Commands import what they need when they run, so that help and errors come at once."""

from __future__ import annotations

import codecs
import difflib
import functools
import io
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.console import Console

from siamesenorm.loading import EXIT_INTERRUPTED, loading
from siamesenorm.version import __version__

EXIT_BAD_INPUT = 2

LOOKALIKES = {**dict(zip("─│┌┐└┘├┤┬┴┼╭╮╰╯▶▼▲◀·÷×–−", "-|+++++++++++++>v^<*/x--", strict=True)), "…": "..."}
"""For drawings and help on an output that cannot take them."""

app = typer.Typer(
    name="siamesenorm",
    help="How sublayer outputs flow back into a Transformer's residual stream.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _complete_topology(incomplete: str) -> list[tuple[str, str]]:
    from siamesenorm.residual import TOPOLOGIES

    return [(name, found.equation) for name, found in TOPOLOGIES.items() if name.startswith(incomplete)]


@app.command()
def topologies(
    topology: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME[:OPTION=VALUE,…]",
            help="Explain this one, such as siamese or siamese:form=plain; without it, all are listed.",
            autocompletion=_complete_topology,
            show_default=False,
        ),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Blocks of the stack explained, 12 by default.")
    ] = None,
    dim: Annotated[
        int | None, typer.Option(min=1, max=2**20, help="Width of the stack explained, 768 by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List every residual topology, or explain one with its drawing, numbers and options."""
    if topology is None and (blocks is not None or dim is not None):
        raise typer.BadParameter("--blocks and --dim describe the stack of one topology; give its name")
    with loading():
        from siamesenorm import catalogue
        from siamesenorm.commands import topologies as command

    size = (dim or catalogue.DIM, blocks or catalogue.BLOCKS)
    if as_json:
        typer.echo(command.table_json() if topology is None else command.one_json(topology, *size))
    elif topology is None:
        command.show_table(Console())
    else:
        command.show_one(Console(), topology, *size)


def _register() -> None:
    """Commands of files that import nothing heavy themselves."""
    from siamesenorm.commands import (
        compare,
        data,
        evaluate,
        export,
        fid,
        generate,
        inspect,
        models,
        predict,
        recipes,
        report,
        sample,
        train,
    )

    app.command()(compare.compare)
    app.command()(report.report)
    app.command()(inspect.inspect)
    app.command()(train.train)
    app.command()(recipes.recipes)
    app.command()(models.models)
    app.command()(generate.generate)
    app.command()(sample.sample)
    app.command()(predict.predict)
    app.command()(evaluate.evaluate)
    app.command()(export.export)
    app.command()(fid.fid)
    app.add_typer(data.app)


_register()


@functools.cache
def _command() -> Callable[..., object]:
    """The tree of all commands, made once a process."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: bad input is one sentence on stderr and 2, never a trace."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper) and output.errors == "strict":
            output.reconfigure(errors="lookalikes")
    try:
        _command()(args=None if arguments is None else list(arguments), prog_name="siamesenorm")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ValueError as error:
        if not _is_bad_input(error):
            raise
        print(f"siamesenorm: {with_suggestion(str(error))}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


def _is_bad_input(error: ValueError) -> bool:
    """Whether it is one of the library's own errors, whose message is a sentence for people."""
    from siamesenorm.data.errors import DataError
    from siamesenorm.interop.errors import InteropError
    from siamesenorm.residual.errors import TopologyError
    from siamesenorm.train.errors import ConfigError

    return isinstance(error, (ConfigError, DataError, InteropError, TopologyError))


def _lookalikes(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(LOOKALIKES.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


codecs.register_error("lookalikes", _lookalikes)


def with_suggestion(message: str) -> str:
    """An error's sentence, with the nearest allowed word where the refused one looks like a slip of the finger."""
    found = re.search(r"'([^']+)'.*; .*?(?:names: |kinds: |options are |takes one of |takes )(.+)$", message)
    near = difflib.get_close_matches(found[1].lower(), found[2].split(", "), n=1) if found else []
    return f"{message}; did you mean {near[0]}?" if near else message
