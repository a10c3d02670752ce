"""meshkit's dispatchers conform, and the suite finds those that do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshkit as mk
from meshkit.core._torch import TorchDispatchMode
from meshkit.core.sharding import chunk
from meshkit.moe.routing import Routing, least_capacity
from meshkit.parallel.expert import AllToAll, Dispatcher, OneRank, _exchange
from meshkit.parallel.expert._dispatch import keep_within
from meshkit.parallel.expert.conformance import FEATURES, ExpertShard, check_dispatcher
from meshkit.strategy import Capacity, ExpertPolicy
from tests.laws.parity.cases import Cell, Moe, batches, mesh_for, own_rows, start
from tests.world import RankError, pool, run_ranks

CPU = torch.device("cpu")


def all_to_all(mesh: mk.Mesh, experts: int) -> AllToAll:
    return AllToAll.on(experts, mesh["ep", "etp"])


def held_on(mesh: mk.Mesh, experts: int) -> ExpertShard:
    own = chunk(experts, mesh.spec.ep, mesh["ep"].get_local_rank())
    return ExpertShard(range(own.start, own.stop), chunk(FEATURES, mesh.spec.etp, mesh["etp"].get_local_rank()))


def conform(spec: str, change: Callable[[Dispatcher], Dispatcher] | None = None) -> int:
    mesh = mesh_for(spec)

    def make(experts: int) -> Dispatcher:
        dispatcher = all_to_all(mesh, experts)
        return dispatcher if change is None else change(dispatcher)

    return check_dispatcher(make, partial(held_on, mesh), mesh.expert_ranks.get_group(), device=CPU)


def one_rank_conforms() -> int:
    group = dist.group.WORLD
    assert group is not None
    return check_dispatcher(OneRank, lambda experts: ExpertShard(range(experts)), group, device=CPU)


def test_one_rank_conforms() -> None:
    assert pool(1).run(one_rank_conforms) == [8]


@pytest.mark.parametrize(
    ("ranks", "spec"),
    [
        (2, "dp_shard=2 ep=2"),
        (2, "dp_shard=2 etp=2"),
        (3, "dp_shard=3 ep=3"),
        (4, "dp_shard=4 ep=4"),
        (4, "dp_shard=4 ep=2"),
        (4, "dp_shard=4 ep=2 etp=2"),
        (4, "dp_shard=4 etp=4"),
    ],
)
def test_all_to_all_conforms(ranks: int, spec: str) -> None:
    assert pool(ranks).run(conform, spec) == [8] * ranks


class _Wrong:
    def __init__(self, inner: Dispatcher) -> None:
        self.inner = inner


class ForgetsToScaleGradients(_Wrong):
    def __call__(self, x_NC: Tensor, routing: Routing, compute: Callable) -> Tensor:
        return self.inner(x_NC, Routing(routing.experts_NK, routing.weights_NK.detach()), compute) * 1.0


class ReadsPastTheEnd(_Wrong):
    def __call__(self, x_NC: Tensor, routing: Routing, compute: Callable) -> Tensor:
        def padded(rows: Tensor, counts: list[int]) -> Tensor:
            more = torch.cat([rows, rows.new_empty(1, rows.shape[1])])
            return (compute(rows, counts) + 0 * more.sum()) if len(rows) else compute(rows, counts)

        return self.inner(x_NC, routing, padded)


@pytest.mark.parametrize("change", [ForgetsToScaleGradients, ReadsPastTheEnd])
def test_a_dispatcher_that_is_wrong_is_found(change: type) -> None:
    with pytest.raises(RankError, match=r"(is None|is off by)"):
        run_ranks(2, conform, "dp_shard=2 ep=2", change)


def dropped(drop: str) -> list[Tensor]:
    """Six tokens of which the first expert is chosen by all, and may take 1.0 * 6 * 1 / 3 = 2."""
    x = torch.arange(6.0).unsqueeze(1) + 1
    weights = torch.tensor([[0.1], [0.9], [0.2], [0.8], [0.3], [0.7]])
    routing = Routing(torch.zeros(6, 1, dtype=torch.int64), weights)
    dispatcher = OneRank(3, Capacity(factor=1.0, drop=drop))  # type: ignore[arg-type]
    seen: list[list[int]] = []

    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        seen.append(counts)
        return rows * 10

    out = dispatcher(x, routing, compute)
    assert seen == [[2, 0, 0]]
    return out.flatten().tolist()


def test_capacity_drops_by_probability_or_by_position() -> None:
    assert dropped("probability") == pytest.approx([0, 18, 0, 32, 0, 0])
    assert dropped("position") == pytest.approx([1, 18, 0, 0, 0, 0])


@pytest.mark.parametrize(("factor", "stay"), [(0.5, [3, 2, 0]), (0.75, [4, 2, 0]), (0.1, [1, 1, 0]), (1.5, [8, 2, 0])])
def test_a_share_that_is_no_whole_number_is_rounded_up(factor: float, stay: list[int]) -> None:
    """16 pairs of 3 experts are 5 1/3 each; eight of them want the first, and none goes without room."""
    chosen = torch.tensor([0] * 14 + [1] * 2).view(16, 1)
    routing = Routing(chosen, torch.linspace(0.1, 0.9, 16).view(16, 1))
    kept, counts = keep_within(Capacity(factor=factor), routing, torch.arange(16), torch.tensor([14, 2, 0]))
    assert counts.tolist() == stay
    assert sorted(kept[: sum(stay)].tolist()) == [*range(14 - stay[0], 14), *range(16 - stay[1], 16)]


def test_the_least_capacity_follows_from_the_closest_token_of_each_expert() -> None:
    """Closed form, in 4 dims of two experts along the first two axes, and one that nobody chose."""
    x = torch.tensor([[3.0, 4, 0, 0], [1, 0, 0, 0], [0, 0, 2, 0], [0, 1, 0, 1]], dtype=torch.float64)
    weight = torch.tensor([[2.0, 0, 0, 0], [0, 5, 0, 0], [1, 1, 1, 1]], dtype=torch.float64)
    chosen = torch.tensor([[1], [1], [0], [3]])  # 3 is no expert
    found = least_capacity(x, weight, chosen)
    # Cosines 0 of expert 0, and 0.8 of expert 1; a third of the pairs that so many experts share.
    assert found.tolist() == pytest.approx([1 / 3, math.exp(4 * 0.64 / (2 - 0.64)) / 3, 1 / 3])
    along = least_capacity(torch.eye(4), torch.eye(4) * 7, torch.arange(4).view(4, 1))
    assert along.tolist() == [4.0] * 4  # exp(4) / 4 is more than there are


def test_no_limit_is_below_the_least_capacity() -> None:
    chosen = torch.tensor([0] * 14 + [1] * 2).view(16, 1)
    weights = torch.linspace(0.1, 0.9, 16).view(16, 1)
    capacity = Capacity(factor=0.25, least="angle")  # 1 1/3 of the pairs, which is 2
    routing = Routing(chosen, weights, torch.tensor([5.2, 0.3, 0.3]))
    kept, counts = keep_within(capacity, routing, torch.arange(16), torch.tensor([14, 2, 0]))
    assert counts.tolist() == [6, 2, 0]
    assert sorted(kept[:8].tolist()) == [*range(8, 14), 14, 15]
    with pytest.raises(mk.errors.PlanError, match=r"least='bias' is not known\. Use none or angle"):
        Capacity(factor=1, least="bias")  # type: ignore[arg-type]


def dropped_shares(spec: str) -> list[float]:
    cell, found = Cell(mesh=spec, layers=2, moe=Moe(experts=8)), []
    for least in ("none", "angle"):
        capacity = Capacity(factor=0.1, least=least)  # type: ignore[arg-type]
        run = start(cell, experts=ExpertPolicy(capacity=capacity))
        run.forward_backward(own_rows(batches(cell)[0], run.mesh))
        assert run.dropped_share is not None
        found.append(float(run.dropped_share))
    return found


@pytest.mark.parametrize("spec", ["dp_shard=2 ep=2", "tp=2 ep=2", "dp_shard=2"])
def test_fewer_pairs_are_dropped_where_the_angle_wants_more(spec: str) -> None:
    for none, angle in pool(2).run(dropped_shares, spec):
        assert 0 < angle < none


def test_capacity_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(mk.errors.PlanError, match=r"Capacity: factor=0 leaves no room\. 1\.0 is the even share"):
        Capacity(factor=0)
    with pytest.raises(mk.errors.PlanError, match=r"drop='last' is not known\. Use probability or position"):
        Capacity(factor=1, drop="last")  # type: ignore[arg-type]


class Waits(TorchDispatchMode):
    """Counts what makes a host wait for its device: values read, and results whose size the values decide."""

    OPERATORS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        by_mask = name == "aten::index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        unsized = name == "aten::repeat_interleave" and kwargs.get("output_size") is None
        self.count += name in self.OPERATORS or by_mask or unsized
        return func(*args, **kwargs)


def waits(capacity: Capacity | None, copies: int) -> int:
    """How often the host waits in one forward and backward of a layer of experts."""
    run = start(
        Cell(mesh="tp=2 ep=2", layers=2, moe=Moe(experts=8)), experts=ExpertPolicy(capacity=capacity, copies=copies)
    )
    layer = run.model.get_submodule("layers.1.mlp")
    if copies:
        run.forward_backward(own_rows(batches(Cell(mesh=""))[0], run.mesh))
    torch.manual_seed(0)  # ranks of tp have the same tokens
    x = torch.randn(2, 8, 32, dtype=torch.float64, requires_grad=True)
    reads: list[int] = []
    plain = Tensor.tolist

    def tolist(tensor: Tensor) -> Any:
        reads.append(tensor.numel())
        return plain(tensor)

    with patch.object(Tensor, "tolist", tolist), Waits() as others:
        layer(x).square().sum().backward()
    return len(reads) + others.count


@pytest.mark.parametrize(("capacity", "copies"), [(None, 0), (Capacity(factor=0.5), 0), (None, 3)])
def test_the_host_waits_once_in_a_layer(capacity: Capacity | None, copies: int) -> None:
    assert pool(2).run(waits, capacity, copies) == [1, 1]


def order_of_events() -> list[str]:
    """Of a step of a layer with shared experts."""
    run = start(Cell(mesh="dp_shard=2 ep=2", moe=Moe(shared=24)))
    layer = run.model.layers[1].mlp
    events: list[str] = []
    start_rows, wait_rows = _exchange._AllToAllPair.start, _exchange._AllToAllPair.wait

    def starting(self: Any, *args: Any) -> Tensor:
        events.append("start")
        return start_rows(self, *args)

    def waiting(self: Any) -> None:
        events.append("wait")
        wait_rows(self)

    layer.shared_experts.register_forward_hook(lambda *_: events.append("shared"))
    layer.shared_experts.up_proj.register_full_backward_hook(lambda *_: events.append("shared"))
    with (
        patch.object(_exchange._AllToAllPair, "start", starting),
        patch.object(_exchange._AllToAllPair, "wait", waiting),
    ):
        run.forward_backward(own_rows(batches(Cell(mesh=""))[0], run.mesh))
    return events


def test_shared_experts_run_while_rows_travel_forward_and_backward() -> None:
    there, back = ["start", "shared", "wait"], ["start", "wait"]
    for events in pool(2).run(order_of_events):
        assert events == [*there, *back, *back, *there]
