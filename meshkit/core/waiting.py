"""Marks of waits, for the watchdog: `with waiting("an all-reduce"): work.wait()` says that a thread waits for other ranks."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import TypeVar

# [Note: marks are read by another thread]
# The watchdog's thread asks what the main thread waits for, while that one sits in C++ and may never come out. A
# `contextvars.ContextVar` can be read only by the thread that set it, and a `threading.local` too; so the marks are one
# plain dict by thread. Each thread writes its own entry alone, and one read or write of a dict by an int is a single step
# under the GIL: there is no lock, which a waiting thread could hold. A mark costs half a microsecond; nothing is read but by
# the watchdog, once a second.
_waits: dict[int, str] = {}
R = TypeVar("R")


class waiting:
    """Inside, this thread waits for other ranks. what: what it waits for, in an error's words. The innermost mark holds.

    A class rather than a generator, which would cost twice as much. Not for code that torch.compile traces.
    """

    __slots__ = ("_outer", "_what")

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        thread = get_ident()
        self._outer = _waits.get(thread)
        _waits[thread] = self._what

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Also when the wait raises: idents of threads are used again, so a mark left behind would be another thread's.
        if self._outer is None:
            del _waits[get_ident()]
        else:
            _waits[get_ident()] = self._outer


def waits_of(thread: int) -> str | None:
    """What that thread waits for, from any thread; None where it does not."""
    return _waits.get(thread)


def marked(wait: Callable[..., R], what: str) -> Callable[..., R]:
    """The function, marked where nothing around its call is. `faults.location` skips frames of this file."""

    def marked_wait(*args: object) -> R:
        if get_ident() in _waits:
            return wait(*args)
        with waiting(what):
            return wait(*args)

    return marked_wait
