"""Processes that srun starts are ranks of one world, by its variables alone."""

from __future__ import annotations

import pytest

from meshkit.mesh.launcher import first_host, slurm_ranks

SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[03-05,11]",
}


def test_a_task_of_srun_is_a_rank() -> None:
    assert slurm_ranks(SRUN) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(20_000 + 77 * 31 + 1),
    }
    assert slurm_ranks({**SRUN, "SLURM_NODEID": "3"})["LOCAL_WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, {**SRUN, "RANK": "0"}, {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}],
    ids=["none", "a batch script", "torchrun inside of srun", "srun of one task"],
)
def test_other_processes_are_left_as_they_are(environment: dict[str, str]) -> None:
    assert slurm_ranks(environment) == {}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[3-5]", "gpu3"), ("gpu[003,7],x", "gpu003"), ("node-1,node-2", "node-1")],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
