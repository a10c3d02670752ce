"""Which values that cross a cut have a gradient (`None` is not zeros): their reader tells the stage that made them.

A parameter whose part of the graph a later stage detaches, or whose output the loss does not use, has no gradient on one
device, and AdamW then leaves it alone; a gradient of zeros would decay it. Whether a value has one only a backward shows.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core import _torch
from meshkit.core.to_device import HOST, copy_to_host
from meshkit.core.waiting import waiting
from meshkit.errors import StepError

Place = tuple[int, int]
"""(cut, number among the floating values that cross it)"""
LOOK = timedelta(seconds=1)
_TIED = -1  # in place of a cut

# [Note: gradients that are not there]
# A message of gradients has the same tensors in every step, zeros where the reader made none. What is zeros for want of a
# gradient is told beside, over the store, in the first step of a kind (one loss, modules in the same mode, one path through
# the stages, batches that differ in sizes alone): for each microbatch, before its gradients are sent, so the sender of the
# value leaves it out of its backward. That costs a host milliseconds, and sends nothing between devices. Later steps of the
# kind do what that one did: a value has a gradient if some microbatch on some data rank gave it one. A tied weight is told
# of by both of its ends, and again where it has been frozen or thawed.

# [Note: a step with other gradients than the first]
# It goes on to its end, with messages as ever, and is refused there on every rank, before the optimizer. A rank that has a
# gradient too many says so in the store. One that lacks a gradient adds itself to those that do, and the last of all data
# ranks says so. Then the message that sums the loss counts the ranks to which something is odd: where it is none, nobody
# looks into the store. A rank that knows nothing odd does not wait for that count on a device, but looks in the next step.


class Produced:
    """axis: pp. data: the ranks with other rows, whose gradients of one parameter are summed: where one of them has one, all
    have.

    Wire: once, a broadcast of a name over each; over the store as the note says.
    """

    def __init__(self, axis: DeviceMesh, data: DeviceMesh | None) -> None:
        self._peers, self._peer = (data.size(), data.get_local_rank()) if data is not None else (1, 0)
        self._patience = _torch.timeout_of(axis.get_group())
        self._store: Any = None
        if not _torch.is_fake_group(axis.get_group()):
            name = [uuid.uuid4().hex]
            for mesh in (data, axis):
                if mesh is not None and mesh.size() > 1:
                    dist.broadcast_object_list(name, group=mesh.get_group(), group_src=0)
            self._name = f"produced/{name[0]}"
            self._store = _torch.world_store().clone()  # its own connection: others wait in the world's meanwhile
        self._known: dict[Hashable, dict[Place, bool]] = {}
        self._kinds: Sequence[Hashable] = ()
        self._learns = False
        self._step = 0
        self._told: dict[tuple[int, int], tuple[bool, ...]] = {}  # of this rank in this step: by (cut, microbatch)
        self._lacks: list[str] = []  # keys of the store, of values for which this rank has added itself
        self._refused = False  # by this rank
        self._unread: Callable[[], Tensor] | None = None  # a count that nobody has looked at

    def begin_step(self, kinds: Sequence[Hashable]) -> None:
        """kinds: of each microbatch, the same on every rank. Raises: StepError as `settle` does, for the step before."""
        self._look()
        self._kinds, self._told = kinds, {}
        self._lacks, self._refused = [], False
        self._step += 1
        self._learns = self._store is not None and any(kind not in self._known for kind in kinds)

    def tell(self, cut: int, microbatch: int, made: Sequence[bool]) -> None:
        """By the reader of the values, before it sends their gradients."""
        self._told[cut, microbatch] = tuple(made)
        if self._learns:
            self._store.set(self._key(cut, microbatch, self._peer), _bits(made))
        elif self._store is not None:
            for number, each in enumerate(made):
                if each and not self._expected(cut, microbatch, number):
                    self._refuse(
                        f"the loss has a gradient at {_value(cut, number)}, and in the first step of its kind it had none, "
                        f"which stage {cut} was told"
                    )

    def asked(self, cut: int, microbatch: int, count: int) -> list[bool]:
        """By the maker of `count` values, when it has received their gradients: which of them are there."""
        if self._store is None:
            return [True] * count
        if self._learns:
            self._learn(cut, microbatch)
        return [self._expected(cut, microbatch, number) for number in range(count)]

    def tied(self, made: Mapping[int, bool], *, first: bool) -> list[bool]:
        """Which tied parameters have a gradient at one end or the other. made: at this one, of those that are trained."""
        if self._store is None:
            return [True] * len(made)
        if self._learns or any((_TIED, number) not in self._known[kind] for kind in self._kinds for number in made):
            mine, other = (self._key("tied", self._peer, end) for end in (first, not first))
            self._store.set(mine, json.dumps(list(made.items())))
            there = dict(json.loads(self._get(other, "the other end of a tie")))
            if there.keys() != made.keys():
                raise StepError(
                    "pipeline: a tied weight is trained on the first stage or the last, and frozen on the other. Set "
                    "requires_grad on both: for param in run.model.parameters() has it on each."
                )
            for kind in self._kinds:
                known = self._known.setdefault(kind, {})
                for number, here in made.items():
                    known[_TIED, number] = known.get((_TIED, number), False) or here or there[number]
        expected = {number: any(self._known[kind][_TIED, number] for kind in self._kinds) for number in made}
        for number, here in made.items():
            if expected[number] and not here:
                self._lack(_TIED, number, 2 * self._peers, f"tied weight {number}", "its two stages have")
            elif here and not expected[number]:
                self._refuse(
                    f"the loss has a gradient at tied weight {number}, and in the first step of its kind it had none, by "
                    "which its two stages go"
                )
        return list(expected.values())

    def end_step(self) -> None:
        """After the last backward."""
        if self._learns:
            for cut, microbatch in self._told:
                self._learn(cut, microbatch)  # what other data ranks say of them
            for kind in self._kinds:
                self._known.setdefault(kind, {})
        elif self._store is not None:
            wanted = {place for kind in self._kinds for place, made in self._known[kind].items() if made}
            for cut in {cut for cut, _ in self._told}:
                of_cut = [made for (each, _), made in self._told.items() if each == cut]
                for number, made in enumerate(zip(*of_cut, strict=True)):
                    if (cut, number) in wanted and not any(made):
                        self._lack(cut, number, self._peers, _value(cut, number), f"stage {cut} has")
        self._learns = False

    @property
    def odd(self) -> bool:
        """Whether this rank's gradients are not there where they were in the first step of the kind, or there where not."""
        return self._refused or bool(self._lacks)

    def settle(self, count: Tensor) -> None:
        """At the end of a step. count: of the ranks to which it was `odd`, over all data ranks and stages.

        Raises: StepError, on every rank, where a value has a gradient that had none in the first step of the kind, or on all
        data ranks none where it had one; on a device, on ranks to which nothing is odd a step later.
        """
        if self._store is not None:
            self._unread = copy_to_host(count)
            if count.device == HOST or self.odd:
                self._look()

    def _look(self) -> None:
        """See [Note: a step with other gradients than the first]."""
        read, self._unread = self._unread, None
        if read is None or not float(read()):
            return
        for key in self._lacks:
            self._store.delete_key(key)
        verdict = self._key("refused")
        if self._store.check([verdict]):
            raise StepError(self._store.get(verdict).decode())

    def _lack(self, cut: int, number: int, ranks: int, what: str, who: str) -> None:
        key = self._key("lack", cut, number)
        self._lacks.append(key)
        if self._store.add(key, 1) == ranks:
            self._refuse(
                f"the loss has no gradient at {what}, and in the first step of its kind it had one: {who} taken zeros for it"
            )

    def _refuse(self, what: str) -> None:
        self._refused = True
        # The first that says something says it for all.
        self._store.compare_set(self._key("refused"), "", f"pipeline: {what}. {_OF_ITS_OWN}")

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._name, self._step, *parts)))

    def _expected(self, cut: int, microbatch: int, number: int) -> bool:
        return self._known[self._kinds[microbatch]].get((cut, number), False)

    def _learn(self, cut: int, microbatch: int) -> None:
        known = self._known.setdefault(self._kinds[microbatch], {})
        for peer in range(self._peers):
            made = self._get(self._key(cut, microbatch, peer), f"the stage after stage {cut}")
            for number, each in enumerate(made):
                known[cut, number] = known.get((cut, number), False) or each == "1"

    def _get(self, key: str, who: str) -> str:
        waited = timedelta()
        while True:
            try:
                with waiting(f"what {who} has gradients of"):
                    self._store.wait([key], LOOK)
                return str(self._store.get(key).decode())
            except RuntimeError as error:  # DistStoreError is one: not there yet
                waited += LOOK
                if waited >= self._patience:
                    raise StepError(
                        f"pipeline: {who} did not come to its backward: its rank has ended, or stalls before it. Look at its "
                        "screen; more time is init_mesh(timeout=...)."
                    ) from error


def _bits(made: Sequence[bool]) -> str:
    return "".join("01"[each] for each in made)


def _value(cut: int, number: int) -> str:
    return f"value {number} of what stage {cut} hands on"


_OF_ITS_OWN = (
    "Stages agree on that once for each loss: give the steps that differ a loss function of their own, or add what is left "
    "out times 0."
)
