"""Replicas that differ on purpose: experts inside, guards of one replica, one replica alone, shards of bf16 and ZeRO-1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.sharding import full_tensor
from meshkit.faults.corruption import CorruptionGuard
from meshkit.faults.nan_guard import NonFiniteGuard
from meshkit.mesh import replica_mesh
from meshkit.models import LLAMA_PLAN, MixtralConfig, build_model, moe_plan
from meshkit.optim.outer import DiLoCo, OuterOptimizer
from meshkit.parallel.data import after_inference
from tests.compare_shards import difference
from tests.optim.outer.oracles import Batch, Replicas, diloco
from tests.optim.outer.test_local_updates import TOL_FP64_SUM, adamw, data, model, values_of
from tests.tiny import draw_parameters
from tests.world import pool

EXPERTS = MixtralConfig(
    vocab_size=31,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    num_local_experts=4,
)


ZEROS = {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "labels": torch.zeros(1, 8, dtype=torch.int64)}


def experts_model() -> nn.Module:
    torch.manual_seed(3)
    made = build_model(EXPERTS).double()
    draw_parameters(made, std=0.3)
    return made


def train_experts(spec: str, batches: list[list[Batch]], expected: list[dict[str, Tensor]]) -> float:
    mesh = mk.init_mesh(spec)
    own = replica_mesh(mesh)
    run = mk.parallelize(experts_model(), own, plan=moe_plan(EXPERTS))
    optimizer = adamw(run.model)
    outer = OuterOptimizer(run, optimizer, mesh, DiLoCo(every=2))
    replica = mesh["dp_replicate"].get_local_rank()
    for step in batches:
        optimizer.zero_grad()
        run.forward_backward(
            {key: value.tensor_split(own.data_ranks)[own.data_rank] for key, value in step[replica].items()}
        )
        mk.clip_grad_norm(run, 1.0)
        optimizer.step()
        outer.step()
    return max(difference(param, expected[replica][name]) for name, param in run.named_parameters())


@pytest.mark.parametrize("spec", ["dp_replicate=2 dp_shard=2 ep=2", "dp_replicate=2 tp=2 ep=2"])
def test_diloco_of_routed_experts_equals_its_definition(spec: str) -> None:
    replicas = Replicas(experts_model(), 2, adamw)
    batches = data(5, 2)
    diloco(replicas, batches, every=2, lr=0.7, momentum=0.9)
    assert max(pool(4).run(train_experts, spec, batches, values_of(replicas.models))) <= TOL_FP64_SUM


def guarded(bad_replica: int) -> tuple[int, int, list[int]]:
    """(steps that the NaN guard of this replica skipped, meetings, steps that the outer optimizer counted)"""
    mesh = mk.init_mesh("dp_replicate=2 dp_shard=2")
    own = replica_mesh(mesh)
    run = mk.parallelize(model(), own, plan=LLAMA_PLAN)
    optimizer = adamw(run.model)
    outer = OuterOptimizer(run, optimizer, mesh, DiLoCo(every=2))
    replica = mesh["dp_replicate"].get_local_rank()
    nan_guard, met, counted = NonFiniteGuard(max_skips=2), 0, []

    @mk.step.additive  # it holds an optimizer, of which no copy can be made
    def loss(module: nn.Module, part: Batch) -> Tensor:
        summed = mk.cross_entropy(module(part["input_ids"]), part["labels"])
        return summed * (torch.nan if replica == bad_replica and outer.steps == 2 else 1.0)

    with CorruptionGuard(run, optimizer, every_steps=1) as corruption:
        for step, batches in enumerate(data(6, 2), 1):
            optimizer.zero_grad()
            rows = {key: value.tensor_split(2)[own.data_rank] for key, value in batches[replica].items()}
            run.forward_backward(rows, loss=loss)
            if nan_guard.allows(run, mk.clip_grad_norm(run, 1.0), step=step):
                optimizer.step()
            met += step == outer.next_meeting
            outer.step()
            corruption.check(step)  # replicas differ between meetings, and a meeting writes weights
            counted.append(outer.steps)
    return nan_guard.skipped, met, counted


def test_guards_see_their_replica_alone_and_a_skipped_step_counts() -> None:
    found = pool(4).run(guarded, 1)
    assert [skipped for skipped, *_ in found] == [0, 0, 1, 1]
    assert all(met == 3 and counted == [1, 2, 3, 4, 5, 6] for _, met, counted in found)


def norm_and_loss() -> tuple[float, float, int]:
    mesh = mk.init_mesh("dp_replicate=2 dp_shard=2")
    own = replica_mesh(mesh)
    run = mk.parallelize(model(), own, plan=LLAMA_PLAN)
    batch = data(1, 2)[0][mesh["dp_replicate"].get_local_rank()]
    with mk.observe(mesh) as seen:
        loss = run.forward_backward({key: value.tensor_split(2)[own.data_rank] for key, value in batch.items()})
        norm = mk.clip_grad_norm(run, 1e9)
    return float(loss), float(norm), sum(count for message, count in seen.items() if "dp_replicate" in message.axis)


def test_losses_and_norms_are_of_the_replica_and_nothing_is_sent_between_replicas() -> None:
    found = pool(4).run(norm_and_loss)
    for replica in range(2):
        alone, batch = model(), data(1, 2)[0][replica]
        loss = mk.cross_entropy(alone(batch["input_ids"]), batch["labels"]) / (batch["labels"] != -100).sum()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([param.grad for param in alone.parameters() if param.grad is not None])
        for rank in (2 * replica, 2 * replica + 1):
            assert found[rank] == (pytest.approx(loss.item(), abs=1e-10), pytest.approx(norm.item(), abs=1e-10), 0)


def one_replica() -> float:
    """With one replica: the outer optimizer alone (Lookahead with momentum)."""
    mesh = mk.init_mesh("dp_shard=2")
    run = mk.parallelize(model(), replica_mesh(mesh), plan=LLAMA_PLAN)
    optimizer = adamw(run.model)
    outer = OuterOptimizer(run, optimizer, mesh, DiLoCo(every=2))
    batches = data(5, 1)
    for step in batches:
        optimizer.zero_grad()
        run.forward_backward({key: value.tensor_split(2)[mesh.data_rank] for key, value in step[0].items()})
        mk.clip_grad_norm(run, 1.0)
        optimizer.step()
        outer.step()
    replicas = Replicas(model(), 1, adamw)
    diloco(replicas, batches, every=2, lr=0.7, momentum=0.9)
    return max(difference(param, replicas.value(0, name)) for name, param in run.named_parameters())


def test_one_replica_has_the_outer_optimizer_alone() -> None:
    assert max(pool(2).run(one_replica)) <= TOL_FP64_SUM


def bf16_parameters(spec: str, choices: dict[str, Any]) -> bool:
    """Whether parameters in bf16 are the outer ones, in fp32, rounded once."""
    mesh = mk.init_mesh(spec)
    own = replica_mesh(mesh)
    run = mk.parallelize(model().to(torch.bfloat16), own, plan=LLAMA_PLAN, **choices)
    optimizer = adamw(run.model)
    outer = OuterOptimizer(run, optimizer, mesh, DiLoCo(every=2, wire="int8"))
    for step in data(4, 2):
        optimizer.zero_grad()
        mine = step[mesh["dp_replicate"].get_local_rank()]
        rows = {key: value.tensor_split(own.data_ranks)[own.data_rank] for key, value in mine.items()}
        run.forward_backward(rows)
        optimizer.step()
        with torch.no_grad():  # leaves the root unit gathered, also before a meeting
            run.model(ZEROS["input_ids"])
        versions = [entry.param._version for entry in outer.entries.values()]
        outer.step()
    assert all(entry.param._version > before for entry, before in zip(outer.entries.values(), versions, strict=True))
    after_meeting = float(run.evaluate(ZEROS)[0])
    after_inference(run.model)
    assert after_meeting == float(run.evaluate(ZEROS)[0])  # nothing of before the meeting is left gathered
    moved = False
    for entry in outer.entries.values():
        assert entry.parameter is not None and entry.parameter.dtype == torch.float32
        if not torch.equal(full_tensor(entry.parameter).bfloat16(), full_tensor(entry.param)):
            return False
        moved = moved or not torch.equal(full_tensor(entry.param), model().to(torch.bfloat16).get_parameter(entry.name))
    return moved


@pytest.mark.parametrize("inner", ["dp_shard=2", "tp=2"])
def test_parameters_in_bf16_are_the_outer_ones_rounded_once(inner: str) -> None:
    choices = {"zero": 1} if inner == "dp_shard=2" else {}
    assert all(pool(4).run(bf16_parameters, f"dp_replicate=2 {inner}", choices))


def meet_twice() -> bool:
    """Right after a meeting another changes nothing; in a period it averages, without momentum."""
    mesh = mk.init_mesh("dp_replicate=2")
    run = mk.parallelize(model(), replica_mesh(mesh), plan=LLAMA_PLAN)
    optimizer = adamw(run.model)
    outer = OuterOptimizer(run, optimizer, mesh, DiLoCo(every=2))
    for index, step in enumerate(data(3, 2)):
        run.forward_backward(step[mesh["dp_replicate"].get_local_rank()])
        optimizer.step()
        outer.step()
        if index == 1:
            before = [param.detach().clone() for param in run.parameters()]
            outer.meet()
            same = all(torch.equal(one, two) for one, two in zip(before, run.parameters(), strict=True))
    sums = [param.detach().clone() for param in run.parameters()]
    counts = [int((each["labels"] != -100).sum()) for each in data(3, 2)[2]]
    weight = counts[mesh["dp_replicate"].get_local_rank()] / sum(counts)
    for each in sums:
        each.mul_(weight)
        torch.distributed.all_reduce(each)
    outer.meet()
    return same and all((one - two).abs().max() < 1e-12 for one, two in zip(sums, run.parameters(), strict=True))


def test_a_meeting_out_of_turn_averages_and_right_after_one_changes_nothing() -> None:
    assert all(pool(2).run(meet_twice))
