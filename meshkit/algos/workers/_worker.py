"""A rollout worker: gets weights and groups from a trainer's job, and writes answers on a mesh of its own job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.algos.dataflow import SOURCE, Sample, StreamWriter, generation_call
from meshkit.algos.rollout import CachePolicy, Sampling
from meshkit.algos.shardcast import Relay
from meshkit.algos.workers._rollouts import answer_of
from meshkit.algos.workers._wire import Link, Rejoin, Unreachable, node_name
from meshkit.data import load_tokenizer
from meshkit.errors import CheckpointError, StepError
from meshkit.mesh import Mesh
from meshkit.models import load_pretrained
from meshkit.step import Run

IDLE_S = 0.2  # between two questions of a worker that has nothing to write


@dataclass
class _Plan:
    """What the first rank learned, for all: groups to begin by data rank, weights to take, whether the run is over."""

    begin: list[list[Sample]]
    weights: tuple[int, Path] | None = None
    done: bool = False
    rejoin: bool = False


class Desk:
    """The first rank's side: talks with the trainer, and gets weights from it or from relays.

    upstreams: addresses of relays, asked before the trainer.
    """

    def __init__(
        self, address: str, folder: Path, *, secret: str, upstreams: tuple[str, ...], timeout_s: float
    ) -> None:
        self._link, self._timeout_s = (
            Link(address, secret=secret, role="rollout worker", patience_s=timeout_s),
            timeout_s,
        )
        self.node, self._writes = node_name(os.getpid()), set[int]()
        self.settings = self._link.ask_patiently("/join", {})
        self._said = {"node": self.node, "life": str(self.settings["life"])}
        origin = f"http://{self._link.host}:{int(self.settings['weights_port'])}"
        # Three versions: one is read while the next two come. Those of another life are others.
        self._relay = Relay([*upstreams, origin], folder / self._said["life"], secret=secret, poll_s=0.5, keep=3)

    def first_weights(self) -> tuple[int, Path]:
        return self._relay.wait(timeout_s=self._timeout_s)

    def newer(self, version: int) -> tuple[int, Path] | None:
        with suppress(CheckpointError):
            return self._relay.wait(newer_than=version, timeout_s=0.0)
        return None

    def give(self, made: list[Sample]) -> bool:
        """Bring a group's answers. Whether they were taken: somebody else may have brought them."""
        group = made[0][SOURCE]
        self._writes.discard(group)
        answers = [answer_of(sample) for sample in made]
        return bool(self._link.ask_patiently("/rollouts", {**self._said, "group": group, "answers": answers})["taken"])

    def ask(self, version: int, rooms: list[int]) -> _Plan:
        """Groups for data ranks that have so much room: one after the other to the one with most."""
        asked = {"version": version, "room": sum(max(room, 0) for room in rooms), "holds": sorted(self._writes)}
        answer = self._link.ask_patiently("/work", {**self._said, **asked})
        begin: list[list[Sample]] = [[] for _ in rooms]
        left = list(rooms)
        for each in answer["groups"]:
            group = int(each["group"])
            if group in self._writes:  # it is in progress here: who had it since is lost
                continue
            to = left.index(max(left))
            left[to] -= 1
            self._writes.add(group)
            begin[to].append({"key": int(each["key"]), "fields": {"prompt_ids": each["prompt_ids"]}, SOURCE: group})
        return _Plan(begin, self.newer(version), bool(answer["done"]))

    def close(self) -> None:
        with suppress(Unreachable, StepError):
            self._link.ask("/leave", self._said)
        self._link.close()
        self._relay.close()


def work(
    mesh: Mesh,
    address: str,
    folder: str | os.PathLike[str],
    *,
    secret: str,
    build: Callable[[Path, Mapping[str, Any]], Run],
    upstreams: tuple[str, ...] = (),
    tokens: int = 8,
    sequences: int | None = None,
    timeout_s: float = 600.0,
    report: Callable[[str], object] = print,
) -> int:
    """Write rollouts for the trainer at `address` until its run is over; returns how many groups of this job it took.

    Every rank of the mesh, which is all of this job, calls it. folder: for weights, on a disk that all its ranks see.
    build: the run of a published folder, on the mesh, by the trainer's settings, without values. upstreams: relays that are
    asked for weights before the trainer. tokens: of each answer between two looks at what the trainer has. sequences: that
    a data rank writes at the same time. timeout_s: how long a trainer may not answer, as while it starts anew. report: gets
    lines, on the first rank.
    Wire: of the first rank, HTTP with the trainer; between ranks that of `Generation`, and two values of the host a look.
    Raises: StepError for a trainer that does not answer, and one that refuses what is sent, or, after validators have not
    passed it, more of it.
    """
    taken, over = 0, False
    while not over:
        with ExitStack() as stack:
            desk = None
            if mesh.rank == 0:
                desk = Desk(address, Path(folder), secret=secret, upstreams=upstreams, timeout_s=timeout_s)
                stack.callback(desk.close)
            joined = mesh.host.broadcast(None if desk is None else (desk.settings, *desk.first_weights()))
            assert joined is not None
            settings, version, path = joined
            run = build(path, settings)
            load_pretrained(run.model, path)
            writer = _writer(run, path, settings, tokens, sequences)
            if version:
                writer.take_weights(version)
            if desk is not None:
                report(f"{desk.node} writes with weights of version {version}")
            of_life, over = _write(mesh, desk, run, writer, version)
            taken += of_life
            if desk is not None:
                why = "the run is over" if over else "the trainer has started anew"
                report(f"{desk.node}: {why}; {taken} groups of this job were taken")
    return taken


def _write(mesh: Mesh, desk: Desk | None, run: Run, writer: StreamWriter, version: int) -> tuple[int, bool]:
    """(how many groups were taken, whether the run is over); not if the trainer has started anew."""
    taken = 0
    while True:
        whole = writer.advance() if writer.busy else []
        told = mesh.host.gather((mesh.data_rank, writer.room, whole))
        plan = None
        if desk is not None:
            assert told is not None
            by_rank = {data_rank: (room, made) for data_rank, room, made in reversed(told)}
            try:
                taken += sum(desk.give(made) for _, groups in by_rank.values() for made in groups)
                plan = desk.ask(version, [by_rank[rank][0] for rank in sorted(by_rank)])
            except Rejoin:
                plan = _Plan([], rejoin=True)
        plan = mesh.host.broadcast(plan)
        assert plan is not None
        if plan.done or plan.rejoin:
            return taken, plan.done
        if plan.weights is not None:
            version, path = plan.weights
            load_pretrained(run.model, path)
            writer.take_weights(version)
        if any(plan.begin):  # on every rank, as ranks agree on what they begin
            writer.begin(plan.begin[mesh.data_rank])
        elif not writer.busy:
            time.sleep(IDLE_S)


def _writer(run: Run, folder: Path, settings: Mapping[str, Any], tokens: int, sequences: int | None) -> StreamWriter:
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings["sampling"].items()
    }
    call = generation_call(
        run,
        load_tokenizer(folder),
        on="worker",
        sampling=Sampling(**given),
        samples=settings["samples"],
        seed=settings["seed"],
        tokens=tokens,
        cache=None if sequences is None else CachePolicy(max_sequences=sequences),
        fingerprints=settings["fingerprints"],
    )
    assert call.writer is not None
    return call.writer
