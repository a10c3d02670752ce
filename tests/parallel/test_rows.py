"""A forward that mixes the rows of a batch is refused on data ranks, whatever it mixes them by; others are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.parallel import rows
from meshkit.program import Example, read_program
from meshkit.resolve import resolve
from meshkit.strategy import Strategy
from tests.laws.parity.cases import mesh_for
from tests.world import pool
from tests.zoo.odd import ROWS, WIDTH, Layers, features, row_count, squares

Middle = Callable[[Tensor], Tensor]
MIXES: dict[str, Middle] = {
    "by their mean": lambda x: x - x.mean(0),
    "by their largest": lambda x: x / x.abs().amax(0, keepdim=True),
    "by a sum of all": lambda x: x / x.exp().sum(),
    "by their number": lambda x: x / x.shape[0],
    "in reverse": lambda x: x + x.flip(0),
    "rolled": lambda x: x + x.roll(1, 0),
    "in another order": lambda x: x.lerp(x[torch.arange(x.shape[0] - 1, -1, -1)], 0.3),
    "with the first": lambda x: x + x[:1],
    "with the last": lambda x: x * x[-1],
    "by products of two": lambda x: (x @ x.T).tanh() @ x,
    "by products of features": lambda x: x @ (x.T @ x).tanh(),
    "by softmax": lambda x: x * x.softmax(0),
    "normalised": lambda x: F.batch_norm(x, None, None, training=True),
    "summed up": lambda x: x + x.cumsum(0),
    "by a running largest": lambda x: x + x.cummax(0).values,
    "sorted": lambda x: x + x.sort(0).values,
    "by distances": lambda x: x * torch.cdist(x, x).mean(1, keepdim=True),
    "by frequencies": lambda x: x + torch.fft.fft(x, dim=0).real,
    "by their norm": lambda x: x.renorm(2, 1, 1.0),
}


class Doubled(torch.autograd.Function):
    """Nothing is known of a backward that is written by hand and is none of elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(1).flip(1) * 2


KEEPS: dict[str, Middle] = {
    "by features": lambda x: x.flip(1) + x.softmax(1) + x.sort(1).values + x.cumsum(1) + torch.fft.fft(x).real,
    "laid end to end": lambda x: (x.flatten() * 2).view(-1, WIDTH),
    "sorted by values and put back": lambda x: (x[(o := x.detach().sum(1).argsort())] * 2)[o.argsort()],
    "a feature by its value": lambda x: x * x.gather(1, x.detach().argmax(1, keepdim=True)),
    "with a backward of its own": Doubled.apply,
    "by its own norm": lambda x: x.renorm(2, 0, 1.0),
}


def model_of(middle: Middle) -> nn.Module:
    torch.manual_seed(0)
    model = Layers().double()
    model.middle = middle  # type: ignore[method-assign]
    return model


