"""On an accelerator a difference of ranks that stop before the host has looked at it is there for the watchdog's thread."""

from __future__ import annotations

import time

import pytest
import torch

import meshkit as mk
from meshkit.errors import AgreementError
from meshkit.mesh.agreement import open_difference
from tests.device.world import run


def _differ() -> tuple[str, str, str]:
    """(before, of the meeting that nobody has looked at, what is raised some meetings later)"""
    mesh = mk.init_mesh("dp_shard=2", device_type="late")
    for _ in range(3):
        mesh.agreement.meet("forward_backward", facts={"microbatches": 2})
    torch.accelerator.synchronize()
    before = open_difference()
    mesh.agreement.meet("forward_backward", facts={"microbatches": 2 + mesh.rank})
    for _ in range(100):  # as a thread that looks once a second
        if found := open_difference():
            break
        torch.accelerator.synchronize()
        time.sleep(0.01)
    with pytest.raises(AgreementError) as raised:
        for _ in range(9):
            mesh.agreement.meet("forward_backward", facts={"microbatches": 2})
    return before, found, str(raised.value)


def test_the_watchdogs_thread_sees_what_the_host_has_not_looked_at() -> None:
    for (before, found, raised), races in run(2, _differ):
        assert not before and not races
        assert found == raised
        assert "ranks differ in microbatches of forward_backward" in found
        assert "2 on rank 0, 3 on rank 1" in found
