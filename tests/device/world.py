"""Worlds of ranks on an accelerator, `late` or a real one: what `tests.world` starts, with a process group for the device."""

from __future__ import annotations

import atexit
import multiprocessing as mp
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from tests.device import build, load
from tests.world import CONTEXT, World

BACKENDS = {"late": "late:late", "cuda": "nccl"}
# torchao asks for GPUs when it is imported, after which CUDA refuses to start in what is forked.
CONTEXTS = {"cuda": mp.get_context("spawn")}
BY_CHANCE = 0.3  # of what is queued on `late`, some is run by chance so often

_worlds: dict[tuple[int, str], World] = {}


def run(
    size: int, function: Callable[..., Any], *args: Any, device: str = "late", seed: int = 0, timeout_s: float = 240.0
) -> list[tuple[Any, list[str]]]:
    """`function(*args)` on every rank, with the device as the accelerator; of each the result, and the races on `late`.

    A world is used until a rank of it fails.
    """
    if device == "late":
        build()  # before ranks wait for it
    world = _worlds.get((size, device))
    if world is None or not world.alive:
        world = _worlds[size, device] = World(size, CONTEXTS.get(device, CONTEXT))
    return world.run(_on_rank, device, seed, function, *args, timeout_s=timeout_s)


@atexit.register
def end() -> None:
    for world in _worlds.values():
        world.kill()
    _worlds.clear()


def _on_rank(device: str, seed: int, function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    _start(device)
    if device != "late":
        return function(*args), []
    late = load()
    late.configure(BY_CHANCE, seed + dist.get_rank())
    late.races()  # those of before
    result = function(*args)
    torch.accelerator.synchronize()
    return result, late.races()


@lru_cache
def _start(device: str) -> None:
    if device == "late":
        load()
    torch.accelerator.set_device_index(dist.get_rank())
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(BACKENDS[device], store=dist.PrefixStore(device, store), rank=rank, world_size=size)
