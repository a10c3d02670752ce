"""Profiler: traces of a few steps (kernels in time) and, on CUDA, a memory snapshot."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import profile as torch_profile
from torch.profiler import schedule

from meshkit.core import _torch
from meshkit.errors import MeshkitError


@contextmanager
def profile(
    folder: str | os.PathLike[str],
    *,
    rank: int = 0,
    first_step: int = 10,
    steps: int = 3,
    memory: bool = True,
    device: torch.device | None = None,
    enabled: bool = True,
) -> Iterator[Callable[[], None]]:
    """Profile steps `first_step` to `first_step + steps - 1` of the block, counted from 0 when it is entered.

    Yields a function to call at the end of every step. Writes `folder/trace-rank{rank}.json.gz` (open in Perfetto or
    chrome://tracing) and, on a CUDA device with memory=True, `folder/memory-rank{rank}.pickle` (open in
    pytorch.org/memory_viz) with the allocations of the same steps. Every rank writes its own files. A block that ends
    before `first_step` warns that there is no trace; one that ends within the window writes what it has.
    enabled: False yields a function that does nothing.
    """
    if first_step < 1 or steps < 1:
        raise MeshkitError(
            f"profile(first_step={first_step}, steps={steps}): the window holds at least 1 step and starts at step 1 "
            "or later, for the step before it warms the profiler up."
        )
    if not enabled:
        yield lambda: None
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / f"trace-rank{rank}.json.gz"
    snapshot = folder / f"memory-rank{rank}.pickle" if memory and device is not None and device.type == "cuda" else None
    written = []

    def write(profiler: torch_profile) -> None:
        profiler.export_chrome_trace(str(trace))
        written.append(trace)

    with (
        _memory_snapshot(snapshot, range(first_step, first_step + steps)) as memory_step,
        torch_profile(
            # The step before the window is the profiler's warm-up: the first traced one pays for CUPTI's start. Hence
            # first_step >= 1.
            schedule=schedule(wait=first_step - 1, warmup=1, active=steps, repeat=1),
            on_trace_ready=write,
            acc_events=True,  # without it 2.11 warns that a second cycle would drop the first; there is only one
        ) as profiler,
    ):

        def step_done() -> None:
            profiler.step()
            memory_step()

        yield step_done
    if not written:
        warnings.warn(
            f"profile() wrote no trace: the block ended before step {first_step}. Run more steps, or give a smaller "
            "first_step.",
            stacklevel=3,
        )


@contextmanager
def _memory_snapshot(path: Path | None, window: range) -> Iterator[Callable[[], None]]:
    """Record the CUDA allocations of the steps in `window`, if there is a path to write to.

    A step of the window that fails is written as well: running out of memory is the case of interest.
    """
    if path is None:
        yield lambda: None
        return
    done = 0
    recording = False

    def save() -> None:
        nonlocal recording
        _torch.dump_memory_snapshot(path)
        _torch.record_memory_history(False)
        recording = False

    def step_done() -> None:
        nonlocal done, recording
        done += 1
        if done == window.start:
            _torch.record_memory_history(True)
            recording = True
        elif recording and done == window.stop:
            save()

    try:
        yield step_done
    finally:
        if recording:
            save()
