"""Mistakes that people make, each in a run that is right without it: what `check` must find and name.

`Hand` is a model whose tensor and data parallelism are written by hand, `bug` the name of what is wrong with it. The others
are Llamas that something was done to after `parallelize`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.collectives import copy_to_axis, reduce_from_axis
from meshkit.core.sharding import chunk, local_tensor
from meshkit.models.llama import LLAMA_PLAN
from meshkit.preflight.check import Report
from tests.laws.parity.cases import Cell, batches, build, mesh_for
from tests.preflight.check.good import examples, mlp, points, squared_error

MESH = "dp_replicate=2 tp=2"
WIDTH, HIDDEN = 4, 6
SHARDED = {"up.weight": ("tp", 0), "up.bias": ("tp", 0), "down.weight": ("tp", 1)}


class SumTwice(torch.autograd.Function):
    """An all-reduce whose backward is one too, as torch.distributed.nn has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Any) -> Tensor:
        ctx.axis = axis
        return summed(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.axis), None


class DoubledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def summed(x: Tensor, axis: Any) -> Tensor:
    x = x.clone()
    if axis.size() > 1:
        dist.all_reduce(x, group=axis.get_group())
    return x


class Column(nn.Module):
    def __init__(self, inputs: int, outputs: int, mesh: mk.Mesh, bug: str) -> None:
        super().__init__()
        self.axis, self.bug = mesh["tp"], bug
        own = chunk(outputs, self.axis.size(), self.axis.get_local_rank())
        self.weight = nn.Parameter(torch.randn(outputs, inputs)[own].clone())
        self.bias = nn.Parameter(torch.randn(outputs)[own].clone())

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.bug == "no sum of input gradients" else copy_to_axis(x, self.axis)
        weight = self.weight
        if self.axis.size() > 1 and self.bug == "detached":
            weight = weight.detach()
        if self.axis.size() > 1 and self.bug == "wrong backward":
            weight = DoubledBackward.apply(weight)
        return F.linear(x, weight, self.bias)


class Row(nn.Module):
    def __init__(self, inputs: int, outputs: int, mesh: mk.Mesh, bug: str) -> None:
        super().__init__()
        self.axis, self.bug = mesh["tp"], bug
        own = chunk(inputs, self.axis.size(), self.axis.get_local_rank())
        self.weight = nn.Parameter(torch.randn(outputs, inputs)[:, own].clone())
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        if self.bug == "bias on every rank":
            return reduce_from_axis(F.linear(x, self.weight, self.bias), self.axis)
        out = F.linear(x, self.weight)
        if self.bug == "backward sums again":
            out = SumTwice.apply(out, self.axis)
        elif self.bug != "no sum of outputs":
            out = reduce_from_axis(out, self.axis)
        return out + self.bias


class Gate(nn.Module):
    """Something of the user's that talks: the mean of the tokens that the ranks of an axis see."""

    def __init__(self, mesh: mk.Mesh, bug: str) -> None:
        super().__init__()
        self.mesh, self.bug = mesh, bug
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tp, dp = self.mesh["tp"], self.mesh["dp_replicate"]
        first = tp.get_local_rank() == 0
        with torch.no_grad():
            if self.bug == "one rank calls" and tp.size() > 1 and first:
                summed(x.mean(0), tp)
            if self.bug == "other order" and tp.size() > 1:
                for value in (x.mean(0), x.mean()) if first else (x.mean(), x.mean(0)):
                    summed(value, tp)
            if self.bug == "groups crossed":
                for axis in (tp, dp) if first == (dp.get_local_rank() == 0) else (dp, tp):
                    summed(x.mean(), axis)
            if self.bug == "no call without rows" and len(x):
                summed(x.sum(), dp)
            if self.bug == "other dtype":  # of the same width: the ranks add each other's bits up
                summed(x.sum(0).to(torch.int64 if dp.get_local_rank() else torch.float64), dp)
            if self.bug == "other size":
                summed(x.sum(-1), dp)
        return x * self.scale


class Hand(nn.Module):
    def __init__(self, mesh: mk.Mesh, bug: str = "") -> None:
        super().__init__()
        torch.manual_seed(mesh.rank if bug == "seed of rank" else 5)
        self.mesh, self.bug = mesh, bug
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Column(WIDTH, HIDDEN, mesh, bug), Row(HIDDEN, WIDTH, mesh, bug)
        self.gate = Gate(mesh, bug)
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.leave(self.gate(x))


def hand(mesh: mk.Mesh, bug: str) -> Hand:
    return Hand(mesh, bug)


