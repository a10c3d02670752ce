"""Crew (elastic membership, hot spares): which process is which rank in one life of a job."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from meshkit.errors import PlanError

DIGITS = 7


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often, and with whom, a job starts anew in place.

    times: how often all ranks start anew. spares: how many of the launched processes have no rank, and take that of a lost
    one. multiple: with fewer processes left than ranks, go on with the largest multiple of it, and with more again as soon as
    they come: the ranks that one replica of the model needs, of a mesh whose data axis is -1. None: the job ends.
    Spares and lost processes need a launcher that does not end the others, as `srun --no-kill --kill-on-bad-exit=0`, or one
    command on each host; torchrun replaces hosts itself (`--nnodes 2:4`).
    """

    times: int = 3
    spares: int = 0
    multiple: int | None = None

    def __post_init__(self) -> None:
        if self.times < 0 or self.spares < 0 or (self.multiple is not None and self.multiple < 1):
            raise PlanError(
                f"{self}: times and spares are 0 or more, and multiple is 1 or more, the ranks of one replica of the model."
            )

    @classmethod
    def parse(cls, text: str) -> Restarts:
        """`3`, or `3 spares=1 multiple=8`."""
        times, *others = text.split() or ["0"]
        given = dict(word.partition("=")[::2] for word in others)
        if not {*given} <= {"spares", "multiple"} or not all(
            each.isdecimal() and len(each) < DIGITS for each in (times, *given.values())
        ):
            raise PlanError(f'{text!r} is no number of restarts. Give "3", or "3 spares=1 multiple=8".')
        return cls(times=int(times), **{name: int(value) for name, value in given.items()})


@dataclass(frozen=True, kw_only=True)
class Crew:
    """members: by rank, the process that the launcher gave that number. tokens: of each, which process it is: one that comes
    in the place of a lost one has another."""

    life: int
    members: tuple[int, ...]
    tokens: tuple[str, ...]

    def rank_of(self, member: int, token: str) -> int | None:
        """None for a spare, and for one that came in the place of another."""
        if member not in self.members:
            return None
        rank = self.members.index(member)
        return rank if self.tokens[rank] == token else None

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Crew:
        body = json.loads(text)
        return cls(life=body["life"], members=tuple(body["members"]), tokens=tuple(body["tokens"]))


def next_members(
    members: Sequence[int], alive: Collection[int], *, ranks: int, multiple: int | None
) -> tuple[int, ...] | None:
    """By rank, for the next life; None where too few are left.

    Who lives keeps its rank, so that its state is where it was; those of lost ones go to whoever has none. With too few, the
    ranks close up. members: of the life before, by rank. ranks: how many there should be.
    """
    free = sorted({*alive} - {*members})
    places = [*members, *[None] * (ranks - len(members))]
    filled = [member if member in alive else free.pop(0) if free else None for member in places]
    left = [member for member in filled if member is not None]
    if len(left) == ranks:
        return tuple(left)
    size = len(left) // multiple * multiple if multiple else 0
    return tuple(left[:size]) or None
