"""Start a recipe so that an error is read once, and ends every rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing.errors import record

from meshkit.errors import MeshkitError


def run_main(main: Callable[[], None]) -> None:
    """Call `main`; a MeshkitError ends the process with its text alone, without a traceback.

    Most mistakes are made by every rank at once. So the others wait a moment before they speak: torchrun ends them when
    rank 0 has failed, and if it has not, the mistake is theirs and is shown with their rank.
    """
    try:
        record(main)()
    except MeshkitError as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank > 0:
            time.sleep(3)
        print(f"\n{type(error).__name__} (rank {rank}): {error}", file=sys.stderr, flush=True)
        os._exit(1)  # not sys.exit: destructors of process groups wait for ranks that will not come
