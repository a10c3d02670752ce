"""A forward that reads values of floats (`.item()`, `bool`) is refused on data ranks where it uses them, and only there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.parallel.rows import refuse_mixed_rows
from meshkit.program import Example, read_program
from meshkit.resolve import resolve
from meshkit.strategy import Strategy
from tests.laws.parity.cases import mesh_for
from tests.world import pool
from tests.zoo.odd import ROWS, WIDTH, Layers, features, row_count, squares

Middle = Callable[["Reads", Tensor], Any]


def drawn_once(model: Reads, x: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = x.std().item()
    return x / model.kept


def of_the_call_before(model: Reads, x: Tensor) -> Tensor:
    kept, model.kept = model.kept or 1.0, x.abs().max().item()
    return x / kept


def halved(model: Reads, x: Tensor) -> Tensor:
    while x.detach().norm() > 1:
        x = x / 2
    return x


def checked(model: Reads, x: Tensor) -> Tensor:
    largest = x.abs().max().item()
    if not 0 < largest < 100:
        raise ValueError("too large")
    return x / largest


def several(model: Reads, x: Tensor) -> Tensor:
    logged = f"{x.mean():.3f}"
    model.log.append(logged)
    return x * 2 if x.sum() > 0 else x


def unless_it_raises(model: Reads, x: Tensor) -> Tensor:
    try:
        return x * x.mean().item()
    except Exception:
        return x


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = x.abs().max().item()
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / ctx.scale


def of_gradients(model: Reads, x: Tensor) -> Tensor:
    largest, out = x.abs().max().item(), x * 1
    out.register_hook(lambda grad: grad / largest)
    return out


USES: dict[str, Middle] = {
    "as a factor": lambda model, x: x / x.abs().max().item(),
    "unless it raises": unless_it_raises,
    "in a backward": lambda model, x: Scaled.apply(x),
    "for gradients": of_gradients,
    "as a factor of each": lambda model, x: x * (x.abs().max().item() - x.min().item()),
    "by their ratio": lambda model, x: x * math.tanh(x.max().item() / x.min().item()),
    "rounded": lambda model, x: x * int(x.abs().sum()),
    "as a whole number": lambda model, x: x * x.abs().sum().long().item(),
    "in an if": lambda model, x: x * 2 if x.sum() > 0 else x,
    "for an if that is rare": lambda model, x: x * 2 if x.abs().max() > 1e4 else x,
    "in an if of two": lambda model, x: x * 2 if x[0].sum() > 0 and not x[1].sum() > 0 else x,
    "compared with another": lambda model, x: x * 2 if x[0].sum().item() > x[1].sum().item() else x,
    "compared as tensors": lambda model, x: x * 2 if torch.equal(x[0], x[1]) else x,
    "as a list": lambda model, x: x * max(x.detach().flatten().tolist()),
    "as an array": lambda model, x: x * torch.from_numpy(x.detach().numpy().mean(0)),
    "as text": lambda model, x: x * float(f"{x.abs().max():.1f}"),
    "as the number of a loop": halved,
    "after an assertion of them": checked,
    "in the first call": drawn_once,
    "in the next call": of_the_call_before,
    "in a buffer": lambda model, x: x + torch.full((WIDTH,), x.mean().item()),
    "as an index": lambda model, x: x + x[:, int(x.abs().mean())].unsqueeze(1),
    "one of several": several,
    "as whether some are large": lambda model, x: x * 2 if (x.isnan() | (x > 5)).any() else x,
}


def asserts(model: Reads, x: Tensor) -> Tensor:
    assert x.isfinite().all() and not x.isnan().any(), "not finite"
    if not torch.isfinite(x.sum()) or torch.isinf(x).any():
        x = x.clamp(-1e4, 1e4)
    if x.abs().max().item() > 1e6:
        raise ValueError("too large")
    assert x.norm() > 0, f"no norm: {x.norm():.2f}"
    return x


def logs(model: Reads, x: Tensor) -> Tensor:
    model.log.append({"mean": x.mean().item(), "rows": x.detach().norm(dim=1).tolist(), "as": f"{x.std():.3f}"})
    model.log.append((x.detach().numpy().mean(), float(x.detach().max()), str(x.mean())))
    if x.max() > 0:
        model.log.append(x.relu().sum().item())
    return x


ONLY_READS: dict[str, Middle] = {
    "to log": logs,
    "to assert": asserts,
    "for a metric": lambda model, x: (model.log.append(round(x.mean().item(), 3)), x)[1],
    "of a parameter": lambda model, x: x if model.enter.weight.shape[0] > 0 else x * 2,
}


class Reads(Layers):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.chosen = {**USES, **ONLY_READS}[name]
        self.log: list[Any] = []
        self.kept: float | None = None

    def middle(self, x: Tensor) -> Tensor:
        made: Tensor = self.chosen(self, x)
        return made


class Within(nn.Module):
    """Reads values in a module inside of the model."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers, self.leave = Reads(name), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.leave(self.layers(x))
        return out


