"""A forward whose next call is another, by a counter or by Python's random numbers, where a step calls it again."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.program import Example, read_program
from meshkit.resolve import resolve
from meshkit.strategy import MemoryPolicy, Strategy
from tests.laws.parity.cases import mesh_for, own_rows
from tests.world import pool
from tests.zoo.odd import ROWS, WIDTH, Layers, Residual, features, row_count, squares

TOL_FP64 = 1e-12
BLOCKS = mk.Plan(blocks=["blocks.*"])
RECOMPUTE = MemoryPolicy(recompute="full")
GIVEN = Example((torch.empty(ROWS, WIDTH, dtype=torch.float64),))


class InBlocks(Layers):
    class Block(Residual):
        calls = 0

        def scale(self) -> float:
            self.calls += 1
            return 1 + 0.1 * self.calls

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale()

    def __init__(self) -> None:
        super().__init__()
        for index in range(len(self.blocks)):
            self.blocks[index] = self.Block()


class LaterInBlocks(InBlocks):
    """Only the hundredth call is another."""

    class Block(InBlocks.Block):
        def scale(self) -> float:
            self.calls += 1
            return 2.0 if self.calls >= 100 else 1.0


class DrawnInBlocks(InBlocks):
    class Block(InBlocks.Block):
        def scale(self) -> float:
            return random.random()


class InModel(Layers):
    calls = 0

    def middle(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * min(1.0, 0.3 * self.calls)


class OwnGenerator(InBlocks):
    class Block(InBlocks.Block):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)

        def scale(self) -> Any:
            return torch.rand((), generator=self.generator, dtype=torch.float64)


class FreshGenerator(InBlocks):
    """Each call draws the same."""

    class Block(InBlocks.Block):
        def scale(self) -> Any:
            return torch.rand((), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class ForALog(InBlocks):
    """Counted, and a word said once, by which nothing is computed."""

    class Block(InBlocks.Block):
        said = False

        def scale(self) -> float:
            self.calls += 1
            if not self.said:
                self.said = True
            return 1.0


class KeptTable(InBlocks):
    """The first call makes what later ones read."""

    class Block(InBlocks.Block):
        table: Any = None

        def scale(self) -> Any:
            if self.table is None:
                self.table = torch.linspace(0, 1, WIDTH, dtype=torch.float64)
            return self.table


def resolved(model: type[Layers], mesh: str = "dp_shard=2", **choices: Any) -> None:
    resolve(read_program(model().double(), GIVEN), Strategy(plan=BLOCKS, **choices), MeshSpec.parse(mesh))


@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=2", "dp_replicate=2"])
def test_a_counter_in_a_block_that_runs_again_is_refused(mesh: str) -> None:
    with pytest.raises(
        PlanError, match=r"what 'blocks.0' runs is another at \S+ in each call, and recompute='full' runs"
    ):
        resolved(InBlocks, mesh, memory=RECOMPUTE)
    with pytest.raises(
        PlanError, match=r"what 'blocks.0' runs depends on 'blocks.0.calls', which each call changes, and rec"
    ):
        resolved(LaterInBlocks, mesh, memory=RECOMPUTE)
    resolved(InModel, mesh, memory=RECOMPUTE)


@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=2"])
@pytest.mark.parametrize("model", [InBlocks, LaterInBlocks, InModel])
def test_a_counter_that_microbatches_raise_is_refused(model: type[Layers], mesh: str) -> None:
    with pytest.raises(
        PlanError, match="and each of 3 microbatches is a call, where a single device calls it once in a step"
    ):
        resolved(model, mesh, microbatches=3)
    resolved(model, mesh)


def test_draws_of_python_in_a_block_that_runs_again_are_refused() -> None:
    with pytest.raises(PlanError, match=r"the forward of 'blocks.0' draws of Python's `random`(.|\n)*Or draw by torch"):
        resolved(DrawnInBlocks, memory=RECOMPUTE)
    resolved(DrawnInBlocks, microbatches=2)


@pytest.mark.parametrize("model", [ForALog, KeptTable])
def test_what_decides_nothing_or_stays_as_it_is_is_not(model: type[Layers]) -> None:
    resolved(model, memory=RECOMPUTE, microbatches=2)


def step(model: type[Layers], mesh: str, memory: MemoryPolicy, microbatches: int) -> float | str:
    """How far the losses of two steps are off one device; or what is raised, without an example, in the first."""
    torch.manual_seed(0)
    run = mk.parallelize(model().double(), mesh_for(mesh), plan=BLOCKS, memory=memory, microbatches=microbatches)
    torch.manual_seed(0)
    single = model().double()
    off = []
    for seed in range(2):
        batch = {key: value.double() for key, value in features(seed).items()}
        expected = squares(single, batch).detach() / ROWS
        try:
            found = run.forward_backward(own_rows(batch, run.mesh), loss=squares, count=row_count)
        except PlanError as error:
            return str(error)
        off.append(float((found - expected).abs()))
    return max(off)


@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=2"])
def test_without_an_example_the_first_step_shows_it(mesh: str) -> None:
    world = pool(MeshSpec.parse(mesh).world_size)
    for said in world.run(step, InBlocks, mesh, RECOMPUTE, 1):
        assert "what 'blocks.0' runs is another" in str(said)
    for said in world.run(step, InModel, mesh, MemoryPolicy(), 2):
        assert "and each of 2 microbatches is a call" in str(said)


def test_a_counter_of_steps_is_right() -> None:
    for model, memory in ((InBlocks, MemoryPolicy()), (InModel, RECOMPUTE), (ForALog, RECOMPUTE)):
        assert all(float(off) < TOL_FP64 for off in pool(2).run(step, model, "dp_shard=2", memory, 1))


def test_a_generator_of_a_module_is_refused_where_it_is_drawn_of_again() -> None:
    with pytest.raises(
        PlanError, match=r"depends on 'blocks.0.generator', of which each call draws .* recompute='full'"
    ):
        resolved(OwnGenerator, memory=RECOMPUTE)
    with pytest.raises(PlanError, match=r"depends on 'blocks.0.generator', of which each call draws .* 3 microbatches"):
        resolved(OwnGenerator, microbatches=3)
    resolved(OwnGenerator)
    resolved(FreshGenerator, memory=RECOMPUTE)
    resolved(FreshGenerator, microbatches=3)


def test_readings_and_trials_draw_nothing_of_a_module_s_generator() -> None:
    assert max(pool(2).run(step, OwnGenerator, "dp_shard=2", MemoryPolicy(), 1)) < TOL_FP64
