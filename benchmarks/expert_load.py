"""How even are ranks of ep when busy experts are copied, and for how many bytes?

    python -m benchmarks.expert_load                  # of recorded routings: seconds, no ranks
    python -m benchmarks.expert_load --train          # records them anew: some minutes

A small mixture of experts is trained without any balance, and at each step it is written down how many tokens of each of 8
ranks chose each expert of each layer (benchmarks/results/expert_routings.npz). Each way of placing experts then sees the
steps one after the other: it chooses by the steps before, and its busiest rank is counted with the routing that came. `every
rank` is what `ExpertPolicy(hot=...)` was until it followed the load: the busiest experts copied to all ranks.
Copies are counted as experts that are sent to a rank, in one gather of one layer; a step has two, and sends gradients of each
back.
"""

from __future__ import annotations

import dataclasses
import json
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, quantiles

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.rows import environment
from meshkit.models import Qwen3Moe, Qwen3MoeConfig
from meshkit.models.router import Router
from meshkit.moe.routing import count_experts
from meshkit.parallel.expert import Placement, choose_copies, choose_owners, rank_loads

RESULTS = Path(__file__).parent / "results" / "expert_load.jsonl"
ROUTINGS = Path(__file__).parent / "results" / "expert_routings.npz"
RANKS, EXPERTS, CHOSEN, LAYERS = 8, 32, 4, 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    train: bool = False
    """record the routings anew"""
    first: int = 60
    """step from which routings are recorded"""
    steps: int = 60
    """that are recorded"""
    rows: int = 4
    """of 256 tokens, of each rank"""
    history: int = 5
    every: int = 20
    """steps between two tables of owners"""
    limit: float = 1.1
    """the busiest rank over the mean that is asked for"""
    record: bool = False
    """append a row to benchmarks/results/expert_load.jsonl"""


# ------------------------------------------------------------------------------------------------------- recording


def record_routings(settings: Settings) -> None:
    """Writes [steps, layers, ranks, experts] numbers of tokens."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=48,
        norm_topk_prob=True,
    )
    model = Qwen3Moe(config)
    for param in model.parameters():
        if param.ndim > 1:
            nn.init.normal_(param, std=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    counted: list[Tensor] = []
    rows = RANKS * settings.rows

    def count(module: nn.Module, args: tuple[Tensor, ...], routing: tuple[Tensor, ...]) -> None:
        counted.append(count_experts(routing[0].view(RANKS, -1), EXPERTS))

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(count)
    found = []
    for step, batch in enumerate(batches(rows, settings.first + settings.steps)):
        counted.clear()
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= settings.first:
            found.append(torch.stack(counted).numpy().astype(np.uint16))
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    np.savez_compressed(ROUTINGS, counts=np.stack(found))


def batches(rows: int, steps: int) -> Iterator[Tensor]:
    """Bytes of Python's own standard library, in its order: neighbouring steps are of neighbouring files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    per_step = rows * 257
    for step in range(steps):
        start = step * per_step % (len(values) - per_step)
        yield values[start : start + per_step].view(rows, 257)


# ---------------------------------------------------------------------------------------------------------- placing

Loads = Callable[[np.ndarray], list[int]]
Way = Callable[[list[list[int]], int, int], tuple[Placement, int, Loads | None]]
"""(totals of the last steps, layer, step) -> (placement, experts that change owners, rows of each rank of [ranks, experts];
None: by the shares of the placement)"""


def every_rank(hot: int) -> Way:
    """The busiest experts on all ranks, whose tokens stay where they are."""
    alone = Placement.contiguous(EXPERTS, RANKS)

    def place(recent: list[list[int]], layer: int, step: int) -> tuple[Placement, int, Loads]:
        totals = summed(recent)
        busiest = sorted(range(EXPERTS), key=lambda expert: (-totals[expert], expert))[: hot if any(totals) else 0]
        copies = [[r for r in range(RANKS) if r != alone.owners[e]] if e in busiest else [] for e in range(EXPERTS)]

        def loads(counts: np.ndarray) -> list[int]:
            stay = counts[:, busiest].sum(1)
            sent = np.bincount(alone.owners, _without(counts, busiest))
            return (stay + sent).astype(int).tolist()

        return alone.with_copies(copies), 0, loads

    return place