def hand_step(model: Hand, batch: dict[str, Tensor]) -> Tensor:
    """Data parallelism by hand: the mean over the rows of the whole step, gradients summed over the replicas."""
    axis, bug = model.mesh["dp_replicate"], model.bug
    rows = torch.tensor(len(batch["x"]), dtype=torch.float64)
    count = rows.clamp(min=1) if bug == "own mean" else summed(rows, axis)
    loss = squared_error(model, batch) / count
    (loss * model.mesh.spec.world_size if bug == "times the world" else loss).backward()
    for name, param in model.named_parameters():
        if param.grad is None or axis.size() == 1 or (bug == "one left out" and name == "gate.scale"):
            continue
        dist.all_reduce(param.grad, group=axis.get_group())
        if bug == "averaged" or (bug == "one averaged" and name == "gate.scale"):
            param.grad /= axis.size()
        if bug == "one summed twice" and name == "enter.bias":
            dist.all_reduce(param.grad, group=axis.get_group())
    loss = loss.detach()
    return loss if bug == "own loss" else summed(loss, axis)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bug = getattr(model, "bug", "")
    if bug == "rate of rank":
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
    if bug == "no rate":
        optimizer.param_groups[0]["lr"] = 0.0
    if bug == "own norm":
        optimizer.register_step_pre_hook(lambda *_: [nn.utils.clip_grad_norm_(model.parameters(), 1e-3), None][1])
    if bug == "only matrices":
        return torch.optim.SGD([param for param in model.parameters() if param.ndim > 1], lr=0.1)
    return optimizer


# ------------------------------------------------------------------------------------------------ runs of parallelize

CELL = Cell(mesh="dp_shard=2 tp=2", layers=1)
BATCH = batches(CELL)[0]


def llama(mesh: mk.Mesh, bug: str) -> mk.Run:
    model = build(replace(CELL, tied=bug == "torn"))
    if bug == "on meta" and mesh.spec.world_size > 1:
        with torch.device("meta"):
            model = mk.models.Llama(model.config)
    early = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    run = mk.parallelize(model, mesh, plan=LLAMA_PLAN)
    run.early = early  # type: ignore[attr-defined]
    if bug == "added later":
        run.model.norm = Scaled(run.model.norm)
    if mesh.spec.world_size > 1:
        change(run, bug)
    return run


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def change(run: mk.Run, bug: str) -> None:
    """What a user does to a run."""
    named, tp = dict(run.named_parameters()), run.mesh["tp"]
    norm = named["layers.0.input_layernorm.weight"]
    if bug == "hook sums again":
        norm.register_post_accumulate_grad_hook(lambda param: sum_gradient(param, tp))
    if bug == "drawn by each":
        torch.manual_seed(dist.get_rank())
        nn.init.uniform_(local_tensor(named["norm.weight"]))
    if bug == "drawn alike":
        torch.manual_seed(0)
        for param in run.parameters():
            nn.init.normal_(local_tensor(param))
    if bug == "torn":
        run.model.lm_head.weight = nn.Parameter(run.model.lm_head.weight.detach().clone())


def sum_gradient(param: Tensor, axis: Any) -> None:
    assert param.grad is not None
    dist.all_reduce(local_tensor(param.grad), group=axis.get_group())


def without_sync(run: mk.Run, batch: dict[str, Tensor]) -> Tensor:
    if hasattr(run.model, "set_requires_gradient_sync"):
        run.model.set_requires_gradient_sync(False)
    count = mk.step.count_labels(batch).double()
    if run.mesh.tokens.size() > 1:
        dist.all_reduce(count, group=run.mesh.tokens.get_group())
    loss = mk.step.next_token_loss(run.model, batch) / count
    loss.backward()
    loss = loss.detach()
    if run.mesh.tokens.size() > 1:
        dist.all_reduce(loss, group=run.mesh.tokens.get_group())
    return loss


def plain_sgd(run: mk.Run) -> torch.optim.Optimizer:
    return torch.optim.SGD(run.parameters(), lr=0.1, foreach=False)


def mean_error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    # Over the rows, and summed over features: no graph tells that from a sum, and the step does not refuse it.
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="none").mean(0).sum()


def seeded_by_rank() -> nn.Module:
    model = mlp()
    if dist.get_rank() == 2:
        nn.init.normal_(model[2].weight)
    return model


@dataclass(frozen=True, kw_only=True)
class Planted:
    """bug: what is wrong; the rest: what must be said of it."""

    bug: str
    kind: str
    module: str
    parameter: str | None = None
    axes: tuple[str, ...] | None = ()  # None: whichever
    words: str = ""
    model: Callable[..., Any] | None = None
    mesh: str = MESH
    choices: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.bug.replace(" ", "_")

    def check(self) -> Report:
        """On the ranks of a test's world."""
        if self.model is not None:
            return mk.check(self.model, mesh_for(self.mesh), **self.choices)
        return check_hand(self.bug)


def check_hand(bug: str) -> Report:
    few = bug == "no call without rows"
    batch = {name: value[: 1 if few else 5, :WIDTH] for name, value in points().items()}
    return mk.check(
        partial(hand, bug=bug),
        mesh_for(MESH),
        batch=batch,
        step=hand_step,
        optimizer=sgd,
        sharded=SHARDED,
        timeout_s=2.0 if bug == "groups crossed" else 60.0,
    )


