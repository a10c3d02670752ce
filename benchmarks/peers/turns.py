"""Loops that take turns (interleaving): each has ranks of its own, stopped by SIGSTOP while another loop runs a block."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import start_processes

import meshkit as mk
from benchmarks.rows import Spread, spread
from meshkit.metrics import peak_memory

TURN_S = 900.0
PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent is gone
LIBRARY = Path(mk.__file__).parent


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


class World:
    """The ranks of one loop, which are stopped unless it is their turn: call it for a block of steps."""

    def __init__(self, processes: Any, pipes: list[Connection]) -> None:
        self._processes, self._pipes = processes, pipes
        self._answers()  # warmed up
        self._send_signal(signal.SIGSTOP)

    def __call__(self) -> Block:
        blocks: list[Block] = self._asked("run")
        return Block(
            values=blocks[0].values,
            wall_s=max(block.wall_s for block in blocks),
            cpu_s=sum(block.cpu_s for block in blocks),
            peak_bytes=max(block.peak_bytes for block in blocks),
        )

    def files(self) -> list[str]:
        """Of meshkit: those of which functions run in a step, on any rank. One step more."""
        return sorted(set().union(*self._asked("trace")))

    def leave(self) -> None:
        self._send_signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send("leave")
        while not self._processes.join():
            pass

    def _asked(self, command: str) -> list[Any]:
        self._send_signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send(command)
        replies = self._answers()
        # Waiting is not free for everyone: threads of some libraries look whether there is work, over and over.
        self._send_signal(signal.SIGSTOP)
        return replies

    def _answers(self) -> list[Any]:
        replies, deadline = [], time.monotonic() + TURN_S
        for pipe in self._pipes:
            while not pipe.poll(1.0):
                self._processes.join(timeout=0)  # raises what a rank raised
                if time.monotonic() > deadline:
                    self._send_signal(signal.SIGUSR1)  # every rank says where it is
                    time.sleep(1.0)
                    raise TimeoutError(f"a loop has not had its turn within {TURN_S:.0f} s.")
            replies.append(pipe.recv())
        return replies

    def _send_signal(self, number: signal.Signals) -> None:
        for process in self._processes.processes:
            if process.is_alive():
                os.kill(process.pid, number)


@contextmanager
def world(run_rank: Callable[..., None], arguments: tuple[Any, ...], *, ranks: int) -> Iterator[World]:
    """Fresh ranks, warmed up.

    run_rank(rank, *arguments, folder, pipe) joins the others through `folder` (see `join_world`), sends something when
    it is warm, and a `Block` for every "run" that it receives, until it is told to leave. `Turns` is its side of it.
    """
    pipes = [multiprocessing.Pipe() for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        given = (run_rank, arguments, folder, [theirs for _, theirs in pipes])
        processes = start_processes(_run_rank, given, nprocs=ranks, join=False, daemon=True, start_method="forkserver")
        try:
            ranks_of_loop = World(processes, [ours for ours, _ in pipes])
            yield ranks_of_loop
            ranks_of_loop.leave()
        finally:
            for process in processes.processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)


def _run_rank(
    rank: int, run_rank: Callable[..., None], arguments: tuple[Any, ...], folder: str, pipes: list[Connection]
) -> None:
    # Signals that ask would wait until a stopped process goes on.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1)
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
    set before there was any model. folder: of the world, for files.
    """

    def __init__(
        self,
        pipe: Connection,
        device: torch.device,
        *,
        warmup: int,
        steps: int,
        imported_bytes: int,
        folder: str = "",
    ) -> None:
        self.device, self.folder = device, Path(folder)
        self._pipe, self._steps, self._imported_bytes = pipe, steps, imported_bytes
        self._left = warmup
        self._files: set[str] | None = None  # while a step is traced
        self._values: list[float] = []
        self._began: tuple[float, float] | None = None

    def end_step(self, value: Tensor) -> None:
        """value: what the step is known by, its loss for example; the same on every rank. Raises: Leave."""
        self._values.append(value.item())  # waits for the device
        self._left -= 1
        if self._left:
            return
        if self._files is not None:
            sys.setprofile(None)
            paths = [Path(name) for name in self._files]
            self._pipe.send({str(path.relative_to(LIBRARY.parent)) for path in paths if path.is_relative_to(LIBRARY)})
            self._files = None
        elif self._began is None:
            reset_peak(self.device)
            self._pipe.send("warm")
        else:
            wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
            peaks = peak_memory(self.device)
            cuda = self.device.type == "cuda"
            peak = peaks["peak_allocated_bytes"] if cuda else peaks["peak_rss_bytes"] - self._imported_bytes
            self._pipe.send(Block(values=self._values, wall_s=wall, cpu_s=cpu, peak_bytes=peak))
            self._values = []
        command = self._pipe.recv()
        if command == "leave":
            raise Leave
        dist.barrier()
        self._left = self._steps if command == "run" else 1
        self._began = time.perf_counter(), time.process_time()
        if command == "trace":
            self._files = set()
            sys.setprofile(self._note_file)

    def _note_file(self, frame: FrameType, event: str, argument: object) -> None:
        if self._files is not None:
            self._files.add(frame.f_code.co_filename)


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
    """Of time, CPU time of all ranks and peak memory, ratios within each round: below 1 is in favour of `mine`."""
    rounds = list(zip(mine, other, strict=True))
    return {
        "wall_ratio": spread([ours.wall_s / theirs.wall_s for ours, theirs in rounds]),
        "cpu_ratio": spread([ours.cpu_s / theirs.cpu_s for ours, theirs in rounds]),
        "peak_memory_ratio": spread([ours.peak_bytes / theirs.peak_bytes for ours, theirs in rounds]),
    }
