"""Which values that cross a cut have a gradient (`None` is not zeros): their reader tells the stage that made them.

A parameter whose part of the graph a later stage detaches, or whose output the loss does not use, has no gradient on one
device, and AdamW then leaves it alone; a gradient of zeros would decay it. Whether a value has one only a backward shows.
"""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core import _torch
from meshkit.core.waiting import waiting
from meshkit.errors import StepError

Place = tuple[int, int]
"""(cut, number among the floating values that cross it)"""
LOOK = timedelta(seconds=1)
_TIED = -1  # in place of a cut

# [Note: gradients that are not there]
# A message of gradients has the same tensors in every step, zeros where the reader made none. What is zeros for want of a
# gradient is told beside, over the store, in the first step of a kind (one loss, modules in the same mode, batches that
# differ in sizes alone): for each microbatch, before its gradients are sent, so the sender of the value leaves it out of its
# backward. That costs a host milliseconds, and sends nothing between devices. Later steps of the kind do what that one did: a
# value has a gradient if some microbatch on some data rank gave it one. A step that does otherwise raises on the rank that
# sees it.


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
        self._learned = 0  # steps that told
        self._told: dict[tuple[int, int], tuple[bool, ...]] = {}  # of this rank in this step: by (cut, microbatch)

    def begin_step(self, kinds: Sequence[Hashable]) -> None:
        """kinds: of each microbatch, the same on every rank."""
        self._kinds, self._told = kinds, {}
        self._learns = self._store is not None and any(kind not in self._known for kind in kinds)
        if self._learns:
            self._learned += 1

    def tell(self, cut: int, microbatch: int, made: Sequence[bool]) -> None:
        """By the reader of the values, before it sends their gradients. Raises: StepError for one that had none before."""
        self._told[cut, microbatch] = tuple(made)
        if self._learns:
            key = f"{self._name}/{self._learned}/{cut}/{microbatch}/{self._peer}"
            self._store.set(key, "".join("01"[each] for each in made))
        elif self._store is not None:
            for number, each in enumerate(made):
                if each and not self._expected(cut, microbatch, number):
                    raise StepError(
                        f"pipeline: the loss has a gradient at value {number} of what stage {cut} hands on, and in the "
                        f"first step of its kind it had none, which stage {cut} was told. {_OF_ITS_OWN}"
                    )

    def asked(self, cut: int, microbatch: int, count: int) -> list[bool]:
        """By the maker of `count` values, when it has received their gradients: which of them are there."""
        if self._store is None:
            return [True] * count
        if self._learns:
            self._learn(cut, microbatch)
        return [self._expected(cut, microbatch, number) for number in range(count)]

    def tied(self, made: Sequence[bool], *, first: bool) -> list[bool]:
        """Which tied parameters have a gradient at one end or the other. made: at this one."""
        if self._store is None:
            return [True] * len(made)
        if self._learns:
            mine, other = (f"{self._name}/{self._learned}/tied/{self._peer}/{end}" for end in (first, not first))
            self._store.set(mine, "".join("01"[each] for each in made))
            for kind in self._kinds:
                known = self._known.setdefault(kind, {})
                for number, (here, there) in enumerate(
                    zip(made, self._get(other, "the other end of a tie"), strict=True)
                ):
                    known[_TIED, number] = known.get((_TIED, number), False) or here or there == "1"
        return [any(self._known[kind][_TIED, number] for kind in self._kinds) for number in range(len(made))]

    def end_step(self) -> None:
        """Raises: StepError where a value has no gradient that had one in the first step of the kind."""
        cuts = {cut for cut, _ in self._told}
        if self._learns:
            for cut, microbatch in self._told:
                self._learn(cut, microbatch)  # what other data ranks say of them
        elif self._store is not None and self._peers == 1:
            for cut in cuts:
                of_cut = [made for (each, _), made in self._told.items() if each == cut]
                wanted = {place for kind in self._kinds for place, made in self._known[kind].items() if made}
                for number, made in enumerate(zip(*of_cut, strict=True)):
                    if (cut, number) in wanted and not any(made):
                        raise StepError(
                            f"pipeline: the loss has no gradient at value {number} of what stage {cut} hands on, and in the "
                            f"first step of its kind it had one: stage {cut} has taken zeros for it. {_OF_ITS_OWN}"
                        )
        if self._learns:
            for kind in self._kinds:
                self._known.setdefault(kind, {})
        self._learns = False

    def _expected(self, cut: int, microbatch: int, number: int) -> bool:
        return self._known[self._kinds[microbatch]].get((cut, number), False)

    def _learn(self, cut: int, microbatch: int) -> None:
        known = self._known.setdefault(self._kinds[microbatch], {})
        for peer in range(self._peers):
            made = self._get(f"{self._name}/{self._learned}/{cut}/{microbatch}/{peer}", f"stage {cut + 1}")
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


_OF_ITS_OWN = (
    "Stages agree on that once for each loss: give the steps that differ a loss function of their own, or add what is left "
    "out times 0."
)
