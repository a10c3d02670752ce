"""Loops that take turns: each has ranks of its own, which sleep while another loop runs a block of steps."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import Spread, spread
from torch import Tensor
from torch.multiprocessing import start_processes

from meshkit.metrics import peak_memory


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one loop did in a block of steps.

    values: of its steps, in the first block those of the warm-up too: losses, or what else a step is known by. cpu_s: of all
    ranks. peak_bytes: of the rank with the most, since the warm-up; on a CPU what the resident set has grown by since the
    imports, on CUDA what tensors were allocated.
    """

    values: list[float]
    wall_s: float
    cpu_s: float
    peak_bytes: int


# ------------------------------------------------------------------------------------------------ a world of ranks


@contextmanager
def world(run_rank: Callable[..., None], arguments: tuple[Any, ...], *, ranks: int) -> Iterator[Callable[[], Block]]:
    """Fresh ranks, warmed up, that run one block each time the function is called and sleep in between.

    run_rank(rank, *arguments, folder, pipe) joins the others through `folder` (see `join_world`), sends something when
    it is warm, and a `Block` for every "run" that it receives, until it is told to leave.
    """
    pipes = [multiprocessing.Pipe() for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        given = (run_rank, arguments, folder, [theirs for _, theirs in pipes])
        processes = start_processes(_run_rank, given, nprocs=ranks, join=False, daemon=True, start_method="forkserver")

        def answers() -> list[Any]:
            replies = []
            for ours, _ in pipes:
                while not ours.poll(1.0):
                    processes.join(timeout=0)  # raises what a rank raised
                replies.append(ours.recv())
            return replies

        def block() -> Block:
            for ours, _ in pipes:
                ours.send("run")
            blocks: list[Block] = answers()
            return Block(
                values=blocks[0].values,
                wall_s=max(block.wall_s for block in blocks),
                cpu_s=sum(block.cpu_s for block in blocks),
                peak_bytes=max(block.peak_bytes for block in blocks),
            )

        answers()  # warmed up: nothing of this world runs while another has its turn
        yield block
        for ours, _ in pipes:
            ours.send("leave")
        while not processes.join():
            pass


def _run_rank(
    rank: int, run_rank: Callable[..., None], arguments: tuple[Any, ...], folder: str, pipes: list[Connection]
) -> None:
    run_rank(rank, *arguments, folder, pipes[rank])


def join_world(rank: int, ranks: int, folder: str, *, device_type: str = "cpu") -> torch.device:
    device = torch.device(device_type, rank if device_type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # ranks share the cores
    # accelerate reads its rank here, and without OMP_NUM_THREADS would choose the threads itself.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"OMP_NUM_THREADS": "1"} if device.type == "cpu" else {}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        device_id=device if device.type == "cuda" else None,
    )
    return device


# -------------------------------------------------------------------------------------------- a loop's side of it


class Leave(Exception):
    """The loop has had its last turn."""


class Turns:
    """Told of every step, it measures blocks of `steps` steps after `warmup` ones, and sleeps until the next turn.

    For loops that are not ours to cut into steps: a trainer calls it at the end of each. imported_bytes: the resident
    set before there was any model.
    """

    def __init__(self, pipe: Connection, device: torch.device, *, warmup: int, steps: int, imported_bytes: int) -> None:
        self._pipe, self._device, self._steps, self._imported_bytes = pipe, device, steps, imported_bytes
        self._left = warmup
        self._values: list[float] = []
        self._began: tuple[float, float] | None = None

    def end_step(self, value: Tensor) -> None:
        """value: what the step is known by, its loss for example; the same on every rank. Raises: Leave."""
        self._values.append(value.item())  # waits for the device
        self._left -= 1
        if self._left:
            return
        if self._began is None:
            reset_peak(self._device)
            self._pipe.send("warm")
        else:
            wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
            peaks = peak_memory(self._device)
            cuda = self._device.type == "cuda"
            peak = peaks["peak_allocated_bytes"] if cuda else peaks["peak_rss_bytes"] - self._imported_bytes
            self._pipe.send(Block(values=self._values, wall_s=wall, cpu_s=cpu, peak_bytes=peak))
            self._values = []
        if self._pipe.recv() != "run":
            raise Leave
        dist.barrier()
        self._left = self._steps
        self._began = time.perf_counter(), time.process_time()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set becomes its present size


# ------------------------------------------------------------------------------------------------------ comparing


def take_turns(loops: Mapping[str, Callable[[], Block]], rounds: int) -> dict[str, list[Block]]:
    """A block of every loop in each round, in the opposite order every second one: a drifting load favours nobody."""
    blocks: dict[str, list[Block]] = {loop: [] for loop in loops}
    for index in range(rounds):
        for loop in loops if index % 2 == 0 else reversed(loops):
            blocks[loop].append(loops[loop]())
    return blocks


def refuse_other_losses(blocks: dict[str, list[Block]], *, steps: int, tolerance: float) -> tuple[list[float], float]:
    """(the first losses of the first loop, the largest relative difference of any loop from them).

    Raises: SystemExit when the loops did not do the same work.
    """
    traces = {loop: [loss for block in taken for loss in block.values][:steps] for loop, taken in blocks.items()}
    (first, expected), *others = traces.items()
    worst = 0.0
    for loop, trace in others:
        for step, (loss, wanted) in enumerate(zip(trace, expected, strict=True), 1):
            difference = abs(loss - wanted) / abs(wanted)
            if not difference <= tolerance:  # true for nan as well
                raise SystemExit(f"step {step}: {loop} has the loss {loss}, {first} {wanted}: not the same work.")
            worst = max(worst, difference)
    return expected, worst


def compare(mine: list[Block], other: list[Block]) -> dict[str, Spread]:
    """Ratios within each round: speed above 1 and cpu and memory below 1 are in favour of `mine`."""
    rounds = list(zip(mine, other, strict=True))
    return {
        "tokens_per_s_ratio": spread([theirs.wall_s / ours.wall_s for ours, theirs in rounds]),
        "cpu_ratio": spread([ours.cpu_s / theirs.cpu_s for ours, theirs in rounds]),
        "peak_memory_ratio": spread([ours.peak_bytes / theirs.peak_bytes for ours, theirs in rounds]),
    }
