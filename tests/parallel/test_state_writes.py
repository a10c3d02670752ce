"""State that a forward writes is written once in a step, as on one device, whatever runs twice; or it is refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import meshkit as mk
from meshkit.core.sharding import full_tensor
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.program import Example, read_program
from meshkit.resolve import resolve
from meshkit.strategy import ActivationOffload, BlockOverride, MemoryPolicy, Strategy
from tests.laws.parity.cases import mesh_for
from tests.world import pool
from tests.zoo.odd import ROWS, WIDTH, Counter, Layers, Residual, RunningMean, features, row_count, squares

TOL_FP64 = 1e-10  # only the order of summation differs
BLOCKS = mk.Plan(blocks=["blocks.*"])
GIVEN = Example((torch.empty(ROWS, WIDTH, dtype=torch.float64),))


class CountsInBlock(Layers):
    """A block whose output depends on how often it was called."""

    class Block(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * (1 + 0.1 * self.calls)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = self.Block()


class AssignsInBlock(Layers):
    """As above; the buffer is another tensor after each call."""

    class Block(CountsInBlock.Block):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return Residual.forward(self, x) * (1 + 0.1 * self.calls)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = self.Block()


class CountsInside(Layers):
    class Inner(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    class Block(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.inner = CountsInside.Inner()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.inner(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = self.Block()


class NormInBlock(Layers):
    class Block(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.rows(super().forward(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = self.Block()


class SpectralInBlock(Layers):
    """Its largest singular value is approached by a step at each call."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.blocks[0].fc2)


class CountsForALog(Layers):
    """What is computed does not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def middle(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class LargestForALog(CountsForALog):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def middle(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().amax()))
        return x


class MadeTable(Layers):
    """A table that the first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None)

    def middle(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH, dtype=x.dtype)
        return x * self.table


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def rows_of(step: int) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in features(step).items()}


