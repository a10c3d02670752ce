"""Choose for every block what it keeps, within a number of bytes, and say what was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from meshkit.errors import PlanError
from meshkit.memory._knapsack import Option, cheapest
from meshkit.memory.recompute import Treatment

Offer = tuple[Option, Treatment]
"""What one treatment of a block costs."""


@dataclass(frozen=True)
class Choice:
    """What was chosen for the blocks of a rank; `str()` is a table. budget: bytes of activations that the rank may keep."""

    budget: int
    treatments: dict[str, Treatment]
    options: dict[str, Option]

    @property
    def bytes(self) -> int:
        """The most at one time: what all blocks keep, and what the largest that runs again holds besides."""
        kept = [option.bytes for option in self.options.values()]
        return sum(kept) + max((option.passing for option in self.options.values()), default=0)

    @property
    def seconds(self) -> float:
        """What a step takes longer than if everything were kept."""
        return sum(option.seconds for option in self.options.values())

    def __str__(self) -> str:
        lines = [f"activations: {self.bytes:,} of {self.budget:,} bytes, {self.seconds * 1e3:,.3f} ms a step for it"]
        for name, run in groupby(self.options.items(), key=lambda item: item[1]):
            blocks = [block for block, _ in run]
            span = blocks[0] if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
            lines.append(
                f"  {span:28} {name.name:20} {name.bytes:>15,} bytes a block {name.seconds * 1e3:>9,.3f} ms"
                + (f", {name.passing:,} bytes while its backward runs" if name.passing else "")
            )
        return "\n".join(lines)


def choose(offers: Mapping[str, Sequence[Offer]], budget: int) -> Choice:
    """The least time within the budget. Every rank that has the same offers chooses the same.

    Raises: PlanError, with what the least would be, if nothing fits.
    """
    names = list(offers)
    chosen = cheapest([[option for option, _ in offers[name]] for name in names], budget)
    if chosen is None:
        least = [min((option for option, _ in offers[name]), key=lambda option: option.bytes) for name in names]
        kept, passing = sum(option.bytes for option in least), max(option.passing for option in least)
        raise PlanError(
            f"Budget(bytes={budget:,}) is too little: with everything run again the {len(names)} blocks of this rank keep "
            f"{kept:,} bytes, and one needs {passing:,} more while its backward runs, together {kept + passing:,}. Give more "
            "bytes, or fewer rows or tokens, or more ranks."
        )
    picked = {name: offers[name][at] for name, at in zip(names, chosen, strict=True)}
    return Choice(
        budget,
        {name: treatment for name, (_, treatment) in picked.items()},
        {name: option for name, (option, _) in picked.items()},
    )
