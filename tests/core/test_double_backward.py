"""Double backward: collectives give the second derivatives of one device; what is not differentiable twice says so."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import meshkit as mk
from meshkit.core import collectives, full_tensor
from meshkit.errors import PlanError
from meshkit.loss import _cross_entropy, _divergence, _token_log_probs, chunked, token_log_probs
from meshkit.parallel.context import _attention
from meshkit.parallel.expert import _exchange
from meshkit.parallel.pipeline import _split_backward
from meshkit.parallel.tensor import regather
from meshkit.strategy import MemoryPolicy
from tests.laws.parity.cases import mesh_for
from tests.world import RankError, pool

TOL_FP64 = 1e-10  # only the order of summation differs
WIDTH, HIDDEN, ROWS = 8, 12, 6


# ------------------------------------------------------------------------------------------------------ collectives


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def through(
    x: Tensor, up: Tensor, down: Tensor, enter: Callable[[Tensor], Tensor], leave: Callable[[Tensor], Tensor]
) -> Tensor:
    """A column-parallel and a row-parallel layer."""
    return leave(torch.tanh(enter(x) @ up) @ down)


def penalised(out: Tensor, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return (slope.norm(dim=-1) - 1).square().sum() + out.sum()


def second_derivatives(mesh: str, kind: str) -> list[float]:
    """How far gradients of a gradient penalty are off one device."""
    axis: DeviceMesh = mesh_for(mesh)["tp"]
    rank, size = axis.get_local_rank(), axis.size()
    x, up, down = values(ROWS, WIDTH, seed=0), values(WIDTH, HIDDEN, seed=1), values(HIDDEN, WIDTH, seed=2)
    full = [each.clone().requires_grad_() for each in (x, up, down)]
    expected = torch.autograd.grad(penalised(through(*full, lambda h: h, lambda h: h), full[0]), full)

    slices = slice(rank * HIDDEN // size, (rank + 1) * HIDDEN // size)
    local = [x.clone(), up[:, slices].clone(), down[slices].clone()]
    for each in local:
        each.requires_grad_()
    if kind == "copy and reduce":
        enter: Any = lambda h: collectives.copy_to_axis(h, axis)  # noqa: E731
        leave: Any = lambda h: collectives.reduce_from_axis(h, axis)  # noqa: E731
    else:
        enter = lambda h: collectives.gather_dim(collectives.split_dim(h, 0, axis), 0, axis)  # noqa: E731
        leave = lambda h: collectives.join_dim(collectives.scatter_sum_dim(h, 0, axis), 0, axis)  # noqa: E731
    found = torch.autograd.grad(penalised(through(*local, enter, leave), local[0]), local)
    wanted = expected[0], expected[1][:, slices], expected[2][slices]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("kind", ["copy and reduce", "gather, scatter, split and join"])
def test_second_derivatives_through_collectives_are_those_of_one_device(kind: str) -> None:
    for errors in pool(2).run(second_derivatives, "tp=2", kind):
        assert max(errors) <= TOL_FP64


# ------------------------------------------------------------------------------------------- what refuses, and which


REFUSES: dict[Callable[..., Any], str] = {
    regather._GatherRegion.backward: "Use regather=False",
    _exchange._Mirrored.backward: "Use a mesh without ep and etp",
    _exchange._Start.backward: "Use a mesh without ep and etp",
    _exchange._Wait.backward: "Use a mesh without ep and etp",
    _split_backward._Linear.backward: "Use the schedule 1f1b",
    _attention._attention_gradient: "Use a mesh without cp",
    _cross_entropy._VocabParallelCrossEntropy.backward: "F.cross_entropy on logits.full_tensor()",
    chunked._ChunkedCrossEntropy.backward: "F.cross_entropy",
    _token_log_probs._TokenLogProbs.backward: "F.cross_entropy",
    _divergence._Divergences.backward: "F.kl_div",
}
# By mirrors, or of operators of torch on the gradient alone.
DIFFERENTIABLE = {
    *("_CopyToAxis", "_ReduceFromAxis", "_GatherDim", "_ScatterSumDim", "_SplitDim", "_JoinDim"),
    *("_Drop", "_ContiguousGradient", "_OneNode", "_Product", "_WideProduct", "_SumOverAxis"),
}
# One that no backward reaches, one for shapes alone, and one of torch 2.11.
OTHERS = {"_Save", "_FusedRMSNorm", "_LocalShard"}


@pytest.mark.parametrize(("backward", "change"), REFUSES.items(), ids=lambda each: getattr(each, "__qualname__", ""))
def test_a_backward_that_is_not_differentiable_refuses_to_be(backward: Callable[..., Any], change: str) -> None:
    with torch.enable_grad(), pytest.raises(PlanError, match="create_graph=True") as raised:
        backward(None, None)
    assert change in str(raised.value)


def test_every_function_with_a_backward_is_of_one_kind() -> None:
    for module in pkgutil.walk_packages(mk.__path__, "meshkit."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    known = {each.__qualname__.partition(".")[0] for each in REFUSES} | DIFFERENTIABLE | OTHERS
    found = {
        each.__name__ for each in torch.autograd.Function.__subclasses__() if each.__module__.startswith("meshkit.")
    }
    assert found <= known


def test_token_log_probs_refuse_a_second_derivative_and_have_a_first() -> None:
    logits, labels = values(1, ROWS, WIDTH, seed=3).requires_grad_(), torch.arange(ROWS)[None]
    loss = token_log_probs(logits, labels).log_probs.sum()
    torch.autograd.grad(loss, logits, retain_graph=True)
    with pytest.raises(PlanError, match="token log-probabilities are computed again in backward"):
        torch.autograd.grad(loss, logits, create_graph=True)


# ------------------------------------------------------------------------------------------------------------ runs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Any:
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.leave(x)


class Forces(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return force


class OfRows(Net):
    """By torch.func, which a reading cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: self.leave(torch.tanh(self.layers[0](row))).sum()))(x)


