"""Dataflow of trainers whose rollouts are written by workers of other jobs (elastic, fault-tolerant rollout workers).

Workers come and go: what one that is lost was writing is given to another, and the trainers go on.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshkit.algos.dataflow import (
    LATE,
    SOURCE,
    Buffer,
    Call,
    Groups,
    Guard,
    Mailbox,
    Sample,
    Trainers,
    data_ranks,
    refuse_odd_graph,
    to_arrays,
    to_tensors,
)
from meshkit.algos.shardcast import Origin
from meshkit.algos.workers._leases import Leases
from meshkit.algos.workers._server import Read, RolloutServer
from meshkit.algos.workers._unverified import VerifyPolicy
from meshkit.core import _torch
from meshkit.errors import DataError, PlanError
from meshkit.mesh import Mesh

_numbers = itertools.count()
KEPT = 3  # versions of the weights that workers may still get
UNHEARD_S = 10.0  # without a validator, before it is said that groups wait for one


@dataclass(frozen=True, kw_only=True)
class WorkerPolicy:
    """How trainers serve rollout workers.

    port: of the server of groups; weights are at the next one. 0 takes free ones. folder: for the versions that workers may
    still get; what an earlier run left there is deleted. host: the address to serve at; "" is all of this machine's.
    secret: what workers know too. lease_s: a worker that is not heard of for so long is lost. most_groups: of a worker at the
    same time. longest_hold: leases for which it may have one before others may write it too. shard_bytes: of weights.
    tokens: of all answers to a prompt, the most. settings: what else a worker learns when it joins. gives: fields that it
    makes. verify: rollouts are learnt after a validator has passed them, see `VerifyPolicy`.
    Raises: PlanError for a port or seconds out of range, an empty secret, and one that workers and validators share.
    """

    port: int
    folder: str | os.PathLike[str]
    secret: str
    host: str = ""
    lease_s: float = 30.0
    most_groups: int = Leases.most
    longest_hold: int = Leases.longest
    shard_bytes: int = 64 * 2**20
    tokens: int
    settings: Mapping[str, Any]
    gives: Sequence[str]
    verify: VerifyPolicy | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port < (1 << 16) - 1:
            raise PlanError(f"WorkerPolicy(port={self.port}): give one from 1 to 65534, or 0 for free ones.")
        if not self.lease_s > 0:
            raise PlanError(f"WorkerPolicy(lease_s={self.lease_s}): a lease has some seconds.")
        if min(self.most_groups, self.longest_hold) < 1:
            raise PlanError(
                f"WorkerPolicy(most_groups={self.most_groups}, longest_hold={self.longest_hold}): give at least 1 of each."
            )
        if not self.secret:
            raise PlanError("rollout workers are known by a secret, which is empty. Give WorkerPolicy(secret=) a text.")
        if self.verify is not None and self.verify.secret == self.secret:
            raise PlanError(
                "the validators' secret is that of the workers, any of whom could then pass itself. Give validators another."
            )


class WorkerFlow:
    """As a `StreamFlow` whose generators are processes of other jobs, which may be lost, and come, at any time.

    meshes, calls, source, fields, total, staleness, timeout: as of a `StreamFlow`; all calls are on one mesh.
    publish(folder): write the present weights there, for `Relay` and `load_pretrained`. Every rank of the mesh calls it.
    first(sample): what a worker gets of a first sample, as plain JSON. read(sample, answers): what is made of it and of a
    worker's answers; see `Read`.
    The first rank of the mesh has a `RolloutServer` and shardcast's `Origin`. A group whose worker is lost is written anew by
    another, with its newest weights; no token is learnt more than `staleness` updates after the weights that wrote it. With
    `WorkerPolicy.verify` a group is ready when a validator has passed it, and one that fails is written anew by another.
    Wire: each version of the weights to each worker that names the origin first, tokens and log-probabilities back; between
    trainers that of `StreamFlow`.
    Raises: PlanError for calls on several meshes, and without staleness; StepError where rollouts do not come in time.
    Source: INTELLECT-2, Prime Intellect 2025 (2505.07291), whose inference workers join and leave.
    """

    def __init__(
        self,
        meshes: Mapping[str, Mesh],
        calls: Sequence[Call],
        policy: WorkerPolicy,
        *,
        source: Callable[[int], list[Sample]],
        fields: Sequence[str],
        total: int,
        staleness: int,
        publish: Callable[[Path], object],
        first: Callable[[Sample], Mapping[str, Any]],
        read: Callable[[Sample, Sequence[Mapping[str, Any]]], list[Sample]],
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        on = {call.on for call in calls}
        if len(on) != 1 or on - set(meshes):
            raise PlanError(
                f"rollout workers write for one mesh that learns, and calls are on {', '.join(sorted(on))}. Put all on one "
                f"of {', '.join(meshes)}."
            )
        if staleness < 1:
            raise PlanError(f"staleness={staleness}: workers write while trainers learn. Use at least 1.")
        refuse_odd_graph(
            [Call(name="write", on="workers", function=_elsewhere, needs=fields, gives=policy.gives), *calls], fields
        )
        self._mesh, self._calls, self._policy = meshes[on.pop()], list(calls), policy
        self._folder = Path(policy.folder)
        self._source, self._total, self._staleness, self._publish = source, total, staleness, publish
        self._next, self._published = 0, -1
        # [Note: weights that validators need]
        # What waits for a verdict was begun by version v, and step v + staleness does not pass before it was taken: so of the
        # newest version s, v is at least s - staleness, and weights of all tokens are there as long as anybody needs them.
        self._kept = KEPT if policy.verify is None else max(KEPT, staleness + 1)
        self._unheard_since, self._warned = time.monotonic(), False
        self._firsts: dict[int, list[Sample]] = {}
        self._buffer = Buffer(Groups(lambda iteration: len(self._iteration(iteration)), total), staleness)
        self.seconds: dict[str, float] = {}
        """of the calls of the last step on this rank; `wait` is the time until rollouts came, `publish` that of weights"""
        self._is_first = dist.get_rank() == self._mesh.ranks[0]
        (self._group,) = _torch.split(_torch.world(), [[sorted(self._mesh.ranks)]], backend="gloo", timeout=timeout)
        name = f"workers-{next(_numbers)}"
        self._guard, self._mail = Guard(name, timeout=timeout), Mailbox(f"{name}-mail")
        self._server: RolloutServer | None = None
        if self._is_first:
            self._begin_serving(first, read)
        lock = nullcontext() if self._server is None else self._server.lock
        self._trainers = Trainers(
            self._mesh,
            self._buffer,
            self._mail,
            self._guard,
            read=self._read,
            timeout=timeout,
            lock=lock,
            late=self._late,
        )

    def _begin_serving(
        self,
        first: Callable[[Sample], Mapping[str, Any]],
        read: Callable[[Sample, Sequence[Mapping[str, Any]]], list[Sample]],
    ) -> None:
        policy = self._policy
        weights = policy.port + 1 if policy.port else 0
        self._origin = Origin(
            host=policy.host, port=weights, shard_bytes=policy.shard_bytes, keep=self._kept, secret=policy.secret
        )
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._server = RolloutServer(
            self._buffer,
            host=policy.host,
            port=policy.port,
            secret=policy.secret,
            lease_s=policy.lease_s,
            tokens=policy.tokens,
            settings={
                **policy.settings,
                "weights_port": self._origin.port,
                "fingerprints": policy.verify is not None,
            },
            first=lambda group: first(self._sample(group)),
            read=self._reads(read),
            verify=policy.verify,
            most_groups=policy.most_groups,
            longest_hold=policy.longest_hold,
        )

    @property
    def iteration(self) -> int:
        """The next whose training step runs."""
        return self._next

    @property
    def port(self) -> int | None:
        """Of the server, on the first rank; None on all others."""
        return None if self._server is None else self._server.port

    def describe(self) -> str:
        """The calls, their ranks, and where workers come."""
        mesh = self._mesh
        where = "" if self._server is None else f" They come to port {self._server.port}."
        lines = [
            f"{self._calls[0].on}: {len(mesh.ranks)} ranks from {mesh.ranks[0]} on, {len(data_ranks(mesh))} data ranks",
            f"rollouts of workers, tokens at most {self._staleness} updates old.{where}",
        ]
        return "\n".join([*lines, *(f"      {call.name:16} {call.on}" for call in self._calls)])

    def step(self) -> list[Sample]:
        """Run the next training step, as soon as workers have written for it. Returns this rank's samples of it.

        After the last one workers are told that the run is over.
        """
        if self._next >= self._total:
            raise DataError(f"the flow has run its {self._total} iterations. Give a larger total.")
        self.seconds = {"wait": 0.0}
        samples: list[Sample] = []
        if self._group is not None:
            self._give_weights()
            samples = self._trainers.train(self._next, self._calls, self._group, self.seconds)
        self._next += 1
        self._forget()
        if self._server is not None and self._next == self._total:
            self._server.finish()
            self.close()
        if self._group is not None and self._next < self._total:
            self._give_weights()
        return samples

    def close(self) -> None:
        """Workers are not served any more."""
        if self._server is not None:
            self._server.close()
            self._origin.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._server = None

    # ------------------------------------------------------------------------------------------------------- weights

    def _give_weights(self) -> None:
        """Those of this version to the workers, unless they have them."""
        if self._published == self._next:
            return
        assert self._group is not None
        what, began = f"iteration {self._next}, publish", time.perf_counter()
        folder = self._folder / f"{self._next}"
        with self._guard.reports_failure(what):
            self._publish(folder)
            if self._server is not None:
                with self._server.lock:
                    self._server.newest = self._next  # before anybody can have them
                manifest = self._origin.publish(folder, self._next)
                for old in self._folder.iterdir():
                    if int(old.name) <= self._next - self._kept:
                        shutil.rmtree(old)
                with self._server.lock:
                    out = {**self._server.weights, self._next: manifest.digest}
                    self._server.weights = {each: out[each] for each in sorted(out)[-self._kept :]}
        self._published = self._next
        self.seconds["publish"] = self.seconds.get("publish", 0.0) + time.perf_counter() - began

    # ------------------------------------------------------------------------------------------------------- groups

    def _iteration(self, iteration: int) -> list[Sample]:
        if iteration not in self._firsts:
            self._firsts[iteration] = self._source(iteration)
        return self._firsts[iteration]

    def _sample(self, group: int) -> Sample:
        iteration, index = self._buffer.groups.place(group)
        return {**self._iteration(iteration)[index], SOURCE: group}

    def _reads(self, read: Callable[[Sample, Sequence[Mapping[str, Any]]], list[Sample]]) -> Read:
        def read_group(group: int, answers: Sequence[Mapping[str, Any]]) -> list[Sample]:
            assert self._server is not None
            with self._server.lock:
                sample = self._sample(group)
            return read(sample, answers)

        return read_group

    def _read(self) -> None:
        """What came, into the mailbox and the buffer. With the lock."""
        assert self._server is not None
        for group, samples in self._server.arrived():
            self._mail.put(f"group/{group}", samples)
            self._buffer.ready.add(group)
        self._server.leases.expire()
        for refusal in self._server.refusals():
            warnings.warn(f"rollouts of worker {refusal} Another one writes them.", stacklevel=2)
        self._look_for_validators()

    def _look_for_validators(self) -> None:
        """Says once that groups wait and there is no validator; again when one has come and was lost."""
        assert self._server is not None
        now = time.monotonic()
        if not self._server.waiting or self._server.validators():
            self._unheard_since, self._warned = now, False
        elif not self._warned and now - self._unheard_since > UNHEARD_S:
            self._warned = True
            warnings.warn(self._unverified_groups(), stacklevel=2)

    def _unverified_groups(self) -> str:
        assert self._server is not None and self._policy.verify is not None
        address = f"http://{self._policy.host or socket.gethostname()}:{self._server.port}"
        return (
            f"{self._server.waiting} groups of rollouts wait for a validator, and there is none. Start one: python -m "
            f"meshkit rollout-validator {address} --secret-file FILE, with the validators' secret."
        )

    def _late(self) -> str:
        """Why rollouts have not come in time."""
        assert self._server is not None
        if self._server.waiting and not self._server.validators():
            return self._unverified_groups()
        if self._server.waiting:
            waiting = f"{self._server.waiting} groups of rollouts wait for validators, which are slow"
            return f"{waiting}. Start more, or look at what they print."
        return LATE

    def _forget(self) -> None:
        """First samples of groups that all were taken; ranks without a server read of them how many there are, no more."""
        if self._server is None:
            self._firsts = {key: first for key, first in self._firsts.items() if key >= self._next}
            return
        with self._server.lock:
            groups, first = self._buffer.groups, self._buffer.first
            self._firsts = {key: each for key, each in self._firsts.items() if groups.before(key + 1) > first}

    # ------------------------------------------------------------------------------------------------------- resume

    def _ends(self) -> list[int]:
        """How many groups there are up to this iteration, and up to each that may be begun."""
        last = min(self._next + self._staleness + 1, self._total)
        return [self._buffer.groups.before(iteration) for iteration in range(self._next, last + 1)]

    def state_dict(self) -> dict[str, Any]:
        """The iteration, and the groups that are ready: no whole rollout is lost, and others are written anew.

        So are those that wait for a validator: the weights that wrote them are not published again.
        The same on every rank, to be loaded on any mesh, also of another number of workers. Every rank of the world must call
        it, after a `step`. Wire: a broadcast of these, as objects.
        """
        state: dict[str, Any] = {"iteration": self._next, "total": self._total, "staleness": self._staleness}
        state["verified"] = self._policy.verify is not None
        if self._server is not None:
            with self._server.lock:
                self._read()
                ready = {group: self._mail.get(f"group/{group}") for group in sorted(self._buffer.ready)}
                state["ready"] = {group: [to_tensors(each) for each in samples] for group, samples in ready.items()}
                state["buffer"] = {"first": self._buffer.first, "taken": sorted(self._buffer.taken)}
                state["begun"] = dict(self._buffer.begun)
                state["given"] = self._server.leases.next
                state["ends"] = self._ends()
        told = [state]
        dist.broadcast_object_list(told, src=self._mesh.ranks[0])
        return told[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, with the weights of its iteration.

        A flow that verifies has what is ready written anew if the saved one did not verify.
        Raises: DataError for one of a larger staleness, whose rollouts may be older than this flow says, of other first
        samples, of more iterations where groups of them were begun, and of a `StreamFlow`.
        """
        if "given" not in state:
            raise DataError(
                "the saved flow had no rollout workers. Go on without them, or begin anew in another folder."
            )
        if state["staleness"] > self._staleness:
            raise DataError(
                f"the saved flow had tokens of at most {state['staleness']} updates ago, this one has {self._staleness}. "
                "Give at least that staleness."
            )
        self._next = state["iteration"]
        begun = max([state["given"], *state["begun"].values()])
        if begun > self._buffer.groups.before(self._total):
            raise DataError(
                f"the saved flow had {state['total']} iterations and has begun {begun} groups, of which {self._total} "
                "iterations have fewer. Give as many as it had."
            )
        if (ends := self._ends()) != state["ends"][: len(ends)]:
            raise DataError(
                f"the saved flow had groups up to {state['ends']} in iterations from {self._next} on, and this one has up to "
                f"{ends}. Give as many prompts as it had."
            )
        if self._server is None:
            return
        with self._server.lock:
            buffer, leases = self._buffer, self._server.leases
            buffer.first, buffer.taken = state["buffer"]["first"], set(state["buffer"]["taken"])
            ready = state["ready"] if self._policy.verify is None or state.get("verified") else {}
            buffer.begun, buffer.ready = dict(state["begun"]), set(ready)
            for group, samples in ready.items():
                self._mail.put(f"group/{group}", [to_arrays(each) for each in samples])
            buffer.step, leases.next = self._next, state["given"]
            had = buffer.taken | buffer.ready
            leases.free = [group for group in range(buffer.first, leases.next) if group not in had]


def _elsewhere(samples: list[Sample]) -> None:
    """What stands for the workers where the graph of calls is looked at."""
    raise AssertionError("workers have no function here")
