"""``siamesenorm graft``: a trained Pre-Norm model in another topology, the same function, with a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

CERTIFICATE = "graft.json"
ROW = 256


def graft(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="Hugging Face folder, imported folder, or run, of a Pre-Norm model.", show_default=False
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to be made.", show_default=False)],
    to: Annotated[str, typer.Option(metavar="TOPOLOGY", help="Name, or name:option=value,…", show_default=False)],
    text: Annotated[
        Path | None,
        typer.Option(help="Text of the certificate; default: an embedded one, or random tokens without a tokenizer."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of the text, so many at most.", min=2)] = 2048,
    bound: Annotated[float, typer.Option(help="Largest KL in fp32, in nats; above it nothing is written.")] = 1e-6,
    force: Annotated[bool, typer.Option("--force", help="Write all the same.")] = False,
    remote_code: Annotated[
        bool, typer.Option(help="Put the code beside it that transformers loads without this package.")
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier graft, import or export, and nothing else.")
    ] = False,
) -> None:
    """Put a trained Pre-Norm model into another topology without changing what it computes.

    The new streams and gates are set so that nothing changes and gradients reach them. It ends with a certificate:
    largest and mean KL, top-1 agreement and perplexity before and after, in fp32 and bf16, also as graft.json.
    """
    import json

    from siamesenorm.interop.huggingface import export
    from siamesenorm.interop.pretrained.convert import their_generation, their_tokenizer
    from siamesenorm.interop.staging import check_target
    from siamesenorm.language_folder import is_model_folder, model_of
    from siamesenorm.models.lm.grafting import certify
    from siamesenorm.models.lm.grafting import graft as grafted_from
    from siamesenorm.train.errors import ConfigError
    from siamesenorm.train.trained import open_language_model

    if not bound >= 0:
        raise ConfigError(f"--bound: {bound} is not allowed; it takes a number from 0")
    check_target(target, overwrite)
    if is_model_folder(source):
        model, tokenizer, generation = model_of(source, "source"), their_tokenizer(source), their_generation(source)
    else:
        trained = open_language_model(source)
        model, tokenizer, generation = trained.model, trained.tokenizer, None
    after = grafted_from(model, to)
    ids, of = certificate_tokens(model, tokenizer, text, tokens)
    certificate = {"source": str(source), "topology": to, "text": of, "bound": bound, **certify(model, after, ids)}
    for line in in_words(certificate):
        typer.echo(line)
    if not certificate["fp32"]["largest_kl"] <= bound and not force:
        raise ConfigError(
            f"--bound: the largest KL {certificate['fp32']['largest_kl']:.3g} is above {bound:g}; nothing is written "
            "without --force"
        )
    beside = {CERTIFICATE: json.dumps(certificate, indent=2) + "\n"}
    options: dict[str, Any] = {"remote_code": remote_code, "overwrite": overwrite, "generation": generation}
    export(after, target, tokenizer=tokenizer, beside=beside, **options)
    typer.echo(str(target))


def certificate_tokens(model: Any, tokenizer: Any, text: Path | None, tokens: int) -> tuple[Any, str]:
    """Rows of tokens to certify on, and what they are."""
    import torch

    from siamesenorm.data.reading import read_text
    from siamesenorm.data.sources import embedded_documents
    from siamesenorm.train.errors import ConfigError

    width = min(ROW, model.config.max_length, tokens)
    if tokenizer is None:
        if text is not None:
            raise ConfigError("--text: the source has no tokenizer to read it with; without --text tokens are random")
        drawn = torch.randint(model.config.vocab_size, (-(-tokens // width), width), generator=seeded())
        return drawn, "random tokens"
    words = "\n".join(embedded_documents("python-docs", "validation")) if text is None else read_text(text, "--text")
    ids = torch.tensor(list(tokenizer.encode(words[: 16 * tokens]))[:tokens])
    rows = ids[: len(ids) // width * width].view(-1, width)
    if not len(rows):
        raise ConfigError(f"--text: {len(ids)} tokens are too few; it takes {width} at least")
    return rows, "python-docs" if text is None else str(text)


def seeded() -> Any:
    """Random numbers that are the same every time."""
    import torch

    return torch.Generator().manual_seed(0)


def in_words(certificate: dict[str, Any]) -> list[str]:
    """The certificate, a line a precision."""
    return [
        f"{precision}: KL {found['largest_kl']:.2e} at most, {found['mean_kl']:.2e} in the mean; top-1 agreement "
        f"{100 * found['top1_agreement']:.2f} %; perplexity {found['perplexity_before']:.6g} before, "
        f"{found['perplexity_after']:.6g} after; {found['tokens']:,} tokens of {certificate['text']}"
        for precision, found in ((name, certificate[name]) for name in ("fp32", "bf16"))
    ]
