"""Collective error handling: every rank raises the same error, so no rank waits for one that has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from meshkit.errors import CheckpointError, MeshkitError
from meshkit.mesh import HostRanks

T = TypeVar("T")
R = TypeVar("R")


def gather_results(ranks: HostRanks, action: str, act: Callable[[], T]) -> list[T]:
    """Call `act` on every rank and return the results of all ranks, in order of rank.

    action: what is being done, for the error text. Wire: the pickled results, up and down.
    Raises: on every rank the error of the lowest rank that had one; a CheckpointError unless it is a MeshkitError.
    """
    failure, result, own_error = _outcome(action, act)
    # Every rank takes part, failed or not: a rank that left the collective out would leave the others waiting in it.
    outcomes = ranks.all_gather((failure, result))
    _raise_first(outcomes, own_error)
    return [cast(T, value) for _, value in outcomes]


def on_each_rank(ranks: HostRanks, action: str, act: Callable[[], T]) -> T:
    """Call `act` on every rank; each keeps its own result. Only errors are sent, as by `gather_results`."""
    results: list[T] = []
    # append returns None, so what is pickled and sent is the error alone, and not a result of any size.
    gather_results(ranks, action, lambda: results.append(act()))
    return results[0]


def on_rank_0(ranks: HostRanks, action: str, act: Callable[[], T]) -> T:
    """Call `act` on rank 0 and return its result on every rank. Wire and errors as `gather_results`."""
    result: Any = gather_results(ranks, action, lambda: act() if ranks.rank == 0 else None)[0]
    return cast(T, result)


def shared_out(ranks: HostRanks, action: str, act: Callable[[], T], share: Callable[[list[T]], list[R]]) -> R:
    """Call `act` on every rank, and `share` on rank 0 with all results; each rank is given its own of what that returns.

    Wire: the pickled results up, and what is shared down. Errors as `gather_results`.
    """
    failure, result, own_error = _outcome(action, act)
    outcomes = ranks.gather((failure, result))
    told: list[tuple[MeshkitError | None, R | None]] | None = None
    if outcomes is not None:
        failure = next((failed for failed, _ in outcomes if failed is not None), None)
        shares: list[R] | None = None
        if failure is None:
            failure, shares, own_error = _outcome(action, lambda: share([cast(T, value) for _, value in outcomes]))
        told = [(failure, None if shares is None else shares[rank]) for rank in range(ranks.size)]
    failure, own = ranks.scatter(told)
    _raise_first([(failure, None)], own_error)
    return cast(R, own)


def _outcome(action: str, act: Callable[[], T]) -> tuple[MeshkitError | None, T | None, Exception | None]:
    """(the error for all ranks, or None; the result; the error as it was raised here)"""
    try:
        return None, act(), None
    except Exception as error:
        return _as_meshkit_error(error, action), None, error


def _raise_first(outcomes: list[tuple[MeshkitError | None, Any]], own_error: Exception | None) -> None:
    for failure, _ in outcomes:
        if failure is not None:
            # The failure as it was sent, so that all ranks have the same text; on the rank that failed its traceback
            # hangs on it as the cause.
            raise failure from own_error


def _as_meshkit_error(error: Exception, action: str) -> MeshkitError:
    if isinstance(error, MeshkitError):
        return error
    # Made anew from text: an error of another library may not be picklable, and would fail in the all-gather in place
    # of the save.
    return CheckpointError(f"{action}: {type(error).__name__} on rank {dist.get_rank()}: {error}")
