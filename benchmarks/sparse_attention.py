"""How much faster is attention to chosen blocks than to all keys, and what share of the keys travels?

    python benchmarks/sparse_attention.py --ranks 2 --tokens 16384

Forward and backward of one causal layer in fp32 on gloo ranks, group cast with and without `sparse`, in turn; the median of
the ratios of each round. Queries and keys are random walks with some keys that every query likes, so that near blocks and
these attract: what a choice is good for. Random numbers alone, `--noise`, choose blocks from everywhere.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import tyro
from rows import spread
from torch import Tensor

import meshkit as mk
from meshkit.faults import run_main
from meshkit.parallel.context import Shape, SplitMask, choose, watching_choices
from meshkit.strategy import BlockTopK, ContextPolicy, Sparse, VerticalSlash


@dataclass(frozen=True, kw_only=True)
class Settings:
    ranks: int = 2
    tokens: int = 16_384
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    block: int = 64
    blocks: int = 16
    """that a query sees at most; of vertical-slash half of them are columns"""
    rounds: int = 5
    noise: bool = False


def inputs(settings: Settings) -> list[Tensor]:
    """q, k, v, dout [1, T, heads, D] of the whole sequence."""
    draw = torch.Generator().manual_seed(0)
    sizes = (settings.heads, settings.kv_heads, settings.kv_heads, settings.heads)
    made = [torch.randn(1, settings.tokens, size, settings.head_dim, generator=draw) for size in sizes]
    if not settings.noise:
        walk = torch.randn(1, settings.tokens, settings.kv_heads, settings.head_dim, generator=draw).cumsum(1) / 20
        liked = torch.randn(settings.head_dim, generator=draw)
        made[1] += walk
        made[0] += walk.repeat_interleave(settings.heads // settings.kv_heads, 2) + liked
        made[1][:, torch.randint(settings.tokens, (settings.tokens // 2048,), generator=draw)] += 2 * liked
        made[1][:, :4] += 2 * liked
    return made


def measure(settings: Settings) -> None:
    mesh = mk.init_mesh("cp=-1")
    mask, half = mk.Mask.causal(settings.tokens), settings.blocks // 2
    kinds: dict[str, Sparse | None] = {
        "all keys": None,
        "block top-k": BlockTopK(block=settings.block, top=settings.blocks),
        "vertical-slash": VerticalSlash(block=settings.block, vertical=half, slash=settings.blocks - half),
    }
    shape = Shape(
        heads=settings.heads, kv_heads=settings.kv_heads, head_dim=settings.head_dim, itemsize=4, sum_itemsize=4
    )
    splits = {
        name: SplitMask(
            choose(mask, mesh["cp"].size(), ContextPolicy(scheme="group_cast", sparse=sparse), shape).layout, mesh["cp"]
        )
        for name, sparse in kinds.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    told: dict[str, tuple[int, int]] = {}
    for turn in range(settings.rounds + 1):
        for name, split in splits.items():
            q, k, v, dout = (
                torch.cat([x[:, first:after] for first, after in split.layout.runs[split.rank]], 1).requires_grad_()
                for x in inputs(settings)
            )
            with mk.observe(mesh) as sent, watching_choices() as calls:
                dist.barrier()
                begun = time.perf_counter()
                torch.autograd.grad(split.attend(q, k, v), (q, k, v), dout.detach())
                dist.barrier()
                took = time.perf_counter() - begun
            told[name] = sum(m.size * n for m, n in sent.items() if m.op != "all_reduce"), sum(c.pairs for c in calls)
            if turn:
                seconds[name].append(took)
    sums = torch.tensor(list(told.values()), dtype=torch.int64)
    dist.all_reduce(sums)
    pairs = 2 * settings.heads * mask.area
    if mesh.rank == 0:
        for (name, times), (size, seen) in zip(seconds.items(), sums.tolist(), strict=True):
            faster = spread([one / other for one, other in zip(seconds["all keys"], times, strict=True)])
            share = size / int(sums[0, 0]), (seen or pairs) / pairs
            print(
                f"{name:15} {spread(times).median:7.3f} s, {faster.median:.2f} times as fast ({faster.low:.2f} to "
                f"{faster.high:.2f}); {share[0]:.2f} of the bytes, {share[1]:.3f} of the pairs"
            )


def run_rank(rank: int, settings: Settings, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(settings.ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    run_main(lambda: measure(settings))


def main(settings: Settings) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(run_rank, (settings, port), nprocs=settings.ranks)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
