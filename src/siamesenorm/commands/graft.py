"""``siamesenorm graft``: a trained Pre-Norm model in another topology, the same function, with a certificate."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from siamesenorm.commands.completion import complete_topology

CERTIFICATE = "graft.json"
ROW = 256


def graft(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="Hugging Face folder, imported folder, GGUF file, or run, of a Pre-Norm model.",
            show_default=False,
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to be made.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(
            metavar="TOPOLOGY",
            help="Name, or name:option=value,…",
            autocompletion=complete_topology,
            show_default=False,
        ),
    ],
    at: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**9,
            help="A step that the run has a checkpoint of: DST goes on from there.",
            show_default=False,
        ),
    ] = None,
    ramp: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**9,
            help="For topologies that cannot compute the same: steps of training over which they come in, from the "
            "source's function on.",
            show_default=False,
        ),
    ] = None,
    qk_norm: Annotated[
        str | None,
        typer.Option(
            help="A norm on queries and keys that the source has not: head or projection.", show_default=False
        ),
    ] = None,
    regress: Annotated[
        int,
        typer.Option(min=0, max=10**6, help="Steps of gradient on a block's new parameters, where they are not exact."),
    ] = 10,
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
    DST is a Hugging Face folder; of a run that is not finished, or with --at, a run that `siamesenorm train` goes on
    with: step, schedule, data and moments are kept. Where no setting computes the same, gains are calibrated and
    regressed on the text, with the KL behind every stage; --ramp then begins with the source's function all the same.
    """
    import json

    from siamesenorm.models.lm.grafting import certify
    from siamesenorm.models.lm.transplant import transplant
    from siamesenorm.train.errors import ConfigError

    if not bound >= 0:
        raise ConfigError(f"--bound: {bound} is not allowed; it takes a number from 0")
    if qk_norm not in (None, "head", "projection"):
        raise ConfigError(f"--qk-norm: {qk_norm!r} is not allowed; it takes head or projection")
    opened = open_source(source, at)
    live = opened.live
    check_place(opened, target, overwrite)
    ids, of = certificate_tokens(opened.model, opened.tokenizer, text, tokens)
    options: dict[str, Any] = {"ramp": ramp, "qk_norm": qk_norm, "regression": regress}
    made = transplant(opened.model, to, ids, start=0 if live is None else live.step, **options)
    certificate: dict[str, Any] = {
        "source": str(source),
        "topology": made.model.config.topology,
        "text": of,
        "bound": bound,
    }
    certificate |= {} if live is None else {"step": live.step}
    if made.stages:
        certificate |= {"stages": {name: asdict(stage) for name, stage in made.stages.items()}, "kept": made.kept}
    certificate |= certify(opened.model, made.model, ids)
    for line in in_words(certificate):
        typer.echo(line)
    if not certificate["fp32"]["largest_kl"] <= bound and not force:
        blending = "; --ramp STEPS begins with the source's function" if made.stages and ramp is None else ""
        raise ConfigError(
            f"--bound: the largest KL {certificate['fp32']['largest_kl']:.3g} is above {bound:g}; nothing is written "
            f"without --force{blending}"
        )
    beside = {CERTIFICATE: json.dumps(certificate, indent=2) + "\n"}
    if live is not None:
        averaged = made.again(live.averaged_model()) if live.averaged else None
        live.go_on_as(made.model, made.carried, target, averaged=averaged, beside=beside)
        typer.echo(f"{target}: stands at step {live.step}; siamesenorm train {target} goes on")
        return
    from siamesenorm.interop.huggingface import export

    options = {"remote_code": remote_code, "overwrite": overwrite, "generation": opened.generation}
    export(made.model, target, tokenizer=opened.tokenizer, beside=beside, **options)
    typer.echo(str(target))


@dataclass(frozen=True)
class Source:
    """What is to be grafted."""

    folder: Path
    model: Any
    tokenizer: Any
    generation: Any = None
    live: Any = None
    """The run that is to go on, where it is one."""


def open_source(folder: Path, at: int | None) -> Source:
    """The model of a folder or GGUF file, and whether it is that of a run which goes on."""
    from siamesenorm.language_folder import is_model, model_of
    from siamesenorm.train.errors import ConfigError
    from siamesenorm.train.folder import RunFolder
    from siamesenorm.train.live_graft import open_live
    from siamesenorm.train.trained import open_language_model, run_tokenizer

    if is_model(folder):
        from siamesenorm.interop.pretrained.convert import their_generation, their_tokenizer

        if at is not None:
            raise ConfigError(f"--at: {at} is not allowed; {str(folder)!r} is a model and no run")
        return Source(folder, model_of(folder, "source"), their_tokenizer(folder), their_generation(folder))
    run = RunFolder(folder)
    if run.exists and (at is not None or run.status().get("state") != "finished"):
        live = open_live(folder, at)
        return Source(folder, live.model, run_tokenizer(folder, live.config), live=live)
    trained = open_language_model(folder)
    return Source(folder, trained.model, trained.tokenizer)


def check_place(source: Source, target: Path, overwrite: bool) -> None:
    """Raise where DST cannot be written, before there is work that would be lost."""
    from siamesenorm.interop.staging import check_target
    from siamesenorm.train.errors import ConfigError

    if target.resolve().is_relative_to(source.folder.resolve()):
        raise ConfigError(f"target: {str(target)!r} is not allowed; it lies in the source, which stays as it is")
    if source.live is None:
        check_target(target, overwrite)
    elif os.path.lexists(target):
        raise ConfigError(f"target: {str(target)!r} is there already; a run takes a new folder")


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
    if len(ids) < 2:
        raise ConfigError(f"--text: {len(ids)} tokens are too few; it takes 2 at least")
    width = min(width, len(ids))
    rows = ids[: len(ids) // width * width].view(-1, width)
    return rows, "python-docs" if text is None else str(text)


def seeded() -> Any:
    """Random numbers that are the same every time."""
    import torch

    return torch.Generator().manual_seed(0)


def in_words(certificate: dict[str, Any]) -> list[str]:
    """The certificate, a line a stage and a line a precision."""
    stages = [
        f"{name}: KL {found['largest_kl']:.3g} at most, {found['mean_kl']:.3g} in the mean; top-1 agreement "
        f"{100 * found['top1_agreement']:.2f} %; perplexity {found['perplexity_after']:.6g}"
        for name, found in certificate.get("stages", {}).items()
    ]
    return stages + [
        f"{precision}: KL {found['largest_kl']:.2e} at most, {found['mean_kl']:.2e} in the mean; top-1 agreement "
        f"{100 * found['top1_agreement']:.2f} %; perplexity {found['perplexity_before']:.6g} before, "
        f"{found['perplexity_after']:.6g} after; {found['tokens']:,} tokens of {certificate['text']}"
        for precision, found in ((name, certificate[name]) for name in ("fp32", "bf16"))
    ]
