"""``siamesenorm graft``: a trained Pre-Norm model in another topology, the same function, with a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from siamesenorm.commands.completion import complete_topology
from siamesenorm.commands.options import RemoteCode


def graft(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="Hugging Face folder, imported folder, GGUF file, or run, of a Pre-Norm model."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to be made.")],
    to: Annotated[
        str, typer.Option(metavar="TOPOLOGY", help="Name, or name:option=value,…", autocompletion=complete_topology)
    ],
    at: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, help="A step that the run has a checkpoint of: DST goes on from there."),
    ] = None,
    ramp: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**9,
            help="For topologies that cannot compute the same: steps of training over which they come in, from the "
            "source's function on.",
        ),
    ] = None,
    qk_norm: Annotated[
        str | None, typer.Option(help="A norm on queries and keys that the source has not: head or projection.")
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
    remote_code: RemoteCode = True,
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
    from siamesenorm.errors import ConfigError
    from siamesenorm.lab.grafting import certified_graft, open_model_to_graft

    if not bound >= 0:
        raise ConfigError.not_allowed("--bound", bound, "a number from 0")
    if qk_norm not in (None, "head", "projection"):
        raise ConfigError.not_allowed("--qk-norm", qk_norm, "head or projection")
    opened = open_model_to_graft(source, at)
    opened.check_target(target, overwrite)
    made = certified_graft(opened, to, text, tokens, bound, ramp=ramp, qk_norm=qk_norm, regression=regress)
    for line in in_words(made.certificate):
        typer.echo(line)
    if not made.largest_kl <= bound and not force:
        blending = "; --ramp STEPS begins with the source's function" if made.made.stages and ramp is None else ""
        raise ConfigError(
            f"--bound: the largest KL {made.largest_kl:.3g} is above {bound:g}; nothing is written without "
            f"--force{blending}"
        )
    made.write(target, remote_code=remote_code, overwrite=overwrite)
    if opened.live is None:
        typer.echo(str(target))
    else:
        typer.echo(f"{target}: stands at step {opened.live.step}; siamesenorm train {target} goes on")


def in_words(certificate: dict[str, Any]) -> list[str]:
    """The certificate, one line per stage and one line per precision."""
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
