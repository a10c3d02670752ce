"""Streaming dataflow (fully asynchronous RL): generators write without a stop, trainers learn from what is ready.

Generators, the ranks of one mesh, look between tokens at how far training is, take new weights there, and begin what the
buffer's rule allows. Trainers, the ranks of another mesh, take whole groups of rollouts from the buffer, in order.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshkit.algos.dataflow._buffer import Buffer, Groups
from meshkit.algos.dataflow._call import SOURCE, Call, Sample, Sync, to_arrays, to_tensors
from meshkit.algos.dataflow._exchange import DataRanks
from meshkit.algos.dataflow._flow import data_ranks
from meshkit.algos.dataflow._guard import Guard
from meshkit.algos.dataflow._mailbox import Mailbox
from meshkit.algos.dataflow._program import refuse_odd_graph
from meshkit.algos.dataflow._stream_call import StreamCall
from meshkit.algos.dataflow._trainers import LOOK_S, PAUSE_S, Trainers, timed
from meshkit.core import _torch
from meshkit.errors import DataError, PlanError
from meshkit.mesh import Mesh

_numbers = itertools.count()


class StreamFlow:
    """As a `Flow` of a mesh that writes and a mesh that learns, on other ranks, without steps that both walk in turn.

    meshes, source, fields, total, timeout: as of a `Flow`; an iteration is one training step, and has as many groups as
    `source` gives first samples. write: what makes a group of each. calls: on the mesh of `write` those of the rollout
    stage, of groups that have become whole; on the other mesh those that learn. syncs: from the trainers' to the generators',
    after each step, between two tokens.
    staleness: the most updates between the weights that write a token and those that learn from it, at least 1. A training
    step takes the first groups in order that are ready, not always those of its own iteration; see `Buffer`.
    Collective: every rank of the world makes the same flow and calls `step`, which on generators returns when the trainers
    have finished theirs. Ranks of a mesh meet in the order of their own program; the two meet for syncs alone, to which the
    trainers are on their way when generators come. So no speed of either can lead to a deadlock.
    Wire: between two advances of generators an all-reduce of some numbers over them and a request to the store; whole groups
    go through the store, once in and once out for each rank that learns from them; at each step a broadcast of numbers over
    the trainers, and a barrier of all for the syncs.
    Raises: PlanError for meshes that share ranks, and for a graph that cannot run; StepError as `Flow.step`.
    Source: AReaL 2025 (2505.24298) for the bound at the beginning of a group; PipelineRL 2025 (2509.19128).
    """

    def __init__(
        self,
        meshes: Mapping[str, Mesh],
        write: StreamCall,
        calls: Sequence[Call],
        *,
        source: Callable[[int], list[Sample]],
        fields: Sequence[str],
        total: int,
        syncs: Sequence[Sync],
        staleness: int,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        learners = {call.on for call in calls if call.stage == "train"}
        _refuse_odd_meshes(meshes, write, calls, learners, staleness)
        first = Call(name=write.name, on=write.on, function=_written, needs=write.needs, gives=write.gives)
        refuse_odd_graph([first, *calls], fields)
        self._write, self._writes, self._learns = write, write.on, learners.pop()
        self._meshes, self._syncs, self._total, self._staleness = dict(meshes), list(syncs), total, staleness
        self._judges = [call for call in calls if call.on == self._writes]
        self._trains = [call for call in calls if call.on == self._learns]
        self._source = source
        self._data_ranks: dict[str, DataRanks] = {
            name: data_ranks(meshes[name]) for name in (self._writes, self._learns)
        }
        self._rank = dist.get_rank()
        self._next = self._begun = 0
        self._firsts: dict[int, list[Sample]] = {}
        self._buffer = Buffer(Groups(lambda iteration: len(self._first(iteration)), total), staleness)
        self.seconds: dict[str, float] = {}
        """of the calls of the last step on this rank; `wait` is the time until rollouts, or other ranks, came"""
        ranks = [sorted(meshes[name].ranks) for name in (self._writes, self._learns)]
        parts = [[ranks[0]], [ranks[1]], [sorted({*ranks[0], *ranks[1]})]]
        groups = _torch.split(_torch.world(), parts, backend="gloo", timeout=timeout)
        self._writers, self._trainers, self._both = groups
        name = f"stream-{next(_numbers)}"
        self._guard, self._mail = Guard(name, timeout=timeout), Mailbox(f"{name}-mail")
        self._taken = Trainers(
            meshes[self._learns], self._buffer, self._mail, self._guard, read=self._read, timeout=timeout
        )

    @property
    def iteration(self) -> int:
        """The next whose training step runs."""
        return self._next

    def describe(self) -> str:
        """The calls, their meshes and ranks."""
        lines = [
            f"{name}: {len(mesh.ranks)} ranks from {mesh.ranks[0]} on, {len(self._data_ranks[name])} data ranks"
            for name, mesh in self._meshes.items()
            if name in self._data_ranks
        ]
        calls = [f"      {self._write.name:16} {self._write.on}"]
        calls += [f"      {call.name:16} {call.on}" for call in (*self._judges, *self._trains)]
        return "\n".join([*lines, f"streaming, tokens at most {self._staleness} updates old:", *calls])

    def step(self) -> list[Sample]:
        """Run the next training step. Returns this rank's samples of it; of generators those that became whole."""
        if self._next >= self._total:
            raise DataError(f"the flow has run its {self._total} iterations. Give a larger total.")
        self.seconds = {"wait": 0.0}
        samples: list[Sample] = []
        if self._rank in self._meshes[self._learns].ranks:
            samples = self._train()
        elif self._rank in self._meshes[self._writes].ranks:
            samples = self._generate()
        self._next += 1
        self._firsts = {
            key: first for key, first in self._firsts.items() if self._buffer.groups.before(key + 1) > self._begun
        }
        return samples

    # -------------------------------------------------------------------------------------------------- trainers

    def _train(self) -> list[Sample]:
        samples = self._taken.train(self._next, self._trains, self._group(self._trainers), self.seconds)
        if self._is_first(self._learns):
            self._mail.put(f"trained/{self._next}", True)
        self._sync()
        return samples

    def _read(self) -> None:
        for version, begun, ready in self._mail.new():
            if begun:
                self._buffer.begun[version] = max(begun, self._buffer.begun.get(version, 0))
            self._buffer.ready |= set(ready)

    # -------------------------------------------------------------------------------------------------- generators

    def _generate(self) -> list[Sample]:
        """Write until the trainers have finished the step."""
        writer, finished, whole = self._write.writer, list[Sample](), list[list[Sample]]()
        assert writer is not None
        ranks, here = self._data_ranks[self._writes], self._meshes[self._writes].data_rank
        what, looked = f"iteration {self._next}, call {self._write.name}", time.monotonic()
        while True:
            # One message between advances: whether training is done with the step, whether a rank has something whole, and
            # how much each may begin.
            numbers = torch.zeros(2 + len(ranks), dtype=torch.int64)
            if self._is_first(self._writes):
                numbers[0] = self._mail.has(f"trained/{self._next}")
                if time.monotonic() - looked > LOOK_S:
                    looked = time.monotonic()
                    self._guard.raise_failure()
            numbers[1], numbers[2 + here] = len(whole), writer.room
            self._guard.meet(what, self._group(self._writers), numbers)
            trained, any_whole, *rooms = numbers.tolist()
            if any_whole:
                finished += self._finish(whole)
            if trained:
                break
            with self._guard.reports_failure(what):
                began = time.perf_counter()
                assigned = self._assign(rooms)
                if any(assigned):  # on every rank, as ranks agree on what they begin
                    writer.begin(assigned[here])
                whole = writer.advance()
                self._add_seconds(self._write.name, time.perf_counter() - began)
            if not writer.busy and not whole:
                time.sleep(PAUSE_S)
        self._sync()
        if self._next + 1 < self._total:
            writer.take_weights(self._next + 1)
        return finished

    def _assign(self, rooms: list[int]) -> list[list[Sample]]:
        """The first samples that each data rank begins now: one after the other to the one with most room."""
        assigned: list[list[Sample]] = [[] for _ in rooms]
        before, limit = self._begun, self._buffer.limit(self._next)
        while self._begun < limit and max(rooms) > 0:
            to = rooms.index(max(rooms))
            iteration, index = self._buffer.groups.place(self._begun)
            assigned[to].append({**self._first(iteration)[index], SOURCE: self._begun})
            rooms[to] -= 1
            self._begun += 1
        if self._begun > before and self._is_first(self._writes):
            self._mail.append((self._next, self._begun, []))
        return assigned

    def _finish(self, whole: list[list[Sample]]) -> list[Sample]:
        """Run the calls of the rollout stage on whole groups, perhaps none, and put them into the buffer."""
        groups = [made[0][SOURCE] for made in whole]
        samples = [sample for made in whole for sample in made]
        for call in self._judges:
            samples = timed(call, samples, f"iteration {self._next}, call {call.name}", self._guard, self.seconds)
        if groups and self._is_first_of_data_rank(self._writes):
            for group in groups:
                self._mail.put(f"group/{group}", [sample for sample in samples if sample[SOURCE] == group])
            self._mail.append((self._next, 0, groups))
        return samples

    # -------------------------------------------------------------------------------------------------- both

    def _sync(self) -> None:
        """Weights from trainers to generators, which have come between two tokens; after the last step nobody reads them."""
        if self._next + 1 == self._total:
            return
        for sync in self._syncs:
            what, began = f"iteration {self._next}, sync {sync.name}", time.perf_counter()
            self._guard.meet(what, self._group(self._both))
            self.seconds["wait"] += time.perf_counter() - began
            with self._guard.reports_failure(what):
                began = time.perf_counter()
                sync.function()
                self._add_seconds(sync.name, time.perf_counter() - began)

    def _add_seconds(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _first(self, iteration: int) -> list[Sample]:
        if iteration not in self._firsts:
            self._firsts[iteration] = self._source(iteration)
        return self._firsts[iteration]

    def _is_first(self, name: str) -> bool:
        return self._rank == self._meshes[name].ranks[0]

    def _is_first_of_data_rank(self, name: str) -> bool:
        return any(self._rank == ranks[0] for ranks in self._data_ranks[name])

    @staticmethod
    def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        assert group is not None
        return group

    # -------------------------------------------------------------------------------------------------- resume

    def state_dict(self) -> dict[str, Any]:
        """The iteration, groups that are ready, and what is written of others, with the versions of their tokens.

        The same on every rank, to be loaded on any meshes: no rollout is lost. Every rank must call it, after a `step`.
        Wire: one all-gather of these, as objects.
        """
        local: dict[str, Any] = {"ready": {}, "parts": [], "writer": {}, "buffer": {}, "begun": {}}
        if self._both is not None:
            self._guard.meet(f"iteration {self._next}, state", self._both)  # all that is whole is in the buffer
        if self._is_first(self._learns):
            self._read()
            ready = {group: self._mail.get(f"group/{group}") for group in sorted(self._buffer.ready)}
            local["ready"] = {group: [to_tensors(each) for each in samples] for group, samples in ready.items()}
            local["buffer"] = {"first": self._buffer.first, "taken": sorted(self._buffer.taken)}
            local["begun"] = dict(self._buffer.begun)
        if self._is_first_of_data_rank(self._writes):
            assert self._write.writer is not None
            state = self._write.writer.state_dict()
            local["parts"] = state.pop("parts")
            local["writer"] = state
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, local)
        state = {"iteration": self._next, "total": self._total, "staleness": self._staleness}
        for name in ("ready", "writer", "buffer", "begun"):
            state[name] = {key: value for of_rank in by_rank for key, value in of_rank[name].items()}
        parts = [part for of_rank in by_rank for part in of_rank["parts"]]
        return {**state, "parts": sorted(parts, key=lambda part: part[SOURCE])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, with the weights of its iteration on both meshes.

        Raises: DataError for one of a larger staleness, whose rollouts may be older than this flow says.
        """
        if state["staleness"] > self._staleness:
            raise DataError(
                f"the saved flow had tokens of at most {state['staleness']} updates ago, this one has {self._staleness}. "
                "Give at least that staleness."
            )
        self._next = state["iteration"]
        self._buffer.first, self._buffer.taken = state["buffer"]["first"], set(state["buffer"]["taken"])
        self._buffer.begun = dict(state["begun"])
        self._begun = max([self._buffer.first, *self._buffer.begun.values()])
        if self._begun > self._buffer.groups.before(self._total):
            raise DataError(
                f"the saved flow had {state['total']} iterations and has begun {self._begun} groups, of which {self._total} "
                "iterations have fewer. Give as many as it had."
            )
        if self._is_first(self._learns):
            self._buffer.ready = set(state["ready"])
            for group, samples in state["ready"].items():
                self._mail.put(f"group/{group}", [to_arrays(each) for each in samples])
        if self._rank in self._meshes[self._writes].ranks:
            assert self._write.writer is not None
            here, ranks = self._meshes[self._writes].data_rank, len(self._data_ranks[self._writes])
            parts = state["parts"][here::ranks]
            self._write.writer.load_state_dict({**state["writer"], "parts": parts})


def _written(samples: list[Sample]) -> list[Sample]:
    """What stands for the writer where the graph of calls is looked at."""
    raise AssertionError("a StreamCall has no function")


def _refuse_odd_meshes(
    meshes: Mapping[str, Mesh], write: StreamCall, calls: Sequence[Call], learners: set[str], staleness: int
) -> None:
    for name in {write.on, *(call.on for call in calls)}:
        if name not in meshes:
            raise PlanError(f"a call is on mesh {name!r}, which is not there. There are {', '.join(meshes)}.")
    others = {call.on for call in calls} - {write.on} - learners
    if len(learners) != 1 or others or write.on in learners:
        raise PlanError(
            f"a stream has a mesh that writes and one that learns; here {write.on!r} writes, and calls are on "
            f"{', '.join(sorted({call.on for call in calls}))}. Put rewards on one of the two, and what learns on one other."
        )
    if common := set(meshes[write.on].ranks) & set(meshes[next(iter(learners))].ranks):
        raise PlanError(
            f"ranks {sorted(common)} both write and learn, so nothing runs at the same time. Use a Flow, or "
            "init_mesh(ranks=) to give each mesh its own."
        )
    if staleness < 1:
        raise PlanError(f"staleness={staleness}: a stream writes while it learns. Use at least 1, or a Flow.")
