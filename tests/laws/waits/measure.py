"""How often the host would wait, and what it would launch, in a step of a model on a mesh: counted on CPU, on real ranks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass

import torch
from torch import nn

import meshkit as mk
from meshkit.errors import StepError
from meshkit.faults import NonFiniteGuard
from meshkit.mesh import fake_world
from meshkit.optim import LowBitAdamW
from meshkit.preflight.waits import Step, recording
from meshkit.strategy import States
from tests.laws.gate import laws
from tests.laws.gate.cell import Cell
from tests.laws.parity.cases import mesh_for, own_rows

STEPS = 3  # the last is counted: FSDP and autograd make what they keep in the first two


@dataclass(frozen=True, kw_only=True)
class Deep(Cell):
    """A cell of so many layers."""

    count: int

    @property
    def layers(self) -> int:
        return self.count


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Of the step's parts. waits: where, with lines; of all but the guard."""

    waits: tuple[str, ...]
    launches: int
    clip: int
    guard_waits: int
    optimizer: int
    copied_bytes: int
    batch_bytes: int
    mixed: tuple[str, ...]


def numbers(cell: Cell) -> Numbers:
    """Of this rank, in a step that is not the first."""
    run, guard = laws.start(cell), NonFiniteGuard()
    with recording(run) as seen:
        optimizer = mk.adamw(run, lr=laws.LR)
        for step, batch in enumerate(laws.batches(cell)[:STEPS]):
            local = own_rows(batch, run.mesh)
            seen.take()
            run.forward_backward(local, microbatches=cell.microbatches)
            passes = seen.take()
            norm = mk.clip_grad_norm(run, laws.MAX_NORM)
            clip = seen.take()
            with suppress(StepError):  # without other ranks values mean nothing
                guard.allows(run, norm, step=step)
            guarded = seen.take()
            optimizer.step()
            optimizer.zero_grad()
            update = seen.take()
    every: tuple[Step, ...] = (passes, clip, guarded, update)
    return Numbers(
        waits=tuple(str(wait) for part in (passes, clip, update) for wait in part.waits),
        launches=passes.launches.total(),
        clip=clip.launches.total(),
        guard_waits=sum("local_scalar_dense" in wait.why for wait in guarded.waits[:1]),
        optimizer=update.launches.total(),
        copied_bytes=passes.copied_bytes,
        batch_bytes=sum(tensor.nbytes for tensor in local.values()),
        mixed=tuple(str(wait) for part in every for wait in part.mixed),
    )


def in_fake_world(cell: Cell) -> Numbers:
    """Of the first rank, in this process, without the others: collectives send nothing, and cost what they cost."""
    with fake_world(cell.spec.world_size):
        try:
            return numbers(cell)
        finally:
            mesh_for.cache_clear()


def with_layers(cell: Cell, count: int) -> Deep:
    return Deep(**asdict(cell), count=count)


def optimizers_in_fake_world(states: States, *counts: int) -> list[int]:
    with fake_world(1):
        try:
            return [optimizer_launches(states, count) for count in counts]
        finally:
            mesh_for.cache_clear()


def optimizer_launches(states: States, parameters: int) -> int:
    """Launches of one step of an optimizer over so many matrices of one shape, and a norm beside each."""
    mesh = mesh_for("dp_shard=1")
    with recording(mesh) as seen:
        shapes = [(64, 64), (64,)] * parameters
        params = [nn.Parameter(torch.ones(shape, device=mesh.device)) for shape in shapes]
        made = {"8bit": LowBitAdamW, "4bit": LowBitAdamW, "fp8": LowBitAdamW}
        optimizer: torch.optim.Optimizer = (
            made[states](params, states=states) if states in made else mk.optim.ShardedAdamW(params)
        )
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            seen.take()
            optimizer.step()
            step = seen.take()
    assert not step.waits and not step.mixed, step
    return step.launches.total()
