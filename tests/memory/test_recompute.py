"""What blocks run again in backward: the same bits, no more operations than asked for, and what policies may not say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy

import meshkit as mk
from meshkit.core._torch import TorchDispatchMode
from meshkit.memory import spread
from meshkit.models.moe import Mixtral, MixtralConfig
from meshkit.strategy import Recompute
from tests.depth import thin
from tests.laws.parity.cases import Cell, build, run_cell
from tests.laws.parity.test_bytes import observe_step
from tests.world import pool

TOL_FP64 = 1e-10
LAYERS = 4
BLOCKS = [f"layers.{layer}" for layer in range(LAYERS)]
MATMULS = 7  # of a layer: q, k, v, o, gate, up, down
aten = torch.ops.aten


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def step(mode: Any, **options: Any) -> tuple[list[Tensor], Counter[Any], Counter[Any]]:
    """(loss and gradients, operations of forward, operations of backward)."""
    model = build(Cell(mesh="", layers=LAYERS, dtype="float32"))
    mk.recompute(model, blocks=BLOCKS, mode=mode, **options)
    ids = torch.arange(32).reshape(2, 16)
    with Counting() as forward:
        loss = model(ids).square().mean()
    with Counting() as backward:
        loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())], forward.calls, backward.calls


SELECTIVE = [
    (Recompute(mode="selective"), 0, 0),
    (Recompute(mode="selective", every=2), 0, 0),
    (Recompute(mode="selective", keep=("attention",)), 6 * LAYERS, 0),  # the last product is not needed again
    (Recompute(mode="selective", keep=("matmul",)), 0, LAYERS),
    (Recompute(mode="selective", keep=()), 6 * LAYERS, LAYERS),
    (Recompute(mode="selective", every_second_matmul=True), 3 * LAYERS, 0),  # k, o, up
    (Recompute(mode="selective", every_second_matmul=True, every=2), 3 * LAYERS // 2, 0),
    (Recompute(mode="full"), 6 * LAYERS, LAYERS),
    (Recompute(mode="full", every=3), 6 * 2, 2),
    ("none", 0, 0),
]


@pytest.mark.parametrize(("mode", "matmuls", "attentions"), SELECTIVE, ids=str)
def test_gradients_are_the_same_bits_and_only_what_is_not_kept_runs_again(
    mode: Any, matmuls: int, attentions: int
) -> None:
    expected, _, plain = step("none")
    found, forward, backward = step(mode)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert forward[aten.mm.default] == MATMULS * LAYERS + 1
    assert backward[aten.mm.default] - plain[aten.mm.default] == matmuls
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert backward[flash] == attentions


def test_blocks_in_a_row_are_treated_by_their_place_in_the_model() -> None:
    chosen = spread(Recompute(mode="full", every=3), BLOCKS)
    assert [chosen[name].mode for name in BLOCKS] == ["full", "none", "none", "full"]


CELLS = [
    Cell(mesh="dp_shard=2 tp=2", layers=3, memory=mk.MemoryPolicy(recompute=Recompute(every=2)), sequence=True),
    Cell(
        mesh="dp_shard=2 tp=2",
        layers=3,
        sequence=True,
        microbatches=2,
        memory=mk.MemoryPolicy(recompute=Recompute(mode="selective", keep=("matmul",), every_second_matmul=True)),
    ),
    Cell(mesh="tp=4", memory=mk.MemoryPolicy(recompute=Recompute(mode="selective", keep=("attention",)))),
    Cell(mesh="cp=4", memory=mk.MemoryPolicy(recompute=Recompute(mode="selective", keep=("matmul",))), documents=True),
    Cell(mesh="cp=2 tp=2", sequence=True, memory=mk.MemoryPolicy(recompute=Recompute(mode="selective", keep=()))),
    Cell(mesh="pp=2 dp_shard=2", layers=4, memory=mk.MemoryPolicy(recompute=Recompute(every=3)), microbatches=2),
]


@pytest.mark.parametrize("cell", thin(CELLS, 2), ids=str)
def test_ranks_equal_one_device_and_send_what_is_explained(cell: Cell) -> None:
    for outcome in pool(4).run(run_cell, cell):
        assert max(outcome.loss, outcome.norm, outcome.gradient, outcome.parameter) <= TOL_FP64, outcome
    for seen, said in pool(4).run(observe_step, cell):
        assert seen == said


# -------------------------------------------------------------------------------------- randomness and routing


class Noisy(nn.Module):
    """A block with dropout whose hidden state comes by name, and whose scale comes in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, *, hidden: Tensor, rest: tuple[Tensor, Tensor]) -> Tensor:
        scale, shift = rest
        dropped = nn.functional.dropout(self.up(hidden).relu(), 0.3)
        out: Tensor = hidden + self.down(dropped) * scale + shift
        return out


