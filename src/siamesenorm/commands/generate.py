"""``siamesenorm generate``: text from a trained language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.commands.options import Device, Precision, computing


def generate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|HF_DIR",
            help="Folder of a run, finished or not, or of a model that `siamesenorm export --to hf` wrote.",
        ),
    ],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to go on from, together.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; higher is freer.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this probability.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends an answer and is left out; may be given again.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="The same seed draws the same text.")] = None,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Texts to make of each prompt.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="Texts that are made together.")] = 64,
    device: Device = None,
    precision: Precision = "fp32",
) -> None:
    """Let a trained language model go on with a text, or with several; under torchrun processes share them."""
    from siamesenorm.lab.generation import continue_texts
    from siamesenorm.models.lm import Sampling

    sampling = Sampling(temperature, top_k, top_p)
    texts = [prompt for prompt in prompts or [""] for _ in range(samples)]
    with computing(device, precision) as place:
        answers = continue_texts(
            run, texts, place, tokens=tokens, sampling=sampling, stops=stop or [], seed=seed, batch_size=batch_size
        )
        for number, (text, answer) in enumerate(zip(texts, answers, strict=True)):
            if number:
                typer.echo("·" * 8)
            typer.echo(text + answer)
