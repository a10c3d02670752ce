"""How evenly do assignments of packed documents share the work of attention, and what do they send for it?

    python benchmarks/context_balance.py

No ranks and no tensors: counts of visible pairs and of keys. 20 packings of 131,072 tokens, causal documents whose lengths
are log-normal (mu 7, sigma 1.5) or Pareto (0.8, from 200 tokens) with even odds. Work is that of the busiest rank over the
mean; KV is what ranks receive over what a full ring brings them; time is that of planning over per-document zigzag's.
"""

from __future__ import annotations

import heapq
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Column, Table
from rows import environment

from meshkit.mask import Interval, Mask
from meshkit.parallel.context._assign import Runs, assign, received, work

RESULTS = Path(__file__).parent / "results" / "context_balance.jsonl"
TOKENS = 131_072
PACKINGS = 20
RANKS = (8, 16, 32)
SPREADS = (0.05, 0.1, 0.25, 0.5, 1.0)
SLACKS = (0.05, 0.1, 0.2, 0.5)

Planner = Callable[[Mask, int], list[Runs]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    record: bool = False
    """Append a row per assignment to benchmarks/results/context_balance.jsonl."""


def packing(seed: int) -> Mask:
    draw, documents = np.random.default_rng(seed), list[int]()
    while left := TOKENS - sum(documents):
        log_normal, pareto = draw.lognormal(7, 1.5), 200 * (1 + draw.pareto(0.8))
        documents.append(min(left, int(log_normal if draw.random() < 0.5 else pareto)))
    return Mask.documents(documents)


# --------------------------------------------------------------------------------------------- what others do


def largest_first(mask: Mask, parts: int, *, chunk: int) -> list[Runs]:
    """Equal chunks, those with the most work first, to the least loaded rank with room: as MagiAttention dispatches."""
    chunks = [((first, min(first + chunk, mask.tokens)),) for first in range(0, mask.tokens, chunk)]
    pairs = work(mask, chunks)
    runs_of_rank: list[list[Interval]] = [[] for _ in range(parts)]
    loads = [(0, rank) for rank in range(parts)]
    for index in sorted(range(len(chunks)), key=lambda index: -pairs[index]):
        load, rank = heapq.heappop(loads)
        runs_of_rank[rank] += chunks[index]
        if len(runs_of_rank[rank]) < -(-len(chunks) // parts):
            heapq.heappush(loads, (load + pairs[index], rank))
    return [tuple(sorted(runs)) for runs in runs_of_rank]


def spread_out(mask: Mask, parts: int, *, spread: float) -> list[Runs]:
    """Each document, longest first, in zigzag over as few of the least loaded ranks as keep its part of each small.

    Small: at most `spread` of a rank's mean work, and of its tokens; every rank holds equally many tokens.
    """
    runs_of_rank: list[list[Interval]] = [[] for _ in range(parts)]
    room, loads, target = [-(-mask.tokens // parts)] * parts, [0] * parts, mask.area / parts
    for first, after in sorted(mask.components, key=lambda document: document[0] - document[1]):
        length = after - first
        pairs = length * (length + 1) / 2
        fewest = int(np.ceil(max(pairs / (spread * target), length / (spread * mask.tokens / parts))))
        order = sorted((rank for rank in range(parts) if room[rank]), key=lambda rank: (loads[rank], rank))
        while sum(room[rank] for rank in order[:fewest]) < length:
            fewest += 1
        members = order[:fewest]
        sizes = even_sizes(length, [room[rank] for rank in members])
        edges = pairwise(
            accumulate([size // 2 for size in sizes] + [size - size // 2 for size in reversed(sizes)], initial=first)
        )
        for rank, (low, high) in zip([*members, *reversed(members)], edges, strict=True):
            runs_of_rank[rank].append((low, high))
            room[rank] -= high - low
            loads[rank] += (high - low) * (low + high + 1 - 2 * first) // 2
    return [tuple(sorted(run for run in runs if run[0] < run[1])) for runs in runs_of_rank]


def even_sizes(total: int, room: list[int]) -> list[int]:
    """As even as the rooms allow."""
    sizes = [0] * len(room)
    for done, index in enumerate(sorted(range(len(room)), key=room.__getitem__)):
        sizes[index] = min(room[index], -(-total // (len(room) - done)))
        total -= sizes[index]
    return sizes


PLANNERS: dict[str, Planner] = {
    "contiguous": partial(assign, balance="contiguous"),
    "zigzag of the whole": partial(assign, balance="zigzag"),
    "zigzag per document": partial(assign, balance="per_document"),
    "largest first, 512 tokens": partial(largest_first, chunk=512),
    **{f"greedy, spread {spread}": partial(spread_out, spread=spread) for spread in SPREADS},
    "locality": partial(assign, balance="locality"),
    **{f"locality, slack {slack}": partial(assign, balance="locality", slack=slack) for slack in SLACKS},
}


# ------------------------------------------------------------------------------------------------------ measures


@dataclass(frozen=True, kw_only=True)
class Found:
    """Means over packings; `worst` is of all of them. kv_max: of the rank that receives most."""

    work: float
    work_worst: float
    kv: float
    kv_max: float
    runs: float
    """of a rank"""
    plan_ms: float


def measure(planner: Planner, masks: list[Mask], ranks: int) -> Found:
    rows = []
    for mask in masks:
        start = time.process_time()
        assignment = planner(mask, ranks)
        plan_s = time.process_time() - start
        ring = TOKENS - TOKENS / ranks
        keys = [count / ring for count in received(mask, assignment)]
        imbalance = max(work(mask, assignment)) * ranks / mask.area
        rows.append((imbalance, statistics.mean(keys), max(keys), sum(map(len, assignment)) / ranks, 1e3 * plan_s))
    imbalances, kv, kv_max, runs, plan_ms = zip(*rows, strict=True)
    return Found(
        work=statistics.mean(imbalances),
        work_worst=max(imbalances),
        kv=statistics.mean(kv),
        kv_max=statistics.mean(kv_max),
        runs=statistics.mean(runs),
        plan_ms=statistics.median(plan_ms),
    )


def table(ranks: int, measured: dict[str, Found]) -> Table:
    titles = ("work (worst)", "KV (max rank)", "runs a rank", "plan ms", "time")
    out = Table(f"{ranks} ranks", *(Column(title, justify="right") for title in titles))
    for name, row in measured.items():
        ratio = row.plan_ms / measured["zigzag per document"].plan_ms
        out.add_row(
            name,
            f"{row.work:.3f} ({row.work_worst:.3f})",
            f"{row.kv:.2f} ({row.kv_max:.2f})",
            f"{row.runs:.0f}",
            f"{row.plan_ms:.1f}",
            f"{ratio:.2f}",
        )
    return out


def main(settings: Settings) -> None:
    masks = [packing(seed) for seed in range(PACKINGS)]
    results = {ranks: {name: measure(plan, masks, ranks) for name, plan in PLANNERS.items()} for ranks in RANKS}
    for ranks, measured in results.items():
        Console(soft_wrap=True, width=110).print(table(ranks, measured))
    if settings.record:
        common = {**environment(), "tokens": TOKENS, "packings": PACKINGS}
        with RESULTS.open("a") as file:
            for ranks, measured in results.items():
                for name, row in measured.items():
                    numbers = {key: round(value, 4) for key, value in asdict(row).items()}
                    file.write(json.dumps({**common, "ranks": ranks, "assignment": name, **numbers}) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
