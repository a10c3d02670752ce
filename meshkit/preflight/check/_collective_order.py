"""Collective order check: all ranks of a group call the same collective next, or a mismatch is named instead of a hang.

Before each collective every rank writes it into the store of the world, and reads what its peers wrote. The store itself
needs no order.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from meshkit.core import _torch
from meshkit.core._torch import TorchDispatchMode, tree_leaves
from meshkit.core.custom_op import watching_bodies
from meshkit.core.waiting import waiting
from meshkit.errors import CheckError
from meshkit.mesh import Mesh
from meshkit.preflight._collectives import BETWEEN_TWO, NAMES, SAME_SIZE, SPACES, WAITS
from meshkit.preflight.check._finding import Finding
from meshkit.preflight.observe import Axes

LOOK_S = 1.0  # between two looks of a waiting rank whether another one has stopped

Outcome = Finding | str | None  # None: it ended well; a text: an error's, "" because of another rank

_runs = itertools.count()  # the same on every rank: all ranks check together


@dataclass(frozen=True)
class Call:
    """A collective of this rank; op "" is the end of the step. size: elements. where: module and pass (forward, backward)."""

    op: str
    axis: str = ""
    size: int = 0
    dtype: str = ""
    module: str = ""
    where: str = ""

    def agrees(self, other: Call) -> bool:
        if self.op not in SAME_SIZE:
            return self.op == other.op
        return (self.op, self.size, self.dtype) == (other.op, other.size, other.dtype)

    def __str__(self) -> str:
        if not self.op:
            return "is done"
        return f"calls {self.op} of {self.size} {self.dtype} over {self.axis} in {self.where or 'no module'}"


class OutOfOrder(CheckError):
    """A mismatch of collectives; carries the finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class CollectiveOrder(TorchDispatchMode):
    """A context that checks the order of collectives. current_module: returns the running module and "module (pass)"."""

    def __init__(self, mesh: Mesh, current_module: Callable[[], tuple[str, str]], timeout_s: float) -> None:
        super().__init__()
        self.current_module, self.timeout_s, self.calls = current_module, timeout_s, list[Call]()
        self._axes, self._rank, self._ranks = Axes(mesh), dist.get_rank(), mesh.ranks
        self._store: Any = PrefixStore(f"meshkit-check/{next(_runs)}", _torch.world_store())
        self._next: Counter[str] = Counter()
        self._groups = {group.group_name: group for group in [mesh.group, *self._axes.groups]}

    @watching_bodies
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        space, _, op = name.partition("::")
        if space in SPACES and op not in WAITS:
            self._call(NAMES.get(op, op), args)
        return func(*args, **(kwargs or {}))

    def _call(self, op: str, args: tuple[Any, ...]) -> None:
        group = _torch.group_of_call(args)
        if group.size() == 1:
            return
        tensor = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), None)
        module, where = self.current_module()
        call = Call(
            op,
            self._axes.of(group),
            0 if tensor is None else tensor.numel(),
            "" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            module,
            where,
        )
        self.calls.append(call)
        # Written before any waiting: a peer that gives up reads here what this rank is stuck in.
        self._store.set(f"at/{self._rank}", pickle.dumps(call))
        if op not in BETWEEN_TWO:
            self._meet(group, call)

    def _meet(self, group: dist.ProcessGroup, call: Call) -> None:
        self._groups[group.group_name] = group
        key = f"{group.group_name}/{self._next[group.group_name]}"
        self._next[group.group_name] += 1
        self._store.set(f"{key}/{self._rank}", pickle.dumps(call))
        for peer in dist.get_process_group_ranks(group):
            if peer != self._rank:
                peer_call = self._wait(f"{key}/{peer}", call, peer)
                if not call.agrees(peer_call):
                    raise OutOfOrder(_finding({self._rank: call, peer: peer_call}))

    def _wait(self, key: str, call: Call, peer: int) -> Call:
        until = time.monotonic() + self.timeout_s
        while True:
            try:
                with waiting(f"rank {peer} to come to {call.op}"):
                    self._store.wait([key], timedelta(seconds=min(LOOK_S, self.timeout_s)))
                return _call(self._store.get(key))
            except RuntimeError:  # not there yet
                self.look()
                if time.monotonic() > until:
                    raise OutOfOrder(_finding({self._rank: call, peer: self._last(peer)}, stuck=True)) from None

    def look(self) -> None:
        """Raises: Stopped where another rank has stopped."""
        if self._store.check(["stopped"]):
            raise Stopped

    def _last(self, rank: int) -> Call:
        return _call(self._store.get(f"at/{rank}")) if self._store.check([f"at/{rank}"]) else Call("")

    def finish(self, outcome: Outcome) -> tuple[dict[int, Outcome], int]:
        """Exchange how the step ended: (outcome of each rank, number of collectives of the first rank)."""
        if outcome is None:
            # One more entry in each group says that no call follows, so that a peer with one more call does not wait in vain.
            for name in self._groups:
                self._store.set(f"{name}/{self._next[name]}/{self._rank}", pickle.dumps(Call("")))
        else:
            self._store.set("stopped", b"1")
        self._store.set(f"end/{self._rank}", pickle.dumps((outcome, len(self.calls))))
        outcomes: dict[int, Outcome] = {}
        calls = len(self.calls)
        until = time.monotonic() + self.timeout_s
        for rank in self._ranks:
            left = max(LOOK_S, until - time.monotonic())
            try:
                with waiting(f"the end of rank {rank}"):
                    self._store.wait([f"end/{rank}"], timedelta(seconds=left))
                outcomes[rank], peer_calls = pickle.loads(self._store.get(f"end/{rank}"))
                calls = peer_calls if rank == self._ranks[0] else calls
            except RuntimeError:
                outcomes[rank] = _finding({self._rank: Call(""), rank: self._last(rank)}, stuck=True)
        return outcomes, calls


class Stopped(CheckError):
    """Another rank has stopped, and says why."""


def _call(packed: bytes) -> Call:
    call: Call = pickle.loads(packed)
    return call


def _finding(calls: dict[int, Call], *, stuck: bool = False) -> Finding:
    """The finding about calls of two ranks that do not match, by rank."""
    first = next((call for _, call in sorted(calls.items()) if call.op), Call(""))
    axis = first.axis
    calls_text = "; ".join(f"rank {rank} {call}" for rank, call in sorted(calls.items()))
    waits = " and neither goes on" if stuck else ""
    return Finding(
        kind="collectives out of order",
        module=first.module,
        axes=(axis,) if axis else (),
        seen=f"{calls_text}{waits}.",
        likely="a collective is called under a condition that differs between ranks (a rank, a value, a number of rows), or "
        "in an order of its own on each (a loop over a set)",
        change="let every rank of the axis make the same calls in the same order, with zeros where it has nothing to send",
    )
