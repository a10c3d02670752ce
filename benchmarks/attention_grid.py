"""Which scheme of context parallelism keeps its ranks busy, for which mask, kernel, length and number of ranks?

    python -m benchmarks.attention_grid                   # CPU: 2 and 4 gloo ranks, some minutes
    python -m benchmarks.attention_grid --record          # rows, and docs/pictures/attention_grid.svg
    python -m benchmarks.attention_grid --draw            # the picture of the rows that are there

The grid of the Long-Context Attention Benchmark: mask x kernel x scheme x length x ranks, forward and backward of one layer.
A cell is its efficiency: processor time of one attention of all tokens, over ranks times that of the busiest rank; 1 is
perfect, of work that is split without loss and evenly, and what ranks wait for messages is not in it. Beside it the bytes
that
the busiest rank sends. In a round every scheme and the whole take turns on the same ranks; medians over rounds. Before that
every scheme must give the whole's output and gradients.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

import meshkit as mk
from benchmarks.context import TOL, dist_port, inputs, shape_of, timed
from benchmarks.context import Settings as Layer
from benchmarks.rows import environment
from meshkit.faults import run_main
from meshkit.parallel.context import choose
from meshkit.preflight.observe import observe

RESULTS = Path(__file__).parent / "results" / "attention_grid.jsonl"
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "attention_grid.svg"
SCHEMES = ("ring", "all_gather", "group_cast", "ulysses", "auto")
SOFTCAPS = {"flash": None, "math": 50.0}
"""kernel -> the cap of scores that selects it: no flash kernel of torch caps them"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    ranks: tuple[int, ...] = (2, 4)
    tokens: tuple[int, ...] = (512, 1024)
    kernels: tuple[str, ...] = ("flash", "math")
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rounds: int = 3
    record: bool = False
    """append a row for each cell without the scheme to benchmarks/results/attention_grid.jsonl, and draw them"""
    draw: bool = False
    """draw the rows that are there, of each cell the newest, and measure nothing"""


