"""A number of bytes, and what is chosen for every block: the best there is, what really is kept, and the same gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshkit as mk
from meshkit.memory._knapsack import Option, cheapest
from meshkit.memory.budget import Choice
from meshkit.models.llama_plan import LLAMA_PLAN
from meshkit.parallel.budget import choose_for_blocks
from tests.memory.live import held_bytes
from tests.parity.cases import TOKENS, Cell, Moe, build, mesh_for, plan_of, run_cell, start
from tests.parity.test_bytes import observe_step
from tests.world import pool, run_ranks

TOL_FP64 = 1e-10
PLENTY = mk.Budget(bytes=1 << 40, rows=2, seq_len=TOKENS)

# ---------------------------------------------------------------------------------------------------- the knapsack

options = st.builds(Option, st.just(""), st.integers(0, 12), st.integers(0, 9).map(float), st.integers(0, 6))


@settings(max_examples=300, deadline=None)
@given(blocks=st.lists(st.lists(options, min_size=1, max_size=4), min_size=0, max_size=5), budget=st.integers(-1, 60))
def test_the_choice_is_the_best_of_all_there_are(blocks: list[list[Option]], budget: int) -> None:
    def fits(chosen: tuple[Option, ...]) -> bool:
        return sum(o.bytes for o in chosen) + max((o.passing for o in chosen), default=0) <= budget

    every = [chosen for chosen in itertools.product(*blocks) if fits(chosen)]
    found = cheapest(blocks, budget)
    if not every:
        assert found is None
        return
    assert found is not None
    picked = tuple(options[at] for options, at in zip(blocks, found, strict=True))
    assert fits(picked)
    assert sum(o.seconds for o in picked) == min(sum(o.seconds for o in chosen) for chosen in every)


def test_many_alike_blocks_are_no_matter() -> None:
    choices = [Option("none", 1009, 0.0), Option("some", 499, 1.0, 510), Option("full", 31, 3.0, 978)]
    found = cheapest([choices] * 200, 100_000)
    assert found is not None and len(found) == 200


# ------------------------------------------------------------------------------------------- what blocks really keep


def choice_of(cell: Cell, spec: mk.MeshSpec, budget: mk.Budget) -> Choice:
    return choose_for_blocks(
        build(cell),
        spec,
        plan=plan_of(cell),
        memory=mk.MemoryPolicy(recompute=budget),
        blocks=[f"layers.{layer}" for layer in range(cell.layers)],
        sequence=cell.sequence,
        compute=getattr(torch, cell.dtype),
        device="cpu",
    )


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


def offers_of(cell: Cell, spec: mk.MeshSpec) -> dict[str, Option]:
    """Every option of the first block, found by asking for one at a time."""
    from meshkit.parallel import budget as module

    seen: dict[str, Option] = {}
    original = module.choose

    def noting(offers, size):  # type: ignore[no-untyped-def]
        seen.update({option.name: option for option, _ in next(iter(offers.values()))})
        return original(offers, size)

    module.choose = noting
    try:
        choice_of(cell, spec, PLENTY)
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
        assert isinstance(policy, mk.Budget)
        found.append(choice_of(cell, mk.MeshSpec(), policy))
        assert found[-1].bytes <= policy.bytes
        assert f"{found[-1].bytes:,} of {policy.bytes:,} bytes" in str(found[-1])
    assert found[0].seconds == 0
    assert all(first.seconds < second.seconds for first, second in itertools.pairwise(found))
    assert {option.name for option in found[-1].options.values()} == {"full"}
    assert len({option.name for option in found[1].options.values()}) > 1, "blocks are treated differently"


CELLS = [
    (Cell(mesh="dp_shard=4", layers=4), 0.4),
    (Cell(mesh="dp_shard=2 tp=2", layers=4, sequence=True), 0.5),
    (Cell(mesh="dp_shard=2 tp=2", layers=4, sequence=True, microbatches=2), 0.2),
]


@pytest.mark.parametrize(("cell", "part"), CELLS, ids=str)
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
    said = mk.explain(run.whole, run.mesh.spec, **run.choices, rows=2, seq_len=TOKENS, microbatches=2, coordinate=place)
    return str(run.recompute_choice), str(said)


def test_stages_choose_for_the_microbatches_that_live_on_them() -> None:
    budget = replace(PLENTY, microbatches=2)
    cell = Cell(mesh="pp=2", layers=4, memory=mk.MemoryPolicy(recompute=budget))
    everything = offers_of(Cell(mesh="", layers=1), mk.MeshSpec())["none"].bytes
    tables = pool(2).run(printed, cell)
    assert tables[0][0].startswith(f"activations: {2 * 2 * everything:,} of")  # two layers, two microbatches in flight
    assert tables[1][0].startswith(f"activations: {2 * everything:,} of")
    assert all(chosen in said for chosen, said in tables)


def compiled_by_budget(cell: Cell) -> tuple[float, int]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing probes attributes that warn
        outcome = run_cell(cell)
    return max(outcome.loss, outcome.norm, outcome.gradient, outcome.parameter), len(
        {str(each) for each in start(cell).recompute_choice.treatments.values()}
    )


def test_compiled_blocks_follow_the_choice() -> None:
    cell = Cell(mesh="tp=2", layers=3, sequence=True, compile="aot_eager")
    cell = replace(cell, memory=share(cell, mk.MeshSpec(tp=2), 0.5))
    for error, kinds in run_ranks(2, compiled_by_budget, cell, timeout_s=240):
        assert error <= TOL_FP64
        assert kinds > 1


# ------------------------------------------------------------------------------------------------------- refusals


def test_too_few_bytes_are_refused_with_the_arithmetic() -> None:
    cell = Cell(mesh="", layers=4)
    full = offers_of(cell, mk.MeshSpec())["full"]
    with pytest.raises(mk.PlanError, match=f"together {4 * full.bytes + full.passing:,}"):
        choice_of(cell, mk.MeshSpec(), replace(PLENTY, bytes=4 * full.bytes + full.passing - 1))


def test_experts_and_odd_numbers_are_refused() -> None:
    with pytest.raises(mk.PlanError, match="depends on where tokens go"):
        choice_of(Cell(mesh="", moe=Moe()), mk.MeshSpec(), PLENTY)
    with pytest.raises(mk.PlanError, match="rows=0"):
        mk.Budget(bytes=1, rows=0, seq_len=1)
