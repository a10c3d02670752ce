"""Gathering what ranks have, errors included: all raise, or none does."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from meshkit.core import _torch
from meshkit.errors import MeshkitError, PlanError
from meshkit.mesh import Mesh

T = TypeVar("T")


def gathered(mesh: Mesh, act: Callable[[], T]) -> list[T]:
    """The results of all ranks of the mesh, in their order. Wire: an all-gather of objects over it.

    Raises: on every rank, PlanError with what the lowest rank raised.
    """
    error: Exception | None = None
    result, why, packed = None, "", b""
    alone = mesh.spec.world_size == 1 or _torch.is_fake_group(mesh.group)
    try:
        result = act()
        packed = b"" if alone else pickle.dumps(result)  # here, where all hear of what cannot be sent
    except MeshkitError as raised:
        error, why = raised, str(raised).removeprefix("move: ")
    except Exception as raised:  # the other ranks would wait
        error, why = raised, f"{type(raised).__name__}: {raised}"
    outcomes: list[Any] = [(why, packed)]
    if not alone:
        outcomes = [None] * mesh.spec.world_size
        dist.all_gather_object(outcomes, (why, packed), group=mesh.group)
    for why, _ in outcomes:
        if why:
            raise PlanError(f"move: {why}") from error
    return [cast(T, result)] if alone else [pickle.loads(value) for _, value in outcomes]
