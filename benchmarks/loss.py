"""How much memory and time do head and cross-entropy take with whole logits, in chunks, and by Liger?

    python benchmarks/loss.py                                        # one process, one thread, fp32, a 16th of the 8b preset
    python benchmarks/loss.py --preset 8b                            # one GPU: 32,768 tokens, vocabulary 128,256, bf16

Forward and backward of a head and its loss, on the same hidden state with the same weights: logits made whole, as they are
without `MemoryPolicy(loss=...)`; in chunks; and by liger-kernel, where it is installed and there is a GPU. First all must
give the same loss and gradients, or no ratio is reported. Peak bytes are what the step holds at most over what was there
before: counted from the results of operators that are alive on the host, from the allocator on a GPU. They take steps in
turn; a ratio is taken within a round, and its median over rounds is printed with its quartiles.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from rows import Spread, environment, spread
from torch import Tensor, nn

import meshkit as mk
from meshkit.loss.linear_logits import chunk_head
from meshkit.preflight.observe import Peak

RESULTS = Path(__file__).parent / "results" / "loss.jsonl"
WHOLE, CHUNKED, LIGER = "whole", "chunked", "liger"
TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the norm of a gradient; bf16 rounds to 3 digits


@dataclass(frozen=True)
class Size:
    tokens: int
    vocabulary: int
    hidden: int
    chunk: int


LLAMA_3_8B = Size(tokens=32_768, vocabulary=128_256, hidden=4096, chunk=1024)
SIZES = {"small": Size(*(value // 16 for value in asdict(LLAMA_3_8B).values())), "8b": LLAMA_3_8B}


@dataclass(frozen=True, kw_only=True)
class Settings:
    preset: Literal["small", "8b"] = "small"
    chunk: int | None = None
    """tokens of a chunk; default: the preset's"""
    dtype: Literal["float32", "bfloat16"] | None = None
    """default: bfloat16 on a GPU, float32 on the host"""
    rounds: int = 9
    warmup: int = 2
    threads: int = 1
    record: bool = False
    """append a row to benchmarks/results/loss.jsonl"""


# --------------------------------------------------------------------------------------------------- the same head


def heads(size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, nn.Module]:
    """With one weight."""
    losses = {WHOLE: None, CHUNKED: mk.strategy.ChunkedLoss(tokens=size.chunk)}
    if device.type == "cuda" and find_spec("liger_kernel") is not None:
        losses[LIGER] = mk.strategy.ChunkedLoss(backend="liger")
    weight = nn.Parameter(torch.empty(size.vocabulary, size.hidden, device=device, dtype=dtype).normal_(std=0.02))
    models: dict[str, nn.Module] = {}
    for name, loss in losses.items():
        models[name] = nn.ModuleDict({"lm_head": nn.Linear(size.hidden, size.vocabulary, bias=False, device="meta")})
        models[name].lm_head.weight = weight
        if loss is not None:
            chunk_head(models[name].lm_head, loss)
    return models


def step(model: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    hidden.grad = model.lm_head.weight.grad = None
    loss = mk.cross_entropy(model.lm_head(hidden), labels) / len(labels)
    loss.backward()
    return loss.detach()


def largest_difference(models: dict[str, nn.Module], hidden: Tensor, labels: Tensor) -> float:
    """Of loss and gradients, relative to their norms with whole logits."""
    expected: list[Tensor] = []
    worst = 0.0
    for model in models.values():
        values = [step(model, hidden, labels), hidden.grad, model.lm_head.weight.grad]
        expected = expected or values
        for value, reference in zip(values, expected, strict=True):
            worst = max(
                worst, float((value - reference).norm(dtype=torch.float32) / reference.norm(dtype=torch.float32))
            )
    return worst


# ------------------------------------------------------------------------------------------------------ measuring


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    if device.type != "cuda":
        with Peak() as peak:
            run()
        return peak.bytes
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def step_s(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the GPU, or of the processor: with one thread that leaves out what other processes take meanwhile."""
    if device.type != "cuda":
        began = time.process_time()
        run()
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    settings = tyro.cli(Settings)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, settings.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    size = SIZES[settings.preset]
    size = Size(size.tokens, size.vocabulary, size.hidden, settings.chunk or size.chunk)
    hidden = torch.randn(size.tokens, size.hidden, device=device, dtype=dtype).requires_grad_()
    labels = torch.randint(0, size.vocabulary, (size.tokens,), device=device)
    models = heads(size, device, dtype)
    difference = largest_difference(models, hidden, labels)
    if difference > TOL[dtype]:
        raise SystemExit(f"they differ by {difference:.1e} of the norm, so a ratio would say nothing")

    peaks: dict[str, int] = {}
    for name, model in models.items():
        hidden.grad = model.lm_head.weight.grad = None
        peaks[name] = peak_bytes(partial(step, model, hidden, labels), device)
    times: dict[str, list[float]] = {name: [] for name in models}
    load = [round(os.getloadavg()[0], 1)]
    for turn in range(settings.warmup + settings.rounds):
        for name, model in models.items() if turn % 2 == 0 else reversed(models.items()):
            taken = step_s(partial(step, model, hidden, labels), device)
            if turn >= settings.warmup:
                times[name].append(taken)
    load.append(round(os.getloadavg()[0], 1))
    ratios = {
        name: spread([seconds / whole for seconds, whole in zip(times[name], times[WHOLE], strict=True)])
        for name in models
    }
    show(settings, size, dtype, peaks, times, ratios)
    if settings.record:
        row = {
            **environment(),
            "preset": settings.preset,
            **asdict(size),
            "dtype": str(dtype).removeprefix("torch."),
            "rounds": settings.rounds,
            "loadavg": load,
            "largest_difference": difference,
            "peak_bytes": peaks,
            "step_s": {name: asdict(spread(values)) for name, values in times.items()},
            "time_over_whole": {name: asdict(ratio) for name, ratio in ratios.items()},
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


def show(
    settings: Settings,
    size: Size,
    dtype: torch.dtype,
    peaks: dict[str, int],
    times: dict[str, list[float]],
    ratios: dict[str, Spread],
) -> None:
    table = Table(title=f"{settings.preset}: {size}, {dtype}, {settings.rounds} rounds")
    for column in ("logits", "peak bytes", "whole over it", "s a step", "time over whole"):
        table.add_column(column)
    for name, ratio in ratios.items():
        over = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        seconds = f"{spread(times[name]).median:.4f}"
        table.add_row(name, f"{peaks[name]:,}", f"{peaks[WHOLE] / peaks[name]:.1f}", seconds, over)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
