"""A flipped bit of a weight, a moment or a gradient is named by rank and tensor on any mesh; where none flips, nothing is."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import meshkit as mk
from meshkit.core.sharding import local_tensor
from meshkit.errors import CorruptionError
from meshkit.faults import CorruptionGuard
from tests.depth import DEEP
from tests.laws.parity.cases import Cell, Moe, batches, build, mesh_for, own_rows, plan_of, start
from tests.world import pool

EVERY = 5
FLIPS = 72 if DEEP else 2  # of each mesh

MESHES = [
    Cell(mesh="dp_shard=2"),
    Cell(mesh="dp_replicate=2", tied=True, vocab=61),
    Cell(mesh="tp=2", sequence=True),
    Cell(mesh="pp=2", tied=True, microbatches=2, zero=1),
    Cell(mesh="dp_replicate=2 dp_shard=2", zero=2),
    Cell(mesh="dp_replicate=4", heads=(4, 2)),
    Cell(mesh="dp_shard=2 ep=2", layers=3, moe=Moe(balance=0.1)),
]


def few_bits(states: Any) -> mk.MemoryPolicy:
    return mk.MemoryPolicy(optimizer=mk.strategy.OptimizerPolicy(states=states))


def on_host(**offload: Any) -> mk.MemoryPolicy:
    return mk.MemoryPolicy(optimizer=mk.strategy.OptimizerPolicy(offload=mk.strategy.OptimizerOffload(**offload)))


def training(cell: Cell) -> tuple[mk.Run, Any, Callable[..., None]]:
    """(run, optimizer, one step up to the optimizer's, which calls what it is given between backward and clipping)"""
    run = start(cell)
    optimizer = mk.adamw(run, lr=1e-3)
    rows = [own_rows(batch, run.mesh) for batch in batches(cell)]
    turn = iter(range(1 << 30))

    def gradients(reduced: Callable[[], None] = lambda: None) -> None:
        optimizer.zero_grad()
        run.forward_backward(rows[next(turn) % len(rows)], microbatches=cell.microbatches)
        reduced()
        mk.clip_grad_norm(run, 1.0)

    return run, optimizer, gradients


def flip(tensor: Tensor, at: float, bit: int) -> None:
    """In memory, past torch, as a cosmic ray does. at: which byte, as a share of all."""
    raw = local_tensor(tensor).reshape(-1).view(torch.uint8).numpy()
    raw[int(at * raw.size)] ^= np.uint8(1 << bit)


def state_of(cell: Cell, run: mk.Run, optimizer: Any) -> list[tuple[str, Tensor]]:
    """(name as an error has it, tensor) of what this rank holds."""
    held = []
    for name, param in run.named_parameters():
        name = "embed_tokens.weight" if cell.tied and name == "lm_head.weight" else name
        held += [(name, param)]
        moments = optimizer.state.get(param, {})  # none of a frozen one
        held += [(f"{state} of {name}", value) for state, value in moments.items() if value.ndim]
    return [(name, tensor) for name, tensor in held if local_tensor(tensor).numel()]


def gradients_of(cell: Cell, run: mk.Run) -> list[tuple[str, Tensor]]:
    """(name as an error has it, parameter) of what this rank has gradients of."""
    tied = {"lm_head.weight": "embed_tokens.weight"} if cell.tied else {}
    params = [(tied.get(name, name), param) for name, param in run.named_parameters()]
    return [(f"gradient of {name}", param) for name, param in params if local_tensor(param).numel()]


def flip_gradient(param: Tensor, at: float, bit: int) -> None:
    assert param.grad is not None
    flip(param.grad, at, bit)


@dataclass(frozen=True)
class Flip:
    """name: what this rank flipped, "" on the others. ranks, text: of the error, if there was one within 10 steps."""

    name: str
    rank: int
    ranks: tuple[int, ...]
    text: str


def flipped(cell: Cell, kind: str, count: int) -> list[Flip]:
    """On every rank: flips drawn alike on all, each made on one of them, and taken back once it was found.

    kind: "rest", between two steps; "update", by the optimizer's step; "reduced", a gradient before it is clipped; "clipped",
    after that.
    """
    run, optimizer, gradients = training(cell)
    drawn, made = random.Random(f"{cell.mesh} {kind}"), []
    after_update: list[Callable[[], None]] = []
    optimizer.register_step_post_hook(lambda *_: after_update.pop()() if after_update else None)
    guard = CorruptionGuard(run, optimizer, every_steps=EVERY)  # its hooks run after the one above
    gradients()
    optimizer.step()
    held = state_of(cell, run, optimizer)
    for _ in range(count):
        good = [local_tensor(tensor).clone() for _, tensor in held]
        rank, which, at, bit = (
            drawn.randrange(run.mesh.spec.world_size),
            drawn.random(),
            drawn.random(),
            drawn.randrange(8),
        )
        when, name, text, ranks = drawn.randint(1, EVERY), "", "", ()  # before step 0 nothing is at rest
        for step in range(10):
            hit = step == when and rank == run.mesh.rank
            strike: Callable[[], None] = lambda: None  # noqa: E731
            if hit:
                name, tensor = held[int(which * len(held))]
                strike = partial(flip, tensor, at, bit)
                if kind in ("reduced", "clipped"):
                    trained = gradients_of(cell, run)
                    name, param = trained[int(which * len(trained))]
                    strike = partial(flip_gradient, param, at, bit)
            gradients(strike if kind == "reduced" else lambda: None)
            if kind in ("rest", "clipped"):
                strike()
            elif kind == "update" and hit:
                after_update.append(strike)
            optimizer.step()
            try:
                guard.check(step)
            except CorruptionError as error:
                text, ranks = str(error), error.ranks
                break
        made.append(Flip(name=name, rank=rank, ranks=ranks, text=text))
        for (_, tensor), values in zip(held, good, strict=True):
            local_tensor(tensor).copy_(values)
        guard.forget()
    guard.close()
    return made


def named(cell: Cell, kind: str, count: int) -> list[tuple[Flip, Flip]]:
    """(what was flipped, what was said)"""
    ranks = pool(mk.MeshSpec.parse(cell.mesh).world_size)
    of_ranks = ranks.run(flipped, cell, kind, count, timeout_s=900.0 if DEEP else 240.0)
    pairs = []
    for flips in zip(*of_ranks, strict=True):
        assert len({(flip.text, flip.ranks) for flip in flips}) == 1  # the same on every rank
        pairs.append((next(flip for flip in flips if flip.name), flips[0]))
    return pairs


@pytest.mark.parametrize("cell", MESHES, ids=lambda cell: cell.mesh)
def test_a_bit_that_flips_between_steps_is_named_by_rank_and_tensor(cell: Cell) -> None:
    for made, said in named(cell, "rest", FLIPS):
        assert said.ranks == (made.rank,), (made, said)
        # Of three copies and more the majority knows.
        words = "changed on" if cell.mesh != "dp_replicate=4" else "another on"
        assert re.search(rf"{re.escape(made.name)}[ ,].*{words} rank {made.rank}", said.text), (made, said)


@pytest.mark.parametrize("cell", MESHES, ids=lambda cell: cell.mesh)
@pytest.mark.parametrize("kind", ["reduced", "clipped"])
def test_a_bit_that_flips_in_a_gradient_before_the_optimizers_step_is_named(cell: Cell, kind: str) -> None:
    for made, said in named(cell, kind, FLIPS):
        assert said.ranks == (made.rank,), (made, said)
        assert re.search(rf"{re.escape(made.name)}[ ,].*changed on rank {made.rank}", said.text), (made, said)


@pytest.mark.parametrize("cell", [MESHES[5], MESHES[1]], ids=lambda cell: cell.mesh)
def test_a_wrong_update_is_another_than_those_of_its_copies(cell: Cell) -> None:
    copies = mk.MeshSpec.parse(cell.mesh).world_size
    for made, said in named(cell, "update", FLIPS):
        # Of two nobody knows which is right.
        assert said.ranks == ((made.rank,) if copies > 2 else tuple(range(copies))), (made, said)
        assert made.name in said.text, (made, said)


def frozen(cell: Cell) -> str:
    """A flip in a weight that does not train."""
    model = build(cell)
    run = mk.parallelize(model, mesh_for(cell.mesh), plan=mk.lora.attach(model, plan_of(cell), rank=4))
    optimizer = mk.adamw(run, lr=1e-3)
    rows = own_rows(batches(cell)[0], run.mesh)
    with CorruptionGuard(run, optimizer, every_steps=3) as guard, pytest.raises(CorruptionError) as raised:
        for step in range(1, 4):
            run.forward_backward(rows)
            if step == 2 and run.mesh.rank == 1:
                flip(dict(run.named_parameters())["layers.0.mlp.up_proj.weight"], 0.5, 1)
            optimizer.step()
            guard.check(step)
    return str(raised.value)


def test_a_frozen_weight_is_looked_at_too() -> None:
    for said in pool(2).run(frozen, Cell(mesh="dp_shard=2")):
        assert "layers.0.mlp.up_proj.weight changed on rank 1 while nothing wrote it" in said


def quiet(cell: Cell) -> int:
    """Checks of a run in which nothing flips."""
    run, optimizer, gradients = training(cell)
    with CorruptionGuard(run, optimizer, every_steps=1) as guard:
        for step in range(1, 9):
            gradients()
            optimizer.step()
            guard.check(step)
    return step


CALM = [
    *(MESHES if DEEP else ()),  # where flips are named, nothing is named before
    Cell(mesh="cp=2 tp=2", documents=True),
    Cell(mesh="pp=2 dp_replicate=2", tied=True, microbatches=2, zero=1),
    Cell(mesh="dp_replicate=2 tp=2", sequence=True, dtype="float32", memory=few_bits("8bit")),
    Cell(mesh="dp_replicate=2 dp_shard=2", zero=1, dtype="float32", memory=few_bits("fp8")),
    Cell(mesh="dp_shard=2", dtype="float32", memory=mk.MemoryPolicy(precision=mk.strategy.Precision())),
    Cell(mesh="dp_replicate=2", dtype="float32", memory=on_host()),
    Cell(mesh="dp_replicate=2 dp_shard=2 ep=2", layers=3, moe=Moe(balance=0.1)),
]


@pytest.mark.parametrize("cell", CALM, ids=lambda cell: f"{cell.mesh}-{cell.dtype}")
def test_nothing_is_named_where_nothing_flips(cell: Cell) -> None:
    assert pool(mk.MeshSpec.parse(cell.mesh).world_size).run(quiet, cell)[0] == 8


def with_other_memory(cell: Cell) -> list[str]:
    """A weight and a moment get other memory through `.data`, as a load may do it; then a bit flips in it."""
    run, optimizer, gradients = training(cell)
    said = []
    for kind in ("weight", "moment"):
        with CorruptionGuard(run, optimizer, every_steps=4) as guard, pytest.raises(CorruptionError) as raised:
            for step in range(1, 5):
                gradients()
                if step == 4 and run.mesh.rank == 0:
                    flip(of_layer(run, optimizer, kind), 0.5, 1)
                optimizer.step()
                if step == 2:
                    shard = of_layer(run, optimizer, kind)
                    shard.data = shard.data.clone()
                guard.check(step)
        said.append(str(raised.value))
    return said


@torch.no_grad()
def of_layer(run: mk.Run, optimizer: Any, kind: str) -> Any:
    """This rank's shard, the very object."""
    param = dict(run.named_parameters())["layers.1.mlp.up_proj.weight"]
    tensor = param if kind == "weight" else optimizer.state[param]["exp_avg_sq"]
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_a_flip_in_memory_that_was_given_since_is_found() -> None:
    for weight, moment in pool(2).run(with_other_memory, Cell(mesh="tp=2")):
        assert "layers.1.mlp.up_proj.weight changed on rank 0 while nothing wrote it" in weight
        assert "exp_avg_sq of layers.1.mlp.up_proj.weight changed on rank 0 while nothing wrote it" in moment
