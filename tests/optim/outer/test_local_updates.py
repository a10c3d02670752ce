"""Local updates equal their definitions in one process, on any inner mesh, with uneven tokens and empty replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.sharding import full_tensor
from meshkit.mesh import replica_mesh
from meshkit.models import LLAMA_PLAN, Llama
from meshkit.optim.outer import DiLoCo, LocalSGD, OuterOptimizer, Policy, QuadraticRule
from tests.compare_shards import difference
from tests.optim.outer.oracles import Batch, Replicas, diloco, local_sgd
from tests.tiny import draw_parameters, tiny_config
from tests.world import pool
from tests.zoo import causal
from tests.zoo.exact import exact
from tests.zoo.shrink import DATA_IDS

TOL_FP64_SUM = 1e-10  # only summation order differs
CONFIG = tiny_config(vocab_size=31, intermediate_size=20, num_hidden_layers=3)
ROWS, TOKENS = 4, 8


def model() -> Llama:
    torch.manual_seed(5)
    made = Llama(CONFIG).double()
    draw_parameters(made)
    return made


def data(steps: int, replicas: int, *, last_is_empty: bool = True) -> list[list[Batch]]:
    """By step and replica; each has fewer rows than the one before and other ignored labels, and the last may have none."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for step in range(steps):
        batches = []
        for replica in range(replicas):
            rows = 0 if last_is_empty and replica == replicas - 1 and replicas > 2 else max(1, ROWS - replica)
            ids = torch.randint(0, CONFIG.vocab_size, (rows, TOKENS + 1), generator=generator)
            labels = ids[:, 1:].clone()
            labels[:, : (step + replica) % 3] = -100
            batches.append({"input_ids": ids[:, :-1], "labels": labels})
        found.append(batches)
    return found


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-1)


def values_of(models: list[nn.Module]) -> list[dict[str, Tensor]]:
    return [{name: param.detach() for name, param in each.named_parameters()} for each in models]


def train(
    spec: str, policy: Policy, batches: list[list[Batch]], inner: str, choices: dict[str, Any] | None = None
) -> tuple[mk.Run, OuterOptimizer]:
    mesh = mk.init_mesh(spec)
    own = replica_mesh(mesh)
    run = mk.parallelize(model(), own, plan=LLAMA_PLAN, **(choices or {}))
    optimizer = {"adamw": adamw, "sgd": sgd}[inner](run.model)
    outer = OuterOptimizer(run, optimizer, mesh, policy)
    replica = mesh["dp_replicate"].get_local_rank()
    for step in batches:
        rows = {key: value.tensor_split(own.data_ranks)[own.data_rank] for key, value in step[replica].items()}
        optimizer.zero_grad()
        run.forward_backward(rows)
        mk.clip_grad_norm(run, 1.0)
        optimizer.step()
        outer.step()
    return run, outer


def worst_difference(
    spec: str,
    policy: Policy,
    batches: list[list[Batch]],
    inner: str,
    expected: list[dict[str, Tensor]],
    expected_outer: dict[str, Tensor] | None = None,
    choices: dict[str, Any] | None = None,
) -> float:
    run, outer = train(spec, policy, batches, inner, choices)
    replica = outer.mesh["dp_replicate"].get_local_rank()
    worst = max(difference(param, expected[replica][name]) for name, param in run.named_parameters())
    if expected_outer is not None:
        for entry in outer.entries.values():
            worst = max(worst, difference(entry.parameter, expected_outer[entry.name]))
    return worst


INNER = {  # ranks, spec, further choices of the inner run
    "ddp": (3, "dp_replicate=3", {}),
    "fsdp": (4, "dp_replicate=2 dp_shard=2", {}),
    "tp": (6, "dp_replicate=3 tp=2", {"sequence": True}),
    "pp": (4, "pp=2 dp_replicate=2", {"microbatches": 2}),
    "cp x fsdp": (8, "dp_replicate=2 dp_shard=2 cp=2", {}),
}


