"""A step that raises in the middle leaves nothing behind: who catches it and goes on gets what one device gets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshkit as mk
from meshkit.core.gradient import gradient_of
from meshkit.strategy import DataPolicy
from tests.compare_shards import difference
from tests.laws.parity.cases import Cell, batches, build, own_rows, start
from tests.world import pool

TOL_FP64 = 1e-10  # only the order of summation differs


class Interrupted(Exception):
    """What a step raises here."""


def after_a_failure(cell: Cell, where: str) -> dict[str, float]:
    """Differences from one device, after a step whose second microbatch raised on every rank and parameters were written."""
    run, plain = start(cell), build(cell)
    params, (first, second, third) = list(run.parameters()), batches(cell)
    calls, fails = 0, False

    def interrupt(grad: Tensor) -> None:
        raise Interrupted

    @mk.step.additive  # a trial would count as calls
    def loss(model: torch.nn.Module, part: dict[str, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        summed = mk.step.next_token_loss(model, part)
        if fails and calls == 2:
            if where == "forward":
                raise Interrupted
            hidden = model.get_submodule("layers.0.mlp").register_forward_hook(
                lambda module, args, out: out.register_hook(interrupt) and None
            )
            summed = summed + 0 * mk.step.next_token_loss(model, part)
            hidden.remove()
        return summed

    def no_gradients() -> None:
        for param in params:  # as an optimizer's zero_grad does
            param.grad = None

    run.forward_backward(
        own_rows(first, run.mesh), microbatches=cell.microbatches, loss=loss
    )  # it is known from here on
    no_gradients()
    calls, fails = 0, True
    with pytest.raises(Interrupted):
        run.forward_backward(own_rows(first, run.mesh), microbatches=cell.microbatches, loss=loss)
    fails = False
    no_gradients()
    with torch.no_grad():  # as loading a checkpoint does
        for param in (*params, *plain.parameters()):
            param.mul_(1.25)
    summed, tokens = run.evaluate(own_rows(second, run.mesh))
    found = run.forward_backward(own_rows(third, run.mesh), microbatches=cell.microbatches, loss=loss)
    losses = [
        F.cross_entropy(plain(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        for batch in (second, third)
    ]
    losses[1].backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    return {
        "evaluated": abs(float(summed / tokens) - losses[0].item()),
        "loss": abs(float(found) - losses[1].item()),
        **{name: difference(gradient_of(param), expected[name]) for name, param in run.named_parameters()},
    }


CELLS = [
    Cell(mesh="dp_shard=4", zero=1, microbatches=3),
    Cell(mesh="dp_shard=4", zero=2, microbatches=3),
    Cell(mesh="dp_replicate=2 dp_shard=2", microbatches=3, vocab=61),  # sums over dp_shard wait for dp_replicate
    Cell(mesh="dp_replicate=4", microbatches=3),
    Cell(mesh="dp_shard=2x2", data=DataPolicy(parameters="node", gradients="node"), microbatches=3, recompute="full"),
    Cell(mesh="dp_shard=2x2", data=DataPolicy(parameters="node", gradients="none"), microbatches=3, tied=True),
]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_step_after_one_that_raised_equals_one_device(cell: Cell, where: str) -> None:
    for found in pool(4).run(after_a_failure, cell, where):
        assert max(found.values()) <= TOL_FP64, found
