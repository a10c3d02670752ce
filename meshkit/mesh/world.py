"""The world (default process group, rendezvous): started by a launcher's environment, as one rank alone, or as a fake one."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from meshkit.core import _torch
from meshkit.core.calls import calls_ignored
from meshkit.errors import MeshError
from meshkit.mesh.host import host_ranks
from meshkit.mesh.launcher import adopt_slurm

POLL_S = 0.005
SHOWN = 8  # ranks in an error
_seat: int | None = None  # of this process at the launcher, once a world was started
_keeper = 0  # the rank that the launcher's rank 0 is
_renumbered: tuple[str, str] | None = None  # RANK as the launcher gave it, and as a placement has made it


def start_world(device_type: str, timeout: timedelta, *, placement: Sequence[int] = ()) -> None:
    """Start the default process group: of the launcher's ranks, or of this process alone where there is no launcher.

    placement: which of the launcher's ranks each rank is; (), the same.
    Raises: MeshError naming the ranks that have not come within the timeout, and for a placement that parts a node's ranks.
    """
    global _seat, _renumbered, _keeper
    if _renumbered is not None and os.environ.get("RANK") == _renumbered[1]:  # of a world before this one
        os.environ["RANK"] = _renumbered[0]
    _seat, _renumbered, _keeper = None, None, 0
    adopt_slurm()
    # Of a device its own alone: gloo beside it would connect each rank with each other one. See `mesh.host`.
    backend = {"cpu": "gloo", "cuda": "nccl"}.get(device_type)
    if device_type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_torchelastic_launched() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        start = agree_on_start(store, rank, size, timeout)
        store = dist.PrefixStore(f"meshkit/{start}", store)  # type: ignore[attr-defined]
        rank = _placed(rank, size, _agreed(store, rank, placement), placement)
        _keeper = list(placement).index(0) if placement else 0
        if placement:  # reports, call files and alerts speak of ranks of the world
            _renumbered = os.environ["RANK"], str(rank)
            os.environ["RANK"] = str(rank)
    else:
        store, rank, size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _agreed(store: Any, rank: int, placement: Sequence[int]) -> int:
    """Ranks of a node, as rank 0 sees them. Raises: MeshError where this rank has another placement than rank 0."""
    global _seat
    _seat, named = rank, "-".join(map(str, placement))
    if rank == 0:
        store.set("placement", f"{os.environ.get('LOCAL_WORLD_SIZE', '1')} {named}")
    node, _, first = store.get("placement").decode().partition(" ")
    if named != first:
        raise MeshError(
            f"init_mesh: rank 0 of the launcher asks for placement={first or 'none'}, rank {rank} for {named or 'none'}. "
            "Give all ranks the same mesh."
        )
    return int(node)


def launcher_rank() -> int:
    """Which rank the launcher started this process as. Of a world without a placement it is the rank of the world."""
    return int(os.environ.get("RANK", "0")) if _seat is None else _seat


def store_rank() -> int:
    """The rank whose process has the store of the world, where the launcher has none of its own: the launcher's rank 0."""
    return _keeper


