"""What a period sends is what `explain` says, of a run and of a model on meta; `estimate` counts the outer state."""

from __future__ import annotations

from collections import Counter

import pytest

import meshkit as mk
from meshkit.core.sharding import local_tensor
from meshkit.errors import PlanError
from meshkit.mesh import replica_mesh
from meshkit.models import LLAMA_PLAN
from meshkit.optim.outer import CO2, DiLoCo, LocalSGD, OuterOptimizer, Policy, QuadraticRule
from meshkit.preflight.explain import Message
from tests.optim.outer.test_local_updates import TOKENS, adamw, data, model
from tests.world import pool

CASES: list[tuple[Policy, str, int]] = [
    (LocalSGD(every=3), "dp_replicate=3", 3),
    (DiLoCo(every=2, wire="int8"), "dp_replicate=2 dp_shard=2", 4),
    (DiLoCo(every=6, fragments=3, delay=2, wire="int4"), "dp_replicate=2 tp=2", 4),
    (DiLoCo(every=6, fragments=3), "pp=2 dp_replicate=2", 4),
    (CO2(every=2), "dp_replicate=3", 3),
]


def observe_period(spec: str, policy: Policy) -> tuple[Counter[Message], Counter[Message], str, str, int]:
    """(seen on dp_replicate in a period, said of the run, printed of the run and of the model, bytes of the outer state)"""
    mesh = mk.init_mesh(spec)
    run = mk.parallelize(model(), replica_mesh(mesh), plan=LLAMA_PLAN)
    optimizer = adamw(run.model)
    outer = OuterOptimizer(run, optimizer, mesh, policy)
    replica, own = mesh["dp_replicate"].get_local_rank(), run.mesh
    batches = data(12, mesh.spec.dp_replicate)
    rows = [step[replica] for step in batches]
    steps = outer.period.steps

    def train(index: int) -> None:
        run.forward_backward(
            {key: value.tensor_split(own.data_ranks)[own.data_rank] for key, value in rows[index].items()}
        )
        optimizer.step()
        outer.step()

    for index in range(steps):  # what has a delay is under way at the end, as at the beginning
        train(index)
    with mk.observe(mesh) as seen:
        for index in range(steps, 2 * steps):
            train(index)
    on_axis = Counter({message: count for message, count in seen.items() if message.axis == "dp_replicate"})
    said = mk.explain(run, rows=2, seq_len=TOKENS, outer=outer)
    assert said.period is not None
    wanted: Counter[Message] = Counter()
    for op, size in said.period.messages:
        wanted[Message("dp_replicate", op, size)] += 1
    place = {axis: mesh[axis].get_local_rank() for axis in ("pp", "dp_replicate", "dp_shard", "tp")}
    of_model = mk.explain(model(), spec, plan=LLAMA_PLAN, rows=2, seq_len=TOKENS, outer=policy, coordinate=place)
    copies = 0 if isinstance(policy, LocalSGD) else 3 if policy.wire != "full" else 2  # of x, m, and the errors
    held = copies * sum(local_tensor(param).numel() * param.dtype.itemsize for param in run.parameters())
    return on_axis, wanted, str(said.period), str(of_model.period), held


@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_a_period_sends_on_the_axis_is_what_explain_says(case: int) -> None:
    policy, spec, ranks = CASES[case]
    for seen, said, of_run, of_model, _ in pool(ranks).run(observe_period, spec, policy):
        assert seen == said and said
        assert of_run == of_model


def test_estimate_counts_the_outer_state_and_what_travels() -> None:
    for policy, spec, ranks in CASES[1:]:
        held = max(each[-1] for each in pool(ranks).run(observe_period, spec, policy))
        sizes = {"rows": 2, "seq_len": TOKENS, "kernels": "cpu", "plan": LLAMA_PLAN}
        one = mk.MeshSpec.parse(spec)
        inner = spec.replace(f"dp_replicate={one.dp_replicate}", "") or "dp_shard=1"
        plain = mk.estimate(model(), inner, **sizes).optimizer_bytes
        period = mk.explain(model(), spec, plan=LLAMA_PLAN, rows=2, seq_len=TOKENS, outer=policy).period
        assert period is not None
        whole = mk.estimate(model(), spec, outer=policy, **sizes).optimizer_bytes
        # a rank of the estimate is the first, which holds the most here
        assert whole == plain + held + period.flight_bytes


def test_the_closed_form_of_a_period() -> None:
    """N elements in full precision over R replicas: 2 (R - 1) / R of their bytes, as a ring all-reduce once a period."""
    period = mk.explain(
        model().float(), "dp_replicate=4", plan=LLAMA_PLAN, rows=2, seq_len=TOKENS, outer=DiLoCo(every=25)
    ).period
    assert period is not None
    chunk = sum(-(-param.numel() // 4) * 4 for param in model().parameters())  # of each the same share
    assert period.sent_bytes == 2 * 3 * chunk + 3 * 16
    assert period.synchronous_bytes / period.sent_bytes == pytest.approx(25, rel=1e-2)
    rule = LocalSGD(every=QuadraticRule(alpha=1.0, base=3), start_step=5)
    slow = mk.explain(model(), "dp_replicate=4", plan=LLAMA_PLAN, rows=2, seq_len=TOKENS, outer=rule).period
    assert slow is not None and slow.steps == 3


def policy_alone() -> None:
    run = mk.parallelize(model(), replica_mesh(mk.init_mesh("dp_replicate=2")), plan=LLAMA_PLAN)
    with pytest.raises(PlanError, match="a run is of one replica. Give its OuterOptimizer"):
        mk.explain(run, rows=2, seq_len=TOKENS, outer=DiLoCo())


def test_a_run_does_not_say_how_many_replicas_there_are() -> None:
    pool(2).run(policy_alone)
