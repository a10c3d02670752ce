"""FSDP2's buffers in time: what it gathers, holds and reduces at the edges of its units, without running it.

Source: torch.distributed.fsdp._fully_shard of 2.15, `FSDPParamGroup.unshard`, `wait_for_unshard` and `post_backward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshkit.preflight.estimate._timeline import Timeline
from meshkit.preflight.estimate._tracker import GROUPS
from meshkit.preflight.estimate._units import UnitBytes

GATHERED, REDUCING = GROUPS.index("gathered parameters"), GROUPS.index("gradients in reduction")
GRADIENTS, WORK = GROUPS.index("gradients"), GROUPS.index("work of backward")
ROOT = ""


@dataclass(kw_only=True)
class Buffers:
    """units: those that are sharded. frees: whether a unit is freed after forward; kept: those that are not even then.

    replicas: whether gradients are summed over replicas too. ahead: unit -> those that are gathered when it begins, in
    forward; in backward `behind`. idle: whether a unit never runs, which FSDP looks at after the others.
    """

    timeline: Timeline
    units: Mapping[str, UnitBytes]
    frees: bool
    kept: frozenset[str]
    replicas: bool
    ahead: Mapping[str, Sequence[str]] = field(default_factory=dict)
    behind: Mapping[str, Sequence[str]] = field(default_factory=dict)
    idle: bool = False
    _whole: set[str] = field(default_factory=set)
    _on_the_way: set[str] = field(default_factory=set)
    _copied_out: str | None = None  # in forward the buffer of the unit before is there until the next is copied out
    _in_reduction: int = 0
    _parts: dict[str, int] = field(default_factory=dict)  # summed over shards, not over replicas yet
    _copies: set[str] = field(default_factory=set)  # units whose secondary copy is there
    _between: set[str] = field(default_factory=set)  # units whose gradients are summed over the inner ranks
    _last: bool = False
    _summed: set[str] = field(default_factory=set)
    _order: list[str] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)

    def begin(self, *, last: bool = False) -> None:
        """A microbatch begins. last: of the step."""
        self._last = last
        self._order.clear()
        self._open.clear()

    def enter(self, name: str) -> None:
        if name not in self.units:
            return
        where = f"forward of {name or 'the model'}"
        self._gather(name, where, forward=True)
        self._prefetch(self.ahead.get(name, ()), where)

    def leave(self, name: str) -> None:
        if name in self.units:
            if self.frees and name not in self.kept and name != ROOT:
                self._free(name, f"forward of {name}")
            self._order.append(name)
        if name == ROOT:
            self._release(f"forward of {name or 'the model'}")

    def backward(self, name: str) -> None:
        if name not in self.units:
            return
        where = f"backward of {name or 'the model'}"
        self._open.append(name)
        self._gather(name, where, forward=False)
        if name in self.behind:
            self._prefetch(self.behind[name], where)
        elif name in self._order and (at := self._order.index(name)):
            self._prefetch([self._order[at - 1]], where)

    def done(self, name: str, *, reduces: bool, frees: bool, last: bool, added: bool) -> None:
        """The gradients of a unit are there. added: over several microbatches. last: of the step."""
        unit = self.units.get(name)
        if unit is None:
            return
        if name in self._open:
            self._open.remove(name)
        where, change = f"backward of {name or 'the model'}", self.timeline.change
        if frees:
            self._free(name, where)
        if last and name in self._copies:
            self._copies.discard(name)
            change(GATHERED, -unit.copy, where, name)
        if not reduces:
            return
        change(REDUCING, -self._in_reduction, where, name)
        change(REDUCING, unit.reduced, where, name)
        change(GRADIENTS if added else WORK, -(unit.added if added else unit.taken), where, name)
        self._in_reduction = unit.reduced
        change(REDUCING, unit.part, where, name)
        change(REDUCING, unit.reducing, where, name)
        change(REDUCING, -unit.reducing, where, name)
        self._reduce_in_hops(name, where, last=last)
        if self.replicas and not last:
            if name in self._parts:
                change(REDUCING, -unit.part, where, name)
            else:
                self._parts[name] = unit.part
            return
        if name in self._summed:
            if unit.casts_part:
                change(REDUCING, unit.grads, where, name)
                change(REDUCING, -unit.grads, where, name)
            change(REDUCING, -unit.part, where, name)
        else:
            if not unit.casts_part:  # what came out is the gradient
                change(REDUCING, -unit.part, where, name)
            change(GRADIENTS, unit.grads, where, name)
            if unit.casts_part and not self.replicas:  # else it is held until the end
                change(REDUCING, -unit.part, where, name)
            self._summed.add(name)
        change(REDUCING, -self._parts.pop(name, 0), where, name)

    def end(self, *, reduces: bool, frees: bool, last: bool, added: bool) -> None:
        """The backward is over: units whose input has no gradient come now."""
        for name in sorted(
            self._open, key=lambda name: name != ROOT
        ):  # FSDP's root goes through its units, itself first
            self.done(name, reduces=reduces, frees=frees, last=last, added=added)
        if last or (self.idle and reduces):  # else it stays until FSDP comes to the next unit
            self.settle()

    def end_pipeline(self) -> None:
        """All units are reduced after the last row, the last one that ran first, and the root last."""
        called = [name for name in dict.fromkeys(self._order) if name != ROOT]
        for name in (*reversed(called), ROOT):
            self.done(name, reduces=True, frees=True, last=True, added=True)
        self.settle()

    def settle(self) -> None:
        self.timeline.change(REDUCING, -self._in_reduction, "the end of backward", "")
        self._in_reduction = 0

    def _gather(self, name: str, where: str, *, forward: bool) -> None:
        if name in self._whole:
            return
        unit, change = self.units[name], self.timeline.change
        if name not in self._on_the_way:
            self._send(name, where)
        self._on_the_way.discard(name)
        if forward:
            self._release(where)
        change(GATHERED, unit.unsharded, where, name)
        if not unit.gathered:
            change(GATHERED, -unit.cast, where, name)
        elif forward:
            self._copied_out = name
        else:
            change(GATHERED, -unit.gathered, where, name)
        self._whole.add(name)

    def _send(self, name: str, where: str) -> None:
        unit, change = self.units[name], self.timeline.change
        change(GATHERED, unit.cast, where, name)
        change(GATHERED, unit.gathered, where, name)
        if unit.copy:
            self._gather_in_hops(name, where)
        change(GATHERED, unit.gathering, where, name)
        change(GATHERED, -unit.gathering, where, name)
        if unit.gathered:
            change(GATHERED, -unit.cast, where, name)

    def _gather_in_hops(self, name: str, where: str) -> None:
        """See [Note: the secondary copy]."""
        unit, change = self.units[name], self.timeline.change
        is_new = name not in self._copies
        stays = (self.frees and name not in self.kept and name != ROOT) or not self._last
        change(GATHERED, unit.copy * is_new, where, name)
        change(GATHERED, unit.gathers_again, where, name)
        change(GATHERED, -unit.gathers_again, where, name)
        if is_new and stays:
            self._copies.add(name)
        elif is_new:
            change(GATHERED, -unit.copy, where, name)

    def _reduce_in_hops(self, name: str, where: str, *, last: bool) -> None:
        unit, change = self.units[name], self.timeline.change
        if not unit.sums:
            return
        inner = unit.ordered + unit.sums * bool(unit.ordered)  # with one inner rank they lie in the buffer itself
        change(REDUCING, inner, where, name)
        if not last and name not in self._between:
            self._between.add(name)
            change(REDUCING, unit.sums, where, name)
        elif last and name in self._between:
            self._between.discard(name)
            change(REDUCING, -unit.sums, where, name)
        change(REDUCING, -inner, where, name)

    def _prefetch(self, names: Sequence[str], where: str) -> None:
        for name in names:
            if name not in self._whole and name not in self._on_the_way and self.units[name].gathered:
                self._send(name, where)
                self._on_the_way.add(name)

    def _release(self, where: str) -> None:
        if self._copied_out is not None:
            self.timeline.change(GATHERED, -self.units[self._copied_out].gathered, where, self._copied_out)
            self._copied_out = None

    def _free(self, name: str, where: str) -> None:
        if name in self._whole:
            self._whole.discard(name)
            self.timeline.change(GATHERED, -self.units[name].unsharded, where, name)
