"""Streaming DiLoCo and CO2 equal their definitions: fragments, delay, mixing; the late update, its penalty, its clipping."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import meshkit as mk
from meshkit.core.block_quantization import BLOCK, dequantize_blocks, quantize_blocks
from meshkit.core.sharding import local_tensor
from meshkit.errors import PlanError
from meshkit.mesh import replica_mesh
from meshkit.models import LLAMA_PLAN
from meshkit.optim.outer import CO2, DiLoCo, LocalSGD, OuterOptimizer
from meshkit.optim.outer._fragments import fragment_of
from meshkit.optim.outer._policy import Policy
from tests.optim.outer.oracles import Replicas, co2, diloco
from tests.optim.outer.test_local_updates import (
    TOL_FP64_SUM,
    adamw,
    data,
    model,
    train,
    values_of,
    worst_difference,
)
from tests.world import pool


def fragment(name: str) -> int:
    """Of three, by hand: block i is in fragment i, embedding, norm and head where there is least, in the model's order."""
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else BESIDE[name]


BESIDE = {"embed_tokens.weight": 0, "norm.weight": 1, "lm_head.weight": 2}

STREAMING = [
    # policy, spec, ranks, steps
    (DiLoCo(every=6, fragments=3, delay=1, mixing=0.5), "dp_replicate=3", 3, 11),
    (DiLoCo(every=9, fragments=3, delay=3, mixing=0.25), "dp_replicate=2 dp_shard=2", 4, 14),
    (DiLoCo(every=6, fragments=3, delay=2), "pp=2 dp_replicate=2", 4, 10),
    (DiLoCo(every=4, delay=2, mixing=0.5, lr=0.5, momentum=0.8), "dp_replicate=2 tp=2", 4, 10),
    (DiLoCo(every=3, delay=0, mixing=0.3), "dp_replicate=2", 2, 7),
]


@pytest.mark.parametrize("case", range(len(STREAMING)))
def test_streaming_diloco_equals_its_definition(case: int) -> None:
    policy, spec, ranks, steps = STREAMING[case]
    replicas = Replicas(model(), mk.MeshSpec.parse(spec).dp_replicate, adamw)
    batches = data(steps, len(replicas.models))
    assert isinstance(policy.every, int)
    outer = diloco(
        replicas,
        batches,
        every=policy.every,
        lr=policy.lr,
        momentum=policy.momentum,
        fragments=fragment if policy.fragments == 3 else lambda name: 0,
        parts=policy.fragments,
        delay=policy.delay,
        mixing=policy.mixing,
    )
    choices = {"microbatches": 2} if "pp" in spec else {}
    found = pool(ranks).run(
        worst_difference, spec, policy, batches, "adamw", values_of(replicas.models), outer, choices
    )
    assert max(found) <= TOL_FP64_SUM


CO2S = [
    (CO2(every=3, penalty=1.0), "dp_replicate=3", 3),
    (CO2(every=2, lr=0.8, momentum=0.5, penalty="gap"), "dp_replicate=2 dp_shard=2", 4),
    (CO2(every=2, momentum=0.5, penalty=2.0, clip=3e-3), "dp_replicate=2 tp=2", 4),
]


@pytest.mark.parametrize("case", range(len(CO2S)))
def test_co2_equals_its_definition_and_its_clipping_clips(case: int) -> None:
    policy, spec, ranks = CO2S[case]
    replicas = Replicas(model(), mk.MeshSpec.parse(spec).dp_replicate, adamw)
    batches = data(11, len(replicas.models))
    penalty = None if policy.penalty == "gap" else float(policy.penalty)
    options = {"every": policy.every, "lr": policy.lr, "momentum": policy.momentum, "penalty": penalty}
    outer = co2(replicas, batches, clip=policy.clip, **options)
    found = pool(ranks).run(worst_difference, spec, policy, batches, "adamw", values_of(replicas.models), outer)
    assert max(found) <= TOL_FP64_SUM
    if policy.clip < 1:  # so the test can fail: unclipped values are others
        unclipped = co2(Replicas(model(), len(replicas.models), adamw), batches, clip=torch.inf, **options)
        assert max((unclipped[name] - outer[name]).abs().max() for name in outer) > 1e-3