@pytest.mark.parametrize("inner", INNER)
def test_diloco_equals_its_definition_on_any_inner_mesh(inner: str) -> None:
    ranks, spec, choices = INNER[inner]
    replicas = Replicas(model(), mk.MeshSpec.parse(spec).dp_replicate, adamw)
    batches = data(7, len(replicas.models))
    outer = diloco(replicas, batches, every=3, lr=0.7, momentum=0.9)
    args = (spec, DiLoCo(every=3), batches, "adamw", values_of(replicas.models), outer, choices)
    assert max(pool(ranks).run(worst_difference, *args)) <= TOL_FP64_SUM


def test_local_sgd_equals_its_definition_and_post_local_sgd_meets_after_each_early_step() -> None:
    for policy, meets in (
        (LocalSGD(every=3), lambda step: step % 3 == 0),
        (LocalSGD(every=3, start_step=2), lambda step: step <= 2 or (step - 2) % 3 == 0),
        (LocalSGD(every=2, weights="equal"), lambda step: step % 2 == 0),
    ):
        replicas = Replicas(model(), 3, adamw)
        if policy.weights == "equal":
            replicas.mean = lambda name, of: sum(of(index) for index in range(3)) / 3  # type: ignore[method-assign]
        batches = data(8, 3)
        local_sgd(replicas, batches, meets)
        args = ("dp_replicate=3", policy, batches, "adamw", values_of(replicas.models))
        assert max(pool(3).run(worst_difference, *args)) <= TOL_FP64_SUM


