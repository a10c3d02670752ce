"""Where a tensor counts as lying, for the accountant: what offloading allocates is on the host, whatever the device is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_on_host: ContextVar[bool] = ContextVar("on_host", default=False)


@contextmanager
def on_host() -> Iterator[None]:
    """Storages first seen inside lie in the host's memory, or beyond it on disk.

    On a GPU the device of a tensor says so. A run on CPU, and an estimate, have one kind of tensor only: so whoever moves
    tensors off the device allocates their new place in here.
    """
    token = _on_host.set(True)
    try:
        yield
    finally:
        _on_host.reset(token)


def is_on_host() -> bool:
    """Is what is allocated now on the host?"""
    return _on_host.get()
