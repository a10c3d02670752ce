"""Tracing: dispatch modes, fake tensors (shapes without values), the limit on recompiles of torch.compile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

# Taken over as they are. Checked: 2.11, 2.15. Replaced by: nothing yet, for all of them.
# - DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode: tensors without values.
# - TorchDispatchMode: sees every operator below autograd. torch's own documentation uses it.


def fake_mode() -> Any:
    """Inside, new tensors have shapes and no values.

    Private: torch._subclasses, where torch.compile takes it from. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.fake_tensor_converter = _Detaching()
    return mode


def graph_node(tensor: Tensor) -> Any:
    """`tensor.grad_fn`, of which no function mode is told.

    Private: torch._C.DisableTorchFunction, which torch's documentation of function modes names. Checked: 2.11, 2.15. Replaced
    by: nothing yet.
    """
    with torch._C.DisableTorchFunction():
        return tensor.grad_fn


def packs_saved() -> Any:
    """The innermost `pack` hook of what autograd saves now; None outside of any.

    Private: torch._C._autograd._top_saved_tensors_default_hooks. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


@contextmanager
def without_fake_errors() -> Iterator[None]:
    """Inside, torch prints no traceback of an operator that fails on fake tensors; it raises all the same.

    Private: the name of its logger. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_nothing)
    try:
        yield
    finally:
        log.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


class _Detaching(FakeTensorConverter):
    """A tensor with values that meets one without is looked at apart from its graph: torch reads its `.grad`, and warns.

    Private: FakeTensorConverter. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """

    def from_real_tensor(self, fake_mode: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
        plain = type(t) is Tensor and t.requires_grad and not t.is_leaf
        return super().from_real_tensor(fake_mode, t.detach() if plain else t, *args, **kwargs)


def without_modes() -> Any:
    """Inside, no dispatch mode that is around sees operators, as one that counts them would.

    Private: torch.utils._python_dispatch, where torch.compile takes it from. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    return _disable_current_modes()


def is_fake(value: Any) -> bool:
    """A tensor without values. Private: FakeTensor. Checked: 2.11, 2.15. Replaced by: nothing yet."""
    return isinstance(value, FakeTensor)


def is_fake_type(kind: type) -> bool:
    """`is_fake` of a class."""
    return issubclass(kind, FakeTensor)


def wraps_tensors(kind: type) -> bool:
    """A class that runs operators by itself on the tensors it is made of, as DTensor does.

    Private: nothing but that `__torch_dispatch__` says it. Checked: 2.11, 2.15.
    """
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not None and dispatch is not Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


def allow_recompiles(modules: int) -> None:
    """Let torch.compile trace one forward for `modules` modules: those with hooks of their own are traced one by one.

    Private: torch._dynamo.config.recompile_limit, 8 for the process, beyond which `fullgraph` fails. Checked: 2.11, 2.15.
    Replaced by: torch.compile(recompile_limit=...) of 2.15.
    """
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, 8 * modules)


@contextmanager
def functions_replaced(apply: Callable[..., Any]) -> Iterator[None]:
    """Inside, `apply(kind, original, args, kwargs)` is called for each torch.autograd.Function that is applied.

    Private: that `apply` is looked up on the class. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    before = Function.__dict__["apply"]

    def called(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(kind, before.__get__(None, kind), args, kwargs)

    Function.apply = classmethod(called)  # type: ignore[assignment]
    try:
        yield
    finally:
        Function.apply = before
