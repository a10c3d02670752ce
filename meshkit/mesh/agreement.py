"""Agreement: in the first message of each call ranks say what they do and with what, and one that differs is named.

Every call in which ranks meet (a step, an evaluation, clipping, a save, a load) begins with an all-reduce over the mesh, of
the same form in each: what the call sums anyway, and two numbers more. Ranks that make different calls meet in it too, and
learn that, instead of waiting for each other in messages that do not match.
"""

from __future__ import annotations

import hashlib
import math
import socket
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core import _torch
from meshkit.core.hashing import hash64, signed64
from meshkit.core.to_device import HOST, Arriving, copy_to_host, to_device
from meshkit.core.waiting import waiting
from meshkit.errors import AgreementError
from meshkit.mesh._differences import Call, Fact, Scope, Told, difference
from meshkit.mesh.groups import group_axes
from meshkit.mesh.spec import MeshSpec

if TYPE_CHECKING:
    from meshkit.mesh.mesh import Mesh

NUMBERS = 3
"""that a meeting sums besides"""
MEETING_BYTES = 8 * (2 + NUMBERS)
LAG = 4  # meetings, more than a step has; see [Note: when a meeting is looked at]
OTHERS = timedelta(seconds=20)  # for the other ranks to say what they have, once all know that some differ
SHOWN = 200  # characters of a value; of a longer one its hash besides
SAMPLE = 1 << 20  # elements of a tensor of floats that are looked at

# [Note: one number says whether any rank differs]
# Each rank multiplies a hash of what it has by a number of its own, drawn so that those of all ranks that must agree sum to
# zero modulo 2^bits. So the sum over these ranks is zero where their hashes are equal, and by chance in one of 2^bits cases
# where they are not. Such sums add up: facts that all ranks share, those of the ranks of a stage, and those of ranks with the
# same rows travel in one number, whatever groups there are, and every rank learns of every difference in the same message.
# The numbers are whole and their sum is below 2^53 (with those of up to 16 tensors on devices), so fp64 adds them exactly, in
# any order.

# [Note: when a meeting is looked at]
# On the host at once, and everywhere in the first meeting of each kind. On a device the host would wait for all that is
# queued there, so it looks some meetings later, when the number has long come: a difference that appears in a later step is
# named in the next one, or, if its messages do not match, by the watchdog, whose thread looks where the main thread waits
# (`open_difference`). The same number of meetings on every rank, not
# when the number is there: all ranks raise at the same place.


@dataclass
class _Scope:
    """coefficient: this rank's, of [Note: one number says whether any rank differs]. groups: of ranks of the mesh."""

    groups: list[list[int]]
    coefficient: int


_AXES: dict[Scope, tuple[str, ...]] = {
    "mesh": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    "stage": ("dp_replicate", "dp_shard", "cp", "tp"),
    "rows": ("pp", "cp", "tp"),
}
# By name of the group, which meshes of the same ranks share. Their sum over ranks travels too: it names this meeting and no
# other on every rank, also where an error has let ranks make different numbers of them.
_meetings = Counter[str]()
_every: WeakSet[Agreement] = WeakSet()


