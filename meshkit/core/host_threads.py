"""Threads of the host's operators (OpenMP, MKL), for work on the host of a rank that torchrun gives one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """Inside, operators that this thread calls on the host use so many threads; None changes nothing.

    OpenMP keeps the number for each calling thread, so a forward beside it has its own. MKL's is of the process, and is put
    back with it.
    """
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
