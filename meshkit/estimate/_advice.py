"""Which flags would make a run fit: a short list, each of them estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from meshkit.errors import MeshkitError
from meshkit.estimate._recipe import Recipe
from meshkit.estimate._result import Estimate, said

# What to try, cheapest in time first. A flag that the recipe does not have is left out, and so is a value it has already.
CHANGES: tuple[tuple[str, Any], ...] = (
    ("zero", 3),
    ("sequence", True),
    ("loss_chunk", 1024),
    ("precision", "bf16"),
    ("recompute", "selective"),
    ("recompute", "full"),
    ("microbatches", None),  # one row at a time
    ("offload", "host"),
    ("optimizer_offload", True),
)


@dataclass(frozen=True)
class Tried:
    """Flags beyond those given, and the estimate with them; None where the run refuses them, and why."""

    flags: dict[str, Any]
    estimate: Estimate | None
    refusal: str = ""

    def line(self, device_bytes: int) -> tuple[str, str, str]:
        said_of = {name: f"--{name.replace('_', '-')}" for name in self.flags}
        flags = " ".join(
            said_of[name] if value is True else f"{said_of[name]} {value}" for name, value in self.flags.items()
        )
        if self.estimate is None:
            return flags, "", self.refusal
        return flags, said(self.estimate.peak_bytes), "fits" if self.estimate.fits(device_bytes) else "does not fit"


def advise(
    recipe: Recipe, rows: int, now: Estimate, device_bytes: int, again: Callable[[Recipe], Estimate]
) -> Iterator[Tried]:
    """Try each change alone, and then those that helped together, until something fits.

    now: what does not fit. again: estimates a changed recipe.
    """
    helped: dict[str, Any] = {}
    for name, value in _changes(recipe, rows):
        tried = _try(recipe, {name: value}, again)
        yield tried
        if tried.estimate is None:
            continue
        if tried.estimate.fits(device_bytes):
            return
        if tried.estimate.peak_bytes < now.peak_bytes:
            helped[name] = value
    if len(helped) > 1:
        yield _try(recipe, helped, again)


def _try(recipe: Recipe, flags: dict[str, Any], again: Callable[[Recipe], Estimate]) -> Tried:
    try:
        return Tried(flags, again(recipe.changed(**flags)))
    except MeshkitError as error:
        return Tried(flags, None, f"refused: {str(error).splitlines()[0]}")


def _changes(recipe: Recipe, rows: int) -> Iterator[tuple[str, Any]]:
    known = {field.name for field in fields(recipe.config)}
    for name, value in CHANGES:
        value = rows if name == "microbatches" else value
        if name not in known or getattr(recipe.config, name) == value:
            continue
        if name == "recompute" and getattr(recipe.config, name) == "full":
            continue
        if name == "zero" and (getattr(recipe.config, name) is None or "pp=" in recipe.config.mesh):
            continue
        yield name, value