def _without(counts: np.ndarray, experts: list[int]) -> np.ndarray:
    totals = counts.sum(0).astype(float)
    totals[experts] = 0
    return totals


def by_load(copies: int, *, target: float, every: int = 0, spare: int | None = None) -> Way:
    owners: dict[int, tuple[int, ...]] = {}

    def place(recent: list[list[int]], layer: int, step: int) -> tuple[Placement, int, None]:
        before = owners.setdefault(layer, Placement.contiguous(EXPERTS, RANKS).owners)
        totals, moved, nodes = summed(recent), 0, (0,) * RANKS
        if every and step % every == 1:
            most = None if spare is None else EXPERTS // RANKS + spare
            owners[layer] = choose_owners(before, totals, nodes, ranks=RANKS, most=most)
            moved = sum(a != b for a, b in zip(before, owners[layer], strict=True))
        alone = Placement(RANKS, owners[layer], ((),) * EXPERTS)
        return choose_copies(alone, totals, nodes, most=copies, target=target), moved, None

    return place


def summed(recent: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*recent, strict=True)] or [0] * EXPERTS


def replay(counts: np.ndarray, way: Way, history: int) -> dict[str, float]:
    """counts: [steps, layers, ranks, experts]. The first `history` steps are warm-up and do not count."""
    busiest, copies, moved = list[float](), list[int](), 0
    for layer in range(counts.shape[1]):
        recent: deque[list[int]] = deque(maxlen=history)
        for step, of_ranks in enumerate(counts[:, layer]):
            placement, changed, loads_of = way(list(recent), layer, step)
            totals = of_ranks.sum(0).astype(int).tolist()
            recent.append(totals)
            moved += changed
            if step >= history:
                loads = rank_loads(placement, totals) if loads_of is None else loads_of(of_ranks)
                busiest.append(max(loads) * RANKS / sum(loads))
                copies.append(placement.copies_made)
    return {
        "busiest_over_mean": round(mean(busiest), 3),
        "busiest_over_mean_95": round(quantiles(busiest, n=20)[-1], 3),
        "busiest_over_mean_worst": round(max(busiest), 3),
        "copies": round(mean(copies), 2),
        "experts_moved_a_step": round(moved / counts.shape[0] / counts.shape[1], 2),
    }


def main(settings: Settings) -> None:
    if settings.train:
        record_routings(settings)
    counts = np.load(ROUTINGS)["counts"]
    ways: dict[str, Way] = {"no copies": every_rank(0)}
    ways |= {f"every rank, hot={hot}": every_rank(hot) for hot in (1, 2, 4, 8, 16)}
    for target in (1.05, 1.0):
        ways |= {f"by load, copies={n}, target={target}": by_load(n, target=target) for n in (1, 2, 3)}
    every = settings.every
    ways["owners by load, no copies"] = by_load(0, target=1.05, every=every)
    ways["owners by load, spare=2, no copies"] = by_load(0, target=1.05, every=every, spare=2)
    ways["owners by load, copies=2"] = by_load(2, target=1.05, every=every)
    ways["owners by load, spare=2, copies=2"] = by_load(2, target=1.05, every=every, spare=2)
    found = {name: replay(counts, way, settings.history) for name, way in ways.items()}
    table = Table("experts", "busiest / mean", "95 %", "worst", "copies a layer", "moved a step")
    for name, each in found.items():
        table.add_row(name, *(f"{value:g}" for value in each.values()))
    Console(soft_wrap=True, width=120).print(table)
    fixed, ours = (
        min((e["copies"] for name, e in found.items() if kind in name and e["busiest_over_mean"] <= settings.limit))
        for kind in ("every", "by load")
    )
    print(f"up to {settings.limit}: {fixed:g} copies of a layer on every rank, {ours:g} by load")
    if settings.record:
        row = {**environment(), **dataclasses.asdict(settings), "ranks": RANKS, "experts": EXPERTS, "ways": found}
        del row["record"], row["train"]
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
