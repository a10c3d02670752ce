"""Measuring what is unlike: the speed of each block of ranks, and the link between any two, one pair after the other."""

from __future__ import annotations

import time
from functools import partial
from itertools import permutations

import torch
import torch.distributed as dist

from meshkit.cluster._bench import Bench
from meshkit.cluster._unlike import Matrix, Unlike
from meshkit.mesh import host_ranks

ALIKE = 0.05  # of a speed, which is noise
LEAST, MOST, ENOUGH_S = 1 << 16, 1 << 24, 0.05  # bytes of a message; one that takes so long is large enough
ROUNDS, ROUND_S = 5, 0.5  # of products, while all ranks compute
TURNS = 20  # of a small message back and forth


def measure_unlike(bench: Bench, each: int) -> Unlike:
    """Blocks of `each` consecutive ranks. A collective of all ranks.

    speed: of a product while all ranks compute, the slowest rank of a block beside the fastest block. memory_bytes: of GPUs,
    where they differ. Links: between the first ranks of two blocks while all others wait, each way.
    """
    assert bench.group is not None
    blocks = [list(range(first, first + each)) for first in range(0, bench.ranks, each)]
    return Unlike(
        each=each,
        speed=_speeds(bench, blocks),
        memory_bytes=_memories(bench, blocks),
        **_links(bench, [block[0] for block in blocks]),
    )


def memory_bytes(device: torch.device) -> float:
    """Of a GPU what it has; a rank on a CPU is given 8 GiB of the host's."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 2.0**33


def _memories(bench: Bench, blocks: list[list[int]]) -> tuple[float, ...]:
    """Of the device of each block that has least; none where all are alike."""
    own = torch.zeros(bench.ranks, dtype=torch.float64, device=bench.device)
    own[dist.get_rank(bench.group)] = memory_bytes(bench.device)
    dist.all_reduce(own, group=bench.group)
    of_block = tuple(min(own[block].tolist()) for block in blocks)
    return of_block if len(set(of_block)) > 1 else ()


def _speeds(bench: Bench, blocks: list[list[int]]) -> tuple[float, ...]:
    one, other = (torch.randn(size, device=bench.device) for size in ((256, 512), (512, 1024)))
    assert bench.group is not None
    calls = torch.zeros(ROUNDS, bench.ranks, dtype=torch.float64, device=bench.device)
    for each in calls:
        host_ranks(bench.group).barrier()
        end, count = time.perf_counter() + ROUND_S, 0
        while time.perf_counter() < end:
            for _ in range(4):
                one @ other
            if bench.device.type == "cuda":
                torch.cuda.synchronize(bench.device)
            count += 4
        each[dist.get_rank(bench.group)] = count
    dist.all_reduce(calls, group=bench.group)
    of_rank = calls.median(dim=0).values.tolist()
    of_block = [min(of_rank[rank] for rank in block) for block in blocks]
    fastest = max(of_block)
    return tuple(1.0 if own / fastest > 1 - ALIKE else _rounded(own / fastest) for own in of_block)


def _links(bench: Bench, firsts: list[int]) -> dict[str, Matrix]:
    count = len(firsts)
    rates, latencies = ([[0.0] * count for _ in range(count)] for _ in range(2))
    for i, j in permutations(range(count), 2):
        latencies[i][j], rates[i][j] = (_rounded(value) for value in link_between(bench, firsts[i], firsts[j]))
    return {"bytes_per_s": tuple(map(tuple, rates)), "latency_s": tuple(map(tuple, latencies))}


def link_between(bench: Bench, one: int, other: int) -> tuple[float, float]:
    """(seconds of a hop, bytes/s) from one rank to another; the same on all ranks."""
    group, rank = bench.group, dist.get_rank(bench.group)
    small = torch.zeros(1, device=bench.device)

    def there_and_back(message: torch.Tensor) -> None:
        if rank == one:
            dist.send(message, group=group, group_dst=other)
            dist.recv(small, group=group, group_src=other)
        elif rank == other:
            dist.recv(message, group=group, group_src=one)
            dist.send(small, group=group, group_dst=one)

    there_and_back(small)
    hop_s = bench.timed(lambda: there_and_back(small), TURNS) / TURNS / 2
    size = LEAST
    while True:
        message = torch.zeros(size // 4, device=bench.device)
        there_and_back(message)
        took_s = bench.timed(partial(there_and_back, message), 2) / 2
        # Of a link that is far away most of the time is the way there and back.
        if (sent_s := took_s - 2 * hop_s) >= max(ENOUGH_S, hop_s) or size >= MOST:
            return hop_s, size / max(sent_s, 1e-6)
        size *= 4


def _rounded(value: float) -> float:
    """To two digits: what differs less is noise, and blocks that are alike need not be tried in all orders."""
    return float(f"{value:.2g}")
