"""Is AdamW on the host as fast as torch's own? One step of both over the same parameters, in turn, in one run.

    python benchmarks/optimizer.py --parameters 100000000 --threads 2

`update` is what the host computes. `step` is a whole `optimizer.step()`, which also writes the parameters back: on a GPU
that copy runs beside the update, here it is one more pass over memory. Prints one JSON row.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.rows import environment, spread
from meshkit.optim import OffloadedAdamW


def layers(parameters: int) -> list[nn.Parameter]:
    """Pairs of a matrix and a norm of one width, fp32, about so many elements."""
    width = 1024
    count = max(1, parameters // (width * width))
    generator = torch.Generator().manual_seed(0)
    params = []
    for _ in range(count):
        params.append(nn.Parameter(torch.randn(width, width, generator=generator)))
        params.append(nn.Parameter(torch.randn(width, generator=generator)))
    return params


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=30_000_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    mine, theirs = layers(options.parameters), layers(options.parameters)
    offloaded = OffloadedAdamW(mine, lr=1e-3)
    fused = torch.optim.AdamW(theirs, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def gradients(params: list[nn.Parameter]) -> None:
        for index, param in enumerate(params):
            param.grad = torch.full_like(param, 1e-3 * (1 + index % 7))

    times: dict[str, list[float]] = {"fused": [], "step": [], "update": []}
    for repeat in range(options.repeats + 1):
        gradients(theirs)
        fused_s = timed(fused.step)
        gradients(mine)
        for param in mine:
            offloaded.gradient(param)  # they have arrived, as they have after a backward
        whole_s = timed(offloaded.step)
        gradients(mine)
        for param in mine:
            offloaded.gradient(param)
        with mock.patch.object(OffloadedAdamW, "_send", _stay):
            update_s = timed(offloaded.step)
        if repeat:  # the first touches new memory
            for name, value in (("fused", fused_s), ("step", whole_s), ("update", update_s)):
                times[name].append(value)
    count = sum(param.numel() for param in mine)
    row = {
        "benchmark": "optimizer",
        "parameters": count,
        "threads": options.threads,
        "fused_ns_per_parameter": round(spread(times["fused"]).median / count * 1e9, 4),
        "update_ratio": vars(spread([a / b for a, b in zip(times["update"], times["fused"], strict=True)])),
        "step_ratio": vars(spread([a / b for a, b in zip(times["step"], times["fused"], strict=True)])),
        **environment(),
    }
    print(json.dumps(row))


def _stay(optimizer: OffloadedAdamW, state: object, which: int) -> Tensor | None:
    return None


if __name__ == "__main__":
    main()
