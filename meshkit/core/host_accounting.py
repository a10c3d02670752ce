"""Accounting of host memory: which tensors count as the host's, whatever device they are on.

On a GPU a tensor's device says whether it was offloaded. A run on CPU, and an estimate, have tensors of one device only:
there the code that offloads marks what it allocates, and what counts peak memory asks for the marks.
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
    """late: a copy ends only when it is waited for, which is the worst a GPU may do; else at once, as on a CPU."""

    late: bool


_on_host: ContextVar[bool] = ContextVar("on_host", default=False)
_estimating: ContextVar[Estimating | None] = ContextVar("estimating", default=None)
_host_storages: dict[int, weakref.ref[UntypedStorage]] = {}


@contextmanager
def on_host() -> Iterator[None]:
    """Storages first seen inside count as the host's memory, or as disk."""
    token = _on_host.set(True)
    try:
        yield
    finally:
        _on_host.reset(token)


def is_on_host() -> bool:
    """Whether what is allocated now counts as the host's."""
    return _on_host.get()


def made_on_host(make: Callable[[], Tensor]) -> Tensor:
    """What `make` allocates, which counts as the host's as long as it lives, also for counting that begins later."""
    with on_host():
        tensor = make()
    storage = tensor.untyped_storage()
    key = storage._cdata
    # By address, and forgotten with the storage: the address is given to another one afterwards.
    _host_storages[key] = weakref.ref(storage, lambda _: _host_storages.pop(key, None))
    return tensor


def lies_on_host(storage: UntypedStorage) -> bool:
    """Whether `made_on_host` made it."""
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
    """The innermost `estimating`; None in a real run."""
    return _estimating.get()
