"""Is context-parallel attention as fast as it can be, and what does splitting it cost?

    python -m benchmarks.context --ranks 4                     # CPU: gloo ranks against a plain ring
    python -m benchmarks.context --split                       # one process: all partial blocks against one attention
    python -m benchmarks.context --split --gpu-shapes          # the same on a GPU: bf16, heads 32/8, 8K and 64K tokens
    torchrun --nproc-per-node 8 -m benchmarks.context         # GPUs: NCCL ranks, PyTorch's own context parallel as peer

Forward and backward of one causal attention layer. All loops run on the same ranks, in turn, and a ratio is taken within
a round, where the load of the machine is nearly the same for all; their medians are printed with quartiles. Before that every
loop must give the same output and gradients.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

import meshkit as mk
from benchmarks.rows import environment, spread
from meshkit.core.attention_kernels import Backward, Forward
from meshkit.faults import run_main
from meshkit.parallel.context import Shape, choose
from meshkit.parallel.context._layout import plan

RESULTS = Path(__file__).parent / "results" / "context.jsonl"
TOL = {torch.float32: 1e-4, torch.bfloat16: 5e-2}

Loop = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    ranks: int = 2
    """processes to start, unless torchrun has"""
    tokens: int = 4096
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    documents: int = 1
    """the sequence is so many documents, each twice as long as the one before"""
    rounds: int = 5
    bf16: bool = False
    split: bool = False
    """the cost of splitting: one process computes every rank's partial blocks"""
    gpu_shapes: bool = False
    """with --split: bf16, heads 32/8, head_dim 128, 8K and 64K tokens, causal and documents"""
    record: bool = False
    """append rows to benchmarks/results/context.jsonl"""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def mask(self) -> mk.Mask:
        unit = self.tokens / (2**self.documents - 1)
        edges = [round(unit * (2**index - 1)) for index in range(self.documents + 1)]
        return mk.Mask.documents([after - first for first, after in pairwise(edges)])


# ----------------------------------------------------------------------------------------------- a plain ring


class PlainRing(torch.autograd.Function):
    """What one writes first: contiguous shards, blocks that causality hides skipped, fp32 sums, sends overlapped."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:3], float("-inf"), device=q.device)
        kv = torch.stack((k, v))
        for step in range(size):
            following, works = pass_on(kv) if step + 1 < size else (kv, [])
            if step <= rank:
                block_out, block_lse = flash(q, kv[0], kv[1], step == 0)
                new_lse = torch.logaddexp(lse, block_lse)
                out = out * (lse - new_lse).exp().unsqueeze(-1) + block_out * (block_lse - new_lse).exp().unsqueeze(-1)
                lse = new_lse
            for work in works:
                work.wait()
            kv = following
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, size = dist.get_rank(), dist.get_world_size()
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        kv = torch.stack((k, v))
        dkv = torch.zeros(kv.shape, dtype=torch.float32, device=q.device)
        for step in range(size):
            following, works = pass_on(kv) if step + 1 < size else (kv, [])
            if step <= rank:
                block_dq, block_dk, block_dv = flash_backward(dout, q, kv[0], kv[1], out, lse, step == 0)
                dq += block_dq
                dkv += torch.stack((block_dk, block_dv))
            for work in works:
                work.wait()
            kv = following
            dkv, works = pass_on(dkv)
            for work in works:
                work.wait()
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype)


def pass_on(tensor: Tensor) -> tuple[Tensor, list[dist.Work]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    arriving = torch.empty_like(tensor)
    ops = [dist.P2POp(dist.isend, tensor, (rank + 1) % size), dist.P2POp(dist.irecv, arriving, (rank - 1) % size)]
    return arriving, dist.batch_isend_irecv(ops)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if q.is_cuda:
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, *lengths, 0.0, causal, seed, seed
        )
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal
        )
    dq, dk, dv = grads
    return dq, dk, dv


# ---------------------------------------------------------------------------------------------------- the loops


def inputs(settings: Settings, device: torch.device) -> list[Tensor]:
    """q, k, v, dout [1, tokens, heads, head_dim], the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    counts = (settings.heads, settings.kv_heads, settings.kv_heads, settings.heads)
    return [
        torch.randn(1, settings.tokens, count, settings.head_dim, generator=generator).to(device, settings.dtype)
        for count in counts
    ]


def shape_of(settings: Settings) -> Shape:
    return Shape(
        heads=settings.heads, kv_heads=settings.kv_heads, head_dim=settings.head_dim, itemsize=settings.dtype.itemsize
    )


