"""A split model that runs something else on other sizes: proved there too before it runs, or refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.mesh import MeshSpec
from meshkit.parallel.tensor import guard
from meshkit.program import Trace, Unproved, outline, read_program, tensors
from meshkit.resolve import resolve
from meshkit.strategy import Strategy
from tests.laws.parity.cases import mesh_for
from tests.parallel.tensor.parts import VOCABULARY, WIDTH, Model
from tests.world import pool

LONG = 12  # the example has 8 tokens


class OnLength(nn.Module):
    """On long rows it does something else to the hidden features."""

    def __init__(self, long: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.long = long
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(self.long(hidden) if x.shape[1] > LONG else F.silu(hidden))


def mixed() -> nn.Module:
    return OnLength(lambda hidden: hidden.softmax(-1))


def along_tokens() -> nn.Module:
    return OnLength(lambda hidden: F.silu(hidden).flip(1))


def ids(tokens: int) -> Tensor:
    return torch.arange(2 * tokens).view(2, tokens) % VOCABULARY


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["input_ids"]).square().mean()


def losses(part: Callable[[], nn.Module], mesh: str, lengths: list[int]) -> list[tuple[float, float] | str]:
    """(loss on the mesh, on one device) of rows of each length, or what is raised."""
    alone, run = build(part), mk.parallelize(build(part), mesh_for(mesh))
    found: list[tuple[float, float] | str] = []
    for tokens in lengths:
        batch = {"input_ids": ids(tokens)}
        try:
            loss = run.forward_backward(batch, microbatches=1, loss=loss_of, count=lambda _: torch.tensor(1))
            found.append((loss.item(), loss_of(alone, batch).item()))
        except mk.MeshkitError as error:
            found.append(str(error))
    return found


def build(part: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Model(part, part).double()


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2 tp=2"])
def test_what_long_rows_run_is_proved_before_it_runs(mesh: str) -> None:
    ranks = pool(4 if "pp" in mesh else 2)
    for found in ranks.run(losses, along_tokens, mesh, [8, 12, 13, 9]):
        for on_mesh, alone in found:
            assert on_mesh == pytest.approx(alone, rel=1e-12)
    for found in ranks.run(losses, mixed, mesh, [8, 13]):
        assert found[0][0] == pytest.approx(found[0][1], rel=1e-12)
        assert "_softmax.default at test_guard.py" in found[1]


def test_sizes_within_those_that_were_seen_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    program = read_program(build(along_tokens))
    resolved = resolve(program, Strategy(), MeshSpec(tp=2))
    assert resolved.layout is not None
    watch = guard.Guard(program, resolved.layout, resolved.example, resolved.outline, blocks=resolved.blocks)
    read: list[int] = []
    proved: list[int] = []

    def reads(trace: Trace) -> str:
        read.append(tensors(trace.calls[0].args)[0].shape[1])
        return outline(trace)

    prove = guard.prove_layout
    monkeypatch.setattr(guard, "outline", reads)
    monkeypatch.setattr(guard, "prove_layout", lambda *args, **more: (proved.append(1), prove(*args, **more)))
    for tokens in range(8, 101):
        watch(program.model, (ids(tokens),), {})
    assert read == [9, 16, 17, 32, 33, 64, 65, 128]
    assert len(proved) == 1  # at 16 tokens
    watch(program.model, (ids(5),), {})
    assert read[8:] == [5]


def test_what_is_asked_without_gradients_first_is_proved_with_them() -> None:
    class Detached(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad.softmax(-1)

    program = read_program(build(lambda: OnLength(Detached.apply)))
    resolved = resolve(program, Strategy(), MeshSpec(tp=2))
    assert resolved.layout is not None
    watch = guard.Guard(program, resolved.layout, resolved.example, resolved.outline, blocks=resolved.blocks)
    with torch.no_grad(), pytest.raises(Unproved, match="backward"):
        watch(program.model, (ids(13),), {})


class OnNumber(nn.Module):
    """From a number on it does something else to the hidden features."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

        def forward(self, x: Tensor, step: int) -> Tensor:
            hidden = self.up(x)
            return self.down(hidden.softmax(-1) if step > 100 else F.silu(hidden))

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.part, self.head = nn.Embedding(VOCABULARY, WIDTH), self.Part(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, step: int = 0) -> Tensor:
        return self.head(self.part(self.embed(input_ids), step))


def losses_by_step(steps: list[int]) -> list[float | str]:
    """Differences of the loss from one device's, or what is raised."""
    torch.manual_seed(0)
    alone = OnNumber().double()
    run = mk.parallelize(deepcopy(alone), mesh_for("tp=2"))
    found: list[float | str] = []
    for step in steps:

        def loss_at(model: nn.Module, batch: dict[str, Tensor], step: int = step) -> Tensor:
            return model(batch["input_ids"], step=step).square().mean()

        batch = {"input_ids": ids(8)}
        try:
            loss = run.forward_backward(batch, microbatches=1, loss=loss_at, count=lambda _: torch.tensor(1))
            found.append(abs(loss.item() - loss_at(alone, batch).item()))
        except mk.MeshkitError as error:
            found.append(str(error))
    return found


def test_what_runs_from_a_number_on_is_proved_before_it_runs() -> None:
    for early, later, last in pool(2).run(losses_by_step, [0, 7, 101]):
        assert isinstance(early, float)
        assert isinstance(later, float)
        assert max(early, later) < 1e-12
        assert "_softmax.default at test_guard.py" in last
