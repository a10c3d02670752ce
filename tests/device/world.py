"""Worlds of ranks on the device `late`: what `tests.world` starts, with a process group for the device beside gloo's."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

import meshkit as mk
from tests.device import build, load
from tests.world import World

BY_CHANCE = 0.3  # of what is queued, some is run by chance so often

_worlds: dict[int, World] = {}


def run(size: int, function: Callable[..., Any], *args: Any, seed: int = 0, timeout_s: float = 240.0) -> list[Any]:
    """`function(*args)` on every rank, with the device as the accelerator; of each the result, and the races there were."""
    build()  # before ranks wait for it
    world = _worlds.get(size)
    if world is None or not world.alive:
        world = _worlds[size] = World(size)
    return world.run(_on_rank, seed, function, *args, timeout_s=timeout_s)


def end() -> None:
    for world in _worlds.values():
        world.kill()
    _worlds.clear()


def _on_rank(seed: int, function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    late = _start()
    late.configure(BY_CHANCE, seed + dist.get_rank())
    late.races()
    result = function(*args)
    torch.accelerator.synchronize()
    return result, late.races()


@lru_cache
def _start() -> Any:
    late = load()
    torch.accelerator.set_device_index(dist.get_rank())
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,late:late", store=dist.PrefixStore("late", store), rank=rank, world_size=size)
    return late