def on_llama(
    bug: str, kind: str, module: str, parameter: str | None = None, axes: tuple[str, ...] = (), **rest: Any
) -> Planted:
    choices = {"batch": BATCH, **rest.pop("choices", {})}
    return Planted(
        bug=bug,
        kind=kind,
        module=module,
        parameter=parameter,
        axes=axes,
        model=partial(llama, bug=bug),
        choices=choices,
        **{"mesh": CELL.mesh, **rest},
    )


MLP = {"batch": points(5), "loss": squared_error, "count": examples}
NORM = "layers.0.input_layernorm"
TP, DP = ("tp",), ("dp_replicate",)

PLANTED = [
    # what comes back, and what goes out
    Planted(bug="no sum of input gradients", kind="unreduced gradient", module="up", parameter="norm.weight", axes=TP),
    Planted(bug="no sum of outputs", kind="wrong output", module="down", axes=TP, words="reduce_from_axis"),
    Planted(bug="bias on every rank", kind="wrong output", module="down", words="a bias is added on every rank"),
    Planted(bug="backward sums again", kind="gradient reduced twice", module="down", parameter="up.weight", axes=TP),
    Planted(bug="wrong backward", kind="wrong gradient", module="up", parameter="up.weight", words="3 times"),
    Planted(bug="detached", kind="missing gradient", module="up", parameter="up.weight"),
    # sums over data ranks
    Planted(bug="one left out", kind="unreduced gradient", module="gate", parameter="gate.scale", axes=DP),
    Planted(bug="one summed twice", kind="gradient reduced twice", module="enter", parameter="enter.bias", axes=DP),
    Planted(bug="one averaged", kind="averaged gradient", module="gate", parameter="gate.scale", axes=DP),
    on_llama("hook sums again", "gradient reduced twice", NORM, f"{NORM}.weight", TP),
    on_llama(
        "added later", "unreduced gradient", "norm", "norm.scale", ("dp_shard",), choices={"optimizer": plain_sgd}
    ),
    on_llama("no sync", "missing gradient", "embed_tokens", choices={"step": without_sync}),
    # the scale of the loss
    Planted(bug="averaged", kind="wrong loss scale", module="", axes=DP, words="averaged over dp_replicate"),
    Planted(bug="own mean", kind="wrong loss scale", module="", axes=DP, words="averaged over a rank's own"),
    Planted(bug="times the world", kind="wrong loss scale", module="", axes=(*DP, *TP), words="4 times"),
    Planted(bug="own loss", kind="wrong loss", module="", axes=DP, words="its own rows"),
    Planted(
        bug="mean of a loss",
        kind="wrong loss scale",
        module="",
        axes=("dp_shard",),
        words="reduction='mean'",
        model=mlp,
        mesh="dp_shard=2 tp=2",
        choices={**MLP, "loss": mean_error},
    ),
    # the optimizer
    Planted(bug="only matrices", kind="not in the optimizer", module="enter", parameter="enter.bias", words="filter"),
    on_llama(
        "made before",
        "not in the optimizer",
        "embed_tokens",
        "embed_tokens.weight",
        words="made before the model was changed",
        choices={"optimizer": lambda run: run.early},
    ),
    Planted(bug="no rate", kind="not updated", module="enter", parameter="enter.weight"),
    Planted(bug="rate of rank", kind="replicas drift apart", module="enter", parameter="enter.weight", axes=(*DP, *TP)),
    Planted(bug="own norm", kind="replicas drift apart", module="enter", axes=TP, words="clip_grad_norm"),
    # ties and first values
    on_llama("torn", "tied weights torn", "lm_head", "lm_head.weight", mesh="tp=4"),
    Planted(
        bug="seed of rank", kind="different initialisation", module="enter", parameter="enter.weight", axes=(*DP, *TP)
    ),
    Planted(
        bug="seed of the builder",
        kind="different initialisation",
        module="2",
        parameter="2.weight",
        model=seeded_by_rank,
        mesh="dp_shard=2 tp=2",
        choices=MLP,
    ),
    on_llama("drawn by each", "different initialisation", "norm", "norm.weight", TP),
    on_llama("drawn alike", "different initialisation", "embed_tokens", axes=("dp_shard", "tp"), words="same stream"),
    on_llama("on meta", "not initialised", "embed_tokens", "embed_tokens.weight", words="init_weights"),
    # order
    Planted(bug="one rank calls", kind="collectives out of order", module="gate", axes=TP),
    Planted(bug="other order", kind="collectives out of order", module="gate", axes=TP),
    Planted(bug="groups crossed", kind="collectives out of order", module="gate", axes=None, words="neither goes on"),
    Planted(bug="no call without rows", kind="collectives out of order", module="gate", axes=DP),
    Planted(bug="other size", kind="collectives out of order", module="gate", axes=DP),
    Planted(bug="other dtype", kind="collectives out of order", module="gate", axes=DP, words="int64"),
]
BY_NAME = {planted.bug: planted for planted in PLANTED}


def run(bug: str) -> Report:
    return BY_NAME[bug].check() if bug in BY_NAME else check_hand(bug)
