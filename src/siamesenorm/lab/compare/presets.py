"""Grids named after the paper's experiments, at laptop size, with the figures it published.

The paper (arXiv 2602.08064) trains 1.3B parameters on 100B tokens and reports perplexity, one run per cell. Models of
0.6M parameters take higher learning rates: ours are ten times the paper's. `Published.lr` and `.setting` say which of
our cells a figure stands beside.
"""

from __future__ import annotations

from dataclasses import dataclass

from siamesenorm.errors import ConfigError

SIAMESE = "siamese:form=hybrid_pre"
"""The form of the paper's best language models."""
DIVERGED = "diverged"


@dataclass(frozen=True)
class Published:
    """One figure of the paper, and the cell of ours that it stands beside."""

    where: str
    topology: str
    value: float | str
    """Perplexity, accuracy, or how it ended."""
    lr: float | None = None
    setting: str = ""
    inside: tuple[str, str] | None = None
    """What of a trained model it is, and of which stream: (``gains`` or ``lens``, ``x``); default: the metric."""


@dataclass(frozen=True)
class GridPreset:
    """A grid, and what the paper found."""

    name: str
    about: str
    topologies: tuple[str, ...]
    lrs: tuple[float, ...]
    published: tuple[Published, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    sets: tuple[str, ...] = ()
    """As --set takes them."""
    depths: tuple[int, ...] = ()
    recipe: str | None = None
    """What is trained, where it is not the default."""
    metric: str | None = None
    """What it is about, where that is not the loss."""

    @property
    def looks_inside(self) -> bool:
        """Whether figures are of the trained models, which are inspected for them."""
        return any(figure.inside is not None for figure in self.published)


def _lr_table() -> tuple[Published, ...]:
    topologies = ("pre", "post", "deepnorm", "residual_dual", "hybrid", "span", "hyper", SIAMESE)
    rows: dict[float, tuple[float | str | None, ...]] = {
        4e-4: (11.21, None, None, None, 10.91, 11.00, None, 10.57),
        1e-3: (10.84, DIVERGED, 11.47, None, DIVERGED, 10.86, 10.73, 10.43),
        2e-3: (10.89, DIVERGED, DIVERGED, 13.66, DIVERGED, DIVERGED, 10.77, 10.48),
    }
    found = [
        Published(f"lr {lr:g}", topology, value, round(10 * lr, 6))
        for lr, values in rows.items()
        for topology, value in zip(topologies, values, strict=True)
        if value is not None
    ]
    longer = {"pre": 9.67, "hyper": 9.57, SIAMESE: 9.42}
    found += [Published("lr 0.002, 350B tokens", topology, value) for topology, value in longer.items()]
    experts = {"pre": 7.92, SIAMESE: 7.76}
    found += [Published("mixture of experts, lr 0.001", topology, value) for topology, value in experts.items()]
    return tuple(found)


def _depth_table() -> tuple[Published, ...]:
    rows = {10: (17.47, 16.15), 17: (17.23, 15.69), 33: (17.29, 15.64), 80: (18.02, 15.98)}
    ours = dict(zip(rows, DEPTHS, strict=True))
    return tuple(
        Published(f"{blocks} blocks", topology, value, 1e-2, f"blocks={ours[blocks]}")
        for blocks, values in rows.items()
        for topology, value in zip(("pre", SIAMESE), values, strict=True)
    )


DEPTHS = (5, 9, 17, 40)
"""Half of the paper's."""


def _ablation_table() -> tuple[Published, ...]:
    rows = {(False, False): 10.88, (True, False): 10.68, (False, True): 10.51, (True, True): 10.43}
    words = {False: "no", True: "yes"}
    found = [
        Published(f"input norm {words[norm]}, depth scaling {words[scaling]}", ablated(norm, scaling), value, 1e-2)
        for (norm, scaling), value in rows.items()
    ]
    return (
        *found,
        Published("ResiDual with input norm", SINGLE[0], 11.68, 1e-2),
        Published("one HybridNorm stream with both", SINGLE[1], 10.65, 1e-2),
        Published("one HybridNorm stream without depth scaling", SINGLE[2], DIVERGED, 1e-2),
    )


SINGLE = (
    "residual_dual:input_norm=true",
    "hybrid:input_norm=true,depth_scaling=sqrt(2(l+1))",
    "hybrid:input_norm=true",
)
"""What else the paper's ablation has: its mechanisms in topologies of others."""


def ablated(input_norm: bool, depth_scaling: bool) -> str:
    """SiameseNorm with its two auxiliary mechanisms on or off."""
    options = ([] if input_norm else ["input_norm=false"]) + ([] if depth_scaling else ["depth_scaling=none"])
    return ",".join([SIAMESE, *options])


PRESETS = {
    preset.name: preset
    for preset in (
        GridPreset(
            "lr",
            "Learning rates: perplexity of 1.3B parameters after 100B tokens.",
            ("pre", "post", "deepnorm", "residual_dual", "hybrid", "span", "hyper", SIAMESE),
            (4e-3, 1e-2, 2e-2),
            _lr_table(),
        ),
        GridPreset(
            "depth",
            "Depth at a fixed number of parameters: perplexity of 390M after 12B tokens at lr 1e-3.",
            ("pre", SIAMESE),
            (1e-2,),
            _depth_table(),
            depths=DEPTHS,
        ),
        GridPreset(
            "warmup",
            "Warm-up: siamese trains with none, HybridNorm diverges at 300 steps (ours has a hundredth of the steps).",
            ("pre", "hybrid", SIAMESE),
            (1e-2,),
            (
                Published("no warm-up", SIAMESE, "trains", 1e-2, "warmup=0"),
                Published("300 steps", "hybrid", DIVERGED, 1e-2, "warmup=3"),
            ),
            sets=("warmup=0,3,20",),
        ),
        GridPreset(
            "ablation",
            "Input norm and depth scaling, each on and off: perplexity of 1.3B after 100B tokens at lr 1e-3.",
            (*(ablated(norm, scaling) for norm in (False, True) for scaling in (False, True)), *SINGLE),
            (1e-2,),
            _ablation_table(),
        ),
        GridPreset(
            "arithmetic",
            "Arithmetic: accuracy with four choices (chance .25) of 1.3B after 100B tokens, at two rates.",
            ("pre", SIAMESE),
            (1e-2, 2e-2),
            (
                Published("lr 0.001", "pre", 0.270, 1e-2),
                Published("lr 0.001", SIAMESE, 0.294, 1e-2),
                Published("lr 0.002", "pre", 0.281, 2e-2),
                Published("lr 0.002", SIAMESE, 0.396, 2e-2),
                Published("lr 0.002, 350B tokens", "pre", 0.362),
                Published("lr 0.002, 350B tokens", SIAMESE, 0.434),
            ),
            recipe="arithmetic-tiny",
            metric="arithmetic",
        ),
        GridPreset(
            "streams",
            "The two streams at the end of 1.3B parameters after 100B tokens: mean gain of each, and how often each "
            "alone predicts what both do.",
            (SIAMESE,),
            (1e-2,),
            (
                Published("final gain of X", SIAMESE, 1.05, 1e-2, inside=("gains", "x")),
                Published("final gain of Y", SIAMESE, 0.42, 1e-2, inside=("gains", "y")),
                Published("logit lens of X", SIAMESE, 0.426, 1e-2, inside=("lens", "x")),
                Published("logit lens of Y", SIAMESE, 0.162, 1e-2, inside=("lens", "y")),
            ),
        ),
    )
}


def find_preset(name: str | None) -> GridPreset | None:
    """The preset of a name; None for none."""
    if name is not None and name not in PRESETS:
        raise ConfigError.unknown("--preset", name, PRESETS)
    return None if name is None else PRESETS[name]
