"""Reallocation between runs that live: values, bytes on the wire, memory, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import meshkit as mk
from meshkit.algos.reallocate import layout_of, prepare_reallocation, reallocate
from meshkit.core._torch import TorchDispatchMode
from meshkit.core.model_state import model_tensors
from meshkit.core.sharding import local_slices, local_tensor
from meshkit.preflight.observe import Peak
from meshkit.preflight.order import EAGER, LAZY, Call, deadlock, gathered, mismatches, recording
from tests.algos.reallocate.cases import DENSE, EXPERTS, FEW_HEADS, TIED_ODD, Model, mesh_on, start, whole_model
from tests.tiny import TINY
from tests.world import pool

BUCKET_BYTES = 4096


@dataclass(frozen=True)
class Side:
    spec: str
    ranks: tuple[int, ...]
    dtype: str = "float32"


def check(model: Model, src: Side, dst: Side) -> tuple[int, int, int]:
    """Move; (bytes this rank was seen to send, the plan's bytes, lower bound)."""
    first = start(model, src.spec, src.ranks, src.dtype, values=True)
    second = start(model, dst.spec, dst.ranks, dst.dtype, values=False)
    run = prepare_reallocation(first, second, bucket_bytes=BUCKET_BYTES)
    held = dict(second.named_parameters()) if second is not None else {}
    before = {name: local_tensor(tensor).clone() for name, tensor in held_by(first).items()}
    with mk.observe(mesh_on("dp_shard=-1", tuple(range(dist.get_world_size())))) as seen, Peak() as peak:
        run()
    assert peak.bytes <= 2 * BUCKET_BYTES
    whole = model_tensors(whole_model(model))
    for name, tensor in held_by(second).items():
        expected = whole[name][local_slices(tensor)].to(getattr(torch, src.dtype)).to(getattr(torch, dst.dtype))
        assert torch.equal(local_tensor(tensor), expected), name
    for name, tensor in held_by(first).items():
        assert torch.equal(local_tensor(tensor), before[name]), name
    if second is not None:
        assert all(held[name] is param for name, param in second.named_parameters())
    said = {side: layout_of(whole_model(model), side.spec, plan=model.plan, ranks=side.ranks) for side in (src, dst)}
    for side, live in ((src, first), (dst, second)):
        for name, tensor in held_by(live).items():
            region = tuple((part.start, part.stop) for part in local_slices(tensor))
            empty = any(start == stop for start, stop in region)
            assert said[side].tensors[name].regions.get(dist.get_rank()) == (None if empty else region), name
    sent = sum(message.size * count for message, count in seen.items() if message.op == "send")
    assert sent == sum(moved for (sender, _), moved in run.plan.links.items() if sender == dist.get_rank())
    return sent, run.plan.bytes_moved, run.plan.lower_bound_bytes


def held_by(run: mk.Run | None) -> dict[str, torch.Tensor]:
    return model_tensors(run.model) if run is not None else {}


def assert_minimal(results: list[tuple[int, int, int]]) -> None:
    (plan,) = {result[1:] for result in results}
    assert sum(sent for sent, _, _ in results) == plan[0] == plan[1]


SIDES = [
    Side("dp_shard=2 tp=2", (0, 1, 2, 3)),
    Side("pp=2 tp=2", (0, 1, 2, 3), "bfloat16"),
    Side("dp_replicate=2 dp_shard=2", (0, 1, 2, 3)),
    Side("tp=2", (0, 1), "bfloat16"),
    Side("dp_shard=2", (2, 3)),
    Side("pp=3", (1, 2, 3)),
    Side("cp=2", (1, 2)),
    Side("tp=1", (3,)),
]


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([DENSE, TIED_ODD, FEW_HEADS]), st.sampled_from(SIDES), st.sampled_from(SIDES))
def test_a_destination_has_what_a_full_gather_would_give_it(model: Model, src: Side, dst: Side) -> None:
    assert_minimal(pool(4).run(check, model, src, dst))


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (Side("dp_shard=2 tp=2 ep=2 etp=2", (0, 1, 2, 3)), Side("pp=2", (0, 1), "bfloat16")),
        (Side("dp_shard=3 ep=3", (0, 1, 2)), Side("tp=2 ep=2", (2, 3))),
    ],
)
def test_experts_and_their_buffers_move_between_expert_layouts(src: Side, dst: Side) -> None:
    assert_minimal(pool(4).run(check, EXPERTS, src, dst))


