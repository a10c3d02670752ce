"""Own runs: forecasts of the demo's steps on this machine beside measured ones, calibrated by measure-cluster, in one run.

    python -m benchmarks.accuracy.own                 # a quarter of an hour on a quiet machine; prints the rows
    python -m benchmarks.accuracy.own --record        # adds them to benchmarks/results/forecast.jsonl

For 1, 2 and 4 gloo ranks: the ranks measure themselves as `measure-cluster` does, then make the steps of each strategy, all
strategies `--passes` times in turn. The forecasts are made afterwards, from the model and the measured cluster alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshkit as mk
from benchmarks.accuracy.fit import spearman
from benchmarks.rows import environment
from meshkit.cluster import Cluster
from meshkit.cluster.measure import measure
from meshkit.mesh import MeshSpec
from meshkit.mesh.world import start_world
from meshkit.models import LLAMA_PLAN, Llama, LlamaConfig
from meshkit.preflight._format import format_axes
from meshkit.preflight.forecast import Batch, Forecast, Profiles
from meshkit.strategy import ContextPolicy, MemoryPolicy, PipelinePolicy, Recompute, Strategy

RESULTS = Path("benchmarks/results/forecast.jsonl")
# The demo of examples/llama_pretrain.py, and its batch.
CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
)
BATCH = Batch(sequences=16, seq_len=256)
WARMUP, STEPS = 2, 6  # in each pass


def strategies(ranks: int) -> Iterator[Strategy]:
    """Of a world of so many ranks: all train the same batch."""
    selective, full = MemoryPolicy(recompute="selective"), MemoryPolicy(recompute="full")
    half = MemoryPolicy(recompute=Recompute(mode="full", every=2))
    if ranks == 1:
        for memory in (MemoryPolicy(), selective, full, half):
            yield Strategy(mesh="dp_shard=1", memory=memory, microbatches=1)
        for microbatches in (2, 4, 8):
            yield Strategy(mesh="dp_shard=1", microbatches=microbatches)
        return
    for axis in ("dp_shard", "dp_replicate", "tp", "cp"):
        yield Strategy(mesh=f"{axis}={ranks}", microbatches=1)
    for zero in (1, 2):
        yield Strategy(mesh=f"dp_shard={ranks}", zero=zero, microbatches=2)
    yield Strategy(mesh=f"dp_shard={ranks}", memory=full, microbatches=2)
    yield Strategy(mesh=f"tp={ranks}", sequence=True, microbatches=1)
    yield Strategy(mesh=f"tp={ranks}", sequence=True, memory=selective, microbatches=2)
    yield Strategy(mesh=f"cp={ranks}", context=ContextPolicy(scheme="all_gather"), microbatches=1)
    if ranks == 2:
        yield Strategy(mesh="cp=2", context=ContextPolicy(scheme="ulysses"), microbatches=1)
    for schedule, microbatches in (("gpipe", 4), ("1f1b", 4), ("1f1b", 8), ("zb-h1", 4)):
        yield Strategy(mesh=f"pp={ranks}", pipeline=PipelinePolicy(schedule=schedule), microbatches=microbatches)
    if ranks == 2:
        yield Strategy(mesh="pp=2", pipeline=PipelinePolicy(schedule="zbv"), microbatches=4)
    if ranks == 4:
        for mesh in ("dp_shard=2 tp=2", "dp_replicate=2 dp_shard=2", "dp_shard=2 cp=2", "cp=2 tp=2"):
            yield Strategy(mesh=mesh, microbatches=1)
        yield Strategy(mesh="dp_shard=2 tp=2", sequence=True, microbatches=2)
        for mesh in ("pp=2 dp_shard=2", "pp=2 tp=2", "pp=2 cp=2"):
            yield Strategy(mesh=mesh, microbatches=4)


def label(strategy: Strategy) -> str:
    changes = {name: value for name, value in strategy.changes.items() if name not in ("mesh", "microbatches")}
    assert isinstance(strategy.mesh, MeshSpec)
    said = [format_axes(strategy.mesh.sizes(), omit=1) or "one rank", f"microbatches={strategy.microbatches}"]
    said += [f"{name}={_short(value)}" for name, value in changes.items()]
    return " ".join(said)


def _short(value: object) -> str:
    if isinstance(value, MemoryPolicy):
        return value.recompute if isinstance(value.recompute, str) else "every second block full"
    if isinstance(value, PipelinePolicy):
        return str(value.schedule)
    return value.scheme if isinstance(value, ContextPolicy) else str(value)


# ------------------------------------------------------------------------------------------------ one world of ranks


def measured_world(folder: Path, passes: int) -> None:
    """What each rank of a world does; rank 0 writes the cluster and the seconds of each strategy."""
    start_world("cpu", timedelta(minutes=5))
    ranks = dist.get_world_size()
    cluster = measure(torch.device("cpu"), group=dist.group.WORLD if ranks > 1 else None)
    seconds: dict[int, list[float]] = {}
    for _ in range(passes):
        for index, strategy in enumerate(strategies(ranks)):
            seconds.setdefault(index, []).extend(steps_of(strategy))
            if dist.get_rank() == 0:
                print(f"{label(strategy)}: {statistics.median(seconds[index]):.3f} s", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        cluster.write(folder / f"cluster-{ranks}.toml")
        (folder / f"seconds-{ranks}.json").write_text(json.dumps(seconds), encoding="utf-8")
    dist.destroy_process_group()


def steps_of(strategy: Strategy) -> list[float]:
    """Seconds of steps, after some that are not counted; of the slowest rank, since all wait for it in each step."""
    assert isinstance(strategy.mesh, MeshSpec)
    mesh = mk.init_mesh(strategy.mesh)
    with torch.device("meta"):
        model = Llama(CONFIG)
    run = mk.parallelize(model, mesh, replace(strategy, plan=LLAMA_PLAN))
    mk.init_weights(run.model, seed=0, plan=run.plan)
    optimizer = mk.adamw(run, lr=1e-4)
    torch.manual_seed(mesh.data_rank)
    rows = BATCH.rows(mesh.spec)
    ids = torch.randint(0, CONFIG.vocab_size, (rows, BATCH.seq_len + 1))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    seconds = []
    for step in range(WARMUP + STEPS):
        dist.barrier()
        began = time.perf_counter()
        run.forward_backward(batch, microbatches=strategy.microbatches)
        mk.clip_grad_norm(run, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        if step >= WARMUP:
            seconds.append(time.perf_counter() - began)
    return seconds


def launch(ranks: int, folder: Path, passes: int) -> None:
    words = ["-m", "benchmarks.accuracy.own", "--folder", str(folder), "--passes", str(passes)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    environment_ = {**os.environ, "OMP_NUM_THREADS": "1", "MESHKIT_OWN_RANK": "1"}
    subprocess.run([*torchrun, *words], check=True, timeout=3600, env=environment_)


# ------------------------------------------------------------------------------------------------ beside the forecasts


@dataclass(frozen=True, kw_only=True)
class Beside:
    ranks: int
    strategy: Strategy
    told: Forecast
    measured: list[float]

    @property
    def measured_s(self) -> float:
        return statistics.median(self.measured)

    @property
    def error(self) -> float:
        return self.told.seconds / self.measured_s - 1

    def row(self) -> dict[str, Any]:
        low, _, high = statistics.quantiles(self.measured, method="inclusive")
        return {
            "ranks": self.ranks,
            "strategy": label(self.strategy),
            "forecast_s": round(self.told.seconds, 5),
            "measured_s": round(self.measured_s, 5),
            "quartiles_s": [round(low, 5), round(high, 5)],
            "ledger": {name: round(seconds, 5) for name, seconds in self.told.ledger.items()},
        }


def beside(folder: Path, ranks: int, profiles: Profiles) -> list[Beside]:
    cluster = Cluster.read(folder / f"cluster-{ranks}.toml")
    measured = json.loads((folder / f"seconds-{ranks}.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = Llama(CONFIG)
    told = [
        mk.forecast(model, replace(strategy, plan=LLAMA_PLAN), cluster, BATCH, profiles=profiles)
        for strategy in strategies(ranks)
    ]
    return [
        Beside(ranks=ranks, strategy=strategy, told=each, measured=measured[str(index)])
        for index, (strategy, each) in enumerate(zip(strategies(ranks), told, strict=True))
    ]


def summary(rows: Sequence[Beside]) -> dict[str, Any]:
    """Mean error, Spearman's rank correlation, and by how much the forecast's choice is slower than the best of its world."""
    regrets = {}
    for ranks in dict.fromkeys(row.ranks for row in rows):
        of = [row for row in rows if row.ranks == ranks]
        chosen = min(of, key=lambda row: row.told.seconds)
        regrets[ranks] = chosen.measured_s / min(row.measured_s for row in of) - 1
    return {
        "strategies": len(rows),
        "mean_error": round(statistics.mean(abs(row.error) for row in rows), 4),
        "signed_error": round(statistics.mean(row.error for row in rows), 4),
        "spearman": round(spearman([row.told.seconds for row in rows], [row.measured_s for row in rows]), 4),
        "regret": {str(ranks): round(regret, 4) for ranks, regret in regrets.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps clusters and seconds; what is there is not measured again")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if "MESHKIT_OWN_RANK" in os.environ:
        measured_world(options.folder, options.passes)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows, profiles = [], Profiles()
        for ranks in (1, 2, 4):
            if not (folder / f"seconds-{ranks}.json").exists():
                launch(ranks, folder, options.passes)
            rows += beside(folder, ranks, profiles)
    for row in rows:
        print(f"{row.ranks} {label(row.strategy):60} {row.told.seconds:.4f} {row.measured_s:.4f} {row.error:+.1%}")
    found = summary(rows)
    print(json.dumps(found))
    if options.record:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**environment(), **found, "rows": [row.row() for row in rows]}) + "\n")


if __name__ == "__main__":
    main()
