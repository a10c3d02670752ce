"""Noted functions: what a reading of the program records as one step of ours, whatever operators it runs inside.

Collectives are such steps: no operator of PyTorch says that summands became a sum, or that a gradient will be summed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from meshkit.core.document_chunks import one_document
from meshkit.core.linear_attention import linear_attention
from meshkit.core.short_convolution import short_convolution

Function = TypeVar("Function", bound=Callable[..., Any])
Note = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

# A context variable and no argument: the functions are called deep inside of a model's forward.
reader: ContextVar[Note | None] = ContextVar("what reads the program", default=None)


def being_read() -> bool:
    """Whether a program is read now: tensors have no values to look at."""
    return not torch.compiler.is_compiling() and reader.get() is not None


class AnyMask:
    """Stands for a mask while a program is read, where it could depend on values, or has state."""

    def windowed(self, window: int | None) -> Any:
        return self

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **choices: Any) -> Tensor:
        """Plain causal attention. query: [B, T, H, D]; key, value: [B, T, K, D]. Returns [B, T, H, D]."""
        grouped = query.shape[2] != key.shape[2]
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None) -> Tensor:
        """`meshkit.core.linear_attention` of rows of one document."""
        out: Tensor = linear_attention(q, k, v, log_decay, beta, one_document())
        return out

    def short_convolution(self, x: Tensor, weight: Tensor) -> Tensor:
        """`meshkit.core.short_convolution` of rows of one document."""
        out: Tensor = short_convolution(x, weight, one_document())
        return out


def noted(*, reading: Callable[..., Any] | None = None) -> Callable[[Function], Function]:
    """While a program is read, a call is one operation, under the function's name. Otherwise costs a look at a variable.

    reading: runs then in place of the function, for one that needs ranks.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Compiled code is never read, and the compiler of 2.11 knows no context variables.
            if torch.compiler.is_compiling() or (note := reader.get()) is None:
                return function(*args, **kwargs)
            return note(function.__name__, reading or function, args, kwargs)

        return call  # type: ignore[return-value]

    return decorate