def _placed(rank: int, size: int, node: int, placement: Sequence[int]) -> int:
    """The rank of the world that the launcher's rank is. node: ranks of one. Raises: MeshError, on all ranks."""
    if not placement:
        return rank
    named = "-".join(map(str, placement))
    if sorted(placement) != list(range(size)):
        raise MeshError(f"placement {named}: it names each of the {size} ranks, 0 to {size - 1}, once.")
    for first in range(0, size, node):
        if len(nodes := {each // node for each in placement[first : first + node]}) > 1:
            raise MeshError(
                f"placement {named}: ranks {first} to {first + node - 1} are on nodes {sorted(nodes)} of {node} ranks. A "
                "placement keeps the ranks of a node together, in any order."
            )
    return list(placement).index(rank)


def agree_on_start(store: Any, rank: int, size: int, timeout: timedelta, *, place: str = "meshkit/meeting") -> str:
    """A name for this start of the job, the same on all ranks and new. Returns once all ranks have come.

    place: in the store, where they meet. Raises: MeshError naming the ranks that have not come within the timeout.
    """
    # [Note: a restarted job meets in an old store]
    # torchrun restarts a job with the same store. In it a rank would find the addresses of processes that are gone
    # (pytorch#135712), and a counter of restarts does not help, since each host counts its own. So each rank asks rank 0 with
    # a random token, which no process of an earlier start knows; rank 0 answers each token with the name of this start, until
    # each rank has confirmed it. A request left by a dead process is answered too, and nobody reads that answer.
    token, prefix = uuid.uuid4().hex, place
    store.set_timeout(timeout)
    if rank == 0:
        start = token
        missing = _answer_all(store, prefix, start, size, timeout)
        store.set(f"{prefix}/{start}/missing", missing)
    else:
        store.set(f"{prefix}/asks/{rank}", token)
        try:
            start = store.get(f"{prefix}/{token}").decode()
            store.set(f"{prefix}/{start}/{rank}", "confirmed")
            missing = store.get(f"{prefix}/{start}/missing").decode()
        except dist.DistStoreError:
            missing = "rank 0"
    if missing:
        raise MeshError(
            f"init_mesh: {missing} did not come to {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} within "
            f"{timeout.total_seconds():g} s. Look for its error; every rank of WORLD_SIZE must call init_mesh, and reach "
            "that address. init_mesh(timeout=...) waits longer."
        )
    return start


def _answer_all(store: Any, prefix: str, start: str, size: int, timeout: timedelta) -> str:
    """Answer every rank that asks, until all have confirmed; returns a text that names those that have not in time."""
    missing, answered = set(range(1, size)), set[str]()
    end = time.monotonic() + timeout.total_seconds()
    while missing and time.monotonic() < end:
        for rank in tuple(missing):
            request = f"{prefix}/asks/{rank}"
            if store.check([f"{prefix}/{start}/{rank}"]):
                missing.remove(rank)
            elif store.check([request]) and (token := store.get(request).decode()) not in answered:
                store.set(f"{prefix}/{token}", start)
                answered.add(token)
        time.sleep(POLL_S)
    few = ", ".join(map(str, sorted(missing)[:SHOWN])) + (", ..." if len(missing) > SHOWN else "")
    return f"{'rank' if len(missing) == 1 else 'ranks'} {few} of {size}" if missing else ""


def ranks_per_node() -> int:
    """By the launcher; 8 where it does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "8"))


def cores_of_rank() -> int:
    """This rank's share of the cores that its process may run on, by the launcher's count of ranks on the host; at least 1.

    Of ranks that are bound to the cores near their GPU (`torchrun --numa-binding node`) it is less than they could use.
    """
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is one rank of a fake world of any size, whose collectives send nothing.

    `init_mesh(..., device_type="cpu")` and all that follows works; results of collectives have the right shape and
    meaningless values. Afterwards there is no process group, as before.
    Raises: MeshError where there is a world already, and for a rank outside of the fake one.
    """
    if dist.is_initialized():
        raise MeshError(
            f"fake_world({world_size}): this process is in a world of {dist.get_world_size()} ranks already. Call it before "
            "init_mesh, or in a process of its own."
        )
    if not 0 <= rank < world_size:
        raise MeshError(f"fake_world({world_size}): there is no rank {rank}. The ranks are 0 to {world_size - 1}.")
    excepthook = sys.excepthook  # init_process_group puts one in front that names the rank
    _torch.start_fake_world(world_size, rank)
    try:
        with calls_ignored():
            yield
    finally:
        sys.excepthook = excepthook
        dist.destroy_process_group()
        _torch.clear_sharding_caches()


@contextmanager
def main_rank_first() -> Iterator[None]:
    """Rank 0 runs the block first, then all others do: for what one rank builds on disk and the others read. A collective.

    Raises: MeshError on all others for what the block raises on rank 0.
    """
    ranks = host_ranks(_torch.world())
    if ranks.rank > 0 and (failure := ranks.broadcast("")):
        raise MeshError(f"main_rank_first: on rank 0: {failure}")
    try:
        yield
    except Exception as error:
        if ranks.rank == 0:
            ranks.broadcast(f"{type(error).__name__}: {error}")
        raise
    if ranks.rank == 0:
        ranks.broadcast("")
