"""Own runs: forecasts of the demo's steps on this machine beside measured ones, calibrated by measure-cluster, in one run.

    python -m benchmarks.accuracy.own                 # a quarter of an hour on a quiet machine; prints the rows
    python -m benchmarks.accuracy.own --record        # adds them to benchmarks/results/forecast.jsonl

For 1, 2 and 4 gloo ranks: the ranks measure themselves as `measure-cluster` does, then make the steps of each strategy, all
strategies `--passes` times in turn. The forecasts are made afterwards, from the model and the measured cluster alone; once
more with the cluster as one step of the first strategy of its world calibrates it, which then counts no more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
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
from meshkit.preflight.forecast import Batch, Forecast, MeasuredStep, Profiles, calibrated, measure_step
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
    found: dict[int, list[MeasuredStep]] = {}
    for _ in range(passes):
        for index, strategy in enumerate(strategies(ranks)):
            found.setdefault(index, []).extend(steps_of(strategy))
            if dist.get_rank() == 0:
                seconds = statistics.median(step.seconds for step in found[index])
                print(f"{label(strategy)}: {seconds:.3f} s", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        cluster.write(folder / f"cluster-{ranks}.toml")
        steps = [[asdict(step) for step in each] for each in found.values()]
        (folder / f"steps-{ranks}.json").write_text(json.dumps(steps), encoding="utf-8")
    dist.destroy_process_group()


def steps_of(strategy: Strategy) -> list[MeasuredStep]:
    """Steps of this rank, after some that are not counted. All ranks wait for the slowest in each step, at the norm."""
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
    found = []
    for _ in range(WARMUP + STEPS):
        dist.barrier()
        with measure_step(on_host=True) as measured:
            run.forward_backward(batch, microbatches=strategy.microbatches)
            mk.clip_grad_norm(run, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found += measured
    return found[WARMUP:]


def launch(ranks: int, folder: Path, passes: int) -> None:
    words = ["-m", "benchmarks.accuracy.own", "--folder", str(folder), "--passes", str(passes)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    environment_ = {**os.environ, "OMP_NUM_THREADS": "1", "MESHKIT_OWN_RANK": "1"}
    subprocess.run([*torchrun, *words], check=True, timeout=3600, env=environment_)


# ------------------------------------------------------------------------------------------------ beside the forecasts


@dataclass(frozen=True, kw_only=True)
class Beside:
    """traced: on the cluster as the first strategy of its world calibrates it; None of that one."""

    ranks: int
    strategy: Strategy
    told: Forecast
    traced: Forecast | None
    steps: list[MeasuredStep]

    @property
    def measured_s(self) -> float:
        return statistics.median(step.seconds for step in self.steps)

    def row(self) -> dict[str, Any]:
        low, _, high = statistics.quantiles([step.seconds for step in self.steps], method="inclusive")
        return {
            "ranks": self.ranks,
            "strategy": label(self.strategy),
            "forecast_s": round(self.told.seconds, 5),
            "traced_s": self.traced and round(self.traced.seconds, 5),
            "measured_s": round(self.measured_s, 5),
            "quartiles_s": [round(low, 5), round(high, 5)],
            "ledger": {name: round(seconds, 5) for name, seconds in self.told.ledger.items()},
        }


def beside(folder: Path, ranks: int, profiles: Profiles, model: torch.nn.Module) -> list[Beside]:
    cluster = Cluster.read(folder / f"cluster-{ranks}.toml")
    steps = [
        [MeasuredStep(**step) for step in each]
        for each in json.loads((folder / f"steps-{ranks}.json").read_text(encoding="utf-8"))
    ]
    told = [
        mk.forecast(model, replace(strategy, plan=LLAMA_PLAN), cluster, BATCH, profiles=profiles)
        for strategy in strategies(ranks)
    ]
    middle = sorted(steps[0], key=lambda step: step.seconds)[len(steps[0]) // 2]
    by_run = calibrated(cluster, told[0].told, middle)
    return [
        Beside(
            ranks=ranks, strategy=strategy, told=each, traced=each.on(by_run) if each is not told[0] else None, steps=of
        )
        for strategy, each, of in zip(strategies(ranks), told, steps, strict=True)
    ]


def summary(rows: Sequence[Beside]) -> dict[str, Any]:
    """By the level of the cluster."""
    traced = [(row, row.traced) for row in rows if row.traced is not None]
    return {"measured": _summary([(row, row.told) for row in rows]), "traced": _summary(traced)}


def _summary(rows: Sequence[tuple[Beside, Forecast]]) -> dict[str, Any]:
    """Mean error, Spearman's rank correlation, and by how much the forecast's choice is slower than the best of its world."""
    regrets = {}
    for ranks in dict.fromkeys(row.ranks for row, _ in rows):
        of = [(row, told) for row, told in rows if row.ranks == ranks]
        chosen, _ = min(of, key=lambda each: each[1].seconds)
        regrets[str(ranks)] = round(chosen.measured_s / min(row.measured_s for row, _ in of) - 1, 4)
    errors = [told.seconds / row.measured_s - 1 for row, told in rows]
    return {
        "strategies": len(rows),
        "mean_error": round(statistics.mean(map(abs, errors)), 4),
        "signed_error": round(statistics.mean(errors), 4),
        "spearman": round(spearman([told.seconds for _, told in rows], [row.measured_s for row, _ in rows]), 4),
        "regret": regrets,
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
        with torch.device("meta"):
            model = Llama(CONFIG)
        for ranks in (1, 2, 4):
            if not (folder / f"steps-{ranks}.json").exists():
                launch(ranks, folder, options.passes)
            rows += beside(folder, ranks, profiles, model)
    for row in rows:
        traced = f"{row.traced.seconds / row.measured_s - 1:+.1%}" if row.traced is not None else ""
        error = row.told.seconds / row.measured_s - 1
        print(f"{row.ranks} {label(row.strategy):60} {row.told.seconds:.4f} {row.measured_s:.4f} {error:+.1%} {traced}")
    found = summary(rows)
    print(json.dumps(found))
    if options.record:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**environment(), **found, "rows": [row.row() for row in rows]}) + "\n")


if __name__ == "__main__":
    main()
