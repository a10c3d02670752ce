"""A number of bytes, and what is chosen for every block: the best there is, what really is kept, and the same gradients."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshkit as mk
from meshkit.memory.budget.choose import Choice
from meshkit.memory.budget.knapsack import Option, cheapest, most, smallest
from meshkit.memory.budget.profile import choose_for_blocks
from meshkit.memory.offload import offload_of
from meshkit.models.llama import LLAMA_PLAN
from tests.depth import thin
from tests.laws.parity.cases import TOKENS, Cell, Moe, batches, build, mesh_for, own_rows, plan_of, run_cell, start
from tests.laws.parity.test_bytes import observe_step
from tests.memory.live import held_bytes
from tests.world import pool

TOL_FP64 = 1e-10
PLENTY = mk.strategy.Budget(bytes=1 << 40, rows=2, seq_len=TOKENS)

# ---------------------------------------------------------------------------------------------------- the knapsack

options = st.builds(
    lambda kept, seconds, more, moving: Option("", kept, seconds, more + moving, moving),
    st.integers(0, 12),
    st.integers(0, 9).map(float),
    st.integers(0, 6),
    st.sampled_from([0, 0, 2, 5]),
)


@settings(max_examples=300, deadline=None)
@given(
    blocks=st.lists(st.lists(options, min_size=1, max_size=4), min_size=0, max_size=5),
    budget=st.integers(-1, 60),
    beside=st.integers(1, 3),
)
def test_the_choice_is_the_best_of_all_there_are(blocks: list[list[Option]], budget: int, beside: int) -> None:
    def needs(chosen: tuple[Option, ...]) -> int:
        passing = max((o.passing for o in chosen), default=0)
        return sum(o.bytes for o in chosen) + passing + beside * max((o.moving for o in chosen), default=0)

    def fits(chosen: tuple[Option, ...]) -> bool:
        return needs(chosen) <= budget

    def cost(chosen: tuple[Option, ...]) -> tuple[float, int]:
        return sum(o.seconds for o in chosen), sum(o.moving for o in chosen)

    assert all(most(chosen, beside) == needs(chosen) for chosen in itertools.product(*blocks))
    every = [chosen for chosen in itertools.product(*blocks) if fits(chosen)]
    found = cheapest(blocks, budget, beside)
    assert sum(smallest(blocks, beside)) == min(map(needs, itertools.product(*blocks)))
    if not every:
        assert found is None
        return
    assert found is not None
    picked = tuple(options[at] for options, at in zip(blocks, found, strict=True))
    assert fits(picked)
    assert cost(picked) == min(map(cost, every))


def test_many_alike_blocks_are_no_matter() -> None:
    choices = [Option("none", 1009, 0.0), Option("some", 499, 1.0, 510), Option("full", 31, 3.0, 978)]
    away = [Option(f"{o.name} away", 0, o.seconds + 0.37 * at, 1009, o.bytes) for at, o in enumerate(choices)]
    for budget in (5_000, 100_000, 190_000):
        found = cheapest([[*choices, *away]] * 200, budget)
        assert found is not None and len(found) == 200


# ------------------------------------------------------------------------------------------- what blocks really keep


def choice_of(
    cell: Cell, spec: mk.MeshSpec, budget: mk.strategy.Budget, offload: mk.strategy.ActivationOffload | None = None
) -> Choice:
    return choose_for_blocks(
        build(cell),
        spec,
        plan=plan_of(cell),
        memory=mk.MemoryPolicy(recompute=budget, offload=offload),
        blocks=[f"layers.{layer}" for layer in range(cell.layers)],
        sequence=cell.sequence,
        compute=getattr(torch, cell.dtype),
        device="cpu",
    )[0]


@pytest.mark.parametrize("mode", ["none", "activation", "selective", "full"])
def test_what_is_predicted_is_what_a_model_keeps(mode: str) -> None:
    """Of one more layer, run for real."""
    held = []
    for layers in (1, 2):
        model = build(Cell(mesh="", layers=layers, dtype="float32"))  # torch 2.11 mistakes what attention keeps in fp64
        mk.recompute(model, blocks=[f"layers.{layer}" for layer in range(layers)], mode=mode)
        held.append(held_bytes(model, 2, TOKENS))
    offered = offers_of(Cell(mesh="", layers=1, dtype="float32"), mk.MeshSpec())
    assert offered[mode].bytes == held[1] - held[0]


@functools.cache
def offers_of(
    cell: Cell,
    spec: mk.MeshSpec,
    offload: mk.strategy.ActivationOffload | None = None,
    rates: mk.strategy.Rates | None = None,
) -> dict[str, Option]:
    """Every option of the first block, found by asking for one at a time."""
    from meshkit.memory.budget import profile as module

    seen: dict[str, Option] = {}
    original = module.choose

    def noting(offers, size, beside):  # type: ignore[no-untyped-def]
        seen.update({option.name: option for option, _ in next(iter(offers.values()))})
        return original(offers, size, beside)

    module.choose = noting
    try:
        choice_of(cell, spec, replace(PLENTY, rates=rates or mk.strategy.Rates()), offload)
    finally:
        module.choose = original
    return seen


def kept_on_ranks(mesh: str, regather: bool) -> int:
    held = []
    for layers in (1, 2):
        model = build(Cell(mesh="", layers=layers, dtype="float32"))  # torch 2.11 mistakes what attention keeps in fp64
        mk.tensor_parallel(model, mesh_for(mesh)["tp"], plan=LLAMA_PLAN.tensor, sequence=True, regather=regather)
        held.append(held_bytes(model, 2, TOKENS))
    return held[1] - held[0]


@pytest.mark.parametrize("regather", [False, True])
def test_what_is_predicted_without_ranks_is_what_ranks_keep(regather: bool) -> None:
    offered = offers_of(Cell(mesh="", layers=1, sequence=True, dtype="float32"), mk.MeshSpec(tp=2))
    name = "none + regather" if regather else "none"
    assert pool(2).run(kept_on_ranks, "tp=2", regather) == [offered[name].bytes] * 2


# ------------------------------------------------------------------------------------------------- runs by a budget


def share(cell: Cell, spec: mk.MeshSpec, part: float) -> mk.MemoryPolicy:
    """A budget between the least and what everything takes."""
    offered = offers_of(cell, spec)
    least = offered["full"].bytes * cell.layers + offered["full"].passing
    most = offered["none"].bytes * cell.layers
    return mk.MemoryPolicy(recompute=replace(PLENTY, bytes=int(least + part * (most - least))))


def test_less_bytes_take_more_time_and_the_table_says_so() -> None:
    cell = Cell(mesh="", layers=4)
    found = []
    for part in (1.0, 0.6, 0.3, 0.0):
        policy = share(cell, mk.MeshSpec(), part).recompute
        assert isinstance(policy, mk.strategy.Budget)
        found.append(choice_of(cell, mk.MeshSpec(), policy))
        assert found[-1].bytes <= policy.bytes
        assert f"{found[-1].bytes:,} of {policy.bytes:,} bytes" in str(found[-1])
    assert found[0].seconds == 0
    assert all(first.seconds < second.seconds for first, second in itertools.pairwise(found))
    assert {option.name for option in found[-1].options.values()} == {"full"}
    assert len({option.name for option in found[1].options.values()}) > 1, "blocks are treated differently"


CELLS = [
    (Cell(mesh="dp_shard=4", layers=4), 0.4),
    (Cell(mesh="dp_shard=2 tp=2", layers=3, sequence=True), 0.5),
    (Cell(mesh="dp_shard=2 tp=2", layers=3, sequence=True, microbatches=2), 0.2),
]


@pytest.mark.parametrize(("cell", "part"), thin(CELLS, 3), ids=str)
def test_a_run_within_a_budget_equals_one_device_and_is_explained(cell: Cell, part: float) -> None:
    spec = mk.MeshSpec.parse(cell.mesh)
    cell = replace(cell, memory=share(cell, replace(spec, dp_shard=1), part))
    for outcome in pool(4).run(run_cell, cell):
        assert max(outcome.loss, outcome.norm, outcome.gradient, outcome.parameter) <= TOL_FP64, outcome
    for seen, said in pool(4).run(observe_step, cell):
        assert seen == said


def printed(cell: Cell) -> tuple[str, str]:
    run = start(cell)
    place = {"pp": run.mesh["pp"].get_local_rank()}
    said = mk.explain(run, rows=2, seq_len=TOKENS, microbatches=2, coordinate=place)
    return str(run.recompute_choice), str(said)


def test_stages_choose_for_the_microbatches_that_live_on_them() -> None:
    budget = replace(PLENTY, microbatches=2)
    cell = Cell(mesh="pp=2", layers=4, memory=mk.MemoryPolicy(recompute=budget))
    everything = offers_of(Cell(mesh="", layers=1), mk.MeshSpec())["none"].bytes
    tables = pool(2).run(printed, cell)
    assert tables[0][0].startswith(f"activations: {2 * 2 * everything:,} of")  # two layers, two microbatches in flight
    assert tables[1][0].startswith(f"activations: {2 * everything:,} of")
    assert all(chosen in said for chosen, said in tables)


def compiled_by_budget(cell: Cell) -> float:
    import warnings

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing probes attributes that warn
        outcome = run_cell(cell)
    return max(outcome.loss, outcome.norm, outcome.gradient, outcome.parameter)


def test_compiled_blocks_follow_the_choice() -> None:
    cell = Cell(mesh="tp=2", layers=3, sequence=True, compile="aot_eager")
    cell = replace(cell, memory=share(cell, mk.MeshSpec(tp=2), 0.5))
    assert cell.memory is not None and isinstance(cell.memory.recompute, mk.strategy.Budget)
    chosen = choice_of(cell, mk.MeshSpec(tp=2), cell.memory.recompute)
    assert len({str(each) for each in chosen.treatments.values()}) > 1
    assert max(pool(2).run(compiled_by_budget, cell, timeout_s=240)) <= TOL_FP64


# ------------------------------------------------------------------------------------------------------- refusals


def test_too_few_bytes_are_refused_with_the_arithmetic() -> None:
    cell = Cell(mesh="", layers=4)
    full = offers_of(cell, mk.MeshSpec())["full"]
    with pytest.raises(mk.errors.PlanError, match=f"together {4 * full.bytes + full.passing:,}"):
        choice_of(cell, mk.MeshSpec(), replace(PLENTY, bytes=4 * full.bytes + full.passing - 1))


def test_experts_and_odd_numbers_are_refused() -> None:
    with pytest.raises(mk.errors.PlanError, match="depends on where tokens go"):
        choice_of(Cell(mesh="", moe=Moe()), mk.MeshSpec(), PLENTY)
    with pytest.raises(mk.errors.PlanError, match="rows=0"):
        mk.strategy.Budget(bytes=1, rows=0, seq_len=1)


# ------------------------------------------------------------------------------------------------------- offload


ANYTHING = mk.strategy.ActivationOffload(min_bytes=1)
FREE, DEAR = mk.strategy.Rates(host_bytes_per_s=1e18), mk.strategy.Rates(host_bytes_per_s=1e3)


def alone_within(part: float, layers: int = 4, **budget: Any) -> Cell:
    """On one device, by a share of what everything takes, with offload as a choice."""
    cell = Cell(mesh="dp_shard=1", layers=layers, dtype="float32")
    everything = offers_of(cell, mk.MeshSpec())["none"].bytes * layers
    chosen = replace(PLENTY, bytes=int(part * everything), **budget)
    return replace(cell, memory=mk.MemoryPolicy(recompute=chosen, offload=ANYTHING))


def chosen_within(cell: Cell) -> Choice:
    assert cell.memory is not None and isinstance(cell.memory.recompute, mk.strategy.Budget)
    return choice_of(cell, mk.MeshSpec(), cell.memory.recompute, offload=cell.memory.offload)


def test_offload_is_chosen_where_copies_are_quick_and_never_without_need() -> None:
    quick = chosen_within(alone_within(0.9, rates=FREE))
    assert quick.seconds == 0
    moved = [treatment.offload for treatment in quick.treatments.values()]
    assert any(moved) and not moved[-1], "the last keeps its own"
    assert {option.name for option in quick.options.values()} == {"none", "none + offload"}
    assert "bytes wait elsewhere" in str(quick)
    slow = chosen_within(alone_within(0.9, rates=DEAR))
    assert not any(treatment.offload for treatment in slow.treatments.values()) and slow.seconds > 0
    plenty = chosen_within(alone_within(2.0, rates=FREE))
    assert {option.name for option in plenty.options.values()} == {"none"}


def test_a_copy_costs_what_is_longer_than_the_compute_of_its_block() -> None:
    seen = []
    for rate in (1e5, 2e5):  # so slow that compute is nothing beside it
        cell = alone_within(1.0, layers=1)
        offered = offers_of(
            cell, mk.MeshSpec(), mk.strategy.ActivationOffload(keep_last=0), mk.strategy.Rates(host_bytes_per_s=rate)
        )
        option = offered["full + offload"]
        seen.append(option.seconds)
        assert option.seconds == pytest.approx(2 * option.moving / rate, rel=1e-3)
    assert seen[0] == pytest.approx(2 * seen[1], rel=1e-3)


@pytest.mark.parametrize("mode", ["none", "activation", "selective", "full"])
@pytest.mark.parametrize("least", [1, 3000])
def test_what_is_predicted_is_what_offload_moves_and_leaves(mode: str, least: int) -> None:
    """Of two blocks, run for real: what is stored, and what is alive after forward."""
    policy = mk.strategy.ActivationOffload(min_bytes=least, keep_last=0)
    blocks = ["layers.0", "layers.1"]
    held = []
    for moved in ([], blocks):
        model = build(Cell(mesh="", layers=2, dtype="float32"))
        mk.recompute(model, blocks=blocks, mode=mode)
        mk.offload_activations(model, blocks=blocks, policy=policy, keep=set(blocks) - set(moved))
        engine = offload_of(model)
        assert engine is not None
        model(torch.zeros(2, TOKENS, dtype=torch.int64)).sum().backward()  # takes the host's memory
        engine.end_step()
        held.append(held_bytes(model, 2, TOKENS, known=engine.tier.space._slabs))
    engine.end_step()
    offered = offers_of(Cell(mesh="", layers=1, dtype="float32"), mk.MeshSpec(), policy)
    kept, away = offered[mode], offered[f"{mode} + offload"]
    assert engine.last_step.stored_bytes == 2 * away.moving > 0
    assert held[1] - held[0] == 2 * (away.bytes - kept.bytes)


def steps_by_choice(cell: Cell) -> tuple[list[bool], int, int]:
    """Whether the gradients equal bit by bit those without a policy, and what was moved beside what was to be."""
    rows = own_rows(batches(cell)[0], mesh_for(cell.mesh))
    run, plain = start(cell), start(replace(cell, memory=mk.MemoryPolicy()))
    for each in (run, plain):
        each.forward_backward(rows)
    assert run.recompute_choice is not None
    assert run.offload is not None, str(run.recompute_choice)
    whole = dict(plain.named_parameters())
    same = [torch.equal(_local(p.grad), _local(whole[name].grad)) for name, p in run.named_parameters()]
    said = sum(option.moving for option in run.recompute_choice.options.values())
    return same, run.offload.last_step.stored_bytes, said


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("to", ["host", "disk"])
def test_the_chosen_blocks_are_offloaded_and_gradients_stay_bit_for_bit(to: Any) -> None:
    rows = len(batches(Cell(mesh=""))[0]["input_ids"])
    cell = alone_within(0.9 * rows / PLENTY.rows, rates=FREE, rows=rows)
    assert cell.memory is not None
    cell = replace(cell, memory=replace(cell.memory, offload=replace(ANYTHING, to=to)))
    (same, moved, said), *_ = pool(1).run(steps_by_choice, cell)
    assert all(same) and same
    assert moved == said > 0


def test_offload_that_cannot_be_is_refused() -> None:
    with pytest.raises(mk.errors.PlanError, match=r"keep_last=4\): all 4 blocks keep theirs"):
        choice_of(Cell(mesh="", layers=4), mk.MeshSpec(), PLENTY, offload=mk.strategy.ActivationOffload(keep_last=4))
    with pytest.raises(mk.errors.PlanError, match="host_bytes_per_s=0"):
        mk.strategy.Rates(host_bytes_per_s=0)
