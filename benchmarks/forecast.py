"""How long does one forecast take once its model is traced? Llama-3-70B on 512 H100s, by dp, pp and schedule.

    python benchmarks/forecast.py
    python benchmarks/forecast.py --record    # adds a row to results/forecast_time.jsonl

A forecast is `mk.forecast` with its `Profiles`: resolving, messages, the pipeline's table, and the price. first_ms: of each
strategy's first, in which its decisions and its table are made; again_ms: the median of those that follow, and what share of
the first that is. Processor time of one thread; the first of all, which traces, is apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rows import environment

import meshkit as mk
from meshkit.preflight.forecast import Profiles
from meshkit.strategy import PipelinePolicy, Precision

RESULTS = Path(__file__).parent / "results/forecast_time.jsonl"
LIMIT_MS = 10.0
CASES = (
    ("dp_shard=64 tp=8", 16, "1f1b"),
    ("dp_replicate=2 dp_shard=32 tp=8", 16, "1f1b"),
    ("pp=4 dp_shard=16 tp=8", 64, "1f1b"),
    ("pp=8 dp_shard=8 tp=8", 64, "1f1b"),
    ("pp=8 dp_shard=8 tp=8", 64, "zb-h1"),
    ("pp=8 dp_replicate=2 dp_shard=4 tp=8", 64, "interleaved"),
)


def measured(times: int) -> dict[str, Any]:
    with torch.device("meta"):
        model = mk.models.Llama(mk.models.LLAMA3_70B)
    plan, cluster, profiles = mk.models.model_plan(mk.models.LLAMA3_70B), mk.Cluster.read("h100"), Profiles()
    memory = mk.MemoryPolicy(precision=Precision(), recompute="full")

    def took_ms(mesh: str, count: int, schedule: str) -> float:
        pipeline = PipelinePolicy(schedule=schedule)
        strategy = mk.Strategy(
            mesh=mesh, microbatches=count, sequence=True, plan=plan, memory=memory, pipeline=pipeline
        )
        spec = strategy.mesh_for()
        batch = mk.Batch(sequences=count * spec.dp_shard * spec.dp_replicate, seq_len=8192)
        began = time.process_time()
        mk.forecast(model, strategy, cluster, batch, profiles=profiles)
        return (time.process_time() - began) * 1e3

    traced_ms = took_ms(*CASES[0])
    first = [took_ms(*case) for case in CASES]
    again = [statistics.median(took_ms(*case) for _ in range(times)) for case in CASES]
    return {
        "model": "70b",
        "traced_ms": round(traced_ms),
        "cases": [" ".join(map(str, case)) for case in CASES],
        "first_ms": [round(each, 1) for each in first],
        "again_ms": [round(each, 2) for each in again],
        "worst_ms": round(max(again), 2),
        "limit_ms": LIMIT_MS,
        "share_of_traced": round(max(again) / traced_ms, 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    row = environment() | measured(options.times)
    print(json.dumps(row))
    if options.record:
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