def resolved(model: nn.Module, mesh: str) -> None:
    example = Example((torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta"),))
    resolve(read_program(model, example), Strategy(), MeshSpec.parse(mesh))


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_replicate=2", "pp=2"])
@pytest.mark.parametrize("name", MIXES)
def test_rows_that_are_mixed_are_refused(name: str, mesh: str) -> None:
    with pytest.raises(PlanError, match="mixes the rows of a batch"):
        resolved(model_of(MIXES[name]), mesh)


@pytest.mark.parametrize("name", KEEPS)
def test_rows_that_are_kept_apart_are_not(name: str) -> None:
    resolved(model_of(KEEPS[name]), "dp_shard=2")


class Pairs(nn.Module):
    """Compares all rows with all, and returns the features too, of which a loss may be made row by row."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.layers, self.alone = Layers(), alone

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out = self.layers(x)
        return (out @ out.T,) if self.alone else (out @ out.T, out)


def test_of_an_output_with_rows_of_its_own_a_loss_may_read_those() -> None:
    resolved(Pairs(alone=False).double(), "dp_shard=2")
    with pytest.raises(PlanError, match="mixes the rows of a batch"):
        resolved(Pairs(alone=True).double(), "dp_shard=2")


def first_step(name: str, mesh: str) -> str:
    """What is raised of a model of which nothing told what it takes."""
    run = mk.parallelize(model_of({**MIXES, **KEEPS}[name]), mesh_for(mesh))
    batch = {key: value.double() for key, value in features(0).items()}
    batch = {key: value.chunk(run.mesh.data_ranks)[run.mesh.data_rank] for key, value in batch.items()}
    try:
        run.forward_backward(batch, loss=squares, count=row_count)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_replicate=2"])
def test_without_an_example_the_first_step_shows_it(mesh: str) -> None:
    for name in ("normalised", "in reverse"):
        for said in pool(2).run(first_step, name, mesh):
            assert "mixes the rows of a batch" in said
    assert pool(2).run(first_step, "by features", mesh) == ["", ""]


# ------------------------------------------------------------------------------------------------- another kind of call


class Sometimes(Layers):
    """Mixes rows in one kind of call alone."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when, self.inner = when, nn.Identity()
        self.leave = self._modules.pop("leave")  # after the blocks, by which stages are cut where no example tells

    def forward(self, x: Tensor, labels: Tensor | None = None, scale: Tensor | None = None, on: float = 0) -> Tensor:
        said = {
            "training": self.training,
            "the mode of a module inside": self.inner.training,
            "labels": labels is not None,
            "an optional tensor": scale is not None,
            "a number": on > 0,
        }
        x = self.enter(x)
        x = x if scale is None else x * scale
        x = x - x.mean(0) if said[self.when] else x
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def given(model: Any, batch: Any) -> Tensor:
    more = {name: batch[name] for name in ("labels", "scale") if name in batch}
    if batch.get("on") is not None:
        more["on"] = float(batch["on"][0])
    return (model(batch["x"], **more) - batch["y"]).square().sum()


def later(run: mk.Run, when: str) -> dict[str, Tensor]:
    """Turns the run to the other kind of call. Returns what is added to batches."""
    rows = ROWS // run.mesh.data_ranks
    if when == "training":
        run.model.train()
    if when == "the mode of a module inside":
        run.model.get_submodule("inner").train()
    added = {"labels": torch.zeros(rows, dtype=torch.int64), "an optional tensor": torch.ones(rows, 1).double()}
    named = {"labels": "labels", "an optional tensor": "scale"}
    if when == "a number":
        return {"on": torch.ones(rows)}
    return {named[when]: added[when]} if when in named else {}


def two_kinds(when: str, mesh: str, mixes: bool) -> tuple[str, str, list[int]]:
    """What is raised in two steps of each kind, and how many calls were looked at after each step."""
    torch.manual_seed(0)
    model = Sometimes(when if mixes else "a number").double()
    run = mk.parallelize(model, mesh_for(mesh), microbatches=2 if "pp" in mesh else 1)
    run.model.eval()
    batch = {key: value.double() for key, value in features(0).items()}
    batch = {key: value.chunk(run.mesh.data_ranks)[run.mesh.data_rank] for key, value in batch.items()}
    looked = list[int]()

    def step(batch: dict[str, Tensor]) -> str:
        try:
            run.forward_backward(batch, loss=given, count=row_count)
        except PlanError as error:
            return str(error)
        finally:
            looked.append(spy.call_count)
        return ""

    with mock.patch.object(rows, "look_at_rows", wraps=rows.look_at_rows) as spy:
        first = step(batch) or step({key: value[:2] for key, value in batch.items()})
        batch |= later(run, when)
        second = step(batch) or step({key: value[:2] for key, value in batch.items()})
    return first, second, looked


def by_either(found: list[tuple[str, str, list[int]]]) -> list[int]:
    """How often one of two ranks has looked, for both."""
    return [one + other for one, other in zip(found[0][2], found[1][2], strict=True)]


KINDS = ("training", "the mode of a module inside", "labels", "an optional tensor")


@pytest.mark.parametrize("mesh", ["dp_shard=2", "pp=2"])
@pytest.mark.parametrize("when", KINDS)
def test_rows_that_another_kind_of_call_mixes_are_refused_before_it_runs(when: str, mesh: str) -> None:
    found = pool(2).run(two_kinds, when, mesh, True)
    for first, second, _ in found:
        assert first == ""
        assert "mixes the rows of a batch" in second
    assert by_either(found) == [1, 1, 2]


@pytest.mark.parametrize("mesh", ["dp_shard=2", "pp=2"])
@pytest.mark.parametrize("when", KINDS)
def test_a_kind_of_call_is_looked_at_once(when: str, mesh: str) -> None:
    found = pool(2).run(two_kinds, when, mesh, False)
    assert all(first == second == "" for first, second, _ in found)
    assert by_either(found) == [1, 1, 2, 2]


def test_a_number_that_decides_is_another_kind_of_call() -> None:
    found = pool(2).run(two_kinds, "a number", "dp_shard=2", True)
    assert all(first == "" and "mixes the rows of a batch" in second for first, second, _ in found)
    assert by_either(found) == [1, 1, 2]


class MisnamedFeatures(Layers):
    """Its input has the name of token ids, on which it does not run."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


def first_calls(mesh: str) -> tuple[str, str]:
    """What is raised in a first step after evaluation, and of a model whose default example does not run."""
    model = model_of(lambda x: x - x.mean(0) if torch.is_grad_enabled() else x)
    misnamed = MisnamedFeatures().double()
    misnamed.middle = MIXES["in reverse"]  # type: ignore[method-assign]
    said = []
    for each in (model, misnamed):
        run = mk.parallelize(each, mesh_for(mesh))
        batch = {key: value.double().chunk(2)[run.mesh.data_rank] for key, value in features(0).items()}
        with torch.no_grad():
            run.model(batch["x"])
        try:
            run.forward_backward(batch, loss=squares, count=row_count)
        except PlanError as error:
            said.append(str(error))
    one, other = said
    return one, other


def test_calls_without_gradients_and_examples_that_do_not_run_show_nothing() -> None:
    for said in pool(2).run(first_calls, "dp_shard=2"):
        assert all("mixes the rows of a batch" in each for each in said)


def shown(mesh: str) -> int:
    """How many calls are looked at of a model that `resolve` has read by its example."""
    example = Example((torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta"),))
    run = mk.parallelize(model_of(KEEPS["by features"]), mesh_for(mesh), example=example)
    batch = {key: value.double().chunk(run.mesh.data_ranks)[run.mesh.data_rank] for key, value in features(0).items()}
    with mock.patch.object(rows, "look_at_rows") as spy:
        run.forward_backward(batch, loss=squares, count=row_count, microbatches=2)
    return spy.call_count


@pytest.mark.parametrize("mesh", ["dp_shard=2", "pp=2"])
def test_what_resolve_has_read_is_not_read_again(mesh: str) -> None:
    assert pool(2).run(shown, mesh) == [0, 0]


def frozen_norms(mesh: str) -> str:
    """What is raised of a model whose blocks have norms over rows in eval; on pp a rank has only some of them."""
    model = Layers().double()
    for block in model.blocks:
        block.norm = nn.BatchNorm1d(WIDTH).double().eval()
    model.leave = model._modules.pop("leave")
    run = mk.parallelize(model, mesh_for(mesh), microbatches=2)
    batch = {key: value.double().chunk(run.mesh.data_ranks)[run.mesh.data_rank] for key, value in features(0).items()}
    try:
        run.forward_backward(batch, loss=squares, count=row_count)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mesh", ["dp_shard=2", "pp=2"])
def test_modules_of_other_stages_are_read_in_their_own_mode(mesh: str) -> None:
    assert pool(2).run(frozen_norms, mesh) == ["", ""]


# ------------------------------------------------------------------------------------------- microbatches without data ranks


@pytest.mark.parametrize("name", MIXES)
def test_microbatches_of_one_rank_are_parts_too(name: str) -> None:
    example = Example((torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta"),))
    program, one = read_program(model_of(MIXES[name]), example), MeshSpec.parse("dp_shard=1")
    with pytest.raises(PlanError, match=r"mixes the rows of a batch(.|\n)*and microbatches=1"):
        resolve(program, Strategy(microbatches=2), one)
    resolve(program, Strategy(), one)


def steps_of_one_rank(mesh: str) -> tuple[str, str]:
    """What is raised in a step of one microbatch, and in one of two."""
    run = mk.parallelize(model_of(MIXES["by their mean"]), mesh_for(mesh))
    batch = {key: value.double() for key, value in features(0).items()}
    said = []
    for microbatches in (1, 2):
        try:
            run.forward_backward(batch, loss=squares, count=row_count, microbatches=microbatches)
            said.append("")
        except PlanError as error:
            said.append(str(error))
    one, two = said
    return one, two


@pytest.mark.parametrize("mesh", ["dp_shard=1", "tp=2"])
def test_the_first_step_of_several_microbatches_shows_it(mesh: str) -> None:
    for one, two in pool(MeshSpec.parse(mesh).world_size).run(steps_of_one_rank, mesh):
        assert one == ""
        assert "mixes the rows of a batch" in two


class Writes(Layers):
    """Changes a parameter in forward, as it does or so that once more changes nothing."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again

    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            _ = self.enter.weight.mul_(0.9) if self.again else self.enter.weight.clamp_(-1, 1)
        return x


def test_a_parameter_that_each_microbatch_writes_is_refused_on_one_rank_too() -> None:
    example = Example((torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta"),))
    one = MeshSpec.parse("dp_shard=1")
    with pytest.raises(
        PlanError, match=r"'enter.weight' in forward .* which each microbatch does again, and a single device"
    ):
        resolve(read_program(Writes(True).double(), example), Strategy(microbatches=2), one)
    resolve(read_program(Writes(True).double(), example), Strategy(), one)
    resolve(read_program(Writes(False).double(), example), Strategy(microbatches=2), one)


class DrawsOfPython(Layers):
    """Leaves blocks out by chance."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.enter(x))
        for block in self.blocks:
            x = block(x) if random.random() > 0.5 else x
        return self.leave(x)


def test_draws_of_python_are_the_same_in_all_readings() -> None:
    example = Example((torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta"),))
    for seed in range(8):
        random.seed(seed)
        state = random.getstate()
        model = DrawsOfPython().double()
        resolve(read_program(model, example), Strategy(), MeshSpec.parse("dp_shard=2"))
        model.middle = MIXES["by their mean"]  # type: ignore[method-assign]
        with pytest.raises(PlanError, match="mixes the rows of a batch"):
            resolve(read_program(model, example), Strategy(), MeshSpec.parse("dp_shard=2"))
        assert random.getstate() == state