class Mixed(nn.Module):
    """Of three dtypes, the narrowest first, and odd sizes: what lies behind it in one message is at no multiple of 4."""

    def __init__(self, first: float) -> None:
        super().__init__()
        kinds = {"narrow": torch.bfloat16, "middle": torch.float32, "wide": torch.float64}
        for at, (name, dtype) in enumerate(kinds.items()):
            values = torch.arange(9).view(3, 3) + first + 20 * at
            self.register_parameter(name, nn.Parameter(values.to(dtype)))


def mixed_dtypes() -> tuple[list[list[float]], list[str]]:
    meshes = [mesh_on("tp=1", (rank,)) for rank in range(2)]
    src, dst = (
        mk.parallelize(Mixed(first), mesh) if mesh.here else None
        for mesh, first in zip(meshes, (0.0, -70.0), strict=True)
    )
    plan = reallocate(src, dst)
    assert [len(transfers) for transfers in plan.rounds] == [3], "all three share a message"
    run = src if dst is None else dst
    assert run is not None
    return [param.flatten().tolist() for param in run.parameters()], [str(param.dtype) for param in run.parameters()]


def test_tensors_of_several_dtypes_share_a_message_whatever_their_sizes() -> None:
    for values, dtypes in pool(2).run(mixed_dtypes):
        assert values == [[20.0 * at + index for index in range(9)] for at in range(3)]
        assert dtypes == ["torch.bfloat16", "torch.float32", "torch.float64"]