def model_of(name: str, kind: type[nn.Module] = Reads) -> nn.Module:
    torch.manual_seed(0)
    return kind(name).double()


def resolved(model: nn.Module, mesh: str) -> None:
    example = Example((torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta"),))
    resolve(read_program(model, example), Strategy(), MeshSpec.parse(mesh))


@pytest.mark.parametrize("kind", [Reads, Within])
@pytest.mark.parametrize("name", USES)
def test_values_that_decide_are_refused_on_data_ranks(name: str, kind: type[nn.Module]) -> None:
    for mesh in ("dp_shard=2", "dp_replicate=2"):
        with pytest.raises(PlanError, match=r"at test_values.py:\d+: it reads values of floats"):
            resolved(model_of(name, kind), mesh)
    resolved(model_of(name, kind), "tp=1")


@pytest.mark.parametrize("name", USES)
def test_values_that_decide_are_refused_on_stages(name: str) -> None:
    with pytest.raises(PlanError, match=r"at test_values.py:\d+: (it reads values of floats|.*a tensor's values)"):
        resolved(model_of(name), "pp=2")


def step(name: str, mesh: str) -> tuple[str, dict[str, Tensor]]:
    """What is raised in a step of a model of which nothing told what it takes, and its gradients."""
    run = mk.parallelize(model_of(name), mesh_for(mesh))
    batch = {key: value.double() for key, value in features(0).items()}
    batch = {key: value.chunk(run.mesh.data_ranks)[run.mesh.data_rank] for key, value in batch.items()}
    try:
        run.forward_backward(batch, loss=squares, count=row_count)
    except PlanError as error:
        return str(error), {}
    return "", {key: param.grad.full_tensor() for key, param in run.model.named_parameters()}


def test_without_an_example_the_first_step_shows_it() -> None:
    for name in ("as a factor", "in an if", "in the next call"):
        for said, _ in pool(2).run(step, name, "dp_shard=2"):
            assert "it reads values of floats" in said or "mixes the rows of a batch" in said  # the loss, with it


@pytest.mark.parametrize("name", ONLY_READS)
def test_a_forward_that_only_looks_equals_one_device(name: str) -> None:
    model = model_of(name)
    batch = {key: value.double() for key, value in features(0).items()}
    (squares(model, batch) / ROWS).backward()
    for said, grads in pool(2).run(step, name, "dp_shard=2"):
        assert said == ""
        for key, param in model.named_parameters():
            torch.testing.assert_close(grads[key], param.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [Reads, Within])
@pytest.mark.parametrize("name", ONLY_READS)
def test_values_that_are_only_looked_at_are_not(name: str, kind: type[nn.Module]) -> None:
    resolved(model_of(name, kind), "dp_shard=2")


def test_a_refusal_names_the_line_that_decides() -> None:
    line = several.__code__.co_firstlineno + 3
    with pytest.raises(PlanError, match=rf"^Reads at test_values.py:{line}: it reads values of floats"):
        resolved(model_of("one of several"), "dp_shard=2")


class GuardsAHook(nn.Module):
    """What a hook on a block reads decides whether it runs on some rows: it cannot be followed, and the reading ends."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)
        self.block.register_forward_hook(lambda block, args, out: taken(out, self.rare, args[0][:, 0] > 0.6))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def taken(x: Tensor, layer: nn.Linear, rows: Tensor) -> Tensor:
    return x.index_copy(0, rows.nonzero()[:, 0], layer(x[rows])) if rows.any() else x


def test_a_hook_that_reads_values_does_not_keep_a_reading_from_its_end() -> None:
    program = read_program(GuardsAHook(), None)
    assert refuse_mixed_rows(program, Example((torch.zeros(4, 4),), {}), blocks=["block"], closed={})
