"""The engine: what is saved in a block leaves the device, and is back when backward gets there."""

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

BLOCKS_LEAVING = (
    2  # whose tensors may still be on the device on their way out: the one that computes and the one before
)


class Scope:
    """One forward of one block, and what it saved; `previous` is the block before it in the same forward of the model."""

    __slots__ = ("number", "parcels", "previous")

    def __init__(self, number: int, previous: Scope | None) -> None:
        self.number, self.previous = number, previous
        self.parcels: list[weakref.ref[SavedStorage]] = []


class Offload:
    """Moves what blocks save, for all blocks of one model on one device.

    Saved tensors stay where they are if they belong to a parameter or buffer of the block (FSDP frees and refills those),
    come into it from outside without needing a gradient (tables that all blocks share: they live as long as the forward
    anyway), are of a subclass or another device, or lie in a storage smaller than `min_bytes`.
    An exception, or a forward without backward, leaves nothing behind: what autograd drops is given back.
    """

    def __init__(self, policy: ActivationOffload, streams: Streams, tier: Tier | None = None) -> None:
        self.policy, self.streams = policy, streams
        self.tier: Tier = tier or make_tier(policy, streams)
        self.last_step = OffloadStep()
        self._lock = threading.RLock()  # CUDA's backward runs in a thread of its own
        self._parcels: dict[int, weakref.ref[SavedStorage]] = {}  # by address of the storage
        self._leaving: deque[tuple[int, SavedStorage]] = deque()  # with the scope that saved them
        self._dropped: SimpleQueue[tuple[SavedStorage, int]] = SimpleQueue()
        self._numbers = 0
        self._newest: Scope | None = None
        self._counts = {"storages": 0, "tensors": 0, "stored_bytes": 0, "fetched_bytes": 0, "forwarded_bytes": 0}
        self._waited_before = 0.0

    # ------------------------------------------------------------------------------------------------ forward

    def begin_forward(self) -> None:
        """A forward of the model begins: its first block comes after no other."""
        self._newest = None

    @contextmanager
    def block(self, module: nn.Module, inputs: Any, *, keeps: bool) -> Iterator[Scope]:
        """Inside, what autograd saves is moved; keeps: it is not, and the block only has its place in the order."""
        with self._lock:
            self._numbers += 1
            scope = self._newest = Scope(self._numbers, self._newest)
            self._tidy(oldest=scope.number - BLOCKS_LEAVING)
        if keeps:
            yield scope
            return
        with saved_tensors_hooks(partial(self._pack, scope, _Staying(module, inputs)), self._unpack):
            yield scope

    def on_backward(self, scope: Scope, out: Any) -> None:
        """Fetch the scope, and those before it, as soon as backward reaches the block's result."""
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.requires_grad:
                # One tensor of the result is enough, for here a fetch is only begun early: what nodes need before that,
                # `_unpack` fetches.
                value.register_hook(lambda grad: self._prefetch(scope))
                return

    def _pack(self, scope: Scope, staying: _Staying, tensor: Tensor) -> Handle | Kept:
        if not self._may_move(tensor) or tensor.untyped_storage()._cdata in staying:
            return Kept(tensor)
        with self._lock, torch.no_grad():
            self._tidy(oldest=scope.number - BLOCKS_LEAVING)
            storage = tensor.untyped_storage()
            reference = self._parcels.get(storage._cdata)
            parcel = reference() if reference is not None else None
            if parcel is None or not parcel.is_of(tensor):
                source = bytes_of(tensor)
                parcel = SavedStorage(StorageWeakRef(storage), tensor._version, source, self.tier.store(source))
                # Weakly: the handles that autograd holds own the parcel, and `_leaving` does until it has left.
                self._parcels[storage._cdata] = weakref.ref(parcel)
                self._leaving.append((scope.number, parcel))
                self._counts["storages"] += 1
                self._counts["stored_bytes"] += parcel.nbytes
                self._let_go(oldest=scope.number - BLOCKS_LEAVING)
            scope.parcels.append(weakref.ref(parcel))
            parcel.live += 1
            parcel.unseen += 1
            self._counts["tensors"] += 1
            return Handle(tensor, parcel, self._dropped)

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
            parcel = handle.parcel
            if handle.round == parcel.round:
                # This handle was used in this round already: a second backward over a kept graph has begun.
                parcel.round += 1
                parcel.unseen = parcel.live
            data = self._fetch(parcel) if parcel.back is None else parcel.back
            if parcel.arriving:
                parcel.arriving = False
                parcel.stored.arrive()
            restored = handle.view(data)
            handle.round = parcel.round
            # With the last handle of the round the parcel lets go of its bytes: they live on in `restored`, as long as the
            # node that asked for it runs.
            self._seen(parcel)
            return restored

    def _prefetch(self, scope: Scope | None) -> None:
        with self._lock, torch.no_grad():
            self._tidy()
            for _ in range(1 + self.policy.ahead):
                if scope is None:
                    return
                for reference in reversed(scope.parcels):
                    parcel = reference()
                    if parcel is not None and parcel.unseen and parcel.back is None:
                        self._fetch(parcel)
                scope = scope.previous

    def _fetch(self, parcel: SavedStorage) -> Tensor:
        if parcel.source is not None:  # still leaving: it stays
            parcel.back, travelled = parcel.source, False
        else:
            # On the compute stream, whose memory it stays: see [Note: who waits for whom].
            parcel.back = torch.empty(parcel.nbytes, dtype=torch.uint8, device=self.streams.device)
            travelled = parcel.stored.fetch(parcel.back)
            parcel.arriving = True
        self._counts["fetched_bytes" if travelled else "forwarded_bytes"] += parcel.nbytes
        return parcel.back

    def _seen(self, parcel: SavedStorage) -> None:
        """One handle fewer waits for the bytes that are back."""
        parcel.unseen -= 1
        if parcel.unseen <= 0 and parcel.back is not None:
            if parcel.arriving:  # its last handle was dropped unused
                parcel.arriving = False
                parcel.stored.arrive()
            parcel.back = None

    # ------------------------------------------------------------------------------------------------- tidying

    def _tidy(self, *, oldest: int | None = None) -> None:
        """Give back what autograd has dropped, and let go of what has left the device."""
        while True:
            try:
                parcel, seen = self._dropped.get_nowait()
            except Empty:
                break
            parcel.live -= 1
            try:
                if seen != parcel.round:
                    self._seen(parcel)
            finally:
                if not parcel.live:
                    self._release(parcel)
        self._let_go(oldest=oldest)

    def _release(self, parcel: SavedStorage) -> None:
        address = parcel.origin.cdata
        reference = self._parcels.get(address)
        if reference is not None and reference() is parcel:
            del self._parcels[address]
        parcel.stored.release()

    def _let_go(self, *, oldest: int | None = None) -> None:
        """Drop the device's bytes that have left. Compute waits for scopes up to `oldest`, so that few are on their way."""
        while self._leaving:
            number, parcel = self._leaving[0]
            if not parcel.stored.left.query():
                if oldest is None or number > oldest:
                    return
                self.streams.wait(parcel.stored.left)
            parcel.source = None
            self._leaving.popleft()

    # ----------------------------------------------------------------------------------------------- reporting

    def end_step(self) -> None:
        """Close the step's account, which is then `last_step`. Compute waits for what is still on its way out."""
        with self._lock:
            self._tidy(oldest=self._numbers)
            self.tier.tidy()
            waited = self.tier.waited_s + self.streams.waited_s
            self.last_step = OffloadStep(
                **self._counts, peak_bytes=self.tier.peak_bytes, waited_s=waited - self._waited_before
            )
            self._waited_before = waited
            self._counts = dict.fromkeys(self._counts, 0)

    def report(self) -> str:
        """The last step in two lines: where activations wait, and what was moved."""
        return f"activation offload to {self.tier.describe()}\n{self.last_step}"


