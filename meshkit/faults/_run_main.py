"""run_main: start a recipe under the watchdog, so that an error is printed once and ends every rank."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from meshkit.core import _torch
from meshkit.errors import MeshkitError, PlanError
from meshkit.faults.alerts import Alerts, Hook
from meshkit.faults.calls import CallFiles
from meshkit.faults.crew import Restarts
from meshkit.faults.location import location_of
from meshkit.faults.page import Page
from meshkit.faults.supervise import supervise
from meshkit.faults.watchdog import Watchdog, report
from meshkit.mesh.launcher import adopt_slurm

RESTARTS = "MESHKIT_RESTARTS"


def run_main(
    main: Callable[[], None],
    *,
    restarts: int | Restarts | None = None,
    stall_s: float = 20.0,
    alert: Hook | None = None,
    page: str | os.PathLike[str] | None = None,
    calls: str | os.PathLike[str] | None = None,
) -> None:
    """Call `main` and end the process; an error is printed once, with its rank and its location in the training.

    A MeshkitError is shown without a traceback, and ends the process with its `exit_code`; any other error with 1. Most
    mistakes are made by every rank at once: the first to come speaks for those with the same text. A rank that only lost the
    others names the rank that has ended, failed or stays away, and its location: as soon as a connection closes, when a
    collective times out, and when torchrun ends it with SIGTERM.
    Processes that the recipe starts have one thread each, as ranks that torchrun starts, unless OMP_NUM_THREADS says more.
    restarts: how often all ranks are started anew, in place, when one has died or raised: this process stays as a supervisor,
    which has all modules imported, and forks; see `supervise`. `main` then resumes, as after a restart by torchrun. Default:
    the variable MESHKIT_RESTARTS of the environment, as "3" or "3 spares=1 multiple=8", which the launch line sets; else 0.
    stall_s: how long a rank waits at one location before it names the rank it waits for; it goes on waiting, until
    the timeout of the mesh. alert: who is told what is reported here, see `Alerts`. page: an HTML file that rank 0 writes
    every five seconds: where each rank is, and whether it works or waits, see `Page`.
    calls: a folder into which each rank writes its last calls (collectives, messages) when something is reported and when it
    ends; `python -m meshkit calls FOLDER` reads them.
    Wire: a thread of each rank writes its location and its last calls into the store of the world, a kilobyte a second
    (beyond 500 ranks less often).
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    adopt_slurm()
    try:
        if restarts is None:
            restarts = Restarts.parse(os.environ.get(RESTARTS, "0"))
        supervise(Restarts(times=restarts) if isinstance(restarts, int) else restarts)
        # Before `main`, on the main thread: signal handlers can be set nowhere else.
        rank = int(os.environ.get("RANK", "0"))  # of this life
        watchdog = Watchdog(
            stall_s=stall_s,
            alerts=Alerts(alert),
            page=None if page is None or rank else Page(page),
            calls=None if calls is None else CallFiles(calls),
        )
    except PlanError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the ranks of a host have the same files
            report(f"PlanError (rank {os.environ.get('RANK', '0')}): {error}")
        else:
            time.sleep(3)  # torchrun ends all ranks as soon as one has: not before that one has spoken
        _exit(error.exit_code)
    status = 0
    try:
        main()
    except Exception as error:
        _report_error(error, watchdog)
        status = error.exit_code if isinstance(error, MeshkitError) else 1
    else:
        watchdog.leave("done")
    watchdog.finish()
    _exit(status)


def _report_error(error: Exception, watchdog: Watchdog) -> None:
    rank, location = int(os.environ.get("RANK", "0")), location_of(error).text
    text = f"{type(error).__name__} (rank {rank}): {error}"
    # A consequence, not a cause: the rank that failed first speaks for itself, or is named.
    if _torch.says_peer_is_lost(error):
        watchdog.report_missing(text, location)
        return
    # Before anything is printed: the others may see the closed connection at once, and look here for the cause.
    watchdog.leave("error", location, text)
    if not watchdog.is_first(f"{type(error).__name__}: {error}"):
        return
    if not isinstance(error, MeshkitError):
        traceback.print_exception(error)
    watchdog.report(
        "error", text, *getattr(error, "__notes__", ()), f"It was at {location}, on {socket.gethostname()}."
    )


def _exit(status: int) -> NoReturn:
    """End the process at once."""
    # Not sys.exit. On failure, destructors of process groups wait for ranks that will not come. After success, gloo's threads
    # may free a tensor while the interpreter ends, which aborts it (2.11 and 2.15, rarely, on a loaded machine).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