def synchronous(batches: list[list[Batch]], lr: float) -> dict[str, Tensor]:
    """SGD on one device, on the batches of all replicas at once."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for step in batches:
        optimizer.zero_grad()
        joined = {key: torch.cat([batch[key] for batch in step]) for key in step[0]}
        count = (joined["labels"] != -100).sum()
        (mk.cross_entropy(module(joined["input_ids"]), joined["labels"]) / count).backward()
        optimizer.step()
    return {name: param.detach() for name, param in module.named_parameters()}


def local_sgd_without_clipping(batches: list[list[Batch]], expected: dict[str, Tensor]) -> float:
    mesh = mk.init_mesh("dp_replicate=3 dp_shard=2")
    own = replica_mesh(mesh)
    run = mk.parallelize(model(), own, plan=LLAMA_PLAN)
    optimizer = sgd(run.model)
    outer = OuterOptimizer(run, optimizer, mesh, LocalSGD(every=1))
    for step in batches:
        mine = step[mesh["dp_replicate"].get_local_rank()]
        optimizer.zero_grad()
        run.forward_backward({key: value.tensor_split(2)[own.data_rank] for key, value in mine.items()})
        optimizer.step()
        outer.step()
    return max(difference(param, expected[name]) for name, param in run.named_parameters())


def test_local_sgd_of_period_1_equals_synchronous_sgd_with_unequal_tokens_and_an_empty_replica() -> None:
    batches = data(4, 3)
    assert not batches[0][2]["labels"].numel()
    found = pool(6).run(local_sgd_without_clipping, batches, synchronous(batches, 1e-1))
    assert max(found) <= TOL_FP64_SUM


def share_of_two_calls() -> tuple[float, int]:
    """(the weight that the first replica had in the mean, the tokens of this one): two calls make one step."""
    mesh = mk.init_mesh("dp_replicate=2")
    replica = mesh["dp_replicate"].get_local_rank()
    run = mk.parallelize(model(), replica_mesh(mesh), plan=LLAMA_PLAN)
    batches = [data(3, 2)[index][replica] for index in (0, 2)]
    run.forward_backward(batches[0])  # before there is an outer optimizer: not counted
    optimizer = sgd(run.model)
    outer = OuterOptimizer(run, optimizer, mesh, LocalSGD(every=1))
    for batch in batches:
        run.forward_backward(batch)
    optimizer.step()
    values = [torch.empty_like(next(run.parameters())) for _ in range(2)]
    torch.distributed.all_gather(values, next(run.parameters()).detach())
    outer.step()
    apart = values[0] - values[1]
    share = ((next(run.parameters()).detach() - values[1]) * apart).sum() / apart.square().sum()
    return float(share), sum(int((batch["labels"] != -100).sum()) for batch in batches)


def test_tokens_of_all_calls_of_a_step_are_weights() -> None:
    found = pool(2).run(share_of_two_calls)
    (_, first), (_, second) = found
    assert all(share == pytest.approx(first / (first + second), abs=1e-10) for share, _ in found)
    assert first != second


def test_the_quadratic_rule_is_a_period_by_the_learning_rate() -> None:
    rule = QuadraticRule(alpha=0.01, base=2, warmup_steps=3, most=50)
    assert [rule.period(0, 1e-5), rule.period(3, 1e-2), rule.period(3, 2e-3), rule.period(3, 0.0)] == [2, 2, 25, 50]


def meetings_under_a_rule() -> list[int]:
    mesh = mk.init_mesh("dp_replicate=2")
    run = mk.parallelize(model(), replica_mesh(mesh), plan=LLAMA_PLAN)
    optimizer = sgd(run.model)
    rule = QuadraticRule(alpha=0.02, base=1, most=100)
    outer = OuterOptimizer(run, optimizer, mesh, LocalSGD(every=rule, weights="equal"))
    due = []
    for step in range(1, 12):
        optimizer.param_groups[0]["lr"] = 1e-2 if step < 6 else 5e-3
        if step == outer.next_meeting:
            due.append(step)
        outer.step()
    return due


def test_under_the_quadratic_rule_periods_grow_as_the_learning_rate_falls() -> None:
    # lr 0.1 at first: a period of 1; 0.01: 4; 0.005 from step 6 on: 16, asked at the meeting after step 9, or before 5 + 4
    assert pool(2).run(meetings_under_a_rule) == [[1, 5, 9]] * 2


def error_of_a_foreign_model(kind: str, spec: str) -> float:
    """The largest difference of a parameter after four steps of local SGD with a period of 1, which is synchronous SGD."""
    mesh = mk.init_mesh(spec)

    def batch(step: int, rank: int) -> Batch:
        ids = torch.randint(*DATA_IDS, (2, 13), generator=torch.Generator().manual_seed(10 * step + rank))
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}

    with exact():
        run = mk.parallelize(causal.build(kind), replica_mesh(mesh))
        optimizer = torch.optim.SGD(run.parameters(), lr=1e-1)
        outer = OuterOptimizer(run, optimizer, mesh, LocalSGD(every=1))
        one = causal.build(kind)
        alone = sgd(one)
        for step in range(4):
            run.forward_backward(batch(step, mesh.data_rank))
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
            everyone = [batch(step, rank) for rank in range(mesh.data_ranks)]
            ids, labels = (torch.cat([each[name] for each in everyone]) for name in ("input_ids", "labels"))
            F.cross_entropy(one(ids).logits.flatten(0, 1), labels.flatten()).backward()
            alone.step()
            alone.zero_grad()
    expected = dict(one.named_parameters())
    with torch.no_grad():
        return max(float((full_tensor(param) - expected[name]).abs().max()) for name, param in run.named_parameters())


@pytest.mark.parametrize(
    ("kind", "spec"),
    [("gpt2", "dp_replicate=2 tp=2"), ("gemma3_text", "dp_replicate=2 dp_shard=2"), ("llama", "dp_replicate=4")],
)
def test_replicas_of_a_model_of_transformers_equal_one_device(kind: str, spec: str) -> None:
    assert max(pool(4).run(error_of_a_foreign_model, kind, spec)) < TOL_FP64_SUM
