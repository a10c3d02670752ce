"""Memory tracker: counts the bytes of every live storage by kind (parameters, gradients, activations, ...).

A storage is counted once, however many tensors view it, from the operator that makes it until it is freed. Its kind follows
from where it is made: in a module's forward, in a backward, in the optimizer step, in a collective of FSDP.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from meshkit.core import _torch
from meshkit.core._torch import TorchDispatchMode, tree_leaves
from meshkit.core.custom_op import watching_bodies
from meshkit.core.host_accounting import is_on_host, lies_on_host
from meshkit.core.sharding import local_tensor

GROUPS = (
    "parameters",
    "gradients",
    "optimizer state",
    "gathered parameters",
    "gradients in reduction",
    "activations",
    "recomputed activations",
    "logits and loss",
    "work of backward",
    "other",
    "on the host",
)
HOST = GROUPS.index("on the host")
_INDEX = {group: index for index, group in enumerate(GROUPS)}

FORWARD_BACKWARD, CLIP, OPTIMIZER = "the loss", "clipping of gradients", "the optimizer's step"

Totals = tuple[int, ...]
"""bytes of each of GROUPS"""


@dataclass(frozen=True)
class Point:
    """One moment of the step: bytes by group, and what was running."""

    totals: Totals
    where: str

    @property
    def device_bytes(self) -> int:
        return sum(self.totals) - self.totals[HOST]


@dataclass(frozen=True, slots=True)
class Change:
    """A storage that grew, shrank or changed its kind. bytes: by how much the group's sum changes. stream: on which it was
    allocated, 0 for that of the computation.
    """

    storage: int
    group: int
    bytes: int
    where: str
    stream: int = 0


@dataclass
class _Storage:
    """A live storage. number: of all that were seen; group: index in GROUPS; block: whose activation it is, "" for none;
    stream: as a `Change` has it.
    """

    number: int
    bytes: int
    group: int
    block: str
    stream: int
    alive: weakref.ref[UntypedStorage]


class Tracker:
    """A context that counts the storages of `model`'s steps, of real tensors and of fake ones.

    blocks: names of modules (blocks and further units) whose activations are counted one by one. head: the one that makes
    logits. device: tensors elsewhere are on the host. granule: bytes to a multiple of which the allocator rounds up.
    inputs: note of which storages each new one was computed.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[str],
        *,
        head: str,
        device: torch.device,
        granule: int = 1,
        inputs: bool = False,
    ) -> None:
        self.points: list[Point] = []
        self.changes: list[Change] = []  # all, from the first storage that was counted
        self.made_of: dict[int, tuple[int, ...]] = {}  # storage -> those that its operator read
        self.kept: dict[str, int] = {}  # by module, bytes its forward has left alive for one microbatch
        self.after_forward: Totals = (0,) * len(GROUPS)  # when the last forward was over
        self.phase = ""
        self._model, self._head, self._device, self._granule = model, head, device, granule
        self._names = {id(module): name for name, module in model.named_modules()}
        self._tracked_blocks = set(blocks)
        # By address of the storage. A weak reference to each, never the storage: counting must not keep alive what it counts.
        self._storages: dict[int, _Storage] = {}
        self._totals = [0] * len(GROUPS)
        self._by_block: defaultdict[str, int] = defaultdict(int)
        self._stack: list[str] = []
        self._before: list[int] = []
        self._backward_of = ""
        self._model_has_run = False
        self._forced: str | None = None
        self._active = ExitStack()
        self._inputs = inputs
        self._count = 0
        self._streams: dict[Any, int] = {torch.cpu.current_stream(): 0}
        self._mode = _Mode(self)

    # ------------------------------------------------------------------------------------------------ being active

    def __enter__(self) -> Tracker:
        with ExitStack() as stack:
            for hook in (
                nn.modules.module.register_module_forward_pre_hook(self._enter_module),
                # always_call: recompute ends a forward early by an exception, and the module must be left all the same.
                nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
                *(
                    param.register_post_accumulate_grad_hook(self._note_grad)
                    for param in self._model.parameters()
                    if param.requires_grad
                ),
            ):
                stack.callback(hook.remove)
            stack.enter_context(_torch.hiding_shape_propagation())
            # FSDP2 frees and refills gathered parameters by resizing their storages, which no operator reports.
            stack.enter_context(_torch.reporting_resizes(self._resized))
            stack.enter_context(
                _torch.around_fsdp(
                    lambda: self._for("gathered parameters"), lambda: self._for("gradients in reduction"), self._reduced
                )
            )
            stack.enter_context(self._mode)
            self._active = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._active.close()

    def saw(self, out: Any, args: Any) -> None:
        """Count the storages of what an operator returned. args: what it read."""
        before = self._count
        for value in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(value, Tensor):
                self._see(value)
        if self._inputs and self._count > before:
            read = [self.number_of(value) for value in tree_leaves(args) if isinstance(value, Tensor)]
            self.made_of |= dict.fromkeys(range(before, self._count), tuple(each for each in read if each is not None))

    def number_of(self, tensor: Tensor) -> int | None:
        """Of the tensor's storage; None where it is not counted."""
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry.number

    @contextmanager
    def _for(self, group: str) -> Iterator[None]:
        before, self._forced = self._forced, group
        try:
            yield
        finally:
            self._forced = before

    # --------------------------------------------------------------------------------------------------- counting

    def count_as(self, tensors: Iterable[Tensor], group: str) -> None:
        """Move the storages of these tensors to a group, whatever they were counted as."""
        for tensor in tensors:
            local = local_tensor(tensor)
            self._see(local, group)
            self._move(local, group)

    def start(self, phase: str) -> None:
        """Say which part of the step begins."""
        self.phase = phase

    def forget_points(self) -> None:
        """Begin to look for a peak now, with what is alive."""
        self.points.clear()
        self.kept.clear()
        self._point()

    def now(self) -> Totals:
        return tuple(self._totals)

    def _see(self, tensor: Tensor, group: str | None = None) -> None:
        """Count the storage of a tensor, once. group: its kind, where the caller knows better than `_purpose`."""
        if tensor.is_meta and not _torch.is_fake(tensor):
            return  # parameters before they are materialised: fake tensors stand for memory, those on meta for none
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        # There is no hook between forward and backward, so the first storage made in a backward marks the end of forward.
        if self._model_has_run and _torch.in_backward():
            self._note_end_of_forward()
        name, block = (group, "") if group is not None else self._purpose()
        index = _INDEX[name]
        if is_on_host() or tensor.device.type != self._device.type or lies_on_host(storage):
            index, block = HOST, ""
        entry = _Storage(self._count, 0, index, block, self._stream(), weakref.ref(storage, self._died(key)))
        self._count += 1
        # The key is the address of the storage, which may be used again once the storage is freed: _died removes it first.
        self._storages[key] = entry
        self._set_bytes(entry, storage.nbytes())

    # The weak reference has a callback on the tracker, so the callback must not keep the tracker (and all it holds) alive.
    def _died(self, key: int) -> Callable[[Any], None]:
        this = weakref.ref(self)

        def died(_: Any) -> None:
            tracker = this()
            if tracker is not None and key in tracker._storages:
                tracker._set_bytes(tracker._storages.pop(key), 0)

        return died

    def _set_bytes(self, entry: _Storage, size: int) -> None:
        size = -(-size // self._granule) * self._granule  # rounded up, as the allocator does
        grown = size - entry.bytes
        entry.bytes = size
        self._totals[entry.group] += grown
        if grown:
            self.changes.append(Change(entry.number, entry.group, grown, self.where, entry.stream))
        if entry.block:
            self._by_block[entry.block] += grown
        if grown > 0:  # a peak is where something was allocated
            self._point()

    def _resized(self, storage: UntypedStorage) -> None:
        entry = self._storages.get(storage._cdata)
        if entry is not None and self._forced == "gathered parameters":
            self._regroup(entry, self._forced)
        if entry is not None:
            self._set_bytes(entry, storage.nbytes())

    def _move(self, tensor: Tensor, group: str) -> None:
        # What lies on the host stays counted there, whatever it is: the sum of the other groups is the device's.
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        if entry is not None and entry.group != HOST:
            self._regroup(entry, group)

    def _regroup(self, entry: _Storage, group: str) -> None:
        if entry.group != _INDEX[group]:
            where = self.where
            self.changes.append(Change(entry.number, entry.group, -entry.bytes, where, entry.stream))
            self.changes.append(Change(entry.number, _INDEX[group], entry.bytes, where, entry.stream))
        self._totals[entry.group] -= entry.bytes
        if entry.block:
            self._by_block[entry.block] -= entry.bytes
        entry.group, entry.block = _INDEX[group], ""
        self._totals[entry.group] += entry.bytes

    def _stream(self) -> int:
        """FSDP gathers and reduces on streams of its own, and makes some on a CPU too, where they are only names."""
        current = torch.cpu.current_stream()
        return self._streams.setdefault(current, len(self._streams))

    def _point(self) -> None:
        self.points.append(Point(tuple(self._totals), self.where))

    # ----------------------------------------------------------------------------------------------- kinds

    @property
    def where(self) -> str:
        if _torch.in_backward():
            inner = (
                f"recompute of {self._stack[-1]}" if self._stack else f"backward of {self._backward_of or 'the loss'}"
            )
            return inner
        if self._stack:
            return f"forward of {self._stack[-1] or 'the model'}"
        return self.phase

    def _purpose(self) -> tuple[str, str]:
        """(group, block) of a storage that is made now."""
        # The order matters: FSDP gathers inside of forwards and backwards, and a recompute is a forward inside of a backward.
        if self._forced is not None:
            return self._forced, ""
        if _torch.in_backward():
            return ("recomputed activations" if self._stack else "work of backward"), ""
        if self._stack:
            name = next((name for name in reversed(self._stack) if name in self._tracked_blocks), "")
            return ("logits and loss", "") if name and name == self._head else ("activations", name or "around blocks")
        if self.phase == FORWARD_BACKWARD and self._model_has_run:
            return "logits and loss", ""
        return ("optimizer state" if self.phase == OPTIMIZER else "other"), ""

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._stack.append(name)
            self._before.append(self._by_block[name])

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        name = self._names.get(id(module))
        if name is None or not self._stack:
            return
        self._stack.pop()
        before = self._before.pop()
        if _torch.in_backward():
            return
        if name in self._tracked_blocks and name != self._head:
            self.kept[name] = self._by_block[name] - before
        if not name:
            self._model_has_run, self._backward_of = True, ""
        for value in tree_leaves(out):
            # A hook on the output: backward of the module begins when its gradient arrives.
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda grad: self._note_backward(name))
                break

    def _note_backward(self, name: str) -> None:
        self._backward_of = name

    def _note_end_of_forward(self) -> None:
        """At the first operator of a backward: all saved tensors are alive, and local variables of the forward are gone."""
        self.after_forward, self._model_has_run = self.now(), False
        for name, size in self.kept.items():
            # A block's output was still alive when it ended, kept or not. With many microbatches in flight this is more.
            self.kept[name] = min(size, self._by_block[name])

    def _note_grad(self, param: Tensor) -> None:
        # Until it is accumulated nothing tells the gradient of a parameter from other results of backward.
        if param.grad is not None:
            self.count_as([param.grad], "gradients")

    def _reduced(self, grads: list[Tensor]) -> None:
        self.count_as(grads, "gradients")


class _Mode(TorchDispatchMode):
    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker

    @watching_bodies
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_torch.wraps_tensors(kind) for kind in types):
            return NotImplemented  # a tensor made of tensors: those inside are counted when it gets to them
        out = func(*args, **(kwargs or {}))
        self.tracker.saw(out, (args, kwargs))
        return out