class InsideOfBlocks(Net):
    class Descent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)
            return -slope / 9

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Descent() for _ in range(2))  # type: ignore[misc]


class FunctionalInside(Net):
    class Descent(InsideOfBlocks.Descent):
        def forward(self, x: Tensor) -> Tensor:
            return -torch.func.grad(lambda each: self.energy(each).square().sum())(x) / 9

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Descent() for _ in range(2))  # type: ignore[misc]


def squares(model: Any, part: dict[str, Tensor]) -> Tensor:
    return model(part["x"]).square().sum()


def penalty(model: Any, part: dict[str, Tensor]) -> Tensor:
    x = part["x"].clone().requires_grad_()
    return penalised(model(x), x)


def weighted(model: Any, part: dict[str, Tensor]) -> Tensor:
    """By a first derivative, which is differentiated no further."""
    x = part["x"].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    return (out * slope.norm(dim=-1, keepdim=True)).square().sum()


def rows(part: dict[str, Tensor]) -> Tensor:
    return torch.tensor(len(part["x"]))


def off(mesh: str, kind: type[Net], loss: Any, recompute: Any = "none") -> float | str:
    """How far the loss and the gradients of a step are off one device; the text of a refusal."""
    batch = {"x": values(ROWS, WIDTH, seed=4)}
    torch.manual_seed(0)
    alone = kind().double()
    expected = loss(alone, batch) / ROWS
    expected.backward()
    torch.manual_seed(0)
    world = mesh_for(mesh)
    try:
        memory, plan = MemoryPolicy(recompute=recompute), mk.Plan(blocks=["layers.*"]) if recompute != "none" else None
        run = mk.parallelize(kind().double(), world, example=mk.Example((batch["x"],)), plan=plan, memory=memory)
        own = {name: each.tensor_split(world.data_ranks)[world.data_rank] for name, each in batch.items()}
        found = run.forward_backward(own, loss=loss, count=rows)
    except PlanError as error:
        return str(error)
    wanted = dict(alone.named_parameters())
    errors = [float((found - expected).detach().abs())]
    for name, param in run.named_parameters():
        want = wanted[name].grad
        if want is None:  # as the last bias of what is differentiated
            assert param.grad is None or not full_tensor(param.grad).any()
            continue
        assert param.grad is not None
        errors.append(float((full_tensor(param.grad) - want).abs().max() / want.abs().max()))
    return max(errors)


@pytest.mark.parametrize(
    ("mesh", "kind", "loss"),
    [
        ("tp=2", Net, penalty),
        ("tp=2", Net, weighted),
        ("dp_shard=2", Net, weighted),
        ("tp=2", Forces, squares),
        ("tp=2", InsideOfBlocks, squares),
        ("dp_shard=2", InsideOfBlocks, squares),
        ("dp_shard=2", FunctionalInside, squares),
    ],
)
def test_derivatives_in_losses_and_forwards_are_those_of_one_device(mesh: str, kind: type[Net], loss: Any) -> None:
    for error in pool(2).run(off, mesh, kind, loss):
        assert isinstance(error, float), error
        assert error <= TOL_FP64


@pytest.mark.parametrize(
    ("mesh", "kind", "loss", "text"),
    [
        ("dp_shard=2", Net, penalty, "FSDP frees gathered parameters after a first backward"),
        ("dp_replicate=2", Net, penalty, "FSDP frees gathered parameters after a first backward"),
        ("dp_shard=2", OfRows, squares, "FSDP frees gathered parameters after a first backward"),
        ("dp_shard=2", Forces, squares, "runs a backward of its own (torch.autograd.grad) through 'layers.0'"),
        ("pp=2", Forces, squares, "runs a backward of its own (torch.autograd.grad) through 'layers.0'"),
    ],
)
def test_derivatives_that_a_mesh_cannot_have_are_refused(mesh: str, kind: type[Net], loss: Any, text: str) -> None:
    for said in pool(2).run(off, mesh, kind, loss):
        assert isinstance(said, str), said
        assert text in said
        assert "Use a mesh of tp alone" in said


@pytest.mark.parametrize(("mesh", "recompute"), [("tp=2", "none"), ("pp=2", "none"), ("dp_shard=2", "full")])
def test_gradients_by_torch_func_are_refused_where_they_are_not_read_or_run_again(mesh: str, recompute: str) -> None:
    for said in pool(2).run(off, mesh, FunctionalInside, squares, recompute):
        assert isinstance(said, str), said
        assert "test_double_backward.py:" in said
        assert "torch.func.grad and its kin (vjp, jacrev, hessian) let nobody look at what backward saves" in said
        assert "Write torch.autograd.grad(..., create_graph=True), or use dp axes only" in said


def test_a_gradient_penalty_across_stages_is_refused() -> None:
    with pytest.raises(RankError, match="the loss function runs a backward of its own through the model"):
        pool(2).run(off, "pp=2", Net, penalty)
