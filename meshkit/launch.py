"""Start a recipe so that an error is read once, and ends every rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from meshkit.errors import MeshkitError


def run_main(main: Callable[[], None]) -> None:
    """Call `main` and end the process; a MeshkitError ends it with its text alone, without a traceback.

    Most mistakes are made by every rank at once. So the others wait a moment before they speak: torchrun ends them when
    rank 0 has failed, and if it has not, the mistake is theirs and is shown with their rank.
    """
    try:
        main()
    except MeshkitError as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank > 0:
            time.sleep(3)
        print(f"\n{type(error).__name__} (rank {rank}): {error}", file=sys.stderr, flush=True)
        _leave(1)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """Not sys.exit: on failure, destructors of process groups wait for ranks that will not come. After success, gloo's
    threads may free a tensor while the interpreter ends, which aborts it (2.11 and 2.15, rarely, on a loaded machine).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
