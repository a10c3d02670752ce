"""fp64 all the way: what a model computes in fp32 whatever its dtype is computed in fp64, so that a fault of 1e-8 shows.

transformers' norms, routers and rotary embeddings are fp32 islands. Rounded there, two orders of summation differ by 1e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DTYPES = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class _Exact(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        kwargs = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **kwargs)


def _wide(value: Any) -> Any:
    return _DTYPES.get(value, value) if isinstance(value, torch.dtype) else value


@contextmanager
def exact() -> Iterator[None]:
    """Within it new tensors are fp64, and what asks for fp32 gets fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Exact():
            yield
    finally:
        torch.set_default_dtype(before)