def masks(tokens: int) -> dict[str, mk.Mask]:
    edges = [0, *(tokens * (2**n - 1) // 31 for n in range(1, 6))]
    return {
        "full": mk.Mask.full(tokens),
        "causal": mk.Mask.causal(tokens),
        "window": mk.Mask.causal(tokens, window=tokens // 8),
        "documents": mk.Mask.documents([after - first for first, after in pairwise(edges)]),
    }


# ------------------------------------------------------------------------------------------------------- measuring


def cells(settings: Settings, mesh: mk.Mesh) -> Iterator[dict[str, Any]]:
    ranks, rank = mesh.spec.world_size, mesh.rank
    alone = mk.context.SplitMask
    for tokens, (kernel, softcap) in product(settings.tokens, SOFTCAPS.items()):
        if kernel not in settings.kernels:
            continue
        layer = Layer(tokens=tokens, heads=settings.heads, kv_heads=settings.kv_heads, head_dim=settings.head_dim)
        full = inputs(layer, mesh.device)
        for name, mask in masks(tokens).items():
            whole_of = choose(mask, 1, mk.strategy.ContextPolicy(), shape_of(layer)).layout
            loops = {"whole": _loop(alone(whole_of, mesh["tp"]), full, softcap)}
            layouts = {}
            for scheme in SCHEMES:
                policy = mk.strategy.ContextPolicy(scheme=scheme)  # type: ignore[arg-type]  # it checks
                layouts[scheme] = layout = choose(mask, ranks, policy, shape_of(layer)).layout
                mine = [torch.cat([x[:, first:after] for first, after in layout.runs[rank]], dim=1) for x in full]
                loops[scheme] = _loop(alone(layout, mesh["cp"]), mine, softcap)
            expected, sent = loops["whole"](), dict[str, int]()
            for scheme, layout in layouts.items():
                with observe(mesh) as seen:
                    found = loops[scheme]()
                sent[scheme] = sum(message.size * times for message, times in seen.items())
                for part, all_tokens in zip(found, expected, strict=True):
                    own = torch.cat([all_tokens[:, first:after] for first, after in layout.runs[rank]], dim=1)
                    worst = float((part - own).abs().max() / all_tokens.abs().max()) if own.numel() else 0.0
                    assert worst <= TOL[layer.dtype], f"{name}, {kernel}, {scheme}: off by {worst:.1e}"
            most = torch.tensor(list(sent.values()))
            dist.all_reduce(most, dist.ReduceOp.MAX)
            busy: dict[str, list[float]] = {each: [] for each in loops}
            for _ in range(settings.rounds):
                for each, loop in loops.items():
                    busy[each].append(timed(loop, mesh).busiest_cpu_s)
            ratios = {each: [w / ranks / t for w, t in zip(busy["whole"], busy[each], strict=True)] for each in SCHEMES}
            yield {
                "mask": name,
                "kernel": kernel,
                "tokens": tokens,
                "ranks": ranks,
                "efficiency": {each: round(statistics.median(values), 3) for each, values in ratios.items()},
                "sent_bytes": dict(zip(sent, most.tolist(), strict=True)),
                "chosen": f"{layouts['auto'].exchange} ulysses={layouts['auto'].ulysses}",
                "whole_cpu_s": round(statistics.median(busy["whole"]), 4),
            }


def _loop(split: mk.context.SplitMask, shards: list[Tensor], softcap: float | None) -> Any:
    def run() -> tuple[Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in shards[:3])
        out = split.attend(q, k, v, softcap=softcap)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), shards[3])

    return run


def run_rank(rank: int, settings: Settings, ranks: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def measure() -> None:
        for cell in cells(settings, mk.init_mesh("cp=-1")):
            if rank == 0:
                with Path(out).open("a") as file:
                    file.write(json.dumps(cell) + "\n")

    run_main(measure)


# --------------------------------------------------------------------------------------------------------- drawing

CELL, HIGH, LEFT, TOP = 58, 22, 150, 92


def draw(rows: list[dict[str, Any]]) -> str:
    """An SVG: a row for each mask and kernel, a column for each scheme, a block of columns for each ranks and length."""
    blocks = sorted({(row["ranks"], row["tokens"]) for row in rows})
    lines = list(dict.fromkeys((row["kernel"], row["mask"]) for row in rows))
    width = LEFT + len(blocks) * (len(SCHEMES) * CELL + 14)
    height = TOP + len(lines) * HIGH + 14 * (len({kernel for kernel, _ in lines}) - 1) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text x="10" y="18">one attention of all tokens over ranks times the busiest rank, in processor time: 1 is '
        "perfect</text>",
        '<text x="10" y="33" font-size="9">small: MiB that the busiest rank sends, forward and backward</text>',
    ]
    found = {(row["ranks"], row["tokens"], row["kernel"], row["mask"]): row for row in rows}
    for number, (ranks, tokens) in enumerate(blocks):
        left = LEFT + number * (len(SCHEMES) * CELL + 14)
        middle = left + len(SCHEMES) * CELL / 2
        parts.append(f'<text x="{middle}" y="54" text-anchor="middle">{ranks} ranks, {tokens} tokens</text>')
        for column, scheme in enumerate(SCHEMES):
            x = left + (column + 0.5) * CELL
            parts.append(f'<text x="{x}" y="70" text-anchor="middle" font-size="9">{scheme}</text>')
        for line, (kernel, mask) in enumerate(lines):
            y = TOP - 14 + line * HIGH + 14 * [*dict.fromkeys(each for each, _ in lines)].index(kernel)
            if number == 0:
                parts.append(f'<text x="10" y="{y + 15}">{kernel}, {mask}</text>')
            row = found[ranks, tokens, kernel, mask]
            for column, scheme in enumerate(SCHEMES):
                value, sent = row["efficiency"][scheme], row["sent_bytes"][scheme] / 2**20
                x = left + column * CELL
                parts += [
                    f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{HIGH - 2}" fill="{_colour(value)}"/>',
                    f'<text x="{x + 4}" y="{y + 14}" fill="#111">{value:.2f}</text>',
                    f'<text x="{x + CELL - 5}" y="{y + 14}" font-size="8" text-anchor="end" fill="#333">{sent:.2g}</text>',
                ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _colour(value: float) -> str:
    """From red at a third through white to green at 1."""
    share = min(max((value - 1 / 3) * 1.5, 0.0), 1.0)
    low, mid, high = (227, 120, 104), (250, 240, 200), (122, 190, 126)
    start, stop, at = (low, mid, share * 2) if share < 0.5 else (mid, high, share * 2 - 1)
    return "#" + "".join(f"{round(a + (b - a) * at):02x}" for a, b in zip(start, stop, strict=True))


def main(settings: Settings) -> None:
    if settings.draw:
        PICTURE.write_text(draw([json.loads(line) for line in RESULTS.read_text().splitlines()]))
        return
    measured: list[dict[str, Any]] = []
    shared = {
        key: value for key, value in asdict(settings).items() if key in ("heads", "kv_heads", "head_dim", "rounds")
    }
    for ranks in settings.ranks:
        with tempfile.NamedTemporaryFile("r") as out, dist_port() as port:
            torch.multiprocessing.start_processes(run_rank, (settings, ranks, port, out.name), nprocs=ranks)
            rows = [{**environment(), **shared, **json.loads(line)} for line in Path(out.name).read_text().splitlines()]
        measured += rows
        if settings.record:
            with RESULTS.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            PICTURE.write_text(draw(measured))
    table = Table("mask", "kernel", "tokens", "ranks", *SCHEMES)
    for cell in measured:
        of_schemes = [f"{cell['efficiency'][s]:.2f} {cell['sent_bytes'][s] / 2**20:.2g}M" for s in SCHEMES]
        table.add_row(cell["mask"], cell["kernel"], str(cell["tokens"]), str(cell["ranks"]), *of_schemes)
    Console(soft_wrap=True, width=120).print(table)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
