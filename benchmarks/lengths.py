"""How much faster is a step whose documents are shared out by their lengths than one with static context parallelism?

    python benchmarks/lengths.py                 # simulated: no ranks and no tensors, 64 and 256 GPUs
    python benchmarks/lengths.py --ranks 4       # measured: gloo ranks, the longest document is 32 times the median

Simulated are steps of Llama 3 8B in bf16 by `meshkit.parallel.lengths`' costs, messages not hidden: static groups, of the
fastest of all sizes that have room for the longest document, against each rule. Lengths are mixtures of log-normal bodies and
Pareto tails, cut at the context. Measured are whole training steps of one model on the same documents, in turn; a ratio is
taken within a round, of wall-clock and of the processor time of the busiest rank, which is the wall-clock with a core for
each rank.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from rows import environment, spread
from torch import Tensor

import meshkit as mk
from meshkit.errors import DataError
from meshkit.faults import run_main
from meshkit.parallel.lengths import Documents, LengthCosts, LengthPlan, Pace, plan_lengths
from meshkit.strategy import ContextPolicy, Rule

RESULTS = Path(__file__).parent / "results" / "lengths.jsonl"


@dataclass(frozen=True, kw_only=True)
class Settings:
    ranks: int = 0
    """measure on so many processes; 0 simulates"""
    steps: int = 1
    """simulated steps of each cell"""
    rounds: int = 7
    """measured"""
    record: bool = False
    """append rows to benchmarks/results/lengths.jsonl"""


# ------------------------------------------------------------------------------------------------------ simulated


@dataclass(frozen=True)
class Mixture:
    """share of documents in the log-normal body, of which `mu` and `sigma` are the logarithms' mean and deviation; the others
    are Pareto of this exponent from `start` tokens on."""

    share: float
    mu: float
    sigma: float
    start: float
    exponent: float

    def draw(self, total: int, longest: int, seed: int) -> list[int]:
        """Documents of `total` tokens together, the first of which is the longest that the context takes."""
        random = np.random.default_rng(seed)
        lengths, left = [longest], total - longest
        while left > 0:
            body = random.random() < self.share
            length = random.lognormal(self.mu, self.sigma) if body else self.start * (1 + random.pareto(self.exponent))
            lengths.append(int(min(left, longest, length + 1)))
            left -= lengths[-1]
        return lengths


# GitHub: 80 % of documents below 4,096 tokens, and a tail that holds most tokens, as ByteScale reports; the web has shorter
# tails, an encyclopedia hardly any.
MIXTURES = {
    "github": Mixture(0.92, 7.0, 1.3, 8192, 0.9),
    "common crawl": Mixture(0.97, 6.6, 1.2, 4096, 1.2),
    "wikipedia": Mixture(0.99, 6.2, 1.0, 2048, 1.5),
}
CONTEXTS = (192 << 10, 384 << 10)
RANKS = (64, 256)
# GPUs of 80 GB hold about so many tokens of a microbatch, and a step has so many for each GPU.
TOKENS_PER_RANK, TOKENS_PER_STEP = 16 << 10, 32 << 10
# A layer of Llama 3 8B: 32 query and 8 key/value heads of 128, 218 million weights. 4e14 FLOP/s; 200 and 40 GB/s.
COSTS = LengthCosts(
    pair_s=14 * 32 * 128 / 4e14,
    token_s=6 * 218e6 / 4e14,
    key_bytes=2 * 8 * 128 * (2 * 2 + 4),
    near_bytes_per_s=2e11,
    far_bytes_per_s=4e10,
)
HEAD_BYTES = 2 * 2 * 2 * (32 + 8) * 128  # of a token that Ulysses trades, forward and backward, bf16


@dataclass(frozen=True)
class Static:
    seconds: float
    bytes: float
    size: int


def static(lengths: list[int], ranks: int, *, heads: bool) -> Static:
    """Groups of one size for all microbatches, the least that holds the longest document or the fastest larger one.

    heads: Ulysses, of at most 32 ranks as there are heads, else a ring in zigzag. Documents are packed, longest first, into
    rows of a group's tokens (first fit in order); each group takes rows in turn, and a microbatch lasts as long as its
    slowest group.
    """
    found = []
    for size in (1 << power for power in range(ranks.bit_length())):
        if size * TOKENS_PER_RANK < max(lengths) or (heads and size > 32):
            continue
        capacity, rows, room = size * TOKENS_PER_RANK, [[0.0, 0.0]], [size * TOKENS_PER_RANK]
        for length in np.random.default_rng(0).permutation(lengths).tolist():
            if room[-1] < length:  # rows are filled in the order in which documents come, as they are packed today
                rows.append([0.0, 0.0])
                room.append(capacity)
            room[-1] -= length
            rows[-1][0] += length
            rows[-1][1] += length * (length + 1) / 2
        groups = ranks // size
        bandwidth = COSTS.near_bytes_per_s if size <= COSTS.node else COSTS.far_bytes_per_s
        seconds = sent = 0.0
        for first in range(0, len(rows), groups):
            times = []
            for tokens, pairs in rows[first : first + groups]:
                moved = (
                    tokens * (1 - 1 / size) / size * HEAD_BYTES if heads else tokens * (1 - 1 / size) * COSTS.key_bytes
                )
                times.append((COSTS.token_s * tokens + COSTS.pair_s * pairs) / size + moved / bandwidth)
                sent += moved * size
            seconds += max(times)
        found.append(Static(seconds, sent, size))
    return min(found, key=lambda each: each.seconds) if found else Static(float("inf"), 0.0, 0)


# "step": ranks wait at the end of a step only, as with zero=1, which ByteScale assumes.
RULES: dict[tuple[str, Rule], Pace] = {
    ("by_length", "by_length"): "microbatch",
    ("by_length, zero=1", "by_length"): "step",
    ("flexsp", "flexsp"): "microbatch",
    ("bytescale", "bytescale"): "step",
    ("zeppelin", "zeppelin"): "microbatch",
}
MICROBATCHES = (3, 4, 8)  # of which every rule takes the number that is fastest for it


def planned(documents: Documents, ranks: int, microbatches: int, pace: Pace, rule: Rule) -> LengthPlan | None:
    """None where so many microbatches have no room."""
    try:
        return plan_lengths(
            documents,
            ranks=ranks,
            costs=COSTS,
            microbatches=microbatches,
            tokens_per_rank=TOKENS_PER_RANK,
            pace=pace,
            rule=rule,
        )
    except DataError:
        return None


def simulate(settings: Settings) -> list[dict[str, Any]]:
    """A row for each (mixture, context, ranks): milliseconds of a layer and gigabytes of each rule, means over steps."""
    rows = []
    for (name, mixture), longest, ranks in product(MIXTURES.items(), CONTEXTS, RANKS):
        total = ranks * TOKENS_PER_STEP
        if longest > total // 4:
            continue
        row: dict[str, Any] = {"mixture": name, "context": longest, "ranks": ranks, "rules": {}}
        steps = [mixture.draw(total, longest, seed) for seed in range(settings.steps)]
        for kind, heads in (("static ring", False), ("static ulysses", True)):
            taken = [static(lengths, ranks, heads=heads) for lengths in steps]
            row["rules"][kind] = {
                "ms": round(1e3 * statistics.mean(each.seconds for each in taken), 3),
                "gigabytes": round(1e-9 * statistics.mean(each.bytes for each in taken), 3),
                "cp": taken[0].size,
            }
        for (label, rule), pace in RULES.items():
            plans = []
            begin = time.process_time()
            for lengths in steps:
                documents = Documents.causal(lengths)
                tried = [planned(documents, ranks, count, pace, rule) for count in MICROBATCHES]
                plans.append(
                    min((plan for plan in tried if plan is not None), key=lambda plan: plan.step_s, default=None)
                )
            if None in plans:  # it finds no room, however many microbatches
                continue
            taken_s = (time.process_time() - begin) / len(steps) / len(MICROBATCHES)
            row["rules"][label] = {
                "ms": round(1e3 * statistics.mean(plan.step_s for plan in plans), 3),
                "gigabytes": round(1e-9 * statistics.mean(plan.sent_bytes for plan in plans), 3),
                "tokens": max(plan.most_tokens for plan in plans),
                "max_over_mean": round(statistics.mean(plan.max_over_mean for plan in plans), 4),
                "plan_s": round(taken_s, 3),
            }
        rows.append(row)
        print(f"{name}, context {longest >> 10}K, {ranks} GPUs", file=sys.stderr)
    return rows


def summary(rows: list[dict[str, Any]]) -> Table:
    """Of each cell the speed of each rule over the faster static groups."""
    names = [name for name in rows[0]["rules"] if not name.startswith("static")]
    table = Table(
        "mixture", "context", "GPUs", "static cp", *names, "max/mean", "plan s", title="speed over static groups"
    )
    for row in rows:
        rules = row["rules"]
        best = min((rules[name] for name in rules if name.startswith("static")), key=lambda each: each["ms"])
        speeds = [f"{best['ms'] / rules[name]['ms']:.2f}" for name in names]
        own = rules["by_length"]
        cells = (row["mixture"], f"{row['context'] >> 10}K", str(row["ranks"]), str(best["cp"]))
        table.add_row(*cells, *speeds, f"{own['max_over_mean']:.3f}", f"{own['plan_s']:.2f}")
    return table


# ------------------------------------------------------------------------------------------------------- measured

LONGEST, MEDIAN, SHORT = 4096, 128, 56  # so many short documents beside the long one
SHAPE = mk.models.LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
# A core, and messages through the loopback.
CPU = mk.strategy.Rates(flops_per_s=2e10, link_bytes_per_s=1e9, network_bytes_per_s=1e9)
RUNS = {
    "by_length, cp=4": ("cp=4", ContextPolicy(groups="by_length", rates=CPU)),
    "static cp=4": ("cp=4", ContextPolicy()),
    "static cp=4, ring": ("cp=4", ContextPolicy(scheme="ring", balance="per_document")),
    "static cp=2 x dp=2": ("dp_shard=2 cp=2", ContextPolicy()),
    "static cp=2 x dp=2, ring": ("dp_shard=2 cp=2", ContextPolicy(scheme="ring", balance="per_document")),
}


def documents_of(rank: int, ranks: int) -> dict[str, Tensor]:
    """A row for each data rank, of the documents that fill it about evenly; padding is documents of their own."""
    random = np.random.default_rng(0)
    lengths = [LONGEST, *(int(each) + 1 for each in random.lognormal(np.log(MEDIAN), 0.5, SHORT))]
    ids = [torch.from_numpy(random.integers(0, SHAPE.vocab_size, length + 1)) for length in lengths]
    rows: list[list[int]] = [[] for _ in range(ranks)]
    for index in np.argsort([-length for length in lengths], kind="stable").tolist():
        min(rows, key=lambda row: sum(lengths[each] for each in row)).append(index)
    longest = max(sum(lengths[each] for each in row) for row in rows)
    rest = longest - sum(lengths[each] for each in rows[rank])
    inputs = torch.cat([*(ids[each][:-1] for each in rows[rank]), torch.zeros(rest, dtype=torch.int64)])
    labels = torch.cat([*(ids[each][1:] for each in rows[rank]), torch.full((rest,), -100)])
    positions = torch.cat([*(torch.arange(lengths[each]) for each in rows[rank]), torch.zeros(rest, dtype=torch.int64)])
    return {"input_ids": inputs[None], "labels": labels[None], "position_ids": positions[None]}


def measure(settings: Settings) -> None:
    runs = {}
    for name, (spec, policy) in RUNS.items():
        mesh = mk.init_mesh(spec)
        torch.manual_seed(0)
        run = mk.parallelize(mk.models.Llama(SHAPE), mesh, plan=mk.models.LLAMA_PLAN, context=policy)
        runs[name] = run, documents_of(mesh.data_rank, mesh.data_ranks)
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in RUNS}
    losses = {}
    for index in range(settings.rounds + 1):
        for name, (run, batch) in runs.items():
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            losses[name] = run.forward_backward(batch).item()
            busy = torch.tensor([time.process_time() - cpu])
            dist.all_reduce(busy, dist.ReduceOp.MAX)
            if index:  # the first round proves and warms up
                turns[name].append((time.perf_counter() - begin, float(busy)))
            for param in run.parameters():
                param.grad = None
    assert max(losses.values()) - min(losses.values()) < 1e-5, losses
    if dist.get_rank():
        return
    own = next(iter(RUNS))
    plan = mk.context.context_of(runs[own][0].model).plan
    table = Table("against", "tokens/s", "with a core for each rank", "s", title=str(plan))
    for name, taken in turns.items():
        pairs = list(zip(taken, turns[own], strict=True))
        wall, busiest = (spread([other[at] / mine[at] for other, mine in pairs]) for at in (0, 1))
        cells = [f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" for ratio in (wall, busiest)]
        table.add_row(name, *cells, f"{statistics.median(wall_s for wall_s, _ in taken):.2f}")
        if settings.record:
            row = {**environment(), "kind": "measured", "against": name, "ranks": settings.ranks}
            row |= {"speed": asdict(wall), "busiest_rank_cpu": asdict(busiest), "rounds": settings.rounds}
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    Console(width=150).print(table)


def run_rank(rank: int, settings: Settings, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(settings.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run_main(lambda: measure(settings))


@contextmanager
def free_port() -> Iterator[int]:
    """A port that was free a moment ago."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield port


def main(settings: Settings) -> None:
    if settings.ranks:
        with free_port() as port:
            torch.multiprocessing.start_processes(run_rank, (settings, port), nprocs=settings.ranks)
        return
    rows = simulate(settings)
    Console(soft_wrap=True, width=150).print(summary(rows))
    if settings.record:
        with RESULTS.open("a") as file:
            for row in rows:
                file.write(json.dumps({**environment(), "kind": "simulated", "steps": settings.steps, **row}) + "\n")
    faster = [row["rules"] for row in rows]
    for own, name in product(
        ("by_length", "by_length, zero=1"), ("flexsp", "bytescale", "zeppelin", "the better of both")
    ):
        others = [
            min(each["flexsp"]["ms"], each["bytescale"]["ms"]) if name == "the better of both" else each[name]["ms"]
            for each in faster
        ]
        ratios = [other / each[own]["ms"] for other, each in zip(others, faster, strict=True)]
        print(f"{own} over {name}: {statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
