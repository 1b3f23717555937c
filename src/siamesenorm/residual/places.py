"""Where sublayers stand: the layout of a stack, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from siamesenorm.errors import TopologyError, shown

SublayerKind = Literal["attention", "cross_attention", "ffn", "parallel"]
Blocks: TypeAlias = int | Sequence[Sequence[str]]

ATTENTION_KINDS = ("attention", "cross_attention")


@dataclass(frozen=True)
class Place:
    """Where one sublayer stands in the stack."""

    index: int
    """0-based among all sublayers."""
    kind: str
    """attention, cross_attention, ffn or parallel (attention and FFN on the same input)."""
    block: int
    """l: 0-based block."""
    blocks: int
    """L: number of blocks."""
    position: int
    """0-based within its block."""
    size: int
    """Sublayers in its block."""
    total: int
    """Sublayers in the stack: 2L when every block has attention and FFN."""
    branch_factor: float = 1.0
    """What multiplies every branch: base depth over depth, 1 in a stack that is its own base."""

    @property
    def depth(self) -> float:
        """l as laws of depth take it: the block of the base stack that stands at the same height."""
        return self.block * self.branch_factor

    @property
    def base_total(self) -> float:
        """Sublayers in the base stack."""
        return self.total * self.branch_factor

    @property
    def is_attention(self) -> bool:
        """Whether queries, keys and values are read here."""
        return self.kind in ATTENTION_KINDS

    @property
    def ends_block(self) -> bool:
        """Whether this is its block's last sublayer."""
        return self.position == self.size - 1


def lay_out(blocks: Blocks, base_blocks: int | None = None) -> list[Place]:
    """Places of a stack: ``12`` for twelve (attention, ffn) blocks, or the sublayer kinds of every block.

    base_blocks: blocks of the stack whose laws of depth hold here; default: as many as there are.
    """
    whole = isinstance(blocks, int) and not isinstance(blocks, bool)
    listed = isinstance(blocks, Sequence) and not isinstance(blocks, str)
    if not whole and not (listed and all(isinstance(block, Sequence) for block in blocks)):  # type: ignore[union-attr]
        raise TopologyError.not_allowed("blocks", blocks, "a number or a list of sublayer kinds per block")
    if isinstance(blocks, int):
        if blocks < 1:
            raise TopologyError.refused("blocks", blocks, "a stack has at least 1 block")
        blocks = [("attention", "ffn")] * blocks
    known, kinds = get_args(SublayerKind), [tuple([b] if isinstance(b, str) else b) for b in blocks]
    if not kinds or not all(kinds):
        raise TopologyError("blocks: every stack needs at least 1 block and every block at least 1 sublayer")
    for kind in (kind for block in kinds for kind in block):
        if kind not in known:
            raise TopologyError(f"blocks: unknown sublayer kind {shown(kind)}; known kinds: {', '.join(known)}")
    if base_blocks is not None and (
        isinstance(base_blocks, bool) or not isinstance(base_blocks, int) or base_blocks < 1
    ):
        raise TopologyError.not_allowed("base_blocks", base_blocks, "a whole number from 1")
    total, factor = sum(map(len, kinds)), 1.0 if base_blocks is None else base_blocks / len(kinds)
    places: list[Place] = []
    for l, block in enumerate(kinds):
        for position, kind in enumerate(block):
            places.append(Place(len(places), kind, l, len(kinds), position, len(block), total, factor))
    return places


def kinds_of(places: list[Place]) -> list[list[str]]:
    """A layout again, as `lay_out` takes it."""
    blocks: list[list[str]] = [[] for _ in range(places[0].blocks)]
    for place in places:
        blocks[place.block].append(place.kind)
    return blocks
