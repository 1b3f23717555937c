"""The ``siamesenorm`` command. Commands import what they need when they run, so that help and errors come at once."""

from __future__ import annotations

import codecs
import functools
import importlib
import io
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.console import Console

from siamesenorm.commands import data
from siamesenorm.commands.arguments import CommandLine
from siamesenorm.commands.completion import complete_topology
from siamesenorm.commands.options import Json
from siamesenorm.loading import EXIT_INTERRUPTED, loading
from siamesenorm.refusal import say
from siamesenorm.version import __version__

NAME = "siamesenorm"

LOOKALIKES = {**dict(zip("─│┌┐└┘├┤┬┴┼╭╮╰╯▶▼▲◀·÷×–−", "-|+++++++++++++>v^<*/x--", strict=True)), "…": "..."}
"""For drawings and help on an output that cannot take them."""

app = CommandLine(
    name=NAME,
    help="How sublayer outputs flow back into a Transformer's residual stream.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from siamesenorm.commands.version import surroundings

        typer.echo(f"siamesenorm {__version__}")
        for line in surroundings():
            typer.echo(line)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version, and what it runs on."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def topologies(
    topology: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME[:OPTION=VALUE,…]",
            help="Explain this one, such as siamese or siamese:form=plain; without it, all are listed.",
            autocompletion=complete_topology,
            show_default=False,
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
        from siamesenorm.commands import topologies as command

    size = (dim or catalogue.DIM, blocks or catalogue.BLOCKS)
    if as_json:
        typer.echo(command.table_json() if topology is None else command.one_json(topology, *size))
    elif topology is None:
        command.show_table(Console())
    else:
        command.show_one(Console(), topology, *size)


COMMANDS = (
    *("compare", "study", "report", "runs", "inspect", "train", "plan", "branch", "recipes", "models", "generate"),
    *("sample", "predict", "evaluate", "export", "import_model", "graft", "fid"),
)
"""Files of `siamesenorm.commands` that hold a command of their name, in the order of the help; they import little."""

for _name in COMMANDS:
    _file = importlib.import_module(f"siamesenorm.commands.{_name}")
    app.command(_name.removesuffix("_model"))(getattr(_file, _name))
app.add_typer(data.app)


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
        code = _command()(args=None if arguments is None else list(arguments), prog_name=NAME, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as done:  # completion for the shell, a closed pipe
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        refused = say(error)
        if refused is None:
            raise
        return refused


def _lookalikes(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(LOOKALIKES.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


codecs.register_error("lookalikes", _lookalikes)
