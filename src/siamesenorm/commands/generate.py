"""``siamesenorm generate``: text from a trained language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.commands.device import Device, find_device


def generate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|HF_DIR",
            help="Folder of a run, finished or not, or of a model that `siamesenorm export --to hf` wrote.",
            show_default=False,
        ),
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Texts to go on from, together.", show_default=False),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; higher is freer.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many likeliest tokens.", show_default=False)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens of this probability.", show_default=False)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A text that ends an answer and is left out; may be given again.", show_default=False),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="The same seed draws the same text.", show_default=False)
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Texts to make of each prompt.")] = 1,
    device: Device = None,
) -> None:
    """Let a trained language model go on with a text, or with several."""
    from siamesenorm.lab.inspection.source import open_folder
    from siamesenorm.models.lm import Sampling
    from siamesenorm.models.lm.generation import before, ends_with
    from siamesenorm.models.lm.generation import generate as run_generation
    from siamesenorm.train.errors import ConfigError

    try:
        Sampling(temperature, top_k, top_p)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if "" in (stop or []):
        raise ConfigError("stop: an empty text is not allowed; it takes at least one character")
    place = find_device(device)
    found = open_folder(run)
    tokenizer, limit = found.tokenizer, found.model.config.max_length
    texts = [prompt for prompt in prompts or [""] for _ in range(samples)]
    rows = [tokenizer.encode(text) or [tokenizer.eos_id] for text in texts]
    longest = max(map(len, rows))
    if longest >= limit:
        raise ConfigError(
            f"prompt: {longest} tokens are not allowed; with the answer it takes up to model.max_length = {limit}"
        )
    try:
        answers = run_generation(
            found.model.to(place),
            rows,
            max_new_tokens=min(tokens, limit - longest),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_tokens=[tokenizer.eos_id],
            stop_when=ends_with(stop or [], tokenizer.decode),
            seed=seed,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for number, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        if number:
            typer.echo("·" * 8)
        typer.echo(text + before(tokenizer.decode(answer), stop or []))
