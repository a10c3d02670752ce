"""On a mesh of a part of the world, what is wrong names ranks of the world: those that hosts, logs and launchers know."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import meshkit as mk
from meshkit.core.sharding import local_tensor
from meshkit.errors import AgreementError, CorruptionError, StepError
from meshkit.faults import CorruptionGuard, NonFiniteGuard
from meshkit.metrics import Stragglers
from tests.faults.test_corruption import flip
from tests.laws.parity.cases import Cell, batches, build, own_rows, plan_of
from tests.planted import of_the_machine
from tests.world import pool

RANKS = (1, 3)  # of a world of four
STRUCK = 3
HELD_S = 0.2


def on_part(act: Callable[[mk.Run, Any], str], mesh: str) -> str:
    """What is said on the ranks of the mesh."""
    part = mk.init_mesh(mesh, ranks=RANKS)
    if not part.here:
        return ""
    run = mk.parallelize(build(Cell(mesh=mesh)), part, plan=plan_of(Cell(mesh=mesh)))
    return act(run, mk.adamw(run, lr=1e-3))


def trained(run: mk.Run, optimizer: Any, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    run.forward_backward(own_rows(batches(Cell(mesh=""))[0], run.mesh))
    if run.mesh.ranks[run.mesh.rank] == STRUCK and factor != 1:
        for param in run.parameters():
            local_tensor(param.grad).mul_(factor)
    mk.clip_grad_norm(run, 1.0)
    optimizer.step()


def slow(run: mk.Run, optimizer: Any) -> str:
    stragglers = Stragglers(run.mesh, every_steps=4, steps=2, factor=2)
    for step in range(1, 9):
        with stragglers.measure(step):
            trained(run, optimizer)
            time.sleep(HELD_S * (run.mesh.ranks[run.mesh.rank] == STRUCK))
    assert stragglers.last is not None and {rank for link in stragglers.last.links for rank in link.ranks} == {*RANKS}
    return str(stragglers.slow)


def corrupt(run: mk.Run, optimizer: Any) -> str:
    """At rest, and between two copies of which none is known to be right."""
    said = []
    for at_rest in (True, False):
        with CorruptionGuard(run, optimizer, every_steps=3) as guard, pytest.raises(CorruptionError) as raised:
            for step in range(1, 4):
                trained(run, optimizer)
                if step == 2 and run.mesh.ranks[run.mesh.rank] == STRUCK:
                    weight = dict(run.named_parameters())["layers.0.mlp.up_proj.weight"]
                    flip(weight, 0.5 + 6 / local_tensor(weight).nbytes, 1)  # not a bit that an update rounds away
                if not at_rest:
                    guard.forget()
                guard.check(step)
        said.append(f"{raised.value.ranks} {raised.value}")
    return "\n".join(said)


def odd(run: mk.Run, optimizer: Any) -> str:
    with CorruptionGuard(run, optimizer, every_steps=1) as guard:
        for step in range(1, 15):
            trained(run, optimizer, 1e3 if step == 14 else 1.0)
            guard.check(step)
        return str(guard.outlier)


def not_finite(run: mk.Run, optimizer: Any) -> str:
    rows = own_rows(batches(Cell(mesh=""))[0], run.mesh)
    if run.mesh.ranks[run.mesh.rank] == STRUCK:
        run.model.layers[1].mlp.register_forward_hook(of_the_machine(lambda module, args, out: out * float("nan")))
    run.forward_backward(rows)
    with pytest.raises(StepError) as raised:
        NonFiniteGuard(max_skips=0).allows(run, mk.clip_grad_norm(run, 1.0), step=2)
    return str(raised.value)


def unlike(run: mk.Run, optimizer: Any) -> str:
    with pytest.raises(AgreementError) as raised:
        run.forward_backward(own_rows(batches(Cell(mesh=""))[0], run.mesh), microbatches=1 + run.mesh.rank)
    return str(raised.value)


@pytest.mark.parametrize(
    ("act", "mesh", "wanted"),
    [
        (slow, "dp_shard=2", "rank 3 on "),
        (corrupt, "dp_replicate=2", "(3,) step 3: silent data corruption"),
        (odd, "dp_shard=2", "step 14: rank 3 on "),
        (unlike, "dp_shard=2", "1 on rank 1, 2 on rank 3"),
        (not_finite, "dp_shard=2", "the loss of rank 3 is not finite"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_what_is_wrong_on_a_part_of_the_world_names_its_ranks_there(
    act: Callable[..., str], mesh: str, wanted: str
) -> None:
    _, first, _, third = pool(4).run(on_part, act, mesh, timeout_s=120.0)
    assert first == third and wanted in first, first
    if act is corrupt:
        assert "layers.0.mlp.up_proj.weight changed on rank 3 while" in first
        assert "(1, 3) step" in first and "is not the same on ranks 1, 3, which have copies" in first
    if act is not_finite:
        assert "is returned by layers.1.mlp on rank 3." in first
