"""Walk: the step of one rank of pp, chunk by chunk and buffer by buffer, as a timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshkit.parallel.pipeline import Schedule, Task
from meshkit.preflight.estimate._fsdp import Buffers
from meshkit.preflight.estimate._moving import Moving, Since
from meshkit.preflight.estimate._replay import Kept, Swing, Treated
from meshkit.preflight.estimate._template import Item, Template
from meshkit.preflight.estimate._timeline import Timeline
from meshkit.preflight.estimate._tracker import GROUPS
from meshkit.strategy import Shardings

PASSING = GROUPS.index("logits and loss")

# Kinds of rows that make gradients which this kind adds to.
_FILLS = {"F": "F", "B": "BIW", "I": "BI", "W": "BW"}


class Replayed(Protocol):
    """What a chunk does to memory, and what of it waits for W. stays: storages that somebody else frees."""

    def __call__(
        self, item: Item, treated: Treated, stays: frozenset[int] = frozenset()
    ) -> tuple[Swing, Swing | None]: ...


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What a rank runs. stages: (block, its kind) of each of its stages, in order; count: stages of all ranks.

    sharded, experts_sharded: whether FSDP has the dense parameters, and the routed experts, whose names begin with `experts`.
    experts_of: block -> modules of experts that are units. only_hidden: whether nothing else crosses a cut. widened: bytes of
    an accumulated gradient for each of a fresh one. split: weights whose products wait for W. second: parameters of the first
    stage that the last stage, on this rank too, has as well.
    """

    stages: Mapping[int, Sequence[tuple[str, str]]]
    count: int
    shardings: Shardings
    sharded: bool
    experts_sharded: bool
    experts: tuple[str, ...]
    experts_of: Mapping[str, Sequence[str]]
    only_hidden: bool
    widened: int
    split: frozenset[str]
    second: frozenset[str]


