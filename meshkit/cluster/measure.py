"""Measuring a cluster (calibration, microbenchmarks): kernels on every rank at the same time, then each collective.

`python -m meshkit measure-cluster`, alone or under torchrun, runs `measure` and writes its file. On CPU over gloo and on GPUs
over NCCL alike; a minute.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, product
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshkit.cluster._bench import Bench
from meshkit.cluster._cluster import Cluster, Host, Measured, Overlap, Tier
from meshkit.cluster._device import Device, Efficiency, KernelCurve, Kernels
from meshkit.cluster._measure_unlike import link_between, measure_unlike, memory_bytes
from meshkit.core._torch import TorchDispatchMode
from meshkit.mesh import host_ranks

SHAPES = {"cpu": ((32, 256, 2048), (64, 256, 1024)), "cuda": ((512, 2048, 8192), (1024, 4096, 8192))}
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.bfloat16,)}
# Of tensors whose kernels are bound by the memory.
ELEMENTS = {"cpu": (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24), "cuda": (1 << 20, 1 << 23, 1 << 27)}
COLD_BYTES, MOST_OPERANDS = 1 << 26, 64  # of the operands that take turns
# What ranks of a CPU compute between two messages.
BESIDE, PRODUCTS = ((256, 512), (512, 1024)), 4
MESSAGES = tuple(1 << power for power in (8, 12, 15, 18, 20, 22, 24))  # bytes


def measure(
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
    ranks_per_node: int | None = None,
    unlike: bool = False,
) -> Cluster:
    """The cluster that these ranks are. group: of all ranks; None measures one rank alone. A collective.

    ranks_per_node: default all of them. Curves of collectives are of all ranks, of halves, quarters and so on; of other
    numbers the nearest is scaled as the model is.
    unlike: in place of those, the speed of each node, or of each rank of one node, and the links between any two; `device`
    is the fastest rank's, with the memory of the largest.
    """
    bench = Bench(device=device, group=group, fastest=unlike)
    curves = [_products(bench, dtype) for dtype in DTYPES[device.type]]
    peaks = {curve.dtype: max(2 * m * n * k / s for m, n, k, s in curve.points) for curve in curves}
    dtype = DTYPES[device.type][0]
    forward, backward = _attention(bench, dtype, peaks[curves[0].dtype])
    kernels: Kernels = "cuda" if device.type == "cuda" else "cpu"
    memory = _memory(bench, dtype)
    host = Host(cores=_cores(bench)) if kernels == "cpu" else Host()
    found = Device(
        name=torch.cuda.get_device_name(device) if kernels == "cuda" else f"CPU core beside {bench.ranks - 1} others",
        memory_bytes=memory_bytes(device),
        memory_bytes_per_s=memory[-1][0] / memory[-1][1],
        memory_curve=memory,
        flops_per_s=peaks,
        launch_s=_launch_s(bench),
        kernels=kernels,
        efficiency=Efficiency(matmul=1.0, attention=forward, attention_backward=backward, memory=1.0),
        curves=tuple(curves),
    )
    together = group is not None and bench.ranks > 1
    collectives = _collectives(bench) if together and not unlike else ()
    largest = max((size / s for each in collectives for size, s in each.points), default=1e9)
    least = min((s for each in collectives for _, s in each.points), default=1e-5)
    tier = Tier(name="all", ranks=max(bench.ranks, ranks_per_node or 1), bytes_per_s=largest, latency_s=least)
    # What runs at the same time on a CPU shares its cores: each of two takes twice as long.
    overlap = Overlap(compute_slower=2.0, collective_slower=2.0) if kernels == "cpu" else Overlap()
    cluster = Cluster(
        name="measured",
        device=found,
        tiers=(tier,),
        collectives=collectives,
        overlap=overlap,
        host=host,
        level="measured",
        source=f"measure-cluster on {bench.ranks} ranks, torch {torch.__version__}",
    )
    return _with_unlike(cluster, bench, ranks_per_node or bench.ranks) if unlike and together else cluster


def _with_unlike(cluster: Cluster, bench: Bench, per_node: int) -> Cluster:
    """Tiers are the best links that were found."""
    each = per_node if per_node < bench.ranks else 1
    bench = replace(bench, fastest=False)
    found = measure_unlike(bench, each)
    links = [(i, j) for i in range(found.blocks) for j in range(found.blocks) if i != j]
    outer = Tier(
        name="all",
        ranks=bench.ranks,
        bytes_per_s=max(found.bytes_per_s[i][j] for i, j in links),
        latency_s=min(found.latency_s[i][j] for i, j in links),
        per="group" if each > 1 else "rank",
    )
    inner: tuple[Tier, ...] = ()
    if each > 1:
        hop_s, rate = link_between(bench, 0, 1)
        inner = (Tier(name="node", ranks=each, bytes_per_s=rate, latency_s=hop_s),)
    largest = replace(cluster.device, memory_bytes=max(found.memory_bytes, default=cluster.device.memory_bytes))
    return replace(cluster, device=largest, tiers=(*inner, outer), unlike=found)


def _in_turn(bench: Bench, dtype: torch.dtype, *sizes: tuple[int, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Other operands of these sizes each time, as a step has them: those of the last call still lie in a cache."""
    count = min(MOST_OPERANDS, -(-COLD_BYTES // (sum(map(prod, sizes)) * dtype.itemsize)))
    return cycle([tuple(torch.randn(size, dtype=dtype, device=bench.device) for size in sizes) for _ in range(count)])


def _products(bench: Bench, dtype: torch.dtype) -> KernelCurve:
    rows, features = SHAPES[bench.device.type]
    points = []
    for m, n, k in product(rows, features, features):
        operands = _in_turn(bench, dtype, (m, k), (k, n))
        points.append((float(m), float(n), float(k), bench.seconds(lambda of=operands: torch.mm(*next(of)))))  # type: ignore[misc]
    return KernelCurve(dtype=str(dtype).removeprefix("torch."), points=tuple(points))


def _cores(bench: Bench) -> float:
    """Ranks that compute at once as if each were alone: by how much slower a product is while all ranks compute."""
    one, other = (torch.randn(256, 512), torch.randn(512, 512))
    together_s = bench.seconds(lambda: one @ other)
    alone = Bench(device=bench.device)
    alone_s = 0.0
    for rank in range(bench.ranks):  # the others wait, and compute nothing
        if bench.group is not None:
            host_ranks(bench.group).barrier()
        if bench.group is None or dist.get_rank(bench.group) == rank:
            alone_s = alone.seconds(lambda: one @ other)
    alone_s = bench.agreed(alone_s)
    return min(float(bench.ranks), bench.ranks * alone_s / together_s)


def _memory(bench: Bench, dtype: torch.dtype) -> tuple[tuple[float, float], ...]:
    """(bytes read and written, seconds) of kernels that are bound by the memory, by size: what fits a cache is faster, and
    what is so large that the system gives its pages anew each time is slower.
    """
    curve = []
    for elements in ELEMENTS[bench.device.type]:
        operands, size = _in_turn(bench, dtype, (elements,), (elements,)), elements * dtype.itemsize
        runs: Sequence[tuple[Callable[[], Tensor], int]] = (
            (lambda of=operands: torch.add(*next(of)), 3),  # type: ignore[misc]
            (lambda of=operands: next(of)[0].clone(), 2),  # type: ignore[misc]
            (lambda of=operands: F.silu(next(of)[0]), 2),  # type: ignore[misc]
        )
        rate = statistics.harmonic_mean([tensors * size / bench.seconds(run) for run, tensors in runs])
        curve.append((2.0 * size, 2.0 * size / rate))
    return tuple(curve)


def _attention(bench: Bench, dtype: torch.dtype, peak: float) -> tuple[float, float]:
    """(share of the peak in forward, backward's share of that)."""
    rows, heads, tokens, width = (2, 4, 512, 64) if bench.device.type == "cpu" else (4, 16, 4096, 128)
    q, k, v = (
        torch.randn(rows, heads, tokens, width, dtype=dtype, device=bench.device, requires_grad=True) for _ in range(3)
    )
    work = 4.0 * rows * heads * tokens * tokens * width * (tokens + 1) / (2 * tokens)
    with torch.no_grad():
        forward_s = bench.seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    grad = torch.randn(rows, heads, tokens, width, dtype=dtype, device=bench.device)
    both_s = bench.seconds(
        lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)
    )
    forward = min(1.0, work / forward_s / peak)
    return forward, min(1.0, 2.5 * work / max(both_s - forward_s, 1e-9) / peak / forward)


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels: int = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.kernels += not func.is_view
        return func(*args, **(kwargs or {}))


def _launch_s(bench: Bench) -> float:
    """Host seconds of a kernel in a module's forward and backward, Python and autograd with it."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU()) for _ in range(8)))
    model.to(bench.device)
    x = torch.randn(4, 8, device=bench.device)
    with _Count() as count:
        model(x).sum().backward()
    kernels: int = count.kernels
    return bench.seconds(lambda: model(x).sum().backward()) / kernels


def _collectives(bench: Bench) -> tuple[Measured, ...]:
    """Of all ranks, and of halves, quarters, ... of them at the same time, as the groups of a mesh's axis are."""
    sizes = [bench.ranks]
    while sizes[-1] % 2 == 0 and sizes[-1] > 2:
        sizes.append(sizes[-1] // 2)
    measured: list[Measured] = []
    for size in sizes:
        group = bench.group
        if size < bench.ranks:
            group, _ = dist.new_subgroups(size)
        measured += _collectives_of(bench, group, size)
    return tuple(measured)


def _collectives_of(bench: Bench, group: dist.ProcessGroup | None, n: int) -> list[Measured]:
    """Messages between two ranks are measured once, by a ring of all."""
    device, measured = bench.device, []
    operands = _in_turn(bench, torch.float32, *BESIDE)

    def compute() -> None:
        for _ in range(PRODUCTS):
            torch.mm(*next(operands))

    def took(run: Callable[[], object]) -> float:
        return bench.more_seconds(compute, run) if device.type == "cpu" else bench.seconds(run)

    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", *(["send"] if n == bench.ranks else [])):
        points = []
        for size in MESSAGES:
            elements = max(n, size // 4 // n * n)
            whole, part = torch.zeros(elements, device=device), torch.zeros(elements // n, device=device)
            other = torch.zeros_like(whole)
            runs: dict[str, Callable[[], object]] = {
                "all_reduce": lambda whole=whole: dist.all_reduce(whole, group=group),  # type: ignore[misc]
                "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part, group=group),  # type: ignore[misc]
                "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole, group=group),  # type: ignore[misc]
                "all_to_all": lambda whole=whole, other=other: dist.all_to_all_single(other, whole, group=group),  # type: ignore[misc]
                "send": lambda whole=whole, other=other: _to_the_next(whole, other, group),  # type: ignore[misc]
            }
            leaves = elements * 4 * ((n - 1) / n if op == "all_to_all" else 1)
            points.append((leaves, took(runs[op])))
        sizes, seconds = zip(*points, strict=True)
        growing = tuple(zip(sizes, _never_falling(seconds), strict=True))
        ranks = 2 if op == "send" else n
        measured.append(Measured(op=op, tier="all", ranks=ranks, points=growing))
    return measured


def _never_falling(values: Sequence[float]) -> list[float]:
    """The nearest sequence, by squares, that does not fall (isotonic regression): no larger message is faster."""
    pools: list[tuple[float, int]] = []  # (mean, how many)
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, n), (other, m) = pools[-2:]
            pools[-2:] = [((one * n + other * m) / (n + m), n + m)]
    return [mean for mean, count in pools for _ in range(count)]


def _to_the_next(whole: Tensor, other: Tensor, group: dist.ProcessGroup | None) -> None:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    sends = [
        dist.P2POp(dist.isend, whole, (rank + 1) % n, group),
        dist.P2POp(dist.irecv, other, (rank - 1) % n, group),
    ]
    for work in dist.batch_isend_irecv(sends):
        work.wait()


def write_measured(path: Path, device_type: str, *, unlike: bool = False) -> Cluster:
    """Measure on the ranks of the launcher, or on this one alone; the first rank writes the file. unlike: see `measure`."""
    from datetime import timedelta

    from meshkit.mesh.world import start_world

    start_world(device_type, timedelta(minutes=5))
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    try:
        alone = dist.get_world_size() == 1
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) if unlike else 0
        cluster = measure(
            device, group=None if alone else dist.group.WORLD, ranks_per_node=per_node or None, unlike=unlike
        )
        if dist.get_rank() == 0:
            cluster.write(path)
    finally:
        dist.destroy_process_group()
    return cluster
