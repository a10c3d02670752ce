"""The dataflow runner: each rank runs the rows it takes part in, and stores the samples it has."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange

from meshkit.algos.dataflow._call import SOURCE, Call, Sample, Sync, run_call, to_arrays, to_tensors
from meshkit.algos.dataflow._exchange import DataRanks, Exchange, merge, share
from meshkit.algos.dataflow._guard import Guard
from meshkit.algos.dataflow._program import Row, program
from meshkit.core import _torch
from meshkit.errors import DataError, PlanError
from meshkit.mesh import Mesh

_numbers = itertools.count()


class Flow:
    """An algorithm made of calls of models, on meshes of the same or of different ranks.

    meshes: by the names that calls have in `on`; every rank makes all of them, perhaps by `init_mesh(..., ranks=...)`.
    calls: in an order in which they can run. syncs: weight syncs from mesh to mesh after each train stage.
    source(iteration): the first samples of an iteration, the same list on every rank. Each mesh splits them over its data
    ranks in consecutive even parts. The field `source` is added, the index in the list; all samples with one source, such as
    the answers to one prompt, stay on one data rank.
    fields: those of the first samples. total: iterations of the whole run, after which no rollouts are made ahead.
    staleness: how many iterations the rollout stage runs ahead of the train stage, with parameters older by as many; on
    meshes that do not overlap, both run at the same time.
    timeout: of one row, in which ranks may wait for others; see `Guard`.
    Collective: every rank of the world makes the same flow and calls `step`, also those without any call.
    Wire: for each row a barrier of its ranks; for fields that are needed on another mesh two all-to-alls.
    Raises: PlanError for a graph that cannot run; StepError from `step` where a rank does not come.
    """

    def __init__(
        self,
        meshes: Mapping[str, Mesh],
        calls: Sequence[Call],
        *,
        source: Callable[[int], list[Sample]],
        fields: Sequence[str],
        total: int,
        syncs: Sequence[Sync] = (),
        staleness: int = 0,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        for what, name in [(f"call {call.name!r}", call.on) for call in calls] + [
            (f"sync {sync.name!r}", end) for sync in syncs for end in (sync.source, sync.destination)
        ]:
            if name not in meshes:
                raise PlanError(f"{what} is on mesh {name!r}, which is not there. There are {', '.join(meshes)}.")
        self._meshes, self._calls, self._syncs = dict(meshes), {call.name: call for call in calls}, list(syncs)
        self._source, self._fields, self._total, self._staleness = source, tuple(fields), total, staleness
        self._data_ranks = {name: data_ranks(mesh) for name, mesh in meshes.items()}
        self._rank = dist.get_rank()
        self._next = self._made = 0
        self._stored: dict[int, dict[str, list[Sample]]] = {}
        self._sources: dict[int, int] = {}
        self.seconds: dict[str, float] = {}
        """of each row of the last step on this rank; `wait` is the time until other ranks came"""
        rows = self.program(range(2))  # checks the graph
        ends = sorted({frozenset(self._ranks_of(row)) for row in rows}, key=sorted)
        # gloo: samples are on the host, and a barrier must not wait for work that is queued on the device. None where this
        # rank is not in the group, which it never uses then.
        groups = _torch.split(_torch.world(), [[sorted(ranks)] for ranks in ends], backend="gloo", timeout=timeout)
        self._groups: dict[frozenset[int], Any] = dict(zip(ends, groups, strict=True))
        self._guard = Guard(f"flow-{next(_numbers)}", timeout=timeout)

    @property
    def iteration(self) -> int:
        """The next whose train stage runs."""
        return self._next

    def program(self, iterations: range, made: int = 0) -> list[Row]:
        """The rows of these iterations, for all ranks; `made`: iterations that have their rollouts. No communication."""
        calls = list(self._calls.values())
        options: dict[str, Any] = {"total": self._total, "staleness": self._staleness, "made": made}
        return list(program(calls, self._syncs, self._fields, iterations=iterations, **options))

    def step(self) -> list[Sample]:
        """Run the next iteration to the end of its train stage.

        Returns this rank's samples of it, on the mesh of the last call that this rank takes part in; [] without one.
        """
        if self._next >= self._total:
            raise DataError(f"the flow has run its {self._total} iterations. Give a larger total.")
        self.seconds = {"wait": 0.0}
        # Every rank walks the same program and runs its own rows of it: the common order is what rules out deadlock.
        for row in self.program(range(self._next, self._next + 1), self._made):
            if self._rank in self._ranks_of(row):
                self._run(row)
        samples_by_mesh = self._stored.pop(self._next, {})
        self._sources.pop(self._next, None)
        self._next += 1
        self._made = min(self._next + self._staleness, self._total)
        used = [call.on for call in self._calls.values() if call.on in samples_by_mesh]
        return samples_by_mesh[used[-1]] if used else []

    def _run(self, row: Row) -> None:
        what = f"iteration {row.iteration}, {row.kind} {row.name}"
        began = time.perf_counter()
        group = self._groups[frozenset(self._ranks_of(row))]
        self._guard.meet(what, group)
        met = time.perf_counter()
        with self._guard.reports_failure(what):
            if row.kind == "sync":
                next(sync for sync in self._syncs if sync.name == row.name).function()
            elif row.kind == "send":
                self._send(row, group, what)
            else:
                self._call(self._calls[row.name], row.iteration, what)
        self.seconds["wait"] += met - began
        self.seconds[row.name] = self.seconds.get(row.name, 0.0) + time.perf_counter() - met

    def _call(self, call: Call, iteration: int, what: str) -> None:
        returned = run_call(call, self._samples(iteration, call.on), what)
        if returned is None:
            return
        # The call's samples take the place of those it was given: it may have dropped some, or made several of one.
        self._stored[iteration][call.on] = returned

    def _send(self, row: Row, group: dist.ProcessGroup, what: str) -> None:
        samples = self._samples(row.iteration, row.source) if self._is_on(row.source) else []
        exchange = Exchange(self._data_ranks[row.source], self._data_ranks[row.destination], group)
        received = exchange.send(samples, row.fields, self._number_of_sources(row.iteration))
        if self._is_on(row.destination):
            present = self._samples(row.iteration, row.destination)
            self._stored[row.iteration][row.destination] = merge(present, received, what)

    def _samples(self, iteration: int, mesh: str) -> list[Sample]:
        """This rank's samples on the mesh; at first its share of the iteration's first samples."""
        samples_by_mesh = self._stored.setdefault(iteration, {})
        if mesh not in samples_by_mesh:
            first = self._source(iteration)
            missing = [name for name in self._fields if any(name not in sample for sample in first)]
            if missing:
                raise DataError(f"the source's samples of iteration {iteration} have no {', '.join(missing)}.")
            indices = share(len(first), self._data_ranks[mesh], self._rank)
            self._sources[iteration] = len(first)
            samples_by_mesh[mesh] = [{**first[index], SOURCE: index} for index in indices]
        return samples_by_mesh[mesh]

    def _number_of_sources(self, iteration: int) -> int:
        # A rank that has no samples of the iteration yet still needs their number: shares are counted in it.
        if iteration not in self._sources:
            self._sources[iteration] = len(self._source(iteration))
        return self._sources[iteration]

    def _is_on(self, mesh: str) -> bool:
        return self._rank in self._meshes[mesh].ranks

    def _ranks_of(self, row: Row) -> set[int]:
        return {*self._meshes[row.source].ranks, *self._meshes[row.destination].ranks}

    def describe(self) -> str:
        """The calls, their meshes and ranks, and the rows of one iteration in the middle of the run."""
        lines = [
            f"{name}: {len(mesh.ranks)} ranks from {mesh.ranks[0]} on, {len(self._data_ranks[name])} data ranks"
            for name, mesh in self._meshes.items()
        ]
        middle = min(max(self._total - self._staleness - 2, 0), 1)
        lines += [
            f"one iteration, rollouts {self._staleness} ahead:",
            *map(str, self.program(range(middle, middle + 1), middle + self._staleness)),
        ]
        return "\n".join(lines)

    # -------------------------------------------------------------------------------------------------- resume

    def state_dict(self) -> dict[str, Any]:
        """The iteration, and the pending samples of rollouts made ahead; the same on every rank, to be loaded on any meshes.

        Every rank must call it. Wire: one all-gather of the pending samples, as objects.
        """
        # Of the ranks of a data rank, which have the same samples, the first gives them.
        local = {
            iteration: {
                mesh: samples
                for mesh, samples in samples_by_mesh.items()
                if self._rank == next(ranks[0] for ranks in self._data_ranks[mesh] if self._rank in ranks)
            }
            for iteration, samples_by_mesh in self._stored.items()
        }
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, local)
        pending: dict[int, dict[str, list[Sample]]] = {}
        for of_rank in by_rank:
            for iteration, samples_by_mesh in of_rank.items():
                for mesh, samples in samples_by_mesh.items():
                    pending.setdefault(iteration, {}).setdefault(mesh, []).extend(map(to_tensors, samples))
        for samples_by_mesh in pending.values():
            for samples in samples_by_mesh.values():
                # By source, as `share` splits: a mesh of another size then takes its part.
                samples.sort(key=lambda sample: sample[SOURCE])
        return {"iteration": self._next, "made": self._made, "staleness": self._staleness, "pending": pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. Raises: DataError for one of another staleness, which has other samples pending."""
        if state["staleness"] != self._staleness:
            raise DataError(
                f"the saved flow ran its rollouts {state['staleness']} iterations ahead, this one {self._staleness}. "
                "Give the same staleness."
            )
        self._next, self._made = state["iteration"], state["made"]
        self._stored, self._sources = {}, {}
        for iteration, samples_by_mesh in state["pending"].items():
            sources = self._number_of_sources(iteration)
            for mesh, samples in samples_by_mesh.items():
                indices = share(sources, self._data_ranks[mesh], self._rank)
                if self._is_on(mesh):
                    local = [to_arrays(sample) for sample in samples if sample[SOURCE] in indices]
                    self._stored.setdefault(iteration, {})[mesh] = local


def data_ranks(mesh: Mesh) -> DataRanks:
    """For each data rank of the mesh the ranks of the world that have its samples: all of pp, cp and tp."""
    spec = mesh.spec
    ranks = torch.tensor(mesh.ranks)
    data = spec.dp_replicate * spec.dp_shard
    by_data_rank: list[list[int]] = rearrange(
        ranks, "(pp data inner) -> data (pp inner)", pp=spec.pp, data=data
    ).tolist()
    return by_data_rank
