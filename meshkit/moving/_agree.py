"""Gathering what ranks have, errors included: all raise, or none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from meshkit.core import _torch
from meshkit.errors import MeshkitError, PlanError
from meshkit.mesh import Mesh

T = TypeVar("T")


def gathered(mesh: Mesh, act: Callable[[], T]) -> list[T]:
    """The results of all ranks of the mesh, in their order. Wire: an all-gather of objects over it.

    Raises: on every rank, PlanError with what the lowest rank raised.
    """
    error, result, why = None, None, ""
    try:
        result = act()
    except MeshkitError as raised:
        error, why = raised, str(raised)
    if mesh.spec.world_size == 1 or _torch.is_fake_group(mesh.group):
        outcomes: list[Any] = [(why, result)]
    else:
        outcomes = [None] * mesh.spec.world_size
        dist.all_gather_object(outcomes, (why, result), group=mesh.group)
    for why, _ in outcomes:
        if why:
            raise PlanError(f"move: {why}") from error
    return [value for _, value in outcomes]
