"""The engine of activation offload: saved tensors of blocks leave the device, and are back when backward needs them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef

from meshkit.core import _torch
from meshkit.core._torch import tree_leaves
from meshkit.core.host_accounting import estimate_under_way
from meshkit.core.sharding import local_tensor
from meshkit.memory.offload._disk import DiskTier
from meshkit.memory.offload._host import HostTier
from meshkit.memory.offload._saved_storage import Handle, Kept, SavedStorage, Tier, bytes_of
from meshkit.memory.offload._stats import OffloadStep
from meshkit.memory.offload._streams import Streams
from meshkit.strategy import ActivationOffload

# Blocks whose tensors may still be on the device while they are copied out: the one that computes and the one before.
BLOCKS_LEAVING = 2


class Scope:
    """One forward of one block and its saved storages. previous: the block before it in the same forward of the model."""

    __slots__ = ("number", "previous", "storages")

    def __init__(self, number: int, previous: Scope | None) -> None:
        self.number, self.previous = number, previous
        self.storages: list[weakref.ref[SavedStorage]] = []


class Offload:
    """Moves what blocks save, for all blocks of one model on one device.

    Saved tensors stay on the device if they are
    - part of a parameter or buffer of the block (FSDP frees and refills those),
    - inputs of the block that need no gradient (tables that all blocks share: they live as long as the forward anyway),
    - of a tensor subclass or on another device, or
    - in a storage smaller than `min_bytes`.
    An exception, or a forward without backward, leaks nothing: storages are freed when autograd drops their handles.
    """

    def __init__(self, policy: ActivationOffload, streams: Streams, tier: Tier | None = None) -> None:
        self.policy, self.streams = policy, streams
        self.tier: Tier = tier or make_tier(policy, streams)
        self.last_step = OffloadStep()
        self._lock = threading.RLock()  # CUDA's backward runs in a thread of its own
        self._saved: dict[int, weakref.ref[SavedStorage]] = {}  # by address of the storage
        self._leaving: deque[tuple[int, SavedStorage]] = deque()  # with the scope that saved them
        self._dropped: SimpleQueue[tuple[SavedStorage, int]] = SimpleQueue()
        self._numbers = 0
        self._newest: Scope | None = None
        self._counts = {"storages": 0, "tensors": 0, "stored_bytes": 0, "fetched_bytes": 0, "forwarded_bytes": 0}
        self._waited_before = 0.0

    # ------------------------------------------------------------------------------------------------ forward

    def begin_forward(self) -> None:
        """Start a new chain of blocks: the next block has none before it."""
        self._newest = None

    @contextmanager
    def block(self, module: nn.Module, inputs: Any, *, keeps: bool) -> Iterator[Scope]:
        """Inside, tensors that autograd saves are moved. keeps: they stay, and the block only has a place in the order."""
        with self._lock:
            self._numbers += 1
            scope = self._newest = Scope(self._numbers, self._newest)
            self._tidy(oldest=scope.number - BLOCKS_LEAVING)
        if keeps:
            yield scope
            return
        with saved_tensors_hooks(partial(self._pack, scope, _NotMoved(module, inputs)), self._unpack):
            yield scope

    def on_backward(self, scope: Scope, out: Any) -> None:
        """Prefetch the scope and those before it when backward reaches the block's output."""
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.requires_grad:
                # A hook on one output tensor is enough: this only starts fetches early. If a node needs its tensor sooner,
                # `_unpack` fetches it.
                value.register_hook(lambda grad: self._prefetch(scope))
                return

    def _pack(self, scope: Scope, not_moved: _NotMoved, tensor: Tensor) -> Handle | Kept:
        if not self._may_move(tensor) or tensor.untyped_storage()._cdata in not_moved:
            return Kept(tensor)
        with self._lock, torch.no_grad():
            self._tidy(oldest=scope.number - BLOCKS_LEAVING)
            storage = tensor.untyped_storage()
            reference = self._saved.get(storage._cdata)
            saved = reference() if reference is not None else None
            if saved is None or not saved.is_of(tensor):
                source = bytes_of(tensor)
                saved = SavedStorage(StorageWeakRef(storage), tensor._version, source, self.tier.store(source))
                # Weakly: the handles in autograd own the saved storage, and `_leaving` does until its copy out is done.
                self._saved[storage._cdata] = weakref.ref(saved)
                self._leaving.append((scope.number, saved))
                self._counts["storages"] += 1
                self._counts["stored_bytes"] += saved.nbytes
                self._let_go(oldest=scope.number - BLOCKS_LEAVING)
            scope.storages.append(weakref.ref(saved))
            saved.live += 1
            saved.unseen += 1
            self._counts["tensors"] += 1
            return Handle(tensor, saved, self._dropped)

    def _may_move(self, tensor: Tensor) -> bool:
        return (
            _is_plain(tensor)
            and tensor.device == self.streams.device
            and tensor.layout == torch.strided
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.untyped_storage().nbytes() >= self.policy.min_bytes
        )

    # ----------------------------------------------------------------------------------------------- backward

    def _unpack(self, handle: Handle | Kept) -> Tensor:
        if isinstance(handle, Kept):
            return handle.restore()
        with self._lock, torch.no_grad():
            self._tidy()
            handle.refuse_changed()
            saved = handle.saved
            if handle.round == saved.round:
                # This handle was used in this round already: a second backward over a kept graph has begun.
                saved.round += 1
                saved.unseen = saved.live
            data = self._fetch(saved) if saved.back is None else saved.back
            if saved.arriving:
                saved.arriving = False
                saved.stored.arrive()
            restored = handle.view(data)
            handle.round = saved.round
            # With the last handle of the round the saved storage drops its bytes. They live on in `restored`, as long as the
            # node that unpacks it runs.
            self._seen(saved)
            return restored

    def _prefetch(self, scope: Scope | None) -> None:
        with self._lock, torch.no_grad():
            self._tidy()
            for _ in range(1 + self.policy.ahead):
                if scope is None:
                    return
                for reference in reversed(scope.storages):
                    saved = reference()
                    if saved is not None and saved.unseen and saved.back is None:
                        self._fetch(saved)
                scope = scope.previous

    def _fetch(self, saved: SavedStorage) -> Tensor:
        if saved.source is not None:  # the copy out is not done, so the bytes are still here
            saved.back, travelled = saved.source, False
        else:
            # On the compute stream, whose memory it stays: see [Note: who waits for whom].
            saved.back = torch.empty(saved.nbytes, dtype=torch.uint8, device=self.streams.device)
            travelled = saved.stored.fetch(saved.back)
            saved.arriving = True
        self._counts["fetched_bytes" if travelled else "forwarded_bytes"] += saved.nbytes
        return saved.back

    def _seen(self, saved: SavedStorage) -> None:
        """Count one handle as used; with the last one the fetched bytes are dropped."""
        saved.unseen -= 1
        if saved.unseen <= 0 and saved.back is not None:
            if saved.arriving:  # its last handle was dropped unused
                saved.arriving = False
                saved.stored.arrive()
            saved.back = None

    # ------------------------------------------------------------------------------------------------- tidying

    def _tidy(self, *, oldest: int | None = None) -> None:
        """Free storages whose handles autograd has dropped, and device memory whose copies out are done."""
        while True:
            try:
                saved, seen = self._dropped.get_nowait()
            except Empty:
                break
            saved.live -= 1
            try:
                if seen != saved.round:
                    self._seen(saved)
            finally:
                if not saved.live:
                    self._release(saved)
        self._let_go(oldest=oldest)

    def _release(self, saved: SavedStorage) -> None:
        address = saved.origin.cdata
        reference = self._saved.get(address)
        if reference is not None and reference() is saved:
            del self._saved[address]
        saved.stored.release()

    def _let_go(self, *, oldest: int | None = None) -> None:
        """Free device memory whose copies out are done. Compute waits for those of scopes up to `oldest`, to bound memory."""
        while self._leaving:
            number, saved = self._leaving[0]
            if not saved.stored.left.query():
                if oldest is None or number > oldest:
                    return
                self.streams.wait(saved.stored.left)
            saved.source = None
            self._leaving.popleft()

    # ----------------------------------------------------------------------------------------------- reporting

    def end_step(self) -> None:
        """Move the step's counts to `last_step`. Compute waits for copies out that are still under way."""
        with self._lock:
            self._tidy(oldest=self._numbers)
            self.tier.tidy()
            self.tier.end_step()
            waited = self.tier.waited_s + self.streams.waited_s
            self.last_step = OffloadStep(
                **self._counts, peak_bytes=self.tier.peak_bytes, waited_s=waited - self._waited_before
            )
            self._waited_before = waited
            self._counts = dict.fromkeys(self._counts, 0)

    def report(self) -> str:
        """The last step in two lines: the tier, and the bytes moved."""
        return f"activation offload to {self.tier.describe()}\n{self.last_step}"