class Agreement:
    """What the ranks of a mesh have said that they do, and the meetings in which that is compared.

    alone: nobody is there to differ, on one rank or in a fake world.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._bits = mesh, 48 - (mesh.spec.world_size - 1).bit_length()
        self.alone = mesh.spec.world_size == 1 or _torch.is_fake_group(mesh.group)
        self._scopes = {} if self.alone else {scope: _scope(scope, mesh.spec, mesh.rank, self._bits) for scope in _AXES}
        self._calls: list[Call] = []  # since the last meeting
        self._open: deque[tuple[list[Call], Arriving]] = deque()  # meetings that nobody has looked at
        self._kinds: set[str] = set()  # of meetings that were
        _every.add(self)

    def note(
        self,
        what: str,
        facts: Mapping[str, object] | None = None,
        *,
        stage: Mapping[str, object] | None = None,
        rows: Mapping[str, object] | None = None,
    ) -> None:
        """Say what this rank does, to be compared in the next meeting.

        facts: what every rank of the mesh must have alike, by name; stage: those of the same pipeline stage; rows: those that
        differ only in pp, cp or tp, and read the same rows. Tensors are compared by their values, all else by its repr.
        """
        if not self.alone:
            given: dict[Scope, Mapping[str, object]] = {"mesh": facts or {}, "stage": stage or {}, "rows": rows or {}}
            told = {
                scope: {name: _told(value) for name, value in each.items()}
                for scope, each in given.items()
                if self._scopes[scope].coefficient  # else this rank is the only one that has them
            }
            self._calls.append(Call(what, _caller(), told))

    def meet(
        self,
        what: str,
        *numbers: Tensor,
        facts: Mapping[str, object] | None = None,
        stage: Mapping[str, object] | None = None,
        rows: Mapping[str, object] | None = None,
    ) -> tuple[Tensor, ...]:
        """`note`, then compare with all ranks what each has noted since the last meeting; returns the numbers' sums, fp64.

        A collective of all ranks of the mesh. numbers: scalars on its device, at most `NUMBERS`.
        Wire: an all-reduce of `MEETING_BYTES` over the mesh.
        Raises: AgreementError, with one text on every rank, which names the call, the fact, the ranks and their values.
        """
        self.note(what, facts, stage=stage, rows=rows)
        doubles = [number.detach().to(torch.float64) for number in numbers]
        if self._mesh.spec.world_size == 1:
            return tuple(doubles)
        calls, self._calls = self._calls, []
        message = to_device(self._tail(calls, NUMBERS - len(doubles)), self._mesh.device)
        if doubles:
            message = torch.cat([*(number.reshape(1) for number in doubles), message])
        for fact, factor in self._on_device(calls):
            message[-2] += (fact * factor).bitwise_and_((1 << self._bits) - 1)
        with waiting(f"the other ranks to come to {what}"):
            dist.all_reduce(message, group=self._mesh.group)
        if not self.alone:
            self._open.append((calls, copy_to_host(message[-2:])))
            self._look(lag=0 if self._mesh.device == HOST or what not in self._kinds else LAG)
            self._kinds.add(what)
        return message[: len(doubles)].unbind()

    def _look(self, *, lag: int) -> None:
        """At all meetings but the last `lag`."""
        while len(self._open) > lag:
            calls, read = self._open.popleft()
            summed, turn = read().tolist()
            if self._is_difference(summed):
                self._open.clear()
                raise AgreementError(self._difference(calls, turn))

    def open_difference(self) -> str:
        """Of the meetings that are over and that the main thread has not looked at yet; see `open_difference`."""
        for calls, read in list(self._open):
            if read.is_here():
                summed, turn = read().tolist()
                if self._is_difference(summed):
                    return self._difference(calls, turn)
        return ""

    def _is_difference(self, summed: float) -> bool:
        return not math.isfinite(summed) or bool(int(summed) % (1 << self._bits))

    def _difference(self, calls: list[Call], turn: float) -> str:
        world = self._mesh.ranks  # people and logs know a rank by its number there
        told = Told(rank=world[self._mesh.rank], host=socket.gethostname(), calls=[call.in_text() for call in calls])
        groups = {
            scope: [[world[rank] for rank in group] for group in each.groups] for scope, each in self._scopes.items()
        }
        key = f"agreement/{self._mesh.group.group_name}/{turn}"
        return difference(_torch.world_store().clone(), key, told, groups, OTHERS)

    def _tail(self, calls: list[Call], unused: int) -> Tensor:
        """What follows the numbers of a message, on the host: zeros for `unused` ones, the number of [Note: one number says
        whether any rank differs], and which meeting of the group this is."""
        if self.alone:
            return torch.zeros(unused + 2, dtype=torch.float64)
        _meetings[self._mesh.group.group_name] += 1
        total = 0
        for scope, each in self._scopes.items():
            words = [call.what for call in calls] if scope == "mesh" else []
            told = [f"{key}={fact.text}" for key, fact in _facts(calls, scope)]
            total += each.coefficient * hash64("\n".join(words + told))
        total &= (1 << self._bits) - 1
        return torch.tensor([0] * unused + [total, _meetings[self._mesh.group.group_name]], dtype=torch.float64)

    def _on_device(self, calls: list[Call]) -> Iterator[tuple[Tensor, int]]:
        """Digests that are on the device, each with what multiplies it."""
        for scope, each in () if self.alone else self._scopes.items():
            for key, fact in _facts(calls, scope):
                if fact.digest is not None:
                    yield fact.digest, signed64(each.coefficient * (2 * hash64(key) + 1))


def open_difference() -> str:
    """In what the ranks of a mesh have differed since the main thread looked, or "": for the thread of a rank that waits.

    Of use on devices, where that is some meetings ago, and ranks that differ may have stopped in messages that do not match.
    Waits for the other ranks' threads to ask the same.
    """
    return next(filter(None, (each.open_difference() for each in list(_every))), "")


def _scope(scope: Scope, spec: MeshSpec, rank: int, bits: int) -> _Scope:
    axes = group_axes(spec, *_AXES[scope])
    groups = spec.groups(*axes) if axes else [[each] for each in range(spec.world_size)]
    mine = next(group for group in groups if rank in group)
    drawn = [hash64(f"{scope} {each}") for each in mine[:-1]]
    # An axis of one rank has nobody to agree with: its number is zero.
    index = mine.index(rank)
    return _Scope(groups, (drawn[index] if index < len(drawn) else -sum(drawn)) % (1 << bits))


def _facts(calls: list[Call], scope: Scope) -> Iterator[tuple[str, Fact]]:
    for index, call in enumerate(calls):
        for name, fact in call.facts.get(scope, {}).items():
            yield f"{index}.{name}", fact


def _told(value: object) -> Fact:
    if not isinstance(value, Tensor):
        text = value if isinstance(value, str) else repr(value)
        return Fact(text if len(text) <= SHOWN else f"{text[:SHOWN]}... {hash64(text):016x}")
    local = value.detach()
    kind = f"{str(local.dtype).removeprefix('torch.')}{list(local.shape)}"
    flat = local.reshape(-1)
    if flat.numel() > SAMPLE and flat.is_floating_point():
        flat = flat[:: -(-flat.numel() // SAMPLE)]
    if local.device == HOST:
        content = flat.contiguous().view(torch.uint8).numpy().data if flat.numel() else b""
        return Fact(f"{kind} {hashlib.sha256(content).hexdigest()[:16]}")
    return Fact(kind, _digest_on_device(flat))


def _digest_on_device(flat: Tensor) -> Tensor:
    """Its values as whole numbers, weighted by odd ones and summed modulo 2^64; the host does not wait for it."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    weights = torch.arange(flat.numel(), device=flat.device) * signed64(hash64("weights") * 2) + 1
    return (flat.view(whole) * weights).sum()


def _caller() -> str:
    """The line outside of meshkit and torch that made the call."""
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(("meshkit.", "torch.")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
