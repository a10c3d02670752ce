"""Ranks that a benchmark starts itself, each in a network namespace of its own or of its host's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.faults.switch import Switch

ROOT = Path(__file__).parents[1]


def on_switch(net: Switch, rank: int, code: str) -> list[str]:
    """The command that runs Python code as a rank with a card of its own."""
    enter = (
        f"from tests.faults.switch import Switch; net = Switch({net.size}); net.name = {net.name!r}; net.enter({rank})"
    )
    return [sys.executable, "-c", f"{enter}\n{code}"]


def run_ranks(
    commands: Sequence[Sequence[str]],
    *,
    address: str,
    card: str,
    per_node: int = 1,
    timeout_s: float = 900,
    meanwhile: Callable[[list[subprocess.Popen[bytes]]], None] = lambda ranks: time.sleep(0.1),
) -> None:
    """Until all have ended. address: of rank 0. meanwhile: called again and again.

    Raises: TimeoutError; RuntimeError where one ended with an error. No rank outlives the call.
    """
    ranks = []
    for rank, command in enumerate(commands):
        of_rank = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(commands)),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": address,
            "MASTER_PORT": "29556",
            "GLOO_SOCKET_IFNAME": card,
            "OMP_NUM_THREADS": "1",
        }
        ranks.append(subprocess.Popen(command, env={**os.environ, **of_rank}, cwd=ROOT))
    end = time.monotonic() + timeout_s
    try:
        while any(each.poll() is None for each in ranks):
            if time.monotonic() > end:
                raise TimeoutError(f"the ranks did not end within {timeout_s:g} s")
            meanwhile(ranks)
    finally:
        for each in ranks:
            each.kill()
    if any(each.returncode for each in ranks):
        raise RuntimeError(f"ranks ended with {[each.returncode for each in ranks]}")
