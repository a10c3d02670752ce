"""Choice of activation checkpointing within a memory budget: a treatment for every block, and a table of the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from meshkit.errors import PlanError
from meshkit.memory._recompute import Treatment
from meshkit.memory.budget.knapsack import Option, cheapest, most, smallest

Offer = tuple[Option, Treatment]
"""A treatment of a block with its cost."""


@dataclass(frozen=True)
class Choice:
    """The treatments chosen for a rank's blocks; `str()` is a table.

    budget: bytes of activations that the rank may keep. beside: how many other blocks' offloaded bytes are on the device
    (leaving or coming back) while one block's backward runs.
    """

    budget: int
    treatments: dict[str, Treatment]
    options: dict[str, Option]
    beside: int = 1

    @property
    def bytes(self) -> int:
        """Peak bytes on the device: kept by all blocks, the largest recomputed or fetched block, and copies under way."""
        return most(list(self.options.values()), self.beside)

    @property
    def seconds(self) -> float:
        """Seconds a step takes longer than with everything kept."""
        return sum(option.seconds for option in self.options.values())

    def __str__(self) -> str:
        lines = [f"activations: {self.bytes:,} of {self.budget:,} bytes, {self.seconds * 1e3:,.3f} ms a step for it"]
        for option, run in groupby(self.options.items(), key=lambda item: item[1]):
            blocks = [block for block, _ in run]
            span = blocks[0] if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
            lines.append(
                f"  {span:28} {option.name:31} {option.bytes:>15,} bytes a block {option.seconds * 1e3:>9,.3f} ms"
                + (f", {option.moving:,} bytes wait elsewhere" if option.moving else "")
                + (f", {option.passing:,} bytes while its backward runs" if option.passing else "")
            )
        return "\n".join(lines)


def choose(offers: Mapping[str, Sequence[Offer]], budget: int, beside: int = 1, *, rank: str = "this rank") -> Choice:
    """The choice with the least time within the budget; see `cheapest`. Ranks with the same offers choose the same.

    rank: whose blocks they are, for the error.
    Raises: PlanError with the smallest budget that would do, if nothing fits.
    """
    # In the order of the model: ties are broken by it, so that ranks with the same offers choose the same.
    names = list(offers)
    blocks = [[option for option, _ in offers[name]] for name in names]
    chosen = cheapest(blocks, budget, beside)
    if chosen is None:
        kept_bytes, passing = smallest(blocks, beside)
        raise PlanError(
            f"Budget(bytes={budget:,}) is too little: at the least the {len(names)} blocks of {rank} keep {kept_bytes:,} "
            f"bytes, and {passing:,} more are needed while a backward runs, together {kept_bytes + passing:,}. Give more "
            "bytes, or fewer rows or tokens, or more ranks."
        )
    picked = {name: offers[name][at] for name, at in zip(names, chosen, strict=True)}
    return Choice(
        budget,
        {name: treatment for name, (_, treatment) in picked.items()},
        {name: option for name, (option, _) in picked.items()},
        beside,
    )
