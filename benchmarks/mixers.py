"""What does it cost to split the tokens of a recurrent mixer over ranks, and how many bytes are the states?

    torchrun --nproc-per-node 4 benchmarks/mixers.py             # cp=4; a minute
    torchrun --nproc-per-node 4 benchmarks/mixers.py --record

Forward and backward of the scan and of the short convolution of one layer, on one document. Every rank first computes
all tokens by itself, and its part of the split result must be the same. Then both take turns. Of the split loop the
processor time of the busiest rank counts, times the ranks, over that of one rank that has all tokens: 1.0 is a split that
costs nothing. Four ranks on two cores have no core each, so wall-clock would say little. Zigzag, the order of tokens that
balances causal attention in a hybrid, is in the same table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from rows import environment, spread
from torch import Tensor

import meshkit as mk
from meshkit.core.document_chunks import one_document
from meshkit.core.linear_attention import linear_attention
from meshkit.core.short_convolution import short_convolution
from meshkit.faults import run_main
from meshkit.parallel.context import Shape, SplitMask, chain_of, choose
from meshkit.preflight.observe import observe

RESULTS = Path(__file__).parent / "results" / "mixers.jsonl"
TOL = 1e-3  # fp32, of gradients that are sums over thousands of tokens
WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class Settings:
    tokens: int = 8192
    heads: int = 4
    key_size: int = 64
    value_size: int = 64
    rounds: int = 7
    record: bool = False
    """append rows to benchmarks/results/mixers.jsonl"""


def inputs(settings: Settings, *, delta: bool) -> list[Tensor]:
    """q, k, v, log_decay, with `delta` beta; the channels of a convolution and its weight; alike on every rank."""
    torch.manual_seed(0)
    shape = (1, settings.tokens, settings.heads)
    q, k = (F.normalize(torch.randn(*shape, settings.key_size), dim=-1) for _ in range(2))
    found = [q, k, torch.randn(*shape, settings.value_size), -0.1 * torch.rand(shape)]
    return found + ([torch.rand(shape)] if delta else [])


def step(
    scan: Callable[..., Tensor], convolve: Callable[..., Tensor], given: list[Tensor], weight: Tensor
) -> list[Tensor]:
    """The output and the gradients of a scan of convolved values."""
    leaves = [x.detach().requires_grad_() for x in given]
    values = convolve(leaves[2].flatten(2), weight).unflatten(2, leaves[2].shape[2:])
    rest = leaves[4:] or [None]
    out = scan(*leaves[:2], values, leaves[3], *rest)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def compare(settings: Settings) -> None:
    mesh = mk.init_mesh("cp=-1")
    ranks, table = mesh.spec.cp, Table("rule", "tokens", "states sent", "of bytes", "cost over one rank")
    for rule in ("decay", "delta"):
        given = inputs(settings, delta=rule == "delta")
        weight = torch.randn(settings.heads * settings.value_size, WIDTH)

        scan, convolve = (partial(run, table=one_document()) for run in (linear_attention, short_convolution))
        whole = partial(step, scan, convolve, given, weight)
        expected = whole()
        balances: tuple[Literal["contiguous", "zigzag"], ...] = ("contiguous", "zigzag")
        for balance in balances:
            policy = mk.strategy.ContextPolicy(scheme="ring", balance=balance)
            layout = choose(
                mk.Mask.causal(settings.tokens), ranks, policy, Shape(heads=1, kv_heads=1, head_dim=1)
            ).layout
            mask = SplitMask(layout, mesh["cp"])
            own = [mask.own(x) for x in given]

            split = partial(step, mask.linear_attention, mask.short_convolution, own, weight)
            for mine, full in zip(split(), expected, strict=True):
                worst = float((mine - mask.own(full)).abs().max() / full.abs().max())
                assert worst <= TOL, f"{rule}, {balance}: differs from one device by {worst:.1e}"
            with observe(mesh) as seen:
                split()
            size = 4 * settings.heads * settings.key_size * settings.value_size
            sent = torch.tensor(sum(count for message, count in seen.items() if message.size == size))
            dist.all_reduce(sent)
            assert int(sent) == 2 * chain_of(layout)[0], "forward and backward send what is explained"
            ratios = []
            for _ in range(settings.rounds):
                dist.barrier()
                begin = time.process_time()
                split()
                busiest = torch.tensor(time.process_time() - begin)
                dist.all_reduce(busiest, dist.ReduceOp.MAX)
                dist.barrier()
                alone = torch.zeros(())
                if mesh.rank == 0:  # alone, as the others wait
                    begin = time.process_time()
                    whole()
                    alone += time.process_time() - begin
                dist.broadcast(alone, 0)
                ratios.append(float(ranks * busiest / alone))
            cost = spread(ratios)
            states = int(sent) // 2
            if mesh.rank == 0:
                row = {**environment(), **asdict(settings), "ranks": ranks, "rule": rule, "balance": balance}
                row |= {"states": states, "state_bytes": size, "cost": asdict(cost)}
                shown = f"{cost.median:.2f} ({cost.low:.2f} to {cost.high:.2f})"
                table.add_row(rule, balance, str(states), f"{states * size:,}", shown)
                if settings.record:
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    if mesh.rank == 0:
        Console().print(table)


def main(settings: Settings) -> None:
    torch.set_num_threads(1)
    run_main(lambda: compare(settings))


if __name__ == "__main__":
    main(tyro.cli(Settings))