def loops(settings: Settings, mesh: mk.Mesh) -> Iterator[tuple[str, Loop, mk.context.SplitMask | None]]:
    """(name, forward and backward of this rank's part, who holds which tokens; None: contiguous)."""
    full = inputs(settings, mesh.device)
    rank, ranks = mesh.rank, mesh.spec.world_size
    if settings.documents == 1:
        shards = [x.chunk(ranks, dim=1)[rank].contiguous() for x in full]

        def plain_ring() -> tuple[Tensor, ...]:
            q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in shards[:3])
            out = PlainRing.apply(q, k, v)
            grads = torch.autograd.grad(out, (q, k, v), shards[3].transpose(1, 2))
            return tuple(x.transpose(1, 2) for x in (out.detach(), *grads))

        yield "plain ring", plain_ring, None
        if mesh.device_type == "cuda":
            yield "torch context_parallel", torch_context_parallel(shards, mesh), None
    policies = {"auto": mk.strategy.ContextPolicy()} | {
        scheme: mk.strategy.ContextPolicy(scheme=scheme) for scheme in ("ring", "group_cast", "all_gather", "ulysses")
    }
    for name, policy in policies.items():
        layout = choose(settings.mask, ranks, policy, shape_of(settings)).layout
        mask = mk.context.SplitMask(layout, mesh["cp"])
        mine = [torch.cat([x[:, first:after] for first, after in layout.runs[rank]], dim=1) for x in full]

        def split(mask: mk.context.SplitMask = mask, mine: list[Tensor] = mine) -> tuple[Tensor, ...]:
            q, k, v = (x.detach().requires_grad_() for x in mine[:3])
            out = mask.attend(q, k, v)
            return out.detach(), *torch.autograd.grad(out, (q, k, v), mine[3])

        yield f"meshkit {name}", split, mask


def torch_context_parallel(shards: list[Tensor], mesh: mk.Mesh) -> Loop:
    """PyTorch's own, with its head-tail order; its SDPA takes no grouped heads, so keys and values are repeated."""
    from torch.distributed.tensor.experimental import context_parallel

    ratio = shards[0].shape[2] // shards[1].shape[2]

    def run() -> tuple[Tensor, ...]:
        q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in shards[:3])
        with context_parallel(mesh["cp"], buffers=[], buffer_seq_dims=[]):
            wide = (x.repeat_interleave(ratio, 1) for x in (k, v))
            out = F.scaled_dot_product_attention(q, *wide, is_causal=True)
            grads = torch.autograd.grad(out, (q, k, v), shards[3].transpose(1, 2))
        return tuple(x.transpose(1, 2) for x in (out.detach(), *grads))

    return run


def one_device(settings: Settings, device: torch.device) -> list[Tensor]:
    q, k, v, dout = (x.transpose(1, 2) for x in inputs(settings, device))
    for x in (q, k, v):
        x.requires_grad_()
    shown = None if settings.documents == 1 else settings.mask.dense(device)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=shown, is_causal=shown is None, enable_gqa=True)
    return [x.transpose(1, 2) for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))]


def refuse_other_results(
    name: str, loop: Loop, mask: mk.context.SplitMask | None, settings: Settings, mesh: mk.Mesh
) -> None:
    if "torch" in name:
        return  # its order of tokens is its own
    for mine, full in zip(loop(), one_device(settings, mesh.device), strict=True):
        if mask is None:
            expected = full.chunk(mesh.spec.world_size, dim=1)[mesh.rank]
        else:
            expected = torch.cat([full[:, first:after] for first, after in mask.layout.runs[mesh.rank]], dim=1)
        worst = float((mine - expected).abs().max() / expected.abs().max())
        assert worst <= TOL[settings.dtype], f"{name} differs from one device by {worst:.1e}"


