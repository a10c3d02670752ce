"""While parameters are sharded, DTensor detaches by a shorter rule, which gives what its own gives and is gone afterwards."""

from __future__ import annotations

from itertools import product

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshkit.core import _torch
from tests.laws.parity.cases import mesh_for
from tests.world import pool


def detached() -> list[tuple[bool, bool]]:
    """For each pair of placements: whether values and placements are those of torch's own rule."""
    mesh = mesh_for("dp_replicate=2 dp_shard=2").data
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = [getattr(propagator, name, {}) for name in ("op_strategy_funcs", "op_single_dim_strategy_funcs")]
    before = [dict(table) for table in tables]
    found = []
    for number, placements in enumerate(product([Replicate(), Shard(0), Shard(1), Partial()], repeat=2)):
        values = torch.randn(4 + number, 3)  # of a shape nobody has asked about
        tensor = DTensor.from_local(values, mesh, placements, run_check=False)
        with _torch.detach_keeps_placements():
            ours = tensor.detach()
        _torch.clear_sharding_caches()  # or it would answer from memory
        theirs = tensor.detach()
        found.append(
            (
                torch.equal(ours.to_local(), theirs.to_local()) and ours.shape == theirs.shape,
                ours.placements == theirs.placements == tensor.placements,
            )
        )
    assert [dict(table) for table in tables] == before
    return found


def test_detaching_keeps_values_and_placements_as_by_torchs_own_rule() -> None:
    for rank in pool(4).run(detached):
        assert len(rank) == 16
        assert all(same and placed for same, placed in rank)
