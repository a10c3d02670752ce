"""What does skipping stages cost in loss, and what does it save on links of unequal speed?

    python -m benchmarks.skip_pipe loss      # trains the demo; some minutes a run on 2 cores
    python -m benchmarks.skip_pipe hops      # simulated; a minute
    python -m benchmarks.skip_pipe shaped    # measured; some minutes, as root, for network namespaces

loss: the demo of examples/llama_pretrain.py on pp=4, a block to a stage, from the same weights on the same tokens: with all
blocks, and with a quarter of the passes through blocks left out (`skip_pipe`), in the model's order or in any. Held-out text
is always evaluated by all blocks.
hops: ranks of three regions in an order drawn at random, messages between regions 20 times as slow as inside; step times by
the simulator, of 1F1B, of the best table that skips nothing (`auto`, as many microbatches alive), and of `skip_pipe`.
shaped: four ranks with a network card each, in two regions that take turns in the pipeline, so that each hop of 1F1B is
between them; such a link is shaped by tc. Steps of all tables in turn, in one run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro

import meshkit as mk
from benchmarks.namespaces import on_switch, run_ranks
from benchmarks.rows import environment, spread
from meshkit.models import LLAMA_PLAN, Llama, LlamaConfig
from meshkit.parallel.pipeline import Schedule, Times, simulate, write_csv
from meshkit.parallel.pipeline.schedules import auto, one_f_one_b, skip_pipe
from meshkit.strategy import PipelinePolicy
from tests.faults.switch import CARD, switch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "skip_pipe.jsonl"
RANKS, MICROBATCHES = 4, 4
TABLES = {
    "all blocks": lambda: one_f_one_b(RANKS, MICROBATCHES),
    "a quarter skipped": lambda: skip_pipe(RANKS, MICROBATCHES, ratio=0.25),
}
LAST = 20  # steps whose losses are averaged
INSIDE_S, BETWEEN_S = 0.2, 4.0  # of a hop, where a forward of a stage takes 1 and a backward 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    what: tyro.conf.Positional[Literal["loss", "hops", "shaped"]]
    steps: int = 200
    seeds: int = 1
    ranks: int = 8
    microbatches: int = 8
    draws: int = 5
    mbit: float = 5.0
    """of a link between regions, where it is shaped"""
    record: bool = False
    """append a row for each run to benchmarks/results/skip_pipe.jsonl"""


def train(name: str, *, steps: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out, table = Path(folder) / "out", Path(folder) / "table.csv"
        write_csv(TABLES[name](), table)
        flags = ["--mesh", f"pp={RANKS}", "--microbatches", str(MICROBATCHES), "--schedule", str(table)]
        flags += ["--steps", str(steps), "--seed", str(seed), "--out", str(out), "--sample-tokens", "1"]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        subprocess.run([*launch, str(ROOT / "examples" / "llama_pretrain.py"), *flags], check=True)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    held_out = [line["held_out_bits_per_byte"] for line in lines if "held_out_bits_per_byte" in line]
    return {
        "question": "loss",
        "table": name,
        "mesh": f"pp={RANKS}",
        "microbatches": MICROBATCHES,
        "steps": steps,
        "seed": seed,
        "loss": round(mean(losses[-LAST:]), 4),
        "held_out_bits_per_byte": round(held_out[-1], 4),
        "curve": [round(loss, 3) for loss in losses],
    }


def hops(ranks: int, seed: int) -> Times:
    generator = random.Random(seed)
    region = [rank % 3 for rank in range(ranks)]
    generator.shuffle(region)
    seconds = {}
    for one in range(ranks):
        for other in range(one):
            base = INSIDE_S if region[one] == region[other] else BETWEEN_S
            seconds[one, other] = seconds[other, one] = base * generator.uniform(0.5, 1.5)
    return Times(hop_s=lambda source, target: seconds[source, target])


def simulated(ranks: int, microbatches: int, draws: int) -> list[dict[str, Any]]:
    """Step times as shares of 1F1B's."""
    shares: dict[str, list[float]] = {}
    for seed in range(draws):
        times = hops(ranks, seed)
        tables = {"auto": auto(ranks, microbatches, times=times, max_live=ranks)}
        for ratio in (0.25, 0.5):
            for reorder in (False, True):
                name = f"skip_pipe(ratio={ratio}, reorder={reorder})"
                tables[name] = skip_pipe(ranks, microbatches, ratio=ratio, reorder=reorder, times=times)
        full_s = simulate(one_f_one_b(ranks, microbatches), times).makespan_s
        for name, table in tables.items():
            shares.setdefault(name, []).append(simulate(table, times).makespan_s / full_s)
    return [
        {
            "question": "hops",
            "table": name,
            "ranks": ranks,
            "microbatches": microbatches,
            "draws": draws,
            "step_over_1f1b": vars(spread(found)),
        }
        for name, found in shares.items()
    ]


SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SEQ_LEN, PASSES, STEPS = 128, 3, 2


def shaped_tables(microbatches: int, times: Times) -> dict[str, Schedule]:
    tables = {"1f1b": one_f_one_b(RANKS, microbatches)}
    for ratio in (0.25, 0.5):
        for reorder in (False, True):
            name = f"skip_pipe(ratio={ratio}, reorder={reorder})"
            tables[name] = skip_pipe(RANKS, microbatches, ratio=ratio, reorder=reorder, times=times)
    return tables


def far_times(far: float) -> Times:
    """Ranks 0 and 2 are one region, 1 and 3 the other: hops between them take `far` forwards of a stage."""
    return Times(hop_s=lambda source, target: INSIDE_S if source % 2 == target % 2 else far)


def shaped_rank(folder: str, microbatches: int, far: float) -> None:
    mesh = mk.init_mesh(f"pp={RANKS}", device_type="cpu", timeout=timedelta(minutes=5))
    tables, runs = shaped_tables(microbatches, far_times(far)), {}
    for name, table in tables.items():
        with torch.device("meta"):
            model = Llama(
                LlamaConfig(vocab_size=512, num_hidden_layers=RANKS, max_position_embeddings=SEQ_LEN, **SHAPE)
            )
        run = mk.parallelize(model, mesh, plan=LLAMA_PLAN, pipeline=PipelinePolicy(schedule=table))
        mk.init_weights(run.model, seed=0, plan=run.plan)
        runs[name] = run, mk.adamw(run, lr=1e-4)
    ids = torch.randint(0, 512, (microbatches, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    seconds: dict[str, list[float]] = {name: [] for name in tables}
    for turn in range(PASSES + 1):  # the first is not counted
        for name, (run, optimizer) in runs.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(STEPS):
                run.forward_backward(batch, microbatches=microbatches)
                optimizer.step()
                optimizer.zero_grad()
            dist.barrier()
            if turn:
                seconds[name].append((time.perf_counter() - began) / STEPS)
    if dist.get_rank() == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def shaped(mbit: float, microbatches: int) -> list[dict[str, Any]]:
    """Step times as shares of 1F1B's, measured."""
    far = 8.0  # a hidden state of 98,304 bytes beside a stage's forward, as the scheduler is told
    with tempfile.TemporaryDirectory() as folder, switch(RANKS) as net:
        for one, other in combinations(range(RANKS), 2):
            if one % 2 != other % 2:
                net.slow_down(one, other, f"{mbit:g}mbit")
        code = f"from benchmarks.skip_pipe import shaped_rank; shaped_rank({folder!r}, {microbatches}, {far})"
        run_ranks([on_switch(net, rank, code) for rank in range(RANKS)], address=net.addresses[0], card=CARD)
        seconds = json.loads(Path(folder, "seconds.json").read_text())
    plain = one_f_one_b(RANKS, microbatches)
    tables, full_s = shaped_tables(microbatches, far_times(far)), simulate(plain, far_times(far)).makespan_s
    return [
        {
            "question": "shaped",
            "table": name,
            "ranks": RANKS,
            "microbatches": microbatches,
            "mbit": mbit,
            "step_s": vars(spread(of)),
            "step_over_1f1b": vars(spread([one / other for one, other in zip(of, seconds["1f1b"], strict=True)])),
            "simulated_over_1f1b": round(simulate(tables[name], far_times(far)).makespan_s / full_s, 3),
        }
        for name, of in seconds.items()
    ]


def main(settings: Settings) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if settings.what == "shaped":
        rows = shaped(settings.mbit, settings.microbatches)
    elif settings.what == "hops":
        rows = simulated(settings.ranks, settings.microbatches, settings.draws)
    else:
        rows = [train(name, steps=settings.steps, seed=seed) for seed in range(settings.seeds) for name in TABLES]
    for row in rows:
        print({key: value for key, value in row.items() if key != "curve"})
        if settings.record:
            with RESULTS.open("a") as file:
                file.write(json.dumps({**environment(), **row}) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
