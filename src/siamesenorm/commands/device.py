"""``--device``: where a command computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

Device = Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.", show_default=False)]


def find_device(name: str | None) -> torch.device:
    """The device of a name, or the best there is."""
    import torch

    from siamesenorm.interop.errors import InteropError

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InteropError(f"device: {name!r} cannot be used here; it takes cpu, or cuda with a GPU") from None
    return device
