"""A training process beside its steps: garbage collection in chosen ones (gc), TF32 in fp32 products, order of sums."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch


@contextmanager
def collecting_garbage(every: int) -> Iterator[Callable[[int], None]]:
    """Gives `after(step)`, which collects in every so many steps; inside, Python collects at no other time. 0: Python's own.

    Each rank's collector runs when it likes, for up to some hundred milliseconds in a process of many objects, and all
    others wait in the next collective: so all collect in the same step. What there was before, modules and the model, is
    frozen: nobody looks through it again.
    """
    if not every:
        yield lambda step: None
        return
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()

    def after(step: int) -> None:
        if step % every == 0:
            gc.collect()

    try:
        yield after
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def multiplying_fp32(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Inside, fp32 products on CUDA are whole ("ieee") or by TF32; as before afterwards."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        with warnings.catch_warnings():
            # Inductor's advice, where whole products are meant.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            yield
    finally:
        matmul.fp32_precision = before


def add_in_one_order() -> None:
    """From now on kernels add in the same order whenever they run (torch.use_deterministic_algorithms), which is slower."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses products on CUDA
    torch.use_deterministic_algorithms(True)
