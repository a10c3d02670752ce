"""The few parameters of a second dtype, kept whole by every data rank: equal to one device, with any optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.gradient import gradient_of
from meshkit.core.sharding import full_tensor
from meshkit.preflight.observe import observe
from meshkit.strategy import MemoryPolicy, OptimizerOffload, OptimizerPolicy
from tests.parallel.test_data_modules import BLOCKS, SPLITS, batch, built, one_device, own
from tests.world import pool
from tests.zoo.odd import WIDTH, Batch, Layers, Residual, row_count, squares

TOL_FP32 = 2e-6  # of gates in fp32


class TwoDtypes(Layers):
    """A block in fp64 whose gate is in fp32, as routers are beside bf16; another gate is frozen."""

    class Gated(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.fixed = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            gates = torch.sigmoid(self.gate(x.float())) + torch.sigmoid(self.fixed(x.float()))
            return super().forward(x) * gates.double()

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.Gated()

    def double(self) -> TwoDtypes:
        super().double()
        self.blocks[1].gate.float()
        self.blocks[1].fixed.float()
        return self


def two_dtypes(spec: str, sizes: tuple[int, ...], microbatches: int, zero: int, offload: bool = False) -> bool:
    losses, grads, state = one_device(TwoDtypes, 2)
    mesh = mk.init_mesh(spec)
    example = mk.Example((batch(0)["x"],)) if mesh.spec.pp > 1 else None
    plan = BLOCKS if mesh.spec.tp == 1 else None
    on_host = OptimizerPolicy(offload=OptimizerOffload()) if offload else OptimizerPolicy()
    run = mk.parallelize(
        built(TwoDtypes), mesh, plan=plan, zero=zero, example=example, memory=MemoryPolicy(optimizer=on_host)
    )
    optimizer = mk.adamw(run, lr=1e-2)
    for step in range(2):
        with observe(mesh) as seen:
            rows = own(batch(step), sizes, mesh.data_rank)
            loss = run.forward_backward(rows, microbatches=microbatches, loss=squares, count=row_count)
        size = (WIDTH + 1 + 2) * 4  # gate, its bias, and whether each was used
        assert sum(message.size == size for message in seen) == any(
            "gate" in name for name, _ in run.named_parameters()
        )
        assert abs(float(loss) - losses[step]) < TOL_FP32
        for name, param in run.named_parameters() if step == 0 else ():
            if param.requires_grad:
                grad = gradient_of(param)
                assert grad is not None and grad.dtype == param.dtype, name
                torch.testing.assert_close(full_tensor(grad), grads[name], rtol=0, atol=TOL_FP32)
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(full_tensor(tensor), state[name], rtol=0, atol=TOL_FP32)
    return True


@pytest.mark.parametrize(
    ("spec", "sizes", "zero"),
    [*((*split, zero) for split in SPLITS for zero in (1, 3)), ("pp=2 dp_shard=2", (5, 3), 1)],
)
def test_the_few_parameters_of_a_second_dtype_are_kept_whole(spec: str, sizes: tuple[int, ...], zero: int) -> None:
    assert all(pool(mk.MeshSpec.parse(spec).world_size).run(two_dtypes, spec, sizes, 2, zero))


@pytest.mark.parametrize(("spec", "sizes"), [("dp_shard=2", (5, 3)), ("dp_replicate=2", (5, 3))])
def test_their_gradients_leave_for_the_host_when_they_are_summed(spec: str, sizes: tuple[int, ...]) -> None:
    assert all(pool(2).run(two_dtypes, spec, sizes, 2, 1, True))


def after_a_step_that_failed(spec: str) -> bool:
    mesh = mk.init_mesh(spec)
    run = mk.parallelize(built(TwoDtypes), mesh, plan=BLOCKS)
    rows = own(batch(0), (5, 3), mesh.data_rank)
    run.forward_backward(rows, loss=squares, count=row_count)
    before = {name: gradient.clone() for name, gradient in whole_gradients(run).items()}
    assert len(before) == 2

    def fails(model: nn.Module, part: Batch) -> Tensor:
        raise ArithmeticError("a microbatch")

    with pytest.raises(ArithmeticError):
        run.forward_backward(rows, loss=mk.step.additive(fails), count=row_count)
    after = whole_gradients(run)
    return all(torch.equal(after[name], gradient) for name, gradient in before.items())


def whole_gradients(run: mk.Run) -> dict[str, Tensor]:
    return {
        name: param.grad
        for name, param in run.named_parameters()
        if name in run.resolved.whole and param.grad is not None
    }


def test_a_step_that_fails_leaves_the_gradients_of_whole_parameters() -> None:
    assert all(pool(2).run(after_a_step_that_failed, "dp_shard=2"))
