"""Feed-forwards in parts of the tokens: the same gradients, what is sent, what is held, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.memory import chunk_mlp, part_sizes
from meshkit.models.layers import GatedMLP
from meshkit.models.llama import LLAMA_PLAN
from meshkit.strategy import Recompute
from tests.depth import thin
from tests.laws.parity.cases import Cell, Moe, build, mesh_for, run_cell
from tests.laws.parity.test_bytes import observe_step
from tests.memory.live import Live
from tests.tiny import TINY
from tests.world import pool

TOL_FP64 = 1e-10
EVERY_SECOND = Recompute(mode="full", every=2)


def tiles(count: int, **choices: object) -> mk.MemoryPolicy:
    return mk.MemoryPolicy(mlp_chunks=count, **choices)  # type: ignore[arg-type]


CELLS = [
    Cell(mesh="dp_shard=4", memory=tiles(3), microbatches=2),
    Cell(mesh="tp=4", memory=tiles(3)),
    Cell(mesh="tp=4", sequence=True, memory=tiles(3, recompute="full"), vocab=61, hidden_mlp=45),
    Cell(mesh="tp=4", sequence=True, memory=tiles(100, regather=True)),
    Cell(mesh="dp_shard=2 tp=2", sequence=True, layers=3, memory=tiles(2, recompute=EVERY_SECOND), zero=2),
    Cell(mesh="dp_shard=2 cp=2", memory=tiles(3), documents=True),
    Cell(mesh="pp=2 tp=2", sequence=True, layers=4, microbatches=3, memory=tiles(2)),
]
EXPERTS = Cell(mesh="dp_shard=2 tp=2", layers=3, memory=tiles(3, recompute="full"), moe=Moe(experts=8, shared=24))


@pytest.mark.parametrize("cell", thin([*CELLS, EXPERTS, replace(EXPERTS, sequence=True)], 3), ids=str)
def test_parts_equal_one_device(cell: Cell) -> None:
    for outcome in pool(4).run(run_cell, cell):
        assert max(outcome.loss, outcome.norm, outcome.gradient, outcome.parameter) <= TOL_FP64, outcome


@pytest.mark.parametrize("cell", [*CELLS, EXPERTS], ids=str)
def test_what_parts_send_is_explained(cell: Cell) -> None:
    for seen, said in pool(4).run(observe_step, cell):
        assert seen == said


def test_what_is_held_is_that_of_one_part() -> None:
    """Of T tokens and F features, all but a constant is in proportion to T F / n."""
    tokens, hidden, features = 256, 16, 512
    peaks = {}
    for count in (2, 4, 8, 16):
        mlp = chunk_mlp(GatedMLP(hidden, features), mlps=[""], chunks=count)
        x = torch.randn(1, tokens, hidden, requires_grad=True)
        with Live([x, *mlp.parameters()]) as live:
            out = mlp(x)
            assert live.bytes == 4 * tokens * hidden, "forward holds nothing but its result"
            out.backward(torch.ones_like(out))
        peaks[count] = live.peak
    steps = [peaks[fewer] - peaks[more] for fewer, more in pairwise(peaks)]
    assert all(first == 2 * second for first, second in pairwise(steps))
    # gate, up, silu, product and two gradients of them, less the product's own input
    assert steps[0] == pytest.approx(4 * 6 * tokens * features / 4, rel=0.01)


def test_parts_differ_by_one_token_and_none_is_empty() -> None:
    assert part_sizes(11, 3) == [4, 4, 3]
    assert part_sizes(2, 8) == [1, 1]
    assert part_sizes(0, 8) == [0]


@pytest.mark.parametrize(
    ("choices", "match"),
    [
        ({"memory": tiles(2, recompute="selective")}, "mlp_chunks=2 with recompute='selective'"),
        ({"memory": tiles(2), "compile": "aot_eager"}, "mlp_chunks=2 with compile"),
        ({"memory": tiles(2), "plan": replace(LLAMA_PLAN, mlps=())}, "the plan names no feed-forwards"),
        ({"memory": tiles(2), "plan": replace(LLAMA_PLAN, mlps=("layers.*",))}, "is or holds a unit of sharding"),
        ({"memory": tiles(2), "plan": replace(LLAMA_PLAN, units=("layers.*.mlp",))}, "is or holds a unit of sharding"),
    ],
)
def test_what_parts_cannot_do_is_refused(choices: dict, match: str) -> None:
    ((ok, text),) = pool(1).run(refusal, choices)
    assert not ok
    assert match in text


def refusal(choices: dict) -> tuple[bool, str]:
    try:
        mk.parallelize(build(Cell(mesh="")), mk.init_mesh(""), **{"plan": LLAMA_PLAN, **choices})
    except mk.errors.PlanError as error:
        return False, str(error)
    return True, ""


def test_schedules_that_put_weights_off_are_refused_before_any_rank_is_needed() -> None:
    with pytest.raises(mk.errors.PlanError, match="computes weight gradients apart"):
        mk.explain(
            build(Cell(mesh="", layers=4)),
            mk.MeshSpec(pp=2),
            plan=LLAMA_PLAN,
            rows=2,
            seq_len=8,
            pipeline=mk.strategy.PipelinePolicy(schedule="zb-h1"),
            memory=tiles(2),
        )


def centred(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out - out.mean(-2, keepdim=True)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return centred(self, (), self.up(x))


def hooked(model: Any) -> None:
    model.layers[1].mlp.register_forward_hook(centred)


def hooked_inside(model: Any) -> None:
    model.layers[1].mlp.up_proj.register_forward_hook(centred)


def hooked_backward(model: Any) -> None:
    model.layers[1].mlp.register_full_backward_hook(
        lambda module, given, out: (given[0] - given[0].mean(-2, keepdim=True),)
    )


def replaced(model: Any) -> None:
    model.layers[1].mlp = Centred()


def doubled(model: Any) -> None:
    model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 2)


def dropped(model: Any) -> None:
    model.layers[1].mlp = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1))


def of_changed(change: Callable[[Any], None]) -> str:
    model = mk.models.Llama(TINY)
    change(model)
    try:
        mk.parallelize(model, mesh_for("dp_shard=1"), plan=mk.models.LLAMA_PLAN, memory=tiles(3))
    except mk.errors.PlanError as error:
        return str(error)
    return ""


def test_a_feed_forward_that_mixes_tokens_is_refused() -> None:
    for change in (hooked, hooked_inside, hooked_backward, replaced):
        (said,) = pool(1).run(of_changed, change)
        assert "'layers.1.mlp' cannot be seen to treat each token alike" in said


def test_another_feed_forward_that_does_not_is_taken() -> None:
    for change in (doubled, dropped):
        assert pool(1).run(of_changed, change) == [""]


def test_number_of_parts_and_what_is_called_with_more_than_tokens() -> None:
    with pytest.raises(mk.errors.PlanError, match="mlp_chunks=0"):
        tiles(0)
    module = chunk_mlp(nn.Bilinear(4, 4, 4), mlps=[""], chunks=2)
    with pytest.raises(mk.errors.PlanError, match="called with 2 arguments"):
        module(torch.ones(2, 4), torch.ones(2, 4))
