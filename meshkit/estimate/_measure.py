"""What a real run takes, to stand beside what was said."""

from __future__ import annotations

import torch

from meshkit.estimate._estimate import count_parameters, result, tracked_step, tracker_of
from meshkit.step import Run


def measure(run: Run, optimizer: torch.optim.Optimizer, *, rows: int, seq_len: int, microbatches: int = 1) -> int:
    """Peak bytes of the run's second optimizer step: CUDA's own count, and on a CPU that of `Tracker` on real tensors.

    rows, seq_len: as `estimate` takes them. The tokens are zeros; the parameters change.
    """
    batch = {name: torch.zeros(rows, seq_len, dtype=torch.int64) for name in ("input_ids", "labels")}
    device = run.mesh.device
    tracker = tracker_of(run)
    if device.type == "cuda":
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats(device)
            tracked_step(tracker, run, optimizer, batch, microbatches)
        return torch.cuda.max_memory_allocated(device)
    with tracker:
        count_parameters(tracker, run.model)
        for _ in range(2):
            tracker.forget_points()
            tracked_step(tracker, run, optimizer, batch, microbatches)
    return result(tracker, run, {}, kernels="cpu").peak_bytes
