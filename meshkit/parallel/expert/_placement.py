"""Expert placement (EPLB, FSSDP): which rank of `ep` owns each expert, and which others have a copy while they compute.

Dims: E experts, R ranks of ep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshkit.core.sharding import chunk
from meshkit.errors import PlanError


@dataclass(frozen=True)
class Placement:
    """The table of one layer. `print` draws it.

    ranks: of ep. owners: for each expert, the rank that has its parameters and optimizer state. copies: for each expert, the
    other ranks that compute it too, ascending.
    Raises: PlanError for a rank that is none, a copy on the owner, or one twice, with the table.
    """

    ranks: int
    owners: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.copies) != len(self.owners):
            raise PlanError(
                f"Placement: {len(self.owners)} experts have owners, but {len(self.copies)} have copies. Give each expert "
                "its ranks, an empty tuple for none."
            )
        for expert, (owner, copies) in enumerate(zip(self.owners, self.copies, strict=True)):
            if not copies and 0 <= owner < self.ranks:
                continue  # nearly all: copies are chosen one by one, each time by a table of all experts
            wrong = [rank for rank in (owner, *copies) if not 0 <= rank < self.ranks]
            if wrong or owner in copies or list(copies) != sorted(set(copies)):
                raise PlanError(
                    f"Placement: expert {expert} is owned by rank {owner} and copied to {list(copies)}, of {self.ranks} "
                    "ranks of ep. Name each rank once, copies ascending and without the owner."
                    + f"\n{self._drawn(expert)}"
                )

    @classmethod
    def contiguous(cls, experts: int, ranks: int) -> Placement:
        """Equal runs of experts, as DTensor shards a dim; no copies."""
        owners = [rank for rank in range(ranks) for _ in range(*chunk(experts, ranks, rank).indices(experts))]
        return cls(ranks, tuple(owners), ((),) * experts)

    def with_copies(self, copies: Sequence[Sequence[int]]) -> Placement:
        return Placement(self.ranks, self.owners, tuple(map(tuple, copies)))

    @property
    def experts(self) -> int:
        return len(self.owners)

    @cached_property
    def owned(self) -> tuple[tuple[int, ...], ...]:
        """For each rank its experts, ascending: the order in which they lie in its parameters."""
        return tuple(tuple(e for e, owner in enumerate(self.owners) if owner == rank) for rank in range(self.ranks))

    @cached_property
    def copied(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the experts that it has copies of, ascending."""
        return tuple(tuple(e for e, ranks in enumerate(self.copies) if rank in ranks) for rank in range(self.ranks))

    @cached_property
    def on(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the experts that it computes, in the order of its rows: its own, then copies."""
        return tuple((*owned, *copied) for owned, copied in zip(self.owned, self.copied, strict=True))

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each expert the ranks that compute it, ascending."""
        both = zip(self.owners, self.copies, strict=True)
        return tuple(tuple(sorted((owner, *copies))) if copies else (owner,) for owner, copies in both)

    @cached_property
    def in_order(self) -> bool:
        """Whether rows that are sorted by expert are sorted by rank too: no copies, and runs of experts on ranks."""
        return not any(self.copies) and list(self.owners) == sorted(self.owners)

    @property
    def copies_made(self) -> int:
        return sum(map(len, self.copies))

    def sent(self, source: int) -> list[list[int]]:
        """For each rank, the experts of `source` that it gets copies of, ascending."""
        return [[e for e in self.copied[rank] if self.owners[e] == source] for rank in range(self.ranks)]

    def __str__(self) -> str:
        return self._drawn(None)

    def _drawn(self, wrong: int | None) -> str:
        """Experts in columns, ranks in rows: O owns, c has a copy."""
        width = len(str(self.experts - 1)) + 1
        label = len(f"rank {self.ranks - 1}") + 1
        lines = ["expert".ljust(label) + "".join(f"{expert:>{width}}" for expert in range(self.experts))]
        for rank in range(self.ranks):
            marks = [
                "O" if o == rank else "c" if rank in c else "." for o, c in zip(self.owners, self.copies, strict=True)
            ]
            lines.append(f"rank {rank}".ljust(label) + "".join(f"{mark:>{width}}" for mark in marks))
        if wrong is not None:
            lines.append(" " * label + " " * (width * wrong) + f"{'^':>{width}}")
        return "\n".join(lines)
