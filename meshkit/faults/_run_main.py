"""Start a recipe so that an error is read once, and ends every rank."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from meshkit.core import _torch
from meshkit.errors import MeshkitError
from meshkit.faults.location import location_of
from meshkit.faults.watchdog import Watchdog, report


def run_main(main: Callable[[], None], *, stall_s: float = 60.0) -> None:
    """Call `main` and end the process; what it raises is said once, with its rank and its place in the training.

    A MeshkitError is shown without a traceback. Most mistakes are made by every rank at once: the first to come speaks for
    those with the same text. A rank that only lost the others says who has ended, failed or stays away, and where that one
    was: as soon as a connection closes, when a collective times out, and when torchrun ends it with SIGTERM.
    Processes that the recipe starts have one thread each, as ranks that torchrun starts, unless OMP_NUM_THREADS says more.
    stall_s: how long a rank waits in one place before it says for whom; it goes on waiting, until the timeout of the mesh.
    Wire: each rank tells the world's store where it is, 300 bytes a second (less often beyond 500 ranks), by a thread.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    watch = Watchdog(stall_s=stall_s)
    try:
        main()
    except Exception as error:
        _tell(error, watch)
        _leave(1)
    watch.leave("done")
    _leave(0)


def _tell(error: Exception, watch: Watchdog) -> None:
    rank, place = int(os.environ.get("RANK", "0")), location_of(error).text
    text = f"{type(error).__name__} (rank {rank}): {error}"
    if _torch.says_peer_is_lost(error):
        watch.tell_who_is_missing(text, place)
        return
    watch.leave("error", place, text)
    if not watch.first(f"{type(error).__name__}: {error}"):
        return
    if not isinstance(error, MeshkitError):
        traceback.print_exception(error)
    report(text, *getattr(error, "__notes__", ()), f"It was at {place}.")


def _leave(status: int) -> NoReturn:
    """Not sys.exit: on failure, destructors of process groups wait for ranks that will not come. After success, gloo's
    threads may free a tensor while the interpreter ends, which aborts it (2.11 and 2.15, rarely, on a loaded machine).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