def noisy_step(mode: Any) -> list[Tensor]:
    torch.manual_seed(0)
    block, x = Noisy(), torch.randn(4, 8, requires_grad=True)
    scale, shift = torch.rand(8, requires_grad=True), torch.rand(8, requires_grad=True)
    mk.recompute(block, blocks=[""], mode=mode)
    block(hidden=x, rest=(scale, shift)).square().sum().backward()
    return [x.grad, scale.grad, shift.grad, *(param.grad for param in block.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_dropout_draws_the_same_mask(mode: str) -> None:
    for found, expected in zip(noisy_step(mode), noisy_step("none"), strict=True):
        assert torch.equal(found, expected)


def test_inputs_by_name_and_in_tuples_are_seen_by_hooks_around() -> None:
    block, x = Noisy(), torch.randn(4, 8, requires_grad=True)
    scale, shift = torch.rand(8, requires_grad=True), torch.rand(8, requires_grad=True)
    mk.recompute(block, blocks=[""])
    seen: list[int] = []
    with saved_tensors_hooks(lambda tensor: seen.append(tensor.data_ptr()) or tensor, lambda tensor: tensor):
        block(hidden=x, rest=(scale, shift))
    # torch 2.11 saves an empty tensor of its own too.
    assert [memory for memory in seen if memory] == [x.data_ptr(), scale.data_ptr(), shift.data_ptr()]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_router_at_a_near_tie_chooses_alike_again(mode: str) -> None:
    """Scores that differ in their last bits: another order of additions in recompute would send tokens elsewhere."""
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=6,
    )
    gradients, chosen = [], []
    for each in ("none", mode):
        torch.manual_seed(0)
        model = Mixtral(config)
        routes: list[Tensor] = []
        for layer in model.layers:
            weight = layer.mlp.gate.weight.data
            weight.copy_(weight[:1] * (1 + 1e-7 * torch.randn(len(weight), 1)))
            layer.mlp.gate.register_forward_hook(lambda module, args, out, routes=routes: routes.append(out.experts_NK))
        mk.recompute(model, blocks=["layers.0", "layers.1"], mode=each)
        model(torch.arange(64).reshape(2, 32) % 32).square().mean().backward()
        gradients.append([param.grad for param in model.parameters()])
        chosen.append(routes)
    first, again = chosen[1][:2], chosen[1][2:]
    assert len(chosen[0]) == 2 and len(again) == 2
    assert len({tuple(row) for row in first[0].tolist()}) > 1, "ties are broken in more than one way"
    for before, after in zip(first, reversed(again), strict=True):  # backward begins with the last layer
        assert torch.equal(before, after)
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


# ---------------------------------------------------------------------------------------------- policies of one's own


def test_a_policy_of_ones_own_decides_by_operator() -> None:
    def keep_products(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
        return operator is aten.mm.default

    expected, _, plain = step("none")
    found, _, backward = step("none", policy=keep_products)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert backward[aten.mm.default] == plain[aten.mm.default]
    assert backward[aten._scaled_dot_product_flash_attention_for_cpu.default] == LAYERS


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD])
def test_a_policy_that_moves_to_the_host_is_refused(answer: CheckpointPolicy) -> None:
    with pytest.raises(mk.errors.PlanError, match="ActivationOffload"):
        step("none", policy=lambda ctx, operator, *args, **kwargs: answer)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Recompute(mode="some"), "mode='some'\\): choose one of 'none'"),  # type: ignore[arg-type]
        (lambda: Recompute(mode="selective", keep=("softmax",)), "'softmax': choose one of 'matmul'"),  # type: ignore[arg-type]
        (lambda: Recompute(every=0), "every=0"),
        (lambda: Recompute(every_second_matmul=True), "keeps none. Use mode='selective'"),
        (lambda: mk.recompute(nn.Linear(2, 2), blocks=[""], mode="some"), "mode='some'"),  # type: ignore[arg-type]
    ],
)
def test_recomputes_that_mean_nothing_are_refused(make: Any, match: str) -> None:
    with pytest.raises(mk.errors.PlanError, match=match):
        make()
