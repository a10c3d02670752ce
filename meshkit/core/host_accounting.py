"""Where a tensor counts as lying, for the accountant: what offloading allocates is on the host, whatever the device is.

On a GPU the device of a tensor says so. A run on CPU, and an estimate, have one kind of tensor only: so whoever moves tensors
off the device says where their new place is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, UntypedStorage


@dataclass(frozen=True, kw_only=True)
class Estimating:
    """late: copies are over only once somebody waits for them, as on a GPU they may be; else at once, as on a CPU."""

    late: bool


_on_host: ContextVar[bool] = ContextVar("on_host", default=False)
_estimating: ContextVar[Estimating | None] = ContextVar("estimating", default=None)
_host_storages: dict[int, weakref.ref[UntypedStorage]] = {}


@contextmanager
def on_host() -> Iterator[None]:
    """Storages first seen inside lie in the host's memory, or beyond it on disk."""
    token = _on_host.set(True)
    try:
        yield
    finally:
        _on_host.reset(token)


def is_on_host() -> bool:
    """Is what is allocated now on the host?"""
    return _on_host.get()


def made_on_host(make: Callable[[], Tensor]) -> Tensor:
    """What `make` allocates counts as on the host for as long as it lives, also for who begins to count later."""
    with on_host():
        tensor = make()
    storage = tensor.untyped_storage()
    key = storage._cdata
    _host_storages[key] = weakref.ref(storage, lambda _: _host_storages.pop(key, None))
    return tensor


def lies_on_host(storage: UntypedStorage) -> bool:
    """Was it made by `made_on_host`?"""
    return storage._cdata in _host_storages


@contextmanager
def estimating(*, late: bool) -> Iterator[None]:
    """Inside, tensors have no values: nothing is copied to the host, no file is written and no thread begun."""
    token = _estimating.set(Estimating(late=late))
    try:
        yield
    finally:
        _estimating.reset(token)


def estimate_under_way() -> Estimating | None:
    """None in a real run."""
    return _estimating.get()
