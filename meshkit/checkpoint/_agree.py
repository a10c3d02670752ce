"""Collective error handling: every rank raises the same error, so no rank waits for one that has failed."""

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
    """Make a gloo process group of all ranks of the mesh, for host values. Collective; call it on the main thread.

    Its messages, from whichever thread, never queue behind or between the collectives of training.
    """
    (group,) = _torch.split(mesh.group, [[mesh.ranks]], backend="gloo", timeout=timeout)
    assert group is not None  # this rank is one of the mesh's
    return group


def gather_results(group: dist.ProcessGroup, action: str, act: Callable[[], T]) -> list[T]:
    """Call `act` on every rank and return the results of all ranks, in order of rank.

    action: what is being done, for the error text. Wire: one all-gather of the pickled results.
    Raises: on every rank the error of the lowest rank that had one; a CheckpointError unless it is a MeshkitError.
    """
    own_error: Exception | None = None
    result: T | None = None
    try:
        result = act()
    except Exception as error:
        own_error = error
    failure = None if own_error is None else _as_meshkit_error(own_error, action)
    # Every rank takes part, failed or not: a rank that left the collective out would leave the others waiting in it.
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (failure, result), group=group)
    for failure, _ in outcomes:
        if failure is not None:
            # The failure as it was sent, so that all ranks have the same text; on the rank that failed its traceback
            # hangs on it as the cause.
            raise failure from own_error
    return [value for _, value in outcomes]


def on_each_rank(group: dist.ProcessGroup, action: str, act: Callable[[], T]) -> T:
    """Call `act` on every rank; each keeps its own result. Only errors are sent, as by `gather_results`."""
    results: list[T] = []
    # append returns None, so what is pickled and sent is the error alone, and not a result of any size.
    gather_results(group, action, lambda: results.append(act()))
    return results[0]


def on_rank_0(group: dist.ProcessGroup, action: str, act: Callable[[], T]) -> T:
    """Call `act` on rank 0 and return its result on every rank. Wire and errors as `gather_results`."""
    is_first = dist.get_rank(group) == 0
    result: Any = gather_results(group, action, lambda: act() if is_first else None)[0]
    return cast(T, result)


def _as_meshkit_error(error: Exception, action: str) -> MeshkitError:
    if isinstance(error, MeshkitError):
        return error
    # Made anew from text: an error of another library may not be picklable, and would fail in the all-gather in place
    # of the save.
    return CheckpointError(f"{action}: {type(error).__name__} on rank {dist.get_rank()}: {error}")