def test_a_fragment_has_each_nth_block_and_what_is_in_none_goes_where_there_is_least() -> None:
    sizes = {name: param.numel() for name, param in model().named_parameters()}
    blocks = [f"layers.{index}" for index in range(3)]
    assert fragment_of(sizes, blocks, 3) == {name: fragment(name) for name in sizes}
    with pytest.raises(PlanError, match="fragments=4: the model has 3 blocks"):
        fragment_of(sizes, blocks, 4)


# ------------------------------------------------------------------------------------------------------- quantized wires


class QuantizedMean:
    """Two hops in blocks: each replica's change with its error is rounded, the mean is rounded again, and the one that sums a
    chunk takes the error of the mean. `owners` says who sums each element of a tensor."""

    def __init__(self, replicas: Replicas, bits: int, owners: dict[str, Tensor], feedback: bool) -> None:
        self.replicas, self.levels, self.owners, self.feedback = replicas, 2 ** (bits - 1) - 1, owners, feedback
        self.errors: dict[tuple[str, int], Tensor] = {}

    def rounded(self, values: Tensor) -> Tensor:
        flat = torch.zeros(-(-values.numel() // BLOCK) * BLOCK, dtype=torch.float64)
        flat[: values.numel()] = values.reshape(-1)
        blocks = flat.view(-1, BLOCK)
        scale = (blocks.abs().amax(1, keepdim=True) / self.levels).float().double()
        codes = (blocks / scale.where(scale > 0, 1)).round().clamp(-self.levels, self.levels)
        return (codes * scale).view(-1)[: values.numel()].view(values.shape)

    def __call__(self, name: str, change: object) -> Tensor:
        count = len(self.replicas.models)
        sent = []
        for index in range(count):
            wanted = change(index) + self.errors.get((name, index), 0)  # type: ignore[operator]
            sent.append(self.rounded(wanted))
            self.errors[name, index] = (wanted - sent[-1]) * self.feedback
        mean = self.replicas.mean(name, lambda index: sent[index])
        rounded = self.rounded(mean)
        for index in range(count):
            self.errors[name, index] += (mean - rounded) * count * (self.owners[name] == index) * self.feedback
        return rounded


def owners_of(sizes: dict[str, tuple[int, ...]], replicas: int) -> dict[str, Tensor]:
    """Who sums each element: each tensor is cut into parts of as many whole blocks."""
    owners = {}
    for name, shape in sizes.items():
        size = torch.Size(shape).numel()
        part = -(-size // (BLOCK * replicas)) * BLOCK
        owners[name] = (torch.arange(size) // part).view(shape)
    return owners


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_quantized_changes_equal_their_definition_with_and_without_error_feedback(wire: str, feedback: bool) -> None:
    replicas = Replicas(model(), 3, adamw)
    batches = data(8, 3)
    shapes = {name: tuple(param.shape) for name, param in replicas.models[0].named_parameters()}
    mean = QuantizedMean(replicas, int(wire.removeprefix("int")), owners_of(shapes, 3), feedback)
    outer = diloco(replicas, batches, every=2, lr=0.7, momentum=0.9, exchange=mean)
    policy = DiLoCo(every=2, wire=wire, feedback=feedback)  # type: ignore[arg-type]
    found = pool(3).run(worst_difference, "dp_replicate=3", policy, batches, "adamw", values_of(replicas.models), outer)
    assert max(found) <= TOL_FP64_SUM


@pytest.mark.parametrize(("wire", "levels", "error"), [("int8", 127, 0.0065), ("int4", 7, 0.118)])
def test_blocks_round_to_the_nearest_level_with_the_measured_error(wire: str, levels: int, error: float) -> None:
    values = torch.randn(2000, BLOCK, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[3] = 0
    back = dequantize_blocks(quantize_blocks(values, wire), wire, torch.float64)  # type: ignore[arg-type]
    scale = values.abs().amax(1, keepdim=True) / levels
    assert ((back - values).abs() <= scale * 0.5001).all() and not back[3].any()
    assert float((back - values).square().mean().sqrt()) == pytest.approx(error, rel=0.02)
    values[5, 7] = torch.nan
    values[6, 8] = torch.inf
    back = dequantize_blocks(quantize_blocks(values, wire), wire, torch.float64)  # type: ignore[arg-type]
    assert not back[5].isfinite().any() and not back[6].isfinite().all() and back[7].isfinite().all()


# ------------------------------------------------------------------------------------------------------- all alike at the end


def all_alike_after_meet(spec: str, policy: Policy, steps: int) -> list[bool]:
    """Of each parameter, whether it equals the outer one, and the outer one of the first replica, bit for bit."""
    _, outer = train(spec, policy, data(steps, 3), "adamw")
    outer.meet()
    alike = []
    axis = outer.mesh["dp_replicate"].get_group()
    for entry in outer.entries.values():
        local = local_tensor(entry.param)
        first = local.clone()
        torch.distributed.broadcast(first, group=axis, group_src=0)
        alike.append(
            torch.equal(first, local) and (entry.parameter is None or torch.equal(local, local_tensor(entry.parameter)))
        )
    return alike


@pytest.mark.parametrize(
    "policy",
    [
        LocalSGD(every=4),
        DiLoCo(every=6, fragments=3, delay=2, mixing=0.5, wire="int4"),
        CO2(every=3, wire="int8"),
    ],
    ids=str,
)
def test_after_meet_all_replicas_have_the_same_bits_also_where_tp_holds_copies(policy: Policy) -> None:
    for spec, ranks in (("dp_replicate=3 tp=2", 6), ("dp_replicate=3", 3)):
        assert all(all(each) for each in pool(ranks).run(all_alike_after_meet, spec, policy, 5))


def copies_on_tp(policy: Policy) -> list[bool]:
    """Whether the norms, which each rank of tp holds, are the same bits on both."""
    run, _ = train("dp_replicate=3 tp=2", policy, data(6, 3), "adamw")
    alike = []
    for name, param in run.named_parameters():
        if "norm" in name:
            local = local_tensor(param)
            first = local.clone()
            torch.distributed.broadcast(first, group=run.mesh["tp"].get_group(), group_src=0)
            alike.append(torch.equal(first, local))
    return alike


@pytest.mark.parametrize("wire", ["full", "int4"])
def test_ranks_of_one_replica_that_hold_the_same_parameter_get_the_same_bits(wire: str) -> None:
    found = pool(6).run(copies_on_tp, DiLoCo(every=2, wire=wire))  # type: ignore[arg-type]
    assert all(all(each) and each for each in found)


def finished_while_flying(policy: Policy) -> bool:
    """A wait for what is in flight changes no later value."""
    batches = data(8, 3)
    run, _ = train("dp_replicate=3", policy, batches, "adamw")
    mesh = mk.init_mesh("dp_replicate=3")
    other = mk.parallelize(model(), replica_mesh(mesh), plan=LLAMA_PLAN)
    optimizer = adamw(other.model)
    outer = OuterOptimizer(other, optimizer, mesh, policy)
    for step in batches:
        optimizer.zero_grad()
        other.forward_backward(step[mesh["dp_replicate"].get_local_rank()])
        mk.clip_grad_norm(other, 1.0)
        optimizer.step()
        outer.step()
        outer.finish()
    return all(torch.equal(one, two) for one, two in zip(run.parameters(), other.parameters(), strict=True))


def test_to_wait_for_what_is_in_flight_changes_nothing() -> None:
    for policy in (DiLoCo(every=3, delay=2, wire="int8"), CO2(every=3)):
        assert all(pool(3).run(finished_while_flying, policy))


def test_what_a_policy_cannot_be_is_refused() -> None:
    for make, text in (
        (
            lambda: DiLoCo(every=10, fragments=3),
            r"every=10, fragments=3\): fragments meet at even distances. Give a multiple of 3, as 9",
        ),
        (lambda: DiLoCo(every=10, fragments=2, delay=6), r"delay=6\): one fragment travels at a time"),
        (lambda: DiLoCo(every=0), r"DiLoCo\(every=0\): give a number of steps, at least 1"),
        (lambda: DiLoCo(every=5, wire="int2"), r"wire='int2'\): choose full, int8 or int4"),  # type: ignore[arg-type]
        (lambda: CO2(every=5, penalty=0.5), r"CO2\(penalty=0.5\): give 'gap', or a number of at least 1"),
        (lambda: LocalSGD(every=5, weights="rows"), r"weights='rows'\): choose tokens or equal"),  # type: ignore[arg-type]
    ):
        with pytest.raises(PlanError, match=text):
            make()