class _Staying:
    """Storages that are no activations of a block: its parameters and buffers, and inputs that need no gradient.

    They are looked up at the first saved tensor, when FSDP has gathered the block's parameters, and with units inside of the
    block again at each, since those are gathered later.
    """

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        self._module = module
        self._inputs = {tensor.untyped_storage()._cdata for tensor in _tables(inputs)}
        self._own: set[int] | None = None
        self._changes = any(isinstance(child, FSDPModule) for child in module.modules() if child is not module)

    def __contains__(self, address: int) -> bool:
        if address in self._inputs:
            return True
        if self._own is None or (self._changes and address not in self._own):
            self._own = set(_addresses([*self._module.parameters(), *self._module.buffers()]))
        return address in self._own


def _tables(inputs: Any) -> Iterator[Tensor]:
    """Tensors among the inputs that need no gradient, also those in an object as a BlockMask."""
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
    """Of no subclass. In an estimate, one without values: its few whole numbers, which are real, count as staying."""
    if estimate_under_way() is not None:
        return _torch.is_fake(tensor) and not isinstance(tensor, nn.Parameter)
    return type(tensor) is Tensor


def _addresses(tensors: Iterable[Tensor]) -> Iterator[int]:
    for tensor in tensors:
        local = local_tensor(tensor)
        if local.layout == torch.strided and not local.is_meta:
            yield local.untyped_storage()._cdata


def make_tier(policy: ActivationOffload, streams: Streams) -> Tier:
    if (
        policy.to == "host" or estimate_under_way() is not None
    ):  # an estimate writes no files; their bytes count all the same
        return HostTier(streams, reserve=policy.reserve)
    return DiskTier(streams, policy.folder, staging=policy.staging, reserve=policy.reserve)
