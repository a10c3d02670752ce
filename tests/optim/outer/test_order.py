"""Meetings end under NCCL's rules, beside the inner run's calls: whole, in flight, and waited for early by a save."""

from __future__ import annotations

import pytest

import meshkit as mk
from meshkit.mesh import replica_mesh
from meshkit.models import LLAMA_PLAN
from meshkit.optim.outer import CO2, DiLoCo, OuterOptimizer, Policy
from meshkit.preflight.order import EAGER, LAZY, deadlock, gathered, mismatches, recording
from tests.optim.outer.test_local_updates import data, model, sgd
from tests.world import pool

CASES: list[tuple[str, Policy]] = [
    ("dp_replicate=2 tp=2", DiLoCo(every=2)),
    ("pp=2 dp_replicate=2", DiLoCo(every=6, fragments=3, delay=2, wire="int8")),
    ("dp_replicate=2 dp_shard=2", CO2(every=2)),
]


def calls_end(spec: str, policy: Policy) -> tuple[list[object], list[str], int]:
    mesh = mk.init_mesh(spec)
    with recording(mesh) as events:
        own = replica_mesh(mesh)
        run = mk.parallelize(model(), own, plan=LLAMA_PLAN)
        optimizer = sgd(run.model)
        outer = OuterOptimizer(run, optimizer, mesh, policy)
        for step, batches in enumerate(data(7, 2)):
            mine = batches[mesh["dp_replicate"].get_local_rank()]
            run.forward_backward(
                {key: value.tensor_split(own.data_ranks)[own.data_rank] for key, value in mine.items()}
            )
            optimizer.step()
            outer.step()
            if step == 4:
                outer.finish()
        outer.meet()
    ranks = gathered(events, mesh)
    return [deadlock(ranks, rules) for rules in (LAZY, EAGER)], mismatches(ranks), len(ranks[0])


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_calls_of_all_ranks_end_under_nccls_rules(case: int) -> None:
    for deadlocks, differing, calls in pool(4).run(calls_end, *CASES[case]):
        assert not any(deadlocks) and not differing and calls > 20
