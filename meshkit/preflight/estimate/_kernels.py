"""Fake CUDA kernels: on a CPU, allocate and save what the CUDA kernels of RMSNorm and attention would.

RMSNorm is one kernel on CUDA, which keeps its input and one number a row, and many small ones on a CPU. Attention keeps its
input, output and one number a row and head on both, but those numbers in another layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshkit.core.noting import being_read

_aten = torch.ops.aten


@contextmanager
def cuda_kernels(*, attention: bool) -> Iterator[None]:
    """Context in which fake tensors use CUDA's RMSNorm and, with `attention`, CUDA's plain attention in 16 bits.

    It replaces the names in torch.nn.functional that modules call. A TorchFunctionMode would not do: it is off where a
    backward runs a forward again (2.11, 2.15).
    """
    attend = F.scaled_dot_product_attention
    names = {"rms_norm": _rms_norm_or(F.rms_norm)}
    if attention:
        names["scaled_dot_product_attention"] = _flash_or(attend)
    # Put back at the end, for modules of the same process that do not estimate.
    before = {name: getattr(F, name) for name in names}
    for name, function in names.items():
        setattr(F, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)


class _FusedRMSNorm(torch.autograd.Function):
    """Allocates and saves what CUDA's `_fused_rms_norm` does; on other devices the operator decomposes into small ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        # The reciprocal root mean square of each row, which backward reads. CUDA accumulates it in fp32 for narrower inputs.
        rows = x.new_empty((*x.shape[:-dims], *[1] * dims), dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, rows)
        return x.clone()  # reads and writes what the kernel does

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return x + grad, None if weight is None else torch.empty_like(weight), None


def _rms_norm_or(norm: Any) -> Any:
    def rms_norm(
        input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        # CUDA has no kernel for two dtypes either. A reading of the program wants torch's operators.
        if being_read() or _has_values(input) or (weight is not None and weight.dtype != input.dtype):
            return norm(input, normalized_shape, weight, eps)  # type: ignore[no-any-return]
        out: Tensor = _FusedRMSNorm.apply(input, weight, len(normalized_shape))
        return out

    return rms_norm


def _has_values(tensor: Tensor) -> bool:
    """As of a model that is tried on some, which an estimate is not about: these kernels compute nothing."""
    return type(tensor) in (Tensor, nn.Parameter)


def _flash_or(attend: Any) -> Any:
    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # What torch's flash kernel takes: 16 bits, no mask tensor, one size of heads. Values of another size, as DeepSeek's,
        # go to its memory-efficient kernel, also in fp32, but not grouped heads; for the rest torch takes other kernels.
        # They save q, k, v, the output and the log-sum-exp of each row and head in fp32: Dao 2023, section 3.1.
        plain = not args and query.ndim == 4 and kwargs.get("attn_mask") is None and not kwargs.get("dropout_p")
        if not plain or being_read() or _has_values(query):
            return attend(query, key, value, *args, **kwargs)  # type: ignore[no-any-return]
        is_causal, scale = kwargs.get("is_causal", False), kwargs.get("scale")
        half = query.dtype in (torch.bfloat16, torch.float16)
        if half and query.shape[-1] == value.shape[-1]:
            return _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
        aligned = not any(size * query.element_size() % 16 for size in (query.shape[-1], value.shape[-1]))
        single = half or query.dtype == torch.float32
        if single and aligned and query.shape[-1] != value.shape[-1] and query.shape[1] == key.shape[1]:
            return _aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
                query, key, value, None, True, 0.0, is_causal, scale=scale
            )[0]
        return attend(query, key, value, *args, **kwargs)  # type: ignore[no-any-return]

    return attention
