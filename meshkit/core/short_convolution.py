"""Short convolution (causal, depthwise conv1d) over packed documents, as one operator: a token reads the few before it.

Dims: B batch, T tokens, C channels, W width: a token reads itself and W - 1 tokens of its document before it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshkit.core import _torch
from meshkit.core.custom_op import custom_op
from meshkit.core.document_chunks import Places, documents_in
from meshkit.core.double_backward import once_differentiable
from meshkit.core.linear_attention import contiguous
from meshkit.mask import Interval


def convolved(x_BSC: Tensor, weight_CW: Tensor, index: Tensor, places: Tensor) -> Tensor:
    """[B, T, C]: x at `index` is convolved as one stream, and token t's result ends at place `places[t]` of that.

    index: of x, S for zeros. places: [T], of a token without one the length of the stream.
    """
    stream = F.pad(x_BSC, (0, 0, 0, 1)).index_select(1, index)
    width, channels = weight_CW.shape[1], weight_CW.shape[0]
    stream = F.pad(stream, (0, 0, width - 1, 0)).mT
    out = F.conv1d(stream, weight_CW.unsqueeze(1), groups=channels).mT
    return F.pad(out, (0, 0, 0, 1)).index_select(1, places)


@lru_cache(maxsize=32)
def _whole(documents: tuple[Interval, ...], tokens: int, width: int) -> tuple[Places, Places]:
    """The stream of whole documents: zeros before each."""
    index, places = list[int](), list[int]()
    for first, after in documents:
        index += [tokens] * (width - 1)
        places += range(len(index), len(index) + after - first)
        index += range(first, after)
    return Places(index), Places(places)


def _fake(x: Tensor, weight: Tensor, table: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("short_convolution", fake=_fake)
def short_convolution(x: Tensor, weight: Tensor, table: Tensor) -> Tensor:
    """x [B, T, C], weight [C, W] -> [B, T, C]: sum of weight[:, W - 1 - j] x[t - j] over tokens of t's document.

    table: `mask_table` of packed causal documents of T tokens; without bands each row is one.
    """
    return _on_one_device(x, weight, table).clone(memory_format=torch.contiguous_format)


def _on_one_device(x: Tensor, weight: Tensor, table: Tensor) -> Tensor:
    documents = documents_in(table, x.shape[1])
    if not documents or not x.numel():
        return 0 * x + 0 * weight.sum()
    index, places = _whole(documents, x.shape[1], weight.shape[1])
    return convolved(x, weight, index.on(x.device), places.on(x.device))


def _fake_backward(dout: Tensor, x: Tensor, weight: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


@custom_op("short_convolution_backward", fake=_fake_backward)
def short_convolution_backward(dout: Tensor, x: Tensor, weight: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The mirror: (dx, dweight)."""
    with _torch.graph_inside():
        inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
        out = _on_one_device(*inputs, table)
    dx, dweight = contiguous(torch.autograd.grad(out, inputs, dout))
    return dx, dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@once_differentiable("the backward of a short convolution is one operator.", "Use nn.Conv1d")
def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return *short_convolution_backward(dout, *ctx.saved_tensors), None


short_convolution.register_autograd(_gradient, setup_context=_save)
