"""Meter: step time, tokens per second (throughput), MFU, peak memory, time left."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from meshkit.errors import MeshkitError
from meshkit.faults.location import begin_step

from ._flops import FlopsPerToken


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Speed of one step, or the mean over steps. MFU is a fraction, and None when FLOPs or the peak are unknown."""

    step_s: float
    tokens_per_s: float
    mfu_full: float | None
    mfu_causal: float | None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One step seen by a `Meter`: its own rate, the mean rate, training time left, this rank's peak memory."""

    last: Rate
    mean: Rate
    left_s: float
    peak_memory: dict[str, int]

    def scalars(self) -> dict[str, float]:
        """The step as numbers to log: step_s, tokens_per_s, mfu_full and mfu_causal if known, peak bytes, left_s."""
        rate = {name: value for name, value in vars(self.last).items() if value is not None}
        return {**rate, **self.peak_memory, "left_s": self.left_s}


@dataclass(frozen=True)
class _Work:
    """A sum over steps. FLOPs are nan for a step that did not give them, and so is the sum."""

    steps: int
    tokens: int
    seconds: float
    flops_full: float
    flops_causal: float

    def plus(self, other: _Work) -> _Work:
        return _Work(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))

    def rate(self, peak_flops_per_s: float) -> Rate:
        # nan marks what is unknown and goes through the sums by itself: one step without FLOPs leaves the mean
        # without MFU, and not with a wrong one.
        mfu_full, mfu_causal = (
            None if math.isnan(peak_flops_per_s * flops) else flops / self.seconds / peak_flops_per_s
            for flops in (self.flops_full, self.flops_causal)
        )
        return Rate(
            step_s=self.seconds / self.steps,
            tokens_per_s=self.tokens / self.seconds,
            mfu_full=mfu_full,
            mfu_causal=mfu_causal,
        )


class Meter:
    """Times steps from one `step()` to the next, leaving out what happens inside `paused()`.

    The clock starts when the meter is built. The first `warmup_steps` steps (compilation, first allocations) are
    reported but are not part of the mean; until one more has ended, the mean is the last step. Kernels run behind the
    host: call `step()` after something that waits for the device, such as `loss.item()`.

    start_step: steps done before this process, when a run continues. devices: how many share the work, for MFU.
    peak_flops_per_s: of one device, see `peak_flops_per_s()`; None: no MFU. device: whose memory to report.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        start_step: int = 0,
        warmup_steps: int = 3,
        devices: int = 1,
        peak_flops_per_s: float | None = None,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps_left = total_steps - start_step
        self._step = start_step + 1
        # The watchdog names this step where a rank hangs in it.
        begin_step(self._step)
        self._warmup_left = warmup_steps
        self._peak = math.nan if peak_flops_per_s is None else peak_flops_per_s * devices
        self._device = device or torch.device("cpu")
        self._clock = clock
        self._measured: _Work | None = None
        self._paused = False
        self._mark = clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of the step: validation, checkpoints, samples. Pauses may nest."""
        if self._paused:
            yield
            return
        self._paused, began = True, self._clock()
        try:
            yield
        finally:
            self._paused = False
            self._mark += self._clock() - began  # as if the step had begun so much later

    def step(
        self, tokens: int, *, flops_per_token: FlopsPerToken | None = None, seconds: float | None = None
    ) -> Reading:
        """A step has ended.

        tokens: input tokens of the whole step over all devices, ignored labels included. flops_per_token: see
        `ModelFlops.per_token`; None: no MFU. seconds: what the caller measured; None: since the last step, by a clock.
        Raises: MeshkitError inside a pause, and for seconds that are not positive.
        """
        if self._paused:
            raise MeshkitError("Meter.step() inside paused(): a step cannot end in a pause. Call it after the block.")
        if seconds is not None and seconds <= 0:
            raise MeshkitError(f"seconds={seconds}: a step takes a positive time. Give the seconds it took.")
        now = self._clock()
        elapsed = max(now - self._mark, 1e-9) if seconds is None else seconds  # two readings of a clock may be equal
        self._mark = now
        flops = flops_per_token or FlopsPerToken(full=math.nan, causal=math.nan)
        last = _Work(1, tokens, elapsed, flops.full * tokens, flops.causal * tokens)
        if self._warmup_left > 0:
            self._warmup_left -= 1
        else:
            self._measured = self._measured.plus(last) if self._measured else last
        self._steps_left -= 1
        self._step += 1
        begin_step(self._step)
        mean = (self._measured or last).rate(self._peak)
        return Reading(
            last=last.rate(self._peak),
            mean=mean,
            left_s=max(self._steps_left, 0) * mean.step_s,
            peak_memory=peak_memory(self._device),
        )


def peak_memory(device: torch.device) -> dict[str, int]:
    """Peak bytes of this process so far, under names that say what was measured.

    CUDA: peak_allocated_bytes (tensors) and peak_reserved_bytes (with the allocator's cache), since the start or
    `torch.cuda.reset_peak_memory_stats()`. CPU: peak_rss_bytes, the resident set. Empty where the system does not tell.
    """
    if device.type == "cuda":
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        }
    # Not getrusage().ru_maxrss: on Linux it survives exec, so a rank would report the peak of its launcher.
    peak = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return {"peak_rss_bytes": int(peak[1]) * 1024} if peak else {}
