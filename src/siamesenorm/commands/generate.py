"""``siamesenorm generate``: text from a trained language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.commands.device import Device, Precision, computing


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
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="Texts that are made together.")] = 64,
    device: Device = None,
    precision: Precision = "fp32",
) -> None:
    """Let a trained language model go on with a text, or with several; under torchrun processes share them."""
    from siamesenorm.errors import ConfigError
    from siamesenorm.lab.inspection.source import open_folder
    from siamesenorm.models.lm import Sampling
    from siamesenorm.models.lm.generation import before, ends_with
    from siamesenorm.models.lm.generation import generate as run_generation
    from siamesenorm.tasks.sharing import mixed_seed

    try:
        Sampling(temperature, top_k, top_p)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if "" in (stop or []):
        raise ConfigError("stop: an empty text is not allowed; it takes at least one character")
    with computing(device, precision) as place:
        found = open_folder(run)
        tokenizer, limit, model = found.tokenizer, found.model.config.max_length, place.ready(found.model)
        texts = [prompt for prompt in prompts or [""] for _ in range(samples)]
        rows = [tokenizer.encode(text) or [tokenizer.eos_id] for text in texts]
        longest = max(map(len, rows))
        if longest >= limit:
            raise ConfigError(
                f"prompt: {longest} tokens are not allowed; with the answer it takes up to model.max_length = {limit}"
            )

        def answers_from(first: int) -> list[str]:
            """What follows some of the prompts; a text is drawn by its own number, not by its neighbours."""
            part = rows[first : first + batch_size]
            try:
                answers = run_generation(
                    model,
                    part,
                    max_new_tokens=min(tokens, limit - longest),
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    stop_tokens=[tokenizer.eos_id],
                    stop_when=ends_with(stop or [], tokenizer.decode),
                    seed=None if seed is None else [mixed_seed(seed, first + row) for row in range(len(part))],
                )
            except ValueError as error:
                raise ConfigError(str(error)) from None
            return [before(tokenizer.decode(answer), stop or []) for answer in answers]

        made = [answer for part in place.each(range(0, len(rows), batch_size), answers_from) for answer in part]
        for number, (text, answer) in enumerate(zip(texts, made, strict=True)):
            if number:
                typer.echo("·" * 8)
            typer.echo(text + answer)
