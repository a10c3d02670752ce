"""Fake tensors for estimates: floating tensors and bytes have shapes and no memory, whole numbers are real.

What depends on whole numbers is therefore exact: which tokens a rank of cp gets, where documents end. What depends on
floating values is unknown, and refused. Bytes are codes of floating values, or memory that other tensors view.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshkit.core import _torch
from meshkit.core._torch import DynamicOutputShapeException, TorchDispatchMode
from meshkit.errors import PlanError

_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
_NEW = {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"}
_BYTES = (torch.uint8, torch.int8)
_PLAIN = {"empty", "empty_strided", "zeros", "ones", "full", "rand", "randn"}


class Shapes(TorchDispatchMode):
    """Context in which new floating tensors and bytes are fake, and so is what is computed from them.

    Raises: PlanError where Python reads one of their values. A bool reads as False: code that reads one asks whether
    something is wrong (an overflow, a misfit).
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = _torch.fake_mode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(_torch.wraps_tensors(kind) for kind in types):
            return NotImplemented
        if any(_torch.is_fake_type(kind) for kind in types):
            if func is torch.ops.aten._local_scalar_dense.default:
                return _read(args[0])
            try:
                return func(*args, **kwargs)
            except DynamicOutputShapeException as error:
                raise PlanError(_UNKNOWN.format(what=f"{func} makes a tensor whose size depends on values")) from error
        if _makes_fake(func, args, kwargs):
            with self.fake:
                return func(*args, **kwargs)
        return func(*args, **kwargs)


_UNKNOWN = (
    "estimate: {what}, and an estimate has no values. Estimate a model without that, or measure a step of the real run."
)


def _read(tensor: Tensor) -> bool:
    if tensor.dtype == torch.bool:
        return False
    raise PlanError(_UNKNOWN.format(what=f"the step reads a value of a {tensor.dtype} tensor (item, tolist or if)"))


def _makes_fake(func: Any, args: Any, kwargs: Any) -> bool:
    name = func.name().partition("::")[2].partition(".")[0]
    if name in _LIKE | _NEW:
        dtype, device = kwargs.get("dtype") or args[0].dtype, kwargs.get("device") or args[0].device
    elif name in _PLAIN:
        dtype, device = kwargs.get("dtype"), kwargs.get("device") or torch.device("cpu")
        if dtype is None:
            dtype = torch.get_default_dtype() if name != "full" else torch.tensor(args[1]).dtype
    else:
        return False
    return bool(dtype.is_floating_point or dtype in _BYTES) and torch.device(device).type != "meta"
