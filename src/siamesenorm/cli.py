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

from siamesenorm.commands import data
from siamesenorm.commands.arguments import CommandLine
from siamesenorm.interrupts import EXIT_INTERRUPTED, loading
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
        with loading():
            import torch

            from siamesenorm.residual.kernels import native

        missing = native.absence()
        kernels = f"absent: {missing}; PyTorch's operators do their work" if missing else "compiled"
        typer.echo(f"siamesenorm {__version__}")
        typer.echo(f"torch {torch.__version__}")
        typer.echo(f"kernels {kernels}")
        typer.echo(f"threads {torch.get_num_threads()}")
        typer.echo(f"CPU capability {torch.backends.cpu.get_cpu_capability()}")
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


COMMANDS = (
    *("topologies", "compare", "study", "report", "runs", "inspect", "train", "plan", "branch", "recipes", "models"),
    *("generate", "sample", "predict", "evaluate", "export", "import_model", "graft", "fid"),
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
