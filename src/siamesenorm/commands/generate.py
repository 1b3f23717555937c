"""``siamesenorm generate``: text from a trained language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to go on from.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; higher is freer.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many likeliest tokens.", show_default=False)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens of this probability.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same text.", show_default=False)] = None,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Texts to make.")] = 1,
) -> None:
    """Let a trained language model go on with a text."""
    from siamesenorm.models.generation import Sampling
    from siamesenorm.models.generation import generate as run_generation
    from siamesenorm.train.errors import ConfigError
    from siamesenorm.train.trained import open_language_model

    try:
        Sampling(temperature, top_k, top_p)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    trained = open_language_model(run)
    ids = trained.tokenizer.encode(prompt) or [trained.tokenizer.eos_id]
    room = trained.model.config.max_length - len(ids)
    if room < 1:
        raise ConfigError(
            f"prompt: {len(ids)} tokens are not allowed; with the answer it takes up to model.max_length = "
            f"{trained.model.config.max_length}"
        )
    answers = run_generation(
        trained.model,
        [ids] * samples,
        max_new_tokens=min(tokens, room),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_tokens=[trained.tokenizer.eos_id],
        seed=seed,
    )
    for number, answer in enumerate(answers):
        if number:
            typer.echo("·" * 8)
        typer.echo(prompt + trained.tokenizer.decode(answer))
