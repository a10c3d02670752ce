"""Moving (activation offload in time): what of a rank's blocks leaves the device, and what is back, block by block.

As `memory.offload` does it: a block's storages are there until the second block after it begins, on a GPU, whose copies are
taken to end as late as they may; they come back `ahead` blocks before their backward, unless they have not left by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from meshkit.memory.offload import BLOCKS_LEAVING
from meshkit.parallel.pipeline import Schedule
from meshkit.preflight.estimate._replay import Swing
from meshkit.preflight.estimate._step_trace import StepTrace
from meshkit.preflight.estimate._template import Template, Unlike
from meshkit.preflight.estimate._timeline import Timeline
from meshkit.preflight.estimate._tracker import GROUPS, Change
from meshkit.resolve import Resolved

_Task = tuple[int, int]
"""(stage, microbatch)"""


@dataclass(frozen=True, eq=False)
class Moved:
    """What a block of one kind moves. out: storages; copies: those that come back.

    gone: the former leave the device; back: the latter come; handed: they are handed to the block's backward, whose traced
    chunk makes them itself. input: the block's input, where its forward frees it; input_leaves: to the host, as the rest.
    stored_bytes: of the host, or of the disk.
    """

    out: frozenset[int]
    copies: frozenset[int]
    gone: Swing
    back: Swing
    handed: Swing
    input_storages: frozenset[int]
    input_leaves: bool
    input: Swing
    without_input: Swing
    stored_bytes: int


def moved_of(template: Template) -> dict[str, Moved]:
    """By kind, of those that move something. Raises: Unlike where blocks share what moves."""
    trace = template.trace
    found = {}
    for kind, out in trace.moved.items():
        inside = {
            change.storage
            for item in template.blocks[kind]
            for change in trace.chunks[item.index].changes
            if isinstance(change, Change)
        }
        outputs = {storage for name, storage in trace.hidden.items() if name != kind}
        if not out <= inside | {trace.hidden.get(kind)} or not outputs.isdisjoint(out) or trace.output.get(kind) in out:
            raise Unlike("compose: what is offloaded of one block is another's too.")
        copies = trace.fetched.get(kind, frozenset())
        hidden = trace.hidden.get(kind)
        input_ = frozenset[int]() if hidden is None or not _frees(template, kind, hidden) else frozenset({hidden})
        leaves, held = (_sum(trace, each, f"forward of {kind}") for each in (out, input_))
        comes = _sum(trace, copies, f"backward of {kind}")
        found[kind] = Moved(
            out,
            copies,
            leaves.undone,
            comes,
            comes.undone,
            input_,
            input_ <= out,
            held,
            held.undone,
            trace.stored_bytes[kind],
        )
    return found


def _frees(template: Template, kind: str, storage: int) -> bool:
    """Whether the forward of the block frees it."""
    changes = (change for item in template.blocks[kind] for change in template.trace.chunks[item.index].changes)
    return any(isinstance(each, Change) and each.storage == storage and each.bytes < 0 for each in changes)


def waiting_of(template: Template, moved: Mapping[str, Moved], split: frozenset[str]) -> dict[str, Swing]:
    """By kind what of its copies waits for W, where products of weights do."""
    trace = template.trace
    return {
        kind: _sum(
            trace,
            each.copies.intersection(
                storage
                for grad, param in trace.grads.items()
                if param in split and param.startswith(f"{kind}.")
                for storage in trace.made_of.get(grad, ())
            ),
            f"backward of {kind}",
        )
        for kind, each in moved.items()
    }


def _sum(trace: StepTrace, storages: frozenset[int], where: str) -> Swing:
    """All of them come at once."""
    left = [0] * len(GROUPS)
    seen: set[int] = set()
    for chunk in trace.chunks:
        for change in chunk.changes:
            if isinstance(change, Change) and change.storage in storages and change.storage not in seen:
                seen.add(change.storage)
                left[change.group] += change.bytes
    return Swing(tuple(left), tuple(left), where)


class _Leaving(NamedTuple):
    """A block whose storages are on their way out. number: of its forward, of all that the rank has begun. received: whether
    the pipeline holds its input; waits: whether products of weights hold some of them, as their inputs.
    """

    number: int
    task: _Task
    name: str
    kind: str
    received: bool
    waits: bool = False


class Since(NamedTuple):
    """What a task has done: forwards of blocks; how many of other tasks that were leaving are gone; its own that are leaving,
    and how many forwards ago.
    """

    forwards: int
    gone: int
    leaving: tuple[tuple[int, _Leaving], ...]


@dataclass(kw_only=True)
class Moving:
    """moved: by kind of block. waiting: what of each waits for W. late: whether copies end when something waits for them, or
    at once.
    """

    timeline: Timeline
    moved: Mapping[str, Moved]
    waiting: Mapping[str, Swing]
    ahead: int
    late: bool
    _task: _Task = (0, 0)
    _number: int = 0
    _leaving: deque[_Leaving] = field(default_factory=deque)
    _back: set[str] = field(default_factory=set)

    @cached_property
    def leaving(self) -> frozenset[int]:
        """Storages that no forward frees, since they are on their way out."""
        return frozenset[int]().union(*(each.out for each in self.moved.values())) if self.late else frozenset()

    def begin(self, task: _Task) -> None:
        self._task = task
        self._back.clear()

    def enter(self, kind: str, *, received: bool) -> frozenset[int]:
        """The forward of a block begins: copies of those before the one before it are waited for. Returns storages that it
        does not free. received: whether the pipeline holds its input.
        """
        self._number += 1
        while self._leaving and self._leaving[0].number <= self._number - BLOCKS_LEAVING:
            gone = self._leaving.popleft()
            self.timeline.swing(self.moved[gone.kind].gone, gone.name)
            if gone.received:
                self.timeline.swing(self.moved[gone.kind].input, gone.name)
            if gone.waits:
                self.timeline.swing(self.waiting[gone.kind], gone.name)
        return self.leaving | self.moved[kind].input_storages if received and kind in self.moved else self.leaving

    def leave(self, name: str, kind: str, *, received: bool) -> None:
        if self.late and kind in self.moved:
            held = received and self.moved[kind].input_leaves
            self._leaving.append(_Leaving(self._number, self._task, name, kind, held))

    def backward(self, blocks: Sequence[tuple[str, str]], at: int, *, splits: bool) -> frozenset[int]:
        """The backward of the block at that place of its stage begins. Returns storages that it does not free. splits: W
        comes later, and frees what waits for it.
        """
        for name, kind in reversed(blocks[max(0, at - self.ahead) : at + 1]):
            if kind in self.moved and name not in self._back:
                self._back.add(name)
                if self._place(name) is None:  # else it is used where it is
                    self.timeline.swing(self.moved[kind].back, name)
        name, kind = blocks[at]
        if kind not in self.moved:
            return frozenset()
        self.timeline.swing(self.moved[kind].handed, name)
        if (place := self._place(name)) is None:
            return frozenset()
        if splits:
            self._leaving[place] = self._leaving[place]._replace(waits=True)
        return self.moved[kind].copies

    def done(self, name: str, kind: str) -> None:
        """The pipeline lets go of the input of a block that it has received, whose backward is over."""
        if kind not in self.moved:
            return
        if (at := self._place(name)) is None or not self.moved[kind].input_leaves:
            self.timeline.swing(self.moved[kind].without_input, name)
        else:  # it goes with the rest
            self._leaving[at] = self._leaving[at]._replace(received=False)

    def waited(self) -> None:
        """W is over, and has freed what waited for it. What has not left goes with the rest."""
        for at, each in enumerate(self._leaving):
            if each.task == self._task:
                if each.received:
                    self.timeline.swing(self.moved[each.kind].input, each.name)
                if each.waits:
                    self.timeline.swing(self.waiting[each.kind], each.name)
                self._leaving[at] = each._replace(received=False, waits=False)

    def _place(self, name: str) -> int | None:
        """Of the block among those that are leaving."""
        places = (at for at, each in enumerate(self._leaving) if each.task == self._task and each.name == name)
        return next(places, None)

    # ------------------------------------------------------------------------------------- tasks that are alike

    @property
    def state(self) -> tuple[object, ...]:
        """On which it depends what the task does."""
        return tuple((self._number - each.number, each.task == self._task, *each[2:]) for each in self._leaving)

    @property
    def mark(self) -> tuple[int, int]:
        return self._number, len(self._others)

    @property
    def _others(self) -> list[_Leaving]:
        return [each for each in self._leaving if each.task != self._task]

    def since(self, mark: tuple[int, int]) -> Since:
        number, others = mark
        own = tuple((self._number - each.number, each) for each in self._leaving if each.task == self._task)
        return Since(self._number - number, others - len(self._others), own)

    def go_on(self, done: Since) -> None:
        """As if the task had done that; the timeline has it already."""
        self._number += done.forwards
        own = [each._replace(number=self._number - ago, task=self._task) for ago, each in done.leaving]
        self._leaving = deque(sorted([*self._others[done.gone :], *own]))


def most_stored(table: Schedule | None, pp_rank: int, of_stages: Mapping[int, int]) -> int:
    """The most bytes that are away at a time. of_stages: of one microbatch of each stage of the rank."""
    if table is None:
        return sum(of_stages.values())
    now = most = 0
    for row in table.ranks[pp_rank]:
        for task in row.tasks:
            if task.op == "F":
                now += of_stages[task.stage]
                most = max(most, now)
            elif task.op in ("B", "I"):
                now -= of_stages[task.stage]
    return most


def in_memory(resolved: Resolved, stored_bytes: int) -> int:
    """How many of them lie in the memory of the host: of a disk what is staged."""
    policy = resolved.memory.offload
    return stored_bytes if policy is None or policy.to == "host" else min(stored_bytes, policy.staging)
