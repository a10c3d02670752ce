"""How long threads were ready to run and had no processor: what a busy machine takes from this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")
_THIS = Path("/proc/thread-self")
_NS = 1e-9

# Source: `run_delay` of the kernel's schedstat, its second number. 0 where there is none (not Linux).


def starved_s() -> float:
    """Seconds of this thread since it began."""
    return _of(_THIS)


@contextmanager
def others_starved() -> Iterator[Callable[[], float]]:
    """Yields what says the seconds of the other threads that live now, all together. It may be asked at each call, for their
    files stay open."""
    this, files = Path(os.readlink(_THIS)).name if _THIS.exists() else "", list[int]()
    with ExitStack() as stack:
        with suppress(OSError):
            for thread in _THREADS.iterdir():
                if thread.name != this:
                    with suppress(OSError):  # it has ended
                        files.append(os.open(thread / "schedstat", os.O_RDONLY))
                        stack.callback(os.close, files[-1])
        last = dict.fromkeys(files, 0.0)  # what each said last: seconds of a thread that ends are not taken back

        def seconds() -> float:
            for file in files:
                with suppress(OSError):
                    last[file] = int(os.pread(file, 80, 0).split()[1]) * _NS
            return sum(last.values())

        yield seconds


def _of(thread: Path) -> float:
    with suppress(OSError):  # it has ended
        return int((thread / "schedstat").read_text().split()[1]) * _NS
    return 0.0
