"""Rows that a forward mixes by whole numbers that it reads, or by sizes that follow values: tried on values on data ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.parallel import rows_tried
from meshkit.program import Example, read_program
from meshkit.resolve import resolve
from meshkit.strategy import Strategy
from tests.laws.parity.cases import mesh_for
from tests.world import pool
from tests.zoo.odd import ROWS, WIDTH, Layers, features, row_count, squares

Middle = Callable[[Tensor], Tensor]


def by_capacity(x: Tensor) -> Tensor:
    """An expert takes as many rows as its share of all; the others pass it by."""
    expert = x.detach()[:, :2].argmax(1)
    out = x.clone()
    for number in range(2):
        taken = (expert == number).nonzero().flatten()[: len(x) // 4 + 1]
        out[taken] = x[taken] * (number + 2)
    return out


MIXES: dict[str, Middle] = {
    "a count": lambda x: x * (x > 0).sum().item(),
    "a count of rows that hold": lambda x: x * int((x.sum(1) > 0).sum()),
    "the largest, by its place": lambda x: x + int(x.detach().flatten().argmax()),
    "a mean of some": lambda x: x - x[x > 0].mean(),
    "the number of some": lambda x: x / x[x > 0].numel(),
    "those that are not zero": lambda x: x * len((x > 0).nonzero()),
    "different ones": lambda x: x * len(torch.unique((x * 4).round())),
    "a capacity": by_capacity,
    "a count beside dropout": lambda x: F.dropout(x, 0.5) * (x > 0).sum().item(),
}


def by_experts(x: Tensor) -> Tensor:
    """Each row by its expert, in loops over those that there are."""
    expert, out = x.detach()[:, :3].argmax(1), torch.zeros_like(x)
    for number in expert.unique().tolist():
        (taken,) = torch.where(expert == number)
        out.index_add_(0, taken, x[taken] * (number + 1))
    return out


def some_in_place(x: Tensor) -> Tensor:
    out = x.clone()
    out[x > 0] = x[x > 0] * 3
    return out


KEEPS: dict[str, Middle] = {
    "experts": by_experts,
    "some, in their place": some_in_place,
    "asked for, and not used": lambda x: x if (x > 0).sum().item() < 10_000 else -x,
    "experts beside dropout": lambda x: by_experts(F.dropout(x, 0.5)),
    # Another one each time, so nothing is shown.
    "noise of its own": lambda x: by_experts(x + torch.randn_like(x)),
}


class Inside(nn.Module):
    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.run = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class With(Layers):
    """The middle in a module of its own, or in the model's own forward."""

    def __init__(self, middle: Middle, *, inside: bool) -> None:
        super().__init__()
        self.inner = Inside(middle if inside else lambda x: x)
        self.own = (lambda x: x) if inside else middle

    def middle(self, x: Tensor) -> Tensor:
        return self.own(self.inner(x))


def model_of(name: str, *, inside: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return With({**MIXES, **KEEPS}[name], inside=inside).double()


def resolved(model: nn.Module, mesh: str) -> None:
    example = Example((torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta"),))
    resolve(read_program(model, example), Strategy(), MeshSpec.parse(mesh))


@pytest.mark.parametrize("inside", [False, True], ids=["in the model", "in a module"])
@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_replicate=2"])
@pytest.mark.parametrize("name", MIXES)
def test_rows_that_are_mixed_by_whole_numbers_or_sizes_are_refused(name: str, mesh: str, inside: bool) -> None:
    with pytest.raises(PlanError, match="mixes the rows of a batch"):
        resolved(model_of(name, inside=inside), mesh)


@pytest.mark.parametrize("inside", [False, True], ids=["in the model", "in a module"])
@pytest.mark.parametrize("name", KEEPS)
def test_rows_that_are_kept_apart_are_not(name: str, inside: bool) -> None:
    resolved(model_of(name, inside=inside), "dp_shard=2")


def test_a_model_on_meta_is_told_the_same() -> None:
    example = Example((torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta"),))
    for name, wanted in (("a count", True), ("experts", False), ("noise of its own", None)):
        model = model_of(name)
        assert rows_tried.mixes_rows(model, example) is wanted
        assert rows_tried.mixes_rows(model.to("meta"), example) is wanted


class Counting(With):
    """Keeps a number and a table from call to call; what it returns is of its rows alone."""

    def __init__(self) -> None:
        super().__init__(by_experts, inside=False)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return super().forward(x) * self.seen.mean()


def test_a_trial_leaves_the_model_and_the_generators_as_they_are() -> None:
    torch.manual_seed(0)
    model = Counting().double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    example = Example((torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta"),))
    assert rows_tried.mixes_rows(model, example) is False
    torch.testing.assert_close(torch.rand(3), wanted, rtol=0, atol=0)
    assert model.calls == 0
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert all(param.grad is None for param in model.parameters())


def test_a_large_model_is_not_tried() -> None:
    model = model_of("a count")
    large = Example((torch.empty(ROWS, 1 << 24, dtype=torch.float64, device="meta"),))
    assert rows_tried.mixes_rows(model, large) is None


class OfTokens(nn.Module):
    """Cuts off the columns that no row of the batch uses, as many models do; and scales by how many it leaves, if asked."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.embed, self.head, self.scaled = nn.Embedding(50, 8), nn.Linear(8, 50), scaled

    def forward(self, input_ids: Tensor) -> Tensor:
        used = int((input_ids > 25).sum(1).max())
        x = self.embed(input_ids)
        return self.head(x * used if self.scaled else x)


def test_token_ids_are_drawn_from_the_table() -> None:
    for scaled in (True, False):
        model = OfTokens(scaled).double()
        said = rows_tried.mixes_rows(model, Example((torch.empty(2, 8, dtype=torch.int64, device="meta"),)))
        assert said is scaled
        with pytest.raises(PlanError, match="mixes the rows of a batch") if scaled else nullcontext():
            resolve(read_program(model), Strategy(), MeshSpec.parse("dp_shard=2"))


def first_step(name: str) -> str:
    """What is raised of a model of which nothing told what it takes."""
    run = mk.parallelize(model_of(name), mesh_for("dp_shard=2"))
    batch = {key: value.double().chunk(2)[run.mesh.data_rank] for key, value in features(0).items()}
    try:
        run.forward_backward(batch, loss=squares, count=row_count)
    except PlanError as error:
        return str(error)
    return ""


def test_without_an_example_the_first_step_shows_it() -> None:
    for said in pool(2).run(first_step, "a count"):
        assert "mixes the rows of a batch" in said
    assert pool(2).run(first_step, "experts") == ["", ""]
