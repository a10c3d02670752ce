"""Pairs of strategies of one model, and what a rank has of a run: for the tests of moving."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import meshkit as mk
from meshkit.checkpoint import Checkpointer
from meshkit.core.model_state import copies_of, model_tensors
from meshkit.core.sharding import local_tensor
from tests.checkpoint.training import Training
from tests.laws.gate.cell import Cell
from tests.laws.gate.laws import _WithLayers
from tests.laws.gate.models import build
from tests.laws.parity.cases import mesh_for, own_rows

ROWS, TOKENS, LR = 5, 16, 1e-2
TOL_FP64 = 1e-10  # only the order of summation differs


@dataclass(frozen=True, kw_only=True)
class Side:
    """Choices of a strategy. memory: of its MemoryPolicy."""

    mesh: str
    memory: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)

    def strategy(self, plan: mk.Plan) -> mk.Strategy:
        return mk.Strategy(
            mesh=mesh_for(self.mesh).spec, plan=plan, memory=mk.MemoryPolicy(**self.memory), **self.choices
        )

    @property
    def ranks(self) -> int:
        return mk.MeshSpec.parse(self.mesh).world_size

    def __str__(self) -> str:
        return " ".join([self.mesh, *self.choices, *self.memory])


@dataclass(frozen=True, kw_only=True)
class Pair:
    before: Side
    after: Side
    model: str = "dense"
    sizes: str = "even"
    precision: str = "fp64"
    optimizer: str = "adamw"
    layers: int = 2
    steps: int = 1  # before the move
    beside: bool = False  # of a run that does not move

    @property
    def ranks(self) -> int:
        return self.before.ranks

    def __str__(self) -> str:
        plain = Pair(before=self.before, after=self.after)
        told = [str(value) for name, value in vars(self).items() if value != getattr(plain, name)]
        return " ".join([str(self.before), "->", str(self.after), *told])


@dataclass
class Job:
    run: mk.Run
    optimizer: Optimizer
    scheduler: LRScheduler
    microbatches: int
    done: int = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for step in range(self.done, self.done + steps):
            batch = own_rows(batch_of(step), self.run.mesh)
            loss = self.run.forward_backward(batch, microbatches=self.microbatches, step=step)
            mk.clip_grad_norm(self.run, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.run.balance_experts()
            self.scheduler.step()
            losses.append(float(loss))
        self.done += steps
        return losses


def batch_of(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 61, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def start(pair: Pair, side: Side, *, other_values: bool = False) -> Job:
    precision = "fp64" if pair.precision == "fp64" else "fp32"
    cell = Cell(model=pair.model, mesh=side.mesh, sizes=pair.sizes, precision=precision)
    model, plan = build(_WithLayers(**vars(cell), count=pair.layers))
    if pair.precision == "bf16":
        model = model.to(torch.bfloat16)
    if other_values:
        with torch.no_grad():
            for tensor in model.state_dict().values():  # not what is derived, as rotary frequencies
                tensor.mul_(0.5) if tensor.is_floating_point() else None
    run = mk.parallelize(model, mesh_for(side.mesh), side.strategy(plan))
    optimizer = optimizer_of(pair, run, lr=0.5 if other_values else LR)
    # A weight for each group that the optimizer has.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return Job(run, optimizer, scheduler, 2 if "pp" in side.mesh else 1)


def optimizer_of(pair: Pair, run: mk.Run, *, lr: float) -> Optimizer:
    params = list(run.parameters())
    match pair.optimizer:
        case "adamw":
            return mk.adamw(run, lr=lr)
        case "sgd":
            return torch.optim.SGD(params, lr=lr, momentum=0.9)
        case "torch adamw":
            groups = [
                {"params": [each for each in params if (each.ndim > 1) == matrices], "weight_decay": 0.1 * matrices}
                for matrices in (True, False)
            ]
            return torch.optim.AdamW(groups, lr=lr, foreach=False)
    raise AssertionError(pair.optimizer)


def facts(job: Job | Training) -> dict[str, str]:
    """All that later steps depend on, on this rank, bit for bit, by name."""
    run, found = job.run, dict[str, str]()
    copies = copies_of(run.model)
    found |= {name: digest(each) for name, each in model_tensors(run.model).items()}
    found |= {f"{name} trained": str(each.requires_grad) for name, each in run.named_parameters()}
    finish = getattr(job.optimizer, "finish", None)
    if finish is not None:
        finish()
    for name, param in run.named_parameters():
        for key, value in job.optimizer.state.get(param, {}).items():
            told = digest(value) if isinstance(value, Tensor) else repr(value)
            found[f"{copies.get(name, name)} {key}"] = told
    for group in job.optimizer.param_groups:
        for param in group["params"]:
            name = next(name for name, each in run.named_parameters() if each is param)
            plain = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            found[f"{name} options"] = repr(sorted(plain.items()))
    found["kind"] = type(job.optimizer).__name__
    found["scheduler"] = repr({key: value for key, value in job.scheduler.state_dict().items() if key != "lr_lambdas"})
    found["random numbers"] = digest(torch.get_rng_state())
    return found


def digest(tensor: Tensor) -> str:
    local = local_tensor(tensor).contiguous()
    bits = local.reshape(-1).view(torch.uint8) if local.numel() else local
    return f"{local.dtype} {list(local.shape)} {hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:12]}"


def differences(found: dict[str, str], expected: dict[str, str]) -> dict[str, tuple[str, str]]:
    return {
        name: (found.get(name, "nothing"), expected.get(name, "nothing"))
        for name in {**found, **expected}
        if found.get(name) != expected.get(name)
    }


@dataclass(frozen=True)
class Told:
    """What a rank saw: what differs at the move, and two steps later; the losses of those, and without a move; bytes."""

    at_once: dict[str, tuple[str, str]]
    later: dict[str, tuple[str, str]]
    losses: list[float]
    unmoved: list[float]
    sent: int
    planned: int
    least: int
    total: int


def compare(pair: Pair, folder: str) -> Told:
    """Move a run, beside saving it and loading it into a run of the other strategy: the oracle."""
    torch.manual_seed(100 + mesh_for(pair.before.mesh).rank)
    job = start(pair, pair.before)
    job.train(pair.steps)
    plan = job.run.plan
    torch.rand(3)  # the generators stand somewhere
    with Checkpointer(folder, asynchronous=False) as saver:
        saver.save(max(1, pair.steps), job.run, job.optimizer, scheduler=job.scheduler)
    others = [start(pair, side, other_values=True) for side in (pair.after, pair.before)[: 1 + pair.beside]]
    for other in others:
        Checkpointer(folder).load(other.run, other.optimizer, scheduler=other.scheduler)
        other.done = job.done
    expected, state = facts(others[0]), torch.get_rng_state()
    with mk.observe(job.run.mesh) as seen:
        moved = job.run.move(pair.after.strategy(plan), optimizer=job.optimizer)
    job.microbatches = others[0].microbatches
    at_once = differences(facts(job), expected)
    losses = []
    for each in (job, *others):
        torch.set_rng_state(state)
        losses.append(each.train(1))
    assert losses[0] == losses[1], losses
    later = differences(facts(job), facts(others[0]))
    rank = torch.distributed.get_rank()
    # Beside messages of one byte, by which channels of pp are opened.
    sent = sum(message.size * count for message, count in seen.items() if message.op == "send" and message.size > 1)
    planned = sum(size for (sender, _), size in moved.links.items() if sender == rank)
    return Told(at_once, later, losses[0], losses[-1], sent, planned, moved.lower_bound_bytes, moved.bytes_moved)
