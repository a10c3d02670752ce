"""Launchers: the variables that srun (Slurm) gives a process, as those that torchrun gives and torch reads."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

FIRST_PORT, PORTS = 20_000, 10_000  # below those that Linux gives to connections by itself


def adopt_slurm() -> None:
    """Under `srun python train.py`, add RANK and its like to the environment. Under torchrun nothing happens."""
    for name, value in slurm_ranks(os.environ).items():
        os.environ.setdefault(name, value)


def slurm_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process; none where it is no task of an srun of several tasks, or has a RANK already."""
    # Not SLURM_NTASKS, which a batch script has too, that is one process and has started none yet.
    size = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environment or "SLURM_PROCID" not in environment or size == "1":
        return {}
    job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(
            _tasks_of(environment.get("SLURM_STEP_TASKS_PER_NODE", size), int(environment.get("SLURM_NODEID", "0")))
        ),
        "MASTER_ADDR": first_host(environment.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        # The same on all ranks, and another for each srun.
        "MASTER_PORT": str(FIRST_PORT + (job * 31 + step) % PORTS),
    }


def first_host(hosts: str) -> str:
    """Of a list as Slurm writes it: `gpu[03-07,9],login` begins with gpu03."""
    name, bracket, rest = re.match(r"([^,\[]+)(\[)?(.*)", hosts).groups()  # type: ignore[union-attr]  # it matches any name
    return name + (re.split(r"[-,\]]", rest)[0] if bracket else "")


def _tasks_of(counts: str, node: int) -> int:
    """Tasks on a node, of `2(x3),1`: two on each of the first three."""
    for part in counts.split(","):
        count, _, times = part.partition("(x")
        node -= int(times.rstrip(")") or "1")
        if node < 0:
            return int(count)
    return int(counts.split(",")[-1].partition("(")[0])
