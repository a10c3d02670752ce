"""Agreement of data ranks on what the model does with different rows: the units it runs, the buffers and state it writes.

FSDP gathers a unit when its forward runs: ranks that run different units meet in different collectives, which hang, or gather
one unit's shards as another's. And a buffer that each rank writes from its own rows is no longer one buffer.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshkit.core import _torch
from meshkit.core.waiting import waiting
from meshkit.errors import PlanError
from meshkit.parallel.snapshot import Snapshot

FORWARDS_READ = 2  # state that a first forward makes is carried into the second
OTHERS = timedelta(seconds=20)  # for the other ranks to leave the path of all earlier steps too
LOOK = timedelta(seconds=1)  # between two looks of a waiting rank whether it waits in vain
_END = "the end of the forward"
_START = "the start of the forward"

# [Note: agreement before a gather]
# The next unit is compared before its parameters are gathered, and again before its gradients are reduced: over the store,
# since a collective with a rank that does not come is what must not happen. That costs milliseconds, so it is
# done only where something new may come: in the first step, and later at a place where more than one thing has been seen to
# follow. At the others the same thing has always followed, on every rank; a rank that is about to do another knows so by
# itself, and asks. The others, if they do not do it too, do not answer: they wait in the collective that was expected. Then
# this rank raises, and issues none.

# [Note: unused parameters]
# FSDP reduces the gradients that a rank has. Where one has others (an expert without tokens), ranks would send buffers of
# different sizes. So in a unit that has run, parameters without a gradient get zeros. What no rank has used in a step must
# have no gradient after it, as on one device, or AdamW would decay it: ranks count who has filled something, in the message
# that sums the loss, and only if all have they compare what. So a parameter that is trained and never used costs that
# comparison in every step: freeze it.


class SameUnits:
    """Watches the forwards of a model under FSDP on this rank.

    group: the ranks with different rows. watch_units: False where blocks are compiled, which take no hooks between them.
    experts: units that FSDP shards over other ranks than the rest. look: may raise where a rank will not come any more.
    Wire: once, a broadcast of a name; over the store as the note says; and in the first two forwards one comparison at the
    end of each.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        *,
        watch_units: bool,
        experts: Sequence[str],
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._rank, self._size = model, dist.get_rank(group), group.size()
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, group=group, group_src=0)
        self._name = f"same_units/{name[0]}"
        self._store = _torch.world_store().clone()  # its own connection: others wait in the world's meanwhile
        self._patience = _torch.timeout_of(group)
        self._asked = self._forwards = 0
        self._group, self._device = group, next(model.parameters()).device
        self._watching = False
        self._unit = self._reduced = _START
        self._known: dict[str, set[str]] = {}
        self._ran, self._filled = set[str](), set[str]()
        self.look = look
        if watch_units:
            for unit, module in model.named_modules():
                if isinstance(module, FSDPModule):
                    assert isinstance(module, nn.Module)
                    module.register_forward_pre_hook(self._enter(unit or "the root"), prepend=True)
                    if unit not in experts:  # of other ranks
                        _torch.before_reductions(module, self._reduce(unit or "the root"))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward and its loss, of a training step.

        Raises: PlanError, on every rank, where they run different units, make parameters, or carry different values over to
        the next forward. Where a rank alone leaves the path of earlier steps it raises alone.
        """
        self._unit, self._watching = _START, True
        reading = self._forwards < FORWARDS_READ
        before = Snapshot(self._model) if reading else None
        mode = before.reads if before is not None and before.reads.tensors else nullcontext()
        try:
            with mode:
                yield
            self._follow(_END)
            self._reduced = _END
        finally:
            self._watching = False
        if before is not None:
            self._compare_state(before)
        self._forwards += 1

    def _enter(self, unit: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, args: Any) -> None:
            if self._watching and not _torch.in_backward():
                self._follow(unit)
                self._ran.add(unit)

        return enter

    def _reduce(self, unit: str) -> Callable[[list[_torch.BeforeReduction]], list[bool]]:
        """Which of the unit's parameters get a gradient of zeros: see [Note: unused parameters]."""

        def reduce(params: list[_torch.BeforeReduction]) -> list[bool]:
            if unit not in self._ran:
                return [False] * len(params)  # on no rank
            self._come_to(f"after {self._reduced}", f"the gradients of {unit}")
            self._reduced = f"the gradients of {unit}"
            for param in params:
                if not param.lacks:
                    self._filled.discard(param.name)
                elif param.fresh:
                    self._filled.add(param.name)
            return [param.lacks for param in params]

        return reduce

    def begin_step(self) -> None:
        self._ran.clear()
        self._filled.clear()

    @property
    def filled(self) -> bool:
        """Whether some parameter has a gradient of zeros since the step's rows on this rank did not use it."""
        return bool(self._filled)

    def settle(self, filled: Tensor) -> None:
        """After the step's last backward, take away gradients of parameters that no rank has used.

        filled: on how many ranks `filled` holds. The host waits for it where it holds here.
        Wire: where it holds on all ranks, an all-reduce of a number for each parameter.
        """
        if not self._filled or int(filled) < self._size:
            return  # a rank that has filled nothing has used them all
        params = dict(self._model.named_parameters())
        counts = torch.tensor([float(name not in self._filled) for name in params], device=self._device)
        dist.all_reduce(counts, group=self._group)
        for param, count in zip(params.values(), counts.tolist(), strict=True):
            if not count:
                param.grad = None

    def _follow(self, unit: str) -> None:
        self._come_to(f"after {self._unit}", unit)
        self._unit = unit

    def _come_to(self, place: str, what: str) -> None:
        """See [Note: agreement before a gather]."""
        known = self._known.setdefault(place, set())
        if what not in known or len(known) > 1:
            before = " or ".join(sorted(known))
            self._agree(
                what,
                lambda first, mine: self._apart(place, mine, f"another to {first}"),
                not known,
                self._apart(place, what, f"another to {before}, as all did before"),
            )
            known.add(what)

    def _apart(self, place: str, mine: str, others: str) -> str:
        return (
            f"data ranks run different modules: {place} rank {self._rank} of the data ranks comes to {mine}, and {others}. "
            "FSDP gathers a module and sums its gradients where all ranks run it: run it on every rank, on a row of zeros "
            "and times zero where it is not needed."
        )

    def _agree(self, value: str, explain: Callable[[str, str], str], is_first: bool, alone: str = "") -> None:
        """Compare a value over all ranks. Raises: PlanError, with one text on every rank, where it differs.

        explain(another rank's value, this rank's). is_first: all ranks come here, however late. Otherwise this rank has left
        the path, and says `alone` if the others do not come too.
        """
        key = f"{self._name}/{self._asked}"
        self._asked += 1
        if self._store.add(f"{key}/asked", 1) == 1:
            self._store.set(f"{key}/first", value)
        elif (first := self._store.get(f"{key}/first").decode()) != value:
            self._store.set(f"{key}/differs", explain(first, value))
        if self._store.add(f"{key}/came", 1) == self._size:
            self._store.set(f"{key}/all", "1")
        if not self._comes(f"{key}/all", self._patience if is_first else OTHERS):
            raise PlanError(alone or "parallelize: a data rank did not come to the end of the forward.")
        if self._store.check([f"{key}/differs"]):
            raise PlanError(self._store.get(f"{key}/differs").decode())
        if self._store.add(f"{key}/left", 1) == self._size:
            for part in ("asked", "first", "came", "all", "left"):
                self._store.delete_key(f"{key}/{part}")

    def _comes(self, key: str, patience: timedelta) -> bool:
        """Whether it does within that time."""
        until = time.monotonic() + patience.total_seconds()
        while True:
            left = max(0.001, min(LOOK.total_seconds(), until - time.monotonic()))
            try:
                with waiting("the other data ranks to come as far in the forward"):
                    self._store.wait([key], timedelta(seconds=left))
                return True
            except RuntimeError:  # DistStoreError is one: not there yet
                self.look()
                if time.monotonic() >= until:
                    return False

    def _compare_state(self, before: Snapshot) -> None:
        written = before.written()
        told = {name: _fingerprint(tensor) for name, tensor in written.items()}
        made = before.made()
        self._agree(json.dumps([made, told], sort_keys=True), _other_state, True)
        if made:
            raise PlanError(_made_in_forward(made[0]))


def _other_state(first: str, mine: str) -> str:
    (first_made, first_told), (my_made, my_told) = json.loads(first), json.loads(mine)
    if first_made or my_made:
        return _made_in_forward(min({*first_made, *my_made}))
    name = min(name for name in {*first_told, *my_told} if first_told.get(name) != my_told.get(name))
    return (
        f"the forward writes {name!r} from each rank's own rows, so that its values differ between data ranks, and a single "
        "device would write it from all rows. Do not write it in training (module.eval(), a GroupNorm instead), or make it "
        "the same on every rank in the forward (torch.distributed.all_reduce before it is written; on GPUs "
        "nn.SyncBatchNorm)."
    )


def _made_in_forward(name: str) -> str:
    return (
        f"parameter {name!r} was made in forward, after the model was split: no rank sums its gradient with the others. Make "
        "it in __init__, or run the model once on a batch before parallelize."
    )


def _fingerprint(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    content = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return hashlib.blake2b(f"{tuple(data.shape)}{data.dtype}".encode() + content, digest_size=8).hexdigest()
