"""Functional collectives without their wrappers, and waits: timed, or marked for the watchdog."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core._torch.calls import begin_call
from meshkit.core.calls import Call
from meshkit.core.waiting import marked, waiting

# [Note: functional collectives without their wrappers]
# The operators behind torch.distributed._functional_collectives have the same names and meaning in 2.11 and 2.15. The Python
# wrappers around them return AsyncCollectiveTensor, which breaks the backward of compiled regions in 2.15, and one was
# renamed between the two versions. So the operators are called directly, on contiguous tensors, which they read as memory
# lies. Each is waited for at once: with gloo the host waits; with NCCL the current stream does, while the host goes on.
# Messages that are to travel beside other work are sent by c10d with async_op instead. Replaced by: the wrappers, once
# compiled backwards take them.

_c10d = torch.ops._c10d_functional

# What selective recompute may keep of communication. Checked: 2.11, 2.15. What replaces them: public functional collectives.
FUNCTIONAL_COLLECTIVES = frozenset(
    {
        _c10d.all_reduce.default,
        _c10d.all_gather_into_tensor.default,
        _c10d.reduce_scatter_tensor.default,
        _c10d.wait_tensor.default,
    }
)


def _wait(tensor: Tensor, what: str, call: Call | None) -> Tensor:
    # torch.compile follows the first branch alone: it knows the answer, and has no way to trace a mark or a clock.
    if torch.compiler.is_compiling():
        compiled: Tensor = _c10d.wait_tensor(tensor)
        return compiled
    if call is not None:
        call.wait(since=call.began)
    with waiting(what):
        done: Tensor = _c10d.wait_tensor(tensor) if _timed_waits is None else _timed(_c10d.wait_tensor, tensor)
    if call is not None:
        call.end()
    return done


def _begin(op: str, tensor: Tensor, group_name: str) -> Call | None:
    return None if torch.compiler.is_compiling() else begin_call(op, tensor, group_name)


def all_reduce_sum(tensor: Tensor, group_name: str) -> Tensor:
    call = _begin("all_reduce", tensor, group_name)
    return _wait(_c10d.all_reduce(tensor, "sum", group_name), "an all-reduce", call)


def all_gather_rows(tensor: Tensor, size: int, group_name: str) -> Tensor:
    """[n, ...] on each of `size` ranks to [size * n, ...]."""
    call = _begin("all_gather", tensor, group_name)
    return _wait(_c10d.all_gather_into_tensor(tensor, size, group_name), "an all-gather", call)


def reduce_scatter_rows(tensor: Tensor, size: int, group_name: str) -> Tensor:
    """[size * n, ...] to this rank's [n, ...] of the sum."""
    call = _begin("reduce_scatter", tensor, group_name)
    return _wait(_c10d.reduce_scatter_tensor(tensor, "sum", size, group_name), "a reduce-scatter", call)


@dataclass
class Waits:
    """Of one thread. seconds: in all its waits."""

    thread: int
    seconds: float = 0.0


_timed_waits: Waits | None = None


@contextmanager
def waits_timed() -> Iterator[Waits]:
    """Inside, this thread's waits for collectives and messages on the host are added up, but for compiled ones.

    Private: that every Python collective without async_op calls `Work.wait` of its class, FSDP's among them; there is no
    hook. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    global _timed_waits
    wait, outer = dist.Work.wait, _timed_waits
    _timed_waits = Waits(threading.get_ident())
    dist.Work.wait = lambda *args: _timed(wait, *args)  # type: ignore[assignment, method-assign]  # put back below
    try:
        yield _timed_waits
    finally:
        dist.Work.wait, _timed_waits = wait, outer  # type: ignore[method-assign]  # put back


def _timed(act: Callable[..., Any], *args: Any) -> Any:
    waits = _timed_waits
    # Other threads (a watchdog's, an asynchronous checkpoint's) wait too: theirs are not counted.
    if waits is None or waits.thread != threading.get_ident():
        return act(*args)
    began = time.perf_counter()
    try:
        return act(*args)
    finally:
        waits.seconds += time.perf_counter() - began


def mark_works() -> None:
    """From now on every `Work.wait` of this process is marked, a user's too, if nothing around it says more.

    For whoever reads marks, the watchdog: until it calls this, nothing is patched. Private, checked, replaced by: as for
    `waits_timed`.
    """
    dist.Work.wait = marked(dist.Work.wait, "a collective or a message")  # type: ignore[method-assign]  # for good
