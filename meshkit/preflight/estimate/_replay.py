"""Replay: what a chunk of a traced step leaves and its highest moment, for each thing that may become of its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshkit.preflight.estimate._step_trace import Accumulated, Chunk, StepTrace
from meshkit.preflight.estimate._tracker import GROUPS, HOST

Totals = tuple[int, ...]

GRADIENTS, WORK = GROUPS.index("gradients"), GROUPS.index("work of backward")

Kept = Literal["reduced", "own", "cast", "added"]
"""What becomes of a parameter's gradient: FSDP holds it until it reduces the unit; the parameter keeps it, or a wider copy
of it; or it is added to one that is there, and freed."""


@dataclass(frozen=True, slots=True)
class Swing:
    """left: change of each group over the chunk. highest: sums of groups at the highest moment, from where it began."""

    left: Totals
    highest: Totals
    where: str

    @property
    def undone(self) -> Swing:
        """What it has left is freed."""
        return Swing(tuple(-size for size in self.left), (0,) * len(self.left), self.where)

    @property
    def rise(self) -> int:
        return sum(self.highest) - self.highest[HOST]

    @property
    def net(self) -> int:
        return sum(self.left) - self.left[HOST]


@dataclass(frozen=True, kw_only=True)
class Treated:
    """How gradients are treated. kept: those of most parameters; experts: of routed experts, whose names begin with these;
    widened: bytes of a wider copy for each byte. split: names of weights whose products wait for W. second: names of
    parameters whose other use has made a gradient before.
    """

    kept: Kept
    experts_kept: Kept
    experts: tuple[str, ...]
    widened: int
    split: frozenset[str] = frozenset()
    second: frozenset[str] = frozenset()

    def of(self, param: str) -> Kept:
        if param in self.second:
            return "added"
        return self.experts_kept if self.experts and param.startswith(self.experts) else self.kept


class Level:
    """Sums of groups, and where they were highest."""

    def __init__(self, where: str) -> None:
        self.now = [0] * len(GROUPS)
        self.device = 0
        self.top, self.highest, self.where = 0, tuple(self.now), where

    def add(self, group: int, size: int, where: str) -> None:
        self.now[group] += size
        if group != HOST:
            self.device += size
            if self.device > self.top:
                self.top, self.highest, self.where = self.device, tuple(self.now), where

    def swing(self) -> Swing:
        return Swing(tuple(self.now), self.highest, self.where)


def replay(
    trace: StepTrace, chunk: Chunk, treated: Treated, stays: frozenset[int] = frozenset()
) -> tuple[Swing, Swing | None]:
    """The chunk itself, and of a split backward its W: the products of weights' gradients, and what they wait with.

    stays: storages that are not freed here.
    """
    level, later = Level(""), Level("")
    waiting: set[int] = set()  # storages that products in W read
    products: list[tuple[str, int]] = []
    where = ""
    for change in chunk.changes:
        if isinstance(change, Accumulated):
            if change.param not in treated.split:
                _accumulate(level, treated, change.param, trace.born[change.storage].bytes, where)
            continue
        where = change.where
        param = trace.grads.get(change.storage)
        if param is not None:
            if change is not trace.born[change.storage]:
                continue  # what becomes of it is said where it is accumulated, and by the walk
            if param in treated.split:
                products.append((param, change.bytes))
                waiting.update(trace.made_of.get(change.storage, ()))
            else:
                level.add(WORK, change.bytes, where)
        elif change.storage in stays and change.bytes < 0:
            continue
        elif change.storage in waiting and change.bytes < 0:
            later.now[change.group] += change.bytes  # freed when all products are done
        else:
            level.add(change.group, change.bytes, where)
    if not treated.split:
        return level.swing(), None
    freed, later = later.now, Level("")
    for param, size in products:
        at = f"backward of {param.rpartition('.')[0]}"
        later.add(WORK, size, at)
        _accumulate(later, treated, param, size, at)
    for group, size in enumerate(freed):
        later.add(group, size, where)
    return level.swing(), later.swing()


def _accumulate(level: Level, treated: Treated, param: str, size: int, where: str) -> None:
    kept = treated.of(param)
    if kept == "reduced":
        return
    if kept == "own":
        level.now[WORK] -= size
        level.now[GRADIENTS] += size
        return
    if kept == "cast":
        level.add(GRADIENTS, treated.widened * size, where)
    level.add(WORK, -size, where)
