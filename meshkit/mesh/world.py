"""The world: the ranks that are here now. Started from a launcher's environment, as one rank alone, or as a fake one."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from meshkit.core import _torch
from meshkit.errors import MeshError

LOOK_S = 0.005
SHOWN = 8  # ranks


def start_world(device_type: str, timeout: timedelta) -> None:
    """The default process group: of the launcher's ranks, or of this process alone when there is no launcher.

    Raises: MeshError naming the ranks that have not come within the timeout.
    """
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else None if device_type != "cpu" else "gloo"
    if device_type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_torchelastic_launched() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        life = _name_of_life(store, rank, size, timeout)
        store = dist.PrefixStore(f"meshkit/{life}", store)  # type: ignore[attr-defined]
    else:
        store, rank, size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _name_of_life(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """What no earlier life of the job has been called, the same on all ranks, once all of them have come.

    torchrun starts a job again with the store that it has, in which a rank would find the addresses of processes that are
    gone (pytorch#135712), and a host does not know how often others have been started. So each rank asks rank 0 with a word
    of its own, which no dead one knows, and rank 0 answers until each rank has said that it heard.
    """
    own, prefix = uuid.uuid4().hex, "meshkit/meeting"
    store.set_timeout(timeout)
    if rank == 0:
        away = _answered(store, prefix, own, size, timeout)
        store.set(f"{prefix}/{own}/away", away)
        life = own
    else:
        store.set(f"{prefix}/asks/{rank}", own)
        try:
            life = store.get(f"{prefix}/{own}").decode()
            store.set(f"{prefix}/{life}/{rank}", "heard")
            away = store.get(f"{prefix}/{life}/away").decode()
        except dist.DistStoreError:
            away = "rank 0"
    if away:
        raise MeshError(
            f"init_mesh: {away} did not come to {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} within "
            f"{timeout.total_seconds():g} s. Look for its error; every rank of WORLD_SIZE must call init_mesh, and reach "
            "that address. init_mesh(timeout=...) waits longer."
        )
    return life


def _answered(store: Any, prefix: str, life: str, size: int, timeout: timedelta) -> str:
    """Answer every rank that asks, until all have heard; returns who has not in time."""
    away, answered = set(range(1, size)), set[str]()
    end = time.monotonic() + timeout.total_seconds()
    while away and time.monotonic() < end:
        for rank in tuple(away):
            asks = f"{prefix}/asks/{rank}"
            if store.check([f"{prefix}/{life}/{rank}"]):
                away.remove(rank)
            elif store.check([asks]) and (word := store.get(asks).decode()) not in answered:
                store.set(f"{prefix}/{word}", life)
                answered.add(word)
        time.sleep(LOOK_S)
    few = ", ".join(map(str, sorted(away)[:SHOWN])) + (", ..." if len(away) > SHOWN else "")
    return f"{'rank' if len(away) == 1 else 'ranks'} {few} of {size}" if away else ""


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process believes to be one rank of a world of any size, whose collectives send nothing.

    `init_mesh(..., device_type="cpu")` and what follows work as ever, and what comes out of a collective has the right
    shape and no meaning. Afterwards there is no process group, as before.
    Raises: MeshError where there is a world already, and for a rank that it would not have.
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
        yield
    finally:
        sys.excepthook = excepthook
        dist.destroy_process_group()
        _torch.clear_sharding_caches()


@contextmanager
def main_rank_first() -> Iterator[None]:
    """Rank 0 runs the block while the others wait, then they run it: what it builds, they find. A collective."""
    if dist.get_rank() > 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()