def compare_on_ranks(settings: Settings) -> None:
    mesh = mk.init_mesh("cp=-1")
    all_loops = list(loops(settings, mesh))
    for name, loop, mask in all_loops:
        refuse_other_results(name, loop, mask, settings, mesh)
    taken: dict[str, list[Turn]] = {name: [] for name, _, _ in all_loops}
    for _ in range(settings.rounds):
        for name, loop, _ in all_loops:
            taken[name].append(timed(loop, mesh))
    if mesh.rank:
        return
    baseline = "plain ring" if "plain ring" in taken else "meshkit ring"
    table = Table("loop", f"speed over the {baseline}", "with a core for each rank", "ms")
    for name, turns in taken.items():
        rounds = list(zip(taken[baseline], turns, strict=True))
        wall = spread([base.wall_s / mine.wall_s for base, mine in rounds])
        busiest = spread([base.busiest_cpu_s / mine.busiest_cpu_s for base, mine in rounds])
        cells = [f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" for ratio in (wall, busiest)]
        table.add_row(name, *cells, f"{1e3 * min(turn.wall_s for turn in turns):.1f}")
        layout = next(mask.layout if mask else None for loop, _, mask in all_loops if loop == name)
        record(
            settings,
            loop=name,
            against=baseline,
            ranks=mesh.spec.world_size,
            layout=None if layout is None else f"{layout.exchange} ulysses={layout.ulysses}",
            speed_ratio=asdict(wall),
            busiest_rank_cpu_ratio=asdict(busiest),
        )
    Console().print(table)


@dataclass(frozen=True)
class Turn:
    """Wall-clock of the slowest rank, and the processor time of the busiest: the wall-clock if each had a core."""

    wall_s: float
    busiest_cpu_s: float


def timed(loop: Loop, mesh: mk.Mesh) -> Turn:
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    loop()
    if mesh.device_type != "cpu":
        torch.accelerator.synchronize()
    busy = torch.tensor([time.process_time() - cpu], device=mesh.device)
    dist.all_reduce(busy, dist.ReduceOp.MAX)
    return Turn(time.perf_counter() - begin, float(busy))


# ------------------------------------------------------------------------------------------------ the cost of splitting


def split_cost(settings: Settings, *, ranks: int) -> None:
    """One process computes the partial blocks of every rank, without any message, against one whole attention."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q, k, v, dout = inputs(settings, device)
    scale = settings.head_dim**-0.5

    def run_whole() -> None:
        """The kernel itself on each document: what nobody can beat without splitting."""
        for first, after in settings.mask.components:
            rows = [x[:, first:after].transpose(1, 2) for x in (q, k, v, dout)]
            out, lse = flash(*rows[:3], True)
            flash_backward(rows[3], *rows[:3], out, lse, True)

    def parts() -> None:
        layout = choose(settings.mask, ranks, mk.strategy.ContextPolicy(scheme="group_cast"), shape_of(settings)).layout
        for group in range(ranks):
            steps = plan(layout, group).steps
            mine = [pieces[group] for pieces in shards]
            running = Forward(mine[0], scale)
            keys = [[take(x[step.owner], step.keys) for x in shards[1:3]] for step in steps]
            for step, (k_part, v_part) in zip(steps, keys, strict=True):
                running.add(k_part, v_part, step.tiles)
            backward = Backward(mine[3], mine[0], running.out.to(q.dtype), running.lse, scale)
            for step, (k_part, v_part) in zip(steps, keys, strict=True):
                dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=device) for x in (k_part, v_part))
                backward.add(k_part, v_part, step.tiles, dk, dv)

    layout = choose(settings.mask, ranks, mk.strategy.ContextPolicy(scheme="group_cast"), shape_of(settings)).layout
    shards = [[torch.cat([x[:, a:b] for a, b in runs], dim=1) for runs in layout.runs] for x in (q, k, v, dout)]
    walls: dict[str, list[float]] = {"whole": [], "parts": []}
    for _ in range(settings.rounds + 1):  # the first round warms up
        for name, run in (("whole", run_whole), ("parts", parts)):
            begin = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            walls[name].append(time.perf_counter() - begin)
    ratio = spread([unsplit / split for unsplit, split in zip(walls["whole"][1:], walls["parts"][1:], strict=True)])
    masking = "causal" if settings.documents == 1 else f"{settings.documents} documents"
    print(
        f"{settings.tokens} tokens, {masking}, {ranks} ranks: {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
    )
    record(
        settings, loop="split", against="whole attention", ranks=ranks, speed_ratio=asdict(ratio), layout="group_cast"
    )


def take(x: Tensor, keys: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.cat([x[:, first:after] for first, after in keys], dim=1) if keys else x[:, :0]


def record(settings: Settings, **measured: Any) -> None:
    if settings.record:
        row = {**environment(), **asdict(settings), **measured}
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


def run_rank(rank: int, settings: Settings, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(settings.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run_main(lambda: compare_on_ranks(settings))


def main(settings: Settings) -> None:
    if settings.split:
        torch.set_num_threads(1)
        shapes = [settings]
        if settings.gpu_shapes:
            large = {**asdict(settings), "bf16": True, "heads": 32, "kv_heads": 8, "head_dim": 128}
            shapes = [
                Settings(**{**large, "tokens": tokens, "documents": documents})
                for tokens in (8192, 65536)
                for documents in (1, 5)
            ]
        for shape in shapes:
            for ranks in (2, 4, 8):
                split_cost(shape, ranks=ranks)
    elif "RANK" in os.environ:
        compare_on_ranks(settings)
    else:
        with dist_port() as port:
            torch.multiprocessing.start_processes(run_rank, (settings, port), nprocs=settings.ranks)


@contextmanager
def dist_port() -> Iterator[int]:
    """A port that was free a moment ago."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield port


if __name__ == "__main__":
    main(tyro.cli(Settings))
