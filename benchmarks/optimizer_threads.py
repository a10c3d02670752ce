"""How many threads should a rank's AdamW on the host use: one, as torchrun gives it, its share of the cores, or all of them?

    torchrun --nproc-per-node 1 benchmarks/optimizer_threads.py --record
    torchrun --nproc-per-node 2 benchmarks/optimizer_threads.py --record

Ranks update at once, as after a step, each its own parameters; a time is that of the last rank to end. The three take turns,
and a ratio to one thread is taken within a round; below 1 is in favour of more threads.
Prints one JSON row, of rank 0; --record adds it to results/optimizer.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.optimizer import layers
from benchmarks.rows import environment, spread
from meshkit.core.host_threads import using_threads
from meshkit.optim import OffloadedAdamW

RESULTS = Path(__file__).parent / "results/optimizer.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    cores = len(os.sched_getaffinity(0))
    counts = {"one": 1, "share": max(1, cores // dist.get_world_size()), "all": cores}
    params = layers(options.parameters)
    optimizer = OffloadedAdamW(params, lr=1e-3)

    def seconds(threads: int) -> float:
        for index, param in enumerate(params):
            param.grad = torch.full_like(param, 1e-3 * (1 + index % 7))
        for param in params:
            optimizer.gradient(param)
        dist.barrier()
        began = time.perf_counter()
        with using_threads(threads):
            optimizer.step()
        took = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took)

    taken: dict[str, list[float]] = {name: [] for name in counts}
    for each in range(options.rounds + 1):
        for name in list(counts) if each % 2 else list(reversed(counts)):
            took = seconds(counts[name])
            if each:  # the first touches new memory
                taken[name].append(took)
    row = {
        "benchmark": "optimizer_threads",
        "ranks": dist.get_world_size(),
        "parameters": sum(param.numel() for param in params),
        "threads": counts,
        "loadavg": round(os.getloadavg()[0], 1),
        "over_one_thread": {
            name: vars(spread([a / b for a, b in zip(times, taken["one"], strict=True)]))
            for name, times in taken.items()
            if name != "one"
        },
        **environment(),
    }
    if dist.get_rank() == 0:
        print(json.dumps(row))
        if options.record:
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
