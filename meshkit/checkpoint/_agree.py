"""One outcome for all ranks: nobody waits for a rank that has failed, and every rank sees the same error."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from meshkit.core import _torch
from meshkit.errors import CheckpointError, MeshkitError
from meshkit.mesh import Mesh

T = TypeVar("T")


def host_group(mesh: Mesh, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks of the mesh for host values alone. Collective of those, on the main thread.

    What it sends, from whichever thread, never queues behind or between the collectives of training.
    """
    return _torch.copy_group(mesh.group, backend="gloo", timeout=timeout)


def agree(group: dist.ProcessGroup, what: str, act: Callable[[], T]) -> list[T]:
    """`act` on every rank; its results in order of rank.

    Wire: one all-gather of the pickled results. Raises: on every rank the error of the lowest rank that had one, as it
    is if it is meshkit's, else as a CheckpointError.
    """
    own: Exception | None = None
    result: T | None = None
    try:
        result = act()
    except Exception as error:
        own = error
    failure = None if own is None else _as_ours(own, what)
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (failure, result), group=group)
    for failure, _ in outcomes:
        if failure is not None:
            raise failure from own
    return [value for _, value in outcomes]


def each(group: dist.ProcessGroup, what: str, act: Callable[[], T]) -> T:
    """`act` on every rank, which keeps its own result; only errors travel, as in `agree`."""
    kept: list[T] = []
    agree(group, what, lambda: kept.append(act()))
    return kept[0]


def on_first(group: dist.ProcessGroup, what: str, act: Callable[[], T]) -> T:
    """`act` on rank 0 only; its result on every rank. Wire and errors as `agree`."""
    first = dist.get_rank(group) == 0
    answer: Any = agree(group, what, lambda: act() if first else None)[0]
    return cast(T, answer)


def _as_ours(error: Exception, what: str) -> MeshkitError:
    if isinstance(error, MeshkitError):
        return error
    return CheckpointError(f"{what}: {type(error).__name__} on rank {dist.get_rank()}: {error}")
