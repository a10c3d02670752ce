"""Collective error handling: every rank raises the same error, so no rank waits for one that has failed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
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
    packed, own_error = _outcome(action, act)
    # Every rank takes part, failed or not: a rank that left the collective out would leave the others waiting in it.
    return _results(ranks.all_gather(packed), own_error)


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
    packed, own_error = _outcome(action, act)
    outcomes = ranks.gather(packed)
    told: list[bytes] | None = None
    if outcomes is not None:  # on rank 0
        failed, shares = b"", list[bytes]()
        try:
            results: list[T] = _results(outcomes, own_error)
            shares = [pickle.dumps((None, own)) for own in share(results)]
        except Exception as error:
            own_error, failed = own_error or error, pickle.dumps((_for_all(error, action), None))
        told = [failed] * ranks.size if failed else shares
    (own,) = _results([ranks.scatter(told)], own_error)
    return cast(R, own)


def _outcome(action: str, act: Callable[[], object]) -> tuple[bytes, Exception | None]:
    """((the error for all ranks, or None, and the result) as bytes, the error as it was raised here)"""
    # Pickled here: what has no bytes is an error of this rank, of which all learn in the same way.
    try:
        return pickle.dumps((None, act())), None
    except Exception as error:
        return pickle.dumps((_for_all(error, action), None)), error


def _results(outcomes: list[bytes], own_error: Exception | None) -> list[Any]:
    told: list[tuple[MeshkitError | None, Any]] = [pickle.loads(each) for each in outcomes]
    for failure, _ in told:
        if failure is not None:
            # The failure as it was sent, so that all ranks have the same text; on the rank that failed its traceback
            # hangs on it as the cause.
            raise failure from own_error
    return [value for _, value in told]


def _for_all(error: Exception, action: str) -> MeshkitError:
    """As it can be sent: from text, unless it is of meshkit and comes out of its bytes as it went in."""
    if isinstance(error, MeshkitError):
        with suppress(Exception):
            if str(pickle.loads(pickle.dumps(error))) == str(error):
                return error
    return CheckpointError(f"{action}: {type(error).__name__} on rank {dist.get_rank()}: {error}")