class SentTo(TorchDispatchMode):
    """Bytes that this rank really sends, by the receiver."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::send":
            (message,), _, receiver = args[:3]
            self.bytes[receiver] = self.bytes.get(receiver, 0) + message.numel() * message.element_size()
        return func(*args, **(kwargs or {}))


def relayed(mix: float, dtype: str) -> tuple[dict[int, int], int, int]:
    """One trainer, and an engine with a whole model on each of four other ranks; two ranks a node."""
    world = mesh_on("dp_shard=-1", tuple(range(dist.get_world_size())))
    src = start(DENSE, "tp=1", (0,), "float32", values=True)
    dst = start(DENSE, "dp_replicate=4", (1, 2, 3, 4), dtype, values=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        run = prepare_reallocation(src, dst, mix=mix, bucket_bytes=BUCKET_BYTES)
    with recording(world) as events, SentTo() as seen:
        run()
    ranks = gathered(events, world)
    # What a relay passes on waits for what it receives: on NCCL, too, all of it ends.
    assert not mismatches(ranks) and not any(deadlock(ranks, rules) for rules in (LAZY, EAGER))
    assert len(run.plan.rounds) > 2 and any(isinstance(event, Call) and event.parts for event in ranks[0])
    whole = model_tensors(whole_model(DENSE))
    for name, tensor in held_by(dst).items():
        values, before = whole[name], torch.full_like(local_tensor(tensor), -7)
        wide = torch.lerp(before.float(), values, mix) if mix < 1 else values
        assert torch.equal(local_tensor(tensor), wide.to(tensor.dtype)), name
    return seen.bytes, run.plan.bytes_between_nodes, sum(tensor.numel() for tensor in whole.values())


@pytest.mark.parametrize(
    ("mix", "dtype", "itemsizes"), [(1.0, "float32", (4, 4)), (1.0, "bfloat16", (2, 2)), (0.25, "bfloat16", (4, 2))]
)
def test_bytes_that_really_pass_between_nodes_are_one_model_a_node(
    mix: float, dtype: str, itemsizes: tuple[int, int]
) -> None:
    results = pool(5).run(relayed, mix, dtype)
    ((between, elements),) = {result[1:] for result in results}
    seen = sum(
        size
        for sender, (sent, *_) in enumerate(results)
        for receiver, size in sent.items()
        if sender // 2 != receiver // 2
    )
    # To nodes (2, 3) and (4,), the second from the first, which passes on what it has mixed; rank 1 is on the trainer's own.
    assert seen == between == elements * sum(itemsizes)


def again_and_mixed() -> tuple[list[float], list[float]]:
    src = start(DENSE, "tp=2", (0, 1), "float32", values=True)
    dst = start(DENSE, "dp_shard=2", (0, 1), "bfloat16", values=False)
    assert src is not None and dst is not None
    follow = prepare_reallocation(src, dst, mix=0.25)
    found: list[float] = []
    for value in (1.0, 5.0):
        with torch.no_grad():
            for tensor in src.parameters():
                local_tensor(tensor).fill_(value)
        follow()
        found.append(float(local_tensor(next(dst.parameters())).float().mean()))
    before = [param._version for param in dst.parameters()]
    plan = reallocate(src, dst)
    assert plan.bytes_moved * 2 == follow.plan.bytes_moved  # a mixed one travels whole
    assert all(after._version > version for after, version in zip(dst.parameters(), before, strict=True))
    found.append(float(local_tensor(next(dst.parameters())).float().mean()))
    return found, [-7 * 0.75 + 1 * 0.25, (-7 * 0.75 + 1 * 0.25) * 0.75 + 5 * 0.25, 5.0]


def adapters_alone() -> tuple[int, int]:
    """(the plan's bytes, those of all adapters on one rank), of a trainer on rank 0 and a generator on rank 1."""
    runs: list[mk.Run | None] = []
    for rank in range(2):
        mesh = mk.init_mesh("tp=1", ranks=[rank])
        if not mesh.here:
            runs.append(None)
            continue
        model = mk.models.Llama(TINY)
        plan = mk.lora.attach(model, mk.models.LLAMA_PLAN, rank=2, alpha=4.0)
        run = mk.parallelize(model, mesh, plan=plan)
        with torch.no_grad():
            for param in run.parameters():
                param.fill_(float(rank + 1))
        runs.append(run)
    sync = prepare_reallocation(*runs, frozen=False)
    sync()
    own = next(run for run in runs if run is not None)
    trained = [param for param in own.parameters() if param.requires_grad]
    frozen = [param for param in own.parameters() if not param.requires_grad]
    assert all(bool((param == 1).all()) for param in trained)
    assert all(bool((param == dist.get_rank() + 1).all()) for param in frozen)
    return sync.plan.bytes_moved, sum(param.numel() * param.element_size() for param in trained)


def test_without_what_is_frozen_the_adapters_alone_move() -> None:
    for moved, trained in pool(2).run(adapters_alone):
        assert moved == trained > 0


def test_a_prepared_one_moves_again_and_mix_is_a_moving_average() -> None:
    for found, expected in pool(2).run(again_and_mixed):
        assert found == pytest.approx(expected, abs=0.02)  # bf16


def refusals() -> list[str]:
    rank = dist.get_rank()
    dense = start(DENSE, "tp=2", (0, 1), "float32", values=True)
    tied = start(TIED_ODD, "dp_shard=2", (0, 1), "float32", values=False)
    texts = []
    for ask in (
        lambda: reallocate(dense, tied),
        lambda: reallocate(dense, None),
        lambda: reallocate(dense if rank == 0 else None, dense),
        lambda: reallocate(dense, dense, mix=1.0 if rank == 0 else 0.5),
        lambda: reallocate(dense, dense, mix=0.0),
    ):
        with pytest.raises(mk.MeshkitError) as error:
            ask()
        texts.append(str(error.value))
    return texts


def test_lockstep_errors_are_the_same_on_every_rank() -> None:
    first, second = pool(2).run(refusals)
    assert first == second
    for text, match in zip(
        first,
        [
            "reallocate: source and destination are different models: 'embed_tokens.weight' has shape (64, 32) there and",
            "reallocate: no rank gives the destination. Pass the Run on the ranks of its mesh, and None elsewhere.",
            "reallocate: rank 0 gives a source on ranks [0, 1], and rank 1 gives none. Every rank of a run's mesh calls",
            "reallocate: rank 0 asks for mix=1.0, bucket_bytes=67108864 and frozen=True, rank 1 for mix=0.5",
            "reallocate: mix=0.0 is the source's share. Use (0, 1]; 1 copies it.",
        ],
        strict=True,
    ):
        assert text.startswith(match), text
