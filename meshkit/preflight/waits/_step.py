"""What a step waits for and launches, as data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wait:
    """The host waits for the device. why: the operator, or what is copied. where: lines of meshkit's, else of the user's."""

    why: str
    where: str

    def __str__(self) -> str:
        return f"{self.why} ({self.where})"


@dataclass(frozen=True, kw_only=True)
class Step:
    """launches: operators on tensors of the device, by name, without collectives and views; a fused or `foreach` one is one.
    copied_bytes: from the host to the device. mixed: operators that torch would refuse, since they get tensors of both."""

    waits: tuple[Wait, ...]
    launches: Counter[str]
    collectives: Counter[str]
    copied_bytes: int
    mixed: tuple[Wait, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.waits)} waits, {self.launches.total()} launches, {self.collectives.total()} collectives"]
        lines += [f"  {times} x {wait}" for wait, times in Counter(map(str, self.waits)).most_common()]
        return "\n".join(lines)


@dataclass
class Waits:
    """What is being recorded."""

    waits: list[Wait] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    copied_bytes: int = 0
    mixed: list[Wait] = field(default_factory=list)
    taken: int = 0

    def take(self) -> Step:
        """What was recorded since this was called last."""
        taken = Step(
            waits=tuple(self.waits),
            launches=self.launches,
            collectives=self.collectives,
            copied_bytes=self.copied_bytes,
            mixed=tuple(self.mixed),
        )
        self.__init__(taken=self.taken + 1)  # type: ignore[misc]
        return taken
