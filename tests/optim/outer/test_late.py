"""Meetings on a device whose work is late: what travels beside computing is waited for, and nothing is read too early."""

from __future__ import annotations

import pytest
import torch

import meshkit as mk
from meshkit.core.sharding import local_tensor
from meshkit.mesh import replica_mesh
from meshkit.models import LLAMA_PLAN
from meshkit.optim.outer import CO2, DiLoCo, OuterOptimizer, Policy
from tests.device.world import run as run_late
from tests.optim.outer.test_local_updates import data, model, sgd
from tests.world import pool

TOL_DEVICE = 1e-5  # fp32; the device's kernels are the host's, in another order of chunks


def train(policy: Policy) -> dict[str, torch.Tensor]:
    mesh = mk.init_mesh("dp_replicate=2")
    run = mk.parallelize(model().float(), replica_mesh(mesh), plan=LLAMA_PLAN)
    optimizer = sgd(run.model)
    outer = OuterOptimizer(run, optimizer, mesh, policy)
    for batches in data(5, 2):
        optimizer.zero_grad()
        run.forward_backward(batches[mesh["dp_replicate"].get_local_rank()])
        optimizer.step()
        outer.step()
    outer.meet()
    return {name: local_tensor(param).cpu().clone() for name, param in run.named_parameters()}


@pytest.mark.parametrize("policy", [DiLoCo(every=2, delay=1, mixing=0.5), CO2(every=2)], ids=str)
def test_meetings_on_a_late_device_have_no_races_and_the_hosts_values(policy: Policy) -> None:
    expected = pool(2).run(train, policy)
    for (values, races), on_host in zip(run_late(2, train, policy), expected, strict=True):
        assert not races
        worst = max(float((values[name] - on_host[name]).abs().max()) for name in on_host)
        assert worst <= TOL_DEVICE