@functools.cache
def one_device(make: Callable[[], nn.Module], steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of the last step, and the buffers after it."""
    model = built(make)
    for step in range(steps):
        model.zero_grad()
        (squares(model, rows_of(step)) / ROWS).backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return grads, {name: buffer.clone() for name, buffer in model.named_buffers()}


def compared(
    make: Callable[[], nn.Module],
    mesh: str,
    options: dict[str, Any],
    microbatches: int | None,
    example: bool,
    steps: int,
) -> str:
    """What is raised. Else steps are compared with one device."""
    given = GIVEN if example or "pp" in mesh else None  # without one, `Layers` cannot be cut
    try:
        on = mesh_for(mesh)
        run = mk.parallelize(built(make), on, example=given, **{"plan": None if on.spec.tp > 1 else BLOCKS, **options})
        for step in range(steps):
            rows = {name: each.chunk(on.data_ranks)[on.data_rank] for name, each in rows_of(step).items()}
            for param in run.parameters():
                param.grad = None
            run.forward_backward(rows, loss=squares, count=row_count, microbatches=microbatches)
    except PlanError as error:
        return str(error)
    grads, buffers = one_device(make, steps)
    for name, param in run.named_parameters():
        torch.testing.assert_close(full_tensor(param.grad), grads[name], rtol=0, atol=TOL_FP64)
    if microbatches is None:
        for name, buffer in run.model.named_buffers():
            torch.testing.assert_close(buffer, buffers[name], rtol=0, atol=TOL_FP64)
    return ""


def said(
    make: Callable[[], nn.Module],
    mesh: str,
    options: dict[str, Any],
    *,
    microbatches: int | None = None,
    example: bool = False,
    steps: int = 2,
) -> str:
    """What every rank raises, which is the same."""
    world = pool(MeshSpec.parse(mesh).world_size)
    texts = set(world.run(compared, make, mesh, options, microbatches, example, steps))
    assert len(texts) == 1, texts
    return str(texts.pop())


# -------------------------------------------------------------------------------------------------------- recompute

TWICE = (
    r"the forward writes 'blocks\.0\.[\w.]+' \(.* at \w+\.py:\d+\), and recompute='\w+' runs the forward of 'blocks\.0' "
    r"again in backward, so it is written twice\. Leave recompute away for this block \(Strategy\(overrides=\{'blocks\.0': "
    r"BlockOverride\(recompute='none'\)\}\)"
)
FULL = {"memory": MemoryPolicy(recompute="full")}
BUT_ONE = {**FULL, "overrides": {"blocks.0": BlockOverride(recompute="none")}}


@pytest.mark.parametrize("make", [CountsInBlock, AssignsInBlock, NormInBlock, SpectralInBlock])
def test_a_block_that_runs_again_may_not_write_state(make: Callable[[], nn.Module]) -> None:
    for mode in ("full", "selective"):
        text = said(make, "dp_shard=1", {"memory": MemoryPolicy(recompute=mode)}, steps=1)
        assert re.match(TWICE, text), text
    assert said(make, "dp_shard=1", BUT_ONE) == ""


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2", "pp=2"])
@pytest.mark.parametrize("example", [False, True])
def test_nor_may_it_on_any_mesh(mesh: str, example: bool) -> None:
    for make in (CountsInBlock, AssignsInBlock):
        text = said(make, mesh, FULL, example=example, steps=1)
        assert re.match(TWICE, text), text
        assert said(make, mesh, BUT_ONE, example=example) == ""


def test_an_example_shows_it_before_anything_runs() -> None:
    program = read_program(built(CountsInBlock), GIVEN)
    for mesh in (MeshSpec(tp=2), MeshSpec(dp_shard=2), MeshSpec(pp=2)):
        with pytest.raises(PlanError, match=TWICE):
            resolve(program, Strategy(plan=None if mesh.tp > 1 else BLOCKS, **FULL), mesh)


def test_a_feed_forward_that_runs_in_parts_may_not_write_state() -> None:
    plan = mk.Plan(blocks=["blocks.*"], mlps=["blocks.0.inner"])
    text = said(CountsInside, "dp_shard=1", {"memory": MemoryPolicy(mlp_chunks=2), "plan": plan}, steps=1)
    assert "the forward writes 'blocks.0.inner.calls'" in text
    assert "mlp_chunks=2 runs this feed-forward on 2 parts of the tokens, so it is written each time" in text


@pytest.mark.parametrize("mesh", ["dp_shard=1", "tp=2"])
def test_outside_of_what_runs_again_and_with_offload_it_may(mesh: str) -> None:
    assert said(Counter, mesh, FULL) == ""
    assert (
        said(CountsInBlock, mesh, {"memory": MemoryPolicy(offload=ActivationOffload(keep_last=0, min_bytes=1))}) == ""
    )


# ----------------------------------------------------------------------------------------------------- microbatches


@pytest.mark.parametrize("mesh", ["dp_shard=1", "tp=2", "dp_shard=2", "pp=2"])
def test_microbatches_may_not_write_what_is_read(mesh: str) -> None:
    for make, name in ((Counter, "calls"), (CountsInBlock, "blocks.0.calls"), (AssignsInBlock, "blocks.0.calls")):
        text = said(make, mesh, {}, microbatches=2, steps=1)
        assert f"the forward writes {name!r} (" in text, text
        assert (
            "in each of 2 microbatches, and what it computes depends on it: a single device would write it once" in text
        )
        assert said(make, mesh, {}) == ""


@pytest.mark.parametrize("mesh", ["dp_shard=1", "tp=2"])
def test_microbatches_may_not_write_what_follows_their_rows(mesh: str) -> None:
    text = said(LargestForALog, mesh, {}, microbatches=2, steps=1)
    assert "the forward writes 'largest' (aten.copy_.default at test_state_writes.py:" in text, text
    assert "from the rows of each of 2 microbatches, and a single device would write it from all rows. Do not" in text
    assert said(LargestForALog, mesh, {}) == ""


def test_running_means_of_microbatches_are_refused() -> None:
    for make, mesh in ((RunningMean, "dp_shard=1"), (LargestForALog, "pp=2"), (RunningMean, "pp=2")):
        assert "mixes the rows of a batch" in said(make, mesh, {}, microbatches=2, steps=1)
    text = said(NormInBlock, "dp_shard=1", {}, microbatches=2, steps=1)
    assert "'blocks.0.rows' is a BatchNorm1d, and in training mode it normalises by the rows of one microbatch." in text
    assert "normalises by the rows of one rank and microbatch" in said(
        NormInBlock, "tp=2", {"microbatches": 2}, steps=1
    )


@pytest.mark.parametrize("mesh", ["dp_shard=1", "tp=2", "dp_shard=2", "pp=2"])
def test_a_count_for_a_log_and_a_table_made_once_may_be_written(mesh: str) -> None:
    assert said(CountsForALog, mesh, {}, microbatches=2) == ""
    if "pp" not in mesh and "tp" not in mesh:  # its second call runs something else
        assert said(MadeTable, mesh, {}, microbatches=2) == ""


@pytest.mark.parametrize("mesh", ["dp_shard=1", "tp=2", "dp_shard=2", "pp=2"])
def test_a_later_step_of_more_microbatches_is_refused_too(mesh: str) -> None:
    assert pool(MeshSpec.parse(mesh).world_size).run(more_later, mesh) == [True] * MeshSpec.parse(mesh).world_size


def more_later(mesh: str) -> bool:
    on = mesh_for(mesh)
    run = mk.parallelize(built(Counter), on, plan=None if on.spec.tp > 1 else BLOCKS, example=GIVEN)
    batch = {name: each.chunk(on.data_ranks)[on.data_rank] for name, each in rows_of(0).items()}
    for rows in (ROWS, ROWS // 2, ROWS // 2):
        run.forward_backward({name: each[:rows] for name, each in batch.items()}, loss=squares, count=row_count)
    with pytest.raises(PlanError, match="in each of 2 microbatches"):
        run.forward_backward(batch, loss=squares, count=row_count, microbatches=2)
    return True


def test_a_strategy_with_microbatches_is_refused_before_anything_runs() -> None:
    program = read_program(built(Counter), GIVEN)
    for mesh in (MeshSpec(tp=2), MeshSpec(dp_shard=2), MeshSpec(pp=2)):
        with pytest.raises(PlanError, match=r"'calls' \(aten.add_.Tensor at odd.py:\d+\) in each of 2 microbatches"):
            resolve(program, Strategy(plan=None if mesh.tp > 1 else BLOCKS, microbatches=2), mesh)
