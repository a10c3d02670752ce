"""How long threads were ready to run and had no processor: what a busy machine takes from this process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")
_THIS = Path("/proc/thread-self")
_NS = 1e-9

# Source: `run_delay` of the kernel's schedstat, its second number. 0 where there is none (not Linux).


def starved_s() -> float:
    """Seconds of this thread since it began."""
    return _of(_THIS)


def others_starved_s() -> float:
    """Seconds of the other threads that live, all of them together."""
    with suppress(OSError):
        return sum(map(_of, _THREADS.iterdir())) - starved_s()
    return 0.0


def _of(thread: Path) -> float:
    with suppress(OSError):  # it has ended
        return int((thread / "schedstat").read_text().split()[1]) * _NS
    return 0.0