@dataclass(kw_only=True)
class Walk:
    rank: Rank
    template: Template
    replayed: Replayed
    timeline: Timeline
    buffers: Buffers
    moving: Moving
    freed: Swing = field(init=False)
    _waiting: dict[tuple[int, int], list[tuple[Item, str]]] = field(default_factory=dict)
    _sent: dict[tuple[int, int], int] = field(default_factory=dict)
    _stepped: set[tuple[str, int]] = field(default_factory=set)  # (kind of row, stage) that ran before
    _again: dict[object, tuple[Swing, str, list[tuple[Item, str]], Since]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.freed = self.template.shares.undone

    # ----------------------------------------------------------------------------------------------- without stages

    def microbatches(self, count: int) -> None:
        """Gradient accumulation. Those between the second and the last are alike."""
        self._microbatch(first=True, last=count == 1)
        if count > 2:
            self._microbatch(first=False, last=False)
        if count > 1:
            self._microbatch(first=False, last=True)

    def _microbatch(self, *, first: bool, last: bool) -> None:
        reduces = last or self.rank.shardings.reduces_every_microbatch
        fresh = first or self.rank.shardings.reduces_every_microbatch
        treated = self._treated(fresh=fresh, own=first, reduces=reduces)
        self.buffers.begin(last=last)
        self.moving.begin((0, 0 if first else 2 if last else 1))
        self._forward(0, treated)
        self._backward(
            0, treated, reduces=reduces, frees=last or self.rank.shardings.frees_parameters, last=last, added=not fresh
        )

    def _treated(self, *, fresh: bool, own: bool, reduces: bool, splits: bool = False) -> Treated:
        """fresh: no unsharded gradients are there; own: nor those of parameters that nothing shards."""

        def kept(sharded: bool) -> Kept:
            if not sharded:
                return "own" if own else "added"
            if not fresh:
                return "added"
            return "reduced" if reduces else "cast" if self.rank.widened > 1 else "own"

        return Treated(
            kept=kept(self.rank.sharded),
            experts_kept=kept(self.rank.experts_sharded),
            experts=self.rank.experts,
            widened=self.rank.widened,
            split=self.rank.split if splits else frozenset(),
            second=self.rank.second,
        )

    def _forward(self, stage: int, treated: Treated) -> None:
        template = self.template
        if stage == 0:
            self._items(template.before, treated)
        elif self.rank.only_hidden:
            self.timeline.swing(template.shares, "")  # each stage makes its own
        for at, (name, kind) in enumerate(self.rank.stages[stage]):
            inner, received = self.rank.experts_of.get(name, ()), stage > 0 and not at
            stays = self.moving.enter(kind, received=received)
            for unit in (name, *inner):
                self.buffers.enter(unit)
            self._chunks(template.blocks[kind], treated, name, stays)
            for unit in (name, *inner):
                self.buffers.leave(unit)
            self.moving.leave(name, kind, received=received)
        if stage == self.rank.count - 1:
            # What the forward made before its blocks is of another stage.
            self._items(
                template.after, treated, stays=self.moving.leaving | (template.locals if stage else frozenset())
            )
        else:
            self.buffers.leave("")
            if stage == 0:
                self.timeline.swing(template.returns, "")

    def _backward(
        self,
        stage: int,
        treated: Treated,
        *,
        reduces: bool,
        frees: bool,
        last: bool,
        added: bool,
        holds: bool = False,
    ) -> list[tuple[Item, str]]:
        """holds: the gradient of the stage's output, to the end. Returns what waits for W."""
        template = self.template
        later: list[tuple[Item, str]] = []

        def done(name: str) -> None:
            self.buffers.done(name, reduces=reduces, frees=frees, last=last, added=added)

        if stage == self.rank.count - 1:
            later += self._items(template.after_backward, treated, done)
        else:
            self.buffers.backward("")
        blocks = self.rank.stages[stage]
        for at, (name, kind) in reversed(tuple(enumerate(blocks))):
            inner = self.rank.experts_of.get(name, ())
            for unit in (name, *inner):
                self.buffers.backward(unit)
            stays = self._of_runtime(stage, name, kind, holds=holds, splits=bool(treated.split))
            stays |= self.moving.backward(blocks, at, splits=bool(treated.split))
            later += self._chunks(template.blocks_backward.get(kind, ()), treated, name, stays)
            if stage and not at and not treated.split:  # else it is held until W
                self.moving.done(name, kind)
            for unit in (*inner, name):
                done(unit)
        if stage == 0 or self.rank.only_hidden:
            self.timeline.swing(self.freed, "")
        if stage == 0:
            later += self._items(template.before_backward, treated, done)
        self.buffers.end(reduces=reduces, frees=frees, last=last, added=added)
        return later

    def _of_runtime(self, stage: int, name: str, kind: str, *, holds: bool, splits: bool) -> frozenset[int]:
        """Storages that the pipeline frees: the gradient of the stage's output; and its input, where that waits for W."""
        blocks, trace = self.rank.stages[stage], self.template.trace
        stays: set[int | None] = set()
        if holds and name == blocks[-1][0]:
            stays.add(trace.incoming.get(kind))
        if splits and stage and name == blocks[0][0]:
            stays.add(trace.hidden.get(kind))
        return frozenset(each for each in stays if each is not None)

    def _chunks(
        self, items: Sequence[Item], treated: Treated, owner: str, stays: frozenset[int] = frozenset()
    ) -> list[tuple[Item, str]]:
        for item in items:
            self.timeline.swing(self.replayed(item, treated, stays)[0], owner)
        return [(item, owner) for item in items] if treated.split else []

    def _items(
        self,
        items: Sequence[Item],
        treated: Treated,
        done: Callable[[str], None] | None = None,
        stays: frozenset[int] = frozenset(),
    ) -> list[tuple[Item, str]]:
        later: list[tuple[Item, str]] = []
        for item in items:
            if item.module not in self.template.blocks:
                if item.edge == "enter":
                    self.buffers.enter(item.module)
                elif item.edge == "leave":
                    self.buffers.leave(item.module)
                elif item.edge == "backward":
                    self.buffers.backward(item.module)
                elif item.edge == "done" and done is not None:
                    done(item.module)
            later += self._chunks([item], treated, item.module, stays)
        return later

    # -------------------------------------------------------------------------------------------------- with stages

    def pipeline(self, table: Schedule, pp_rank: int, inputs: Mapping[int, Crossing]) -> None:
        """inputs: what crosses into each stage."""
        rows = table.ranks[pp_rank]
        posted: set[Task] = set()
        sending: dict[int, tuple[int, tuple[int, int] | None]] = {}

        def source(task: Task) -> tuple[int, int]:
            """(rank, bytes) of what the task needs; rank -1 for nothing."""
            before, after = table.before(task.stage, task.microbatch), table.after(task.stage, task.microbatch)
            if task.op == "F" and before is not None:
                return table.placement[before], inputs[task.stage].forward
            if task.op in ("B", "I") and after is not None:
                return table.placement[after], inputs[after].backward
            return -1, 0

        def post(index: int) -> None:
            for task in rows[index].tasks if index < len(rows) else ():
                rank, size = source(task)
                if rank not in (-1, pp_rank) and task not in posted:
                    posted.add(task)
                    self.timeline.change(PASSING, size, "the loss", "")

        def drop(size: int, of: tuple[int, int] | None) -> None:
            # Until W the received leaf is there, and has the gradient that was sent.
            if of in self._waiting:
                self._sent[of] = size
            else:
                self.timeline.change(PASSING, -size, "the loss", "")

        def send(target: int, size: int, of: tuple[int, int] | None = None) -> None:
            if target != pp_rank:
                if target in sending:
                    drop(*sending[target])
                sending[target] = size, of

        for index, row in enumerate(rows):
            post(index)
            post(index + 1)
            for task in row.tasks:
                self._task(task, source, send, table, inputs)
        for each in sending.values():
            drop(*each)
        self.buffers.end_pipeline()

    def _task(
        self,
        task: Task,
        source: Callable[[Task], tuple[int, int]],
        send: Callable[..., None],
        table: Schedule,
        inputs: Mapping[int, Crossing],
    ) -> None:
        key = task.stage, task.microbatch
        # The runtime has the gradient of the output until its task is over, or its products wait for W.
        rank, size = source(task)
        holds = rank != -1 and task.op == "B"
        later = self._repeated(task, key, holds=holds)
        if task.op == "F":
            after = table.after(task.stage, task.microbatch)
            if after is not None:
                send(table.placement[after], inputs[after].forward)
            return
        if holds:
            self.timeline.change(PASSING, -size, "the loss", "")
        before = table.before(task.stage, task.microbatch)
        if before is not None and task.op != "W":
            send(table.placement[before], inputs[task.stage].backward, key if task.op == "I" else None)
        if task.op == "I":
            self._waiting[key] = later
            if not self.rank.stages[task.stage]:  # no block held the leaf: what follows the blocks has let go of it
                self.timeline.change(PASSING, inputs[task.stage].forward, "the loss", "")
        elif task.op == "W":
            self._waiting.pop(key)
            self.timeline.change(PASSING, -self._sent.pop(key, 0), "the loss", "")
            if task.stage:
                self.timeline.change(PASSING, -inputs[task.stage].forward, "the loss", "")

    def _repeated(self, task: Task, key: tuple[int, int], *, holds: bool) -> list[tuple[Item, str]]:
        """Run the task. From the second of its kind in a stage on, all are alike: parameters and gradients are there."""
        kind = task.op, task.stage
        self.moving.begin(key)
        state = kind, self.moving.state
        if state in self._again:
            swing, owner, later, moved = self._again[state]
            self.timeline.swing(swing, owner)
            self.moving.go_on(moved)
            return later
        start, mark = len(self.timeline.row), self.moving.mark
        fresh = self._stepped.isdisjoint((op, task.stage) for op in _FILLS[task.op])
        self._stepped.add(kind)
        treated = self._treated(fresh=fresh, own=fresh, reduces=False, splits=task.op in ("I", "W"))
        later = []
        if task.op == "F":
            self._forward(task.stage, treated)
        elif task.op in ("B", "I"):
            later = self._backward(
                task.stage, treated, reduces=False, frees=False, last=False, added=not fresh, holds=holds
            )
        else:
            for item, owner in self._waiting[key]:
                waits = self.replayed(item, treated)[1]
                if waits is not None:
                    self.timeline.swing(waits, owner)
            self.moving.waited()
        if not fresh:
            self._again[state] = (*self.timeline.folded(start), later, self.moving.since(mark))
        return later


@dataclass(frozen=True)
class Crossing:
    """Bytes that a stage receives for a microbatch, and that it sends back."""

    forward: int
    backward: int