class _NotMoved:
    """Storages that are no activations of a block: its parameters and buffers, and inputs that need no gradient.

    Parameters are looked up at the first saved tensor and not before, since FSDP gathers them in a hook of the block. If the
    block contains FSDP units, they are looked up again at each saved tensor: units are gathered later.
    """

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        self._module = module
        self._inputs = {tensor.untyped_storage()._cdata for tensor in _tables(inputs)}
        self._params: set[int] | None = None
        self._changes = any(isinstance(child, FSDPModule) for child in module.modules() if child is not module)

    def __contains__(self, address: int) -> bool:
        if address in self._inputs:
            return True
        if self._params is None or (self._changes and address not in self._params):
            self._params = set(_addresses([*self._module.parameters(), *self._module.buffers()]))
        return address in self._params


def _tables(inputs: Any) -> Iterator[Tensor]:
    """Tensors among the inputs that need no gradient, also attributes of objects such as a mask."""
    for leaf in tree_leaves(inputs):
        for value in (leaf, *vars(leaf).values()) if hasattr(leaf, "__dict__") else (leaf,):
            if (
                isinstance(value, Tensor)
                and _is_plain(value)
                and not value.requires_grad
                and value.layout == torch.strided
            ):
                yield value


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is of no subclass. In an estimate: whether it is fake; the few real integer tensors there are not moved."""
    if estimate_under_way() is not None:
        return _torch.is_fake(tensor) and not isinstance(tensor, nn.Parameter)
    return type(tensor) is Tensor


def _addresses(tensors: Iterable[Tensor]) -> Iterator[int]:
    for tensor in tensors:
        local = local_tensor(tensor)
        if local.layout == torch.strided and not local.is_meta:
            yield local.untyped_storage()._cdata


def make_tier(policy: ActivationOffload, streams: Streams) -> Tier:
    # An estimate writes no files, but counts their bytes.
    if policy.to == "host" or estimate_under_way() is not None:
        return HostTier(streams, reserve=policy.reserve)
    return DiskTier(streams, policy.folder, staging=policy.staging, reserve=policy.reserve)
