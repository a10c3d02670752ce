"""PyTorch alone, cp: keys and values gathered over the ranks, head and tail of the sequence on each (zigzag).

torch's own `context_parallel` has no path for attention on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface

from benchmarks.peers.work import Training, transformers_model


class Gather(torch.autograd.Function):
    """[B, H, T/cp, D] of each rank -> [cp, B, H, T/cp, D]; backward sums and scatters."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        out = part.new_empty(dist.get_world_size() * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(out, part.contiguous())
        return out.unflatten(0, (-1, len(part)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.flatten(0, 1).contiguous())
        return out


def gathered_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """q: [B, Hq, T/cp, D], of chunks `rank` and `2 * cp - 1 - rank` of the sequence; k, v: [B, Hk, T/cp, D]."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    length = q.shape[2] // 2
    parts = Gather.apply(torch.cat((k, v), dim=-1))  # one message
    heads, tails = parts.split(length, dim=3)
    kv = torch.cat((*heads, *reversed(tails)), dim=2)  # in the order of the sequence
    outs = []
    for chunk, q_of_chunk in zip((rank, 2 * ranks - 1 - rank), q.split(length, dim=2), strict=True):
        seen = (chunk + 1) * length
        keys, values = kv[:, :, :seen].chunk(2, dim=-1)
        bias = causal_lower_right(length, seen)
        outs.append(F.scaled_dot_product_attention(q_of_chunk, keys, values, bias, scale=scaling, enable_gqa=True))
    return torch.cat(outs, dim=2).transpose(1, 2), None


def context_parallel(work: Training) -> tuple[nn.Module, Tensor]:
    """(the model in DDP, the positions of this rank)."""
    AttentionInterface.register("gathered", gathered_attention)
    model = transformers_model(work)
    model.set_attn_implementation("gathered")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = torch.arange(work.tokens).chunk(2 * ranks)
    forward = DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True, forward_sync_buffers=False
    )
    return forward, torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))
