"""Tracing: dispatch modes, fake tensors (shapes without values), the limit on recompiles of torch.compile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, in_kernel_invocation_manager
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
    mode = _Quick(allow_non_fake_inputs=True)
    mode.fake_tensor_converter = _Detaching()
    return mode


def fake_like(mode: Any, tensor: Tensor) -> Tensor:
    """A tensor of `mode` with the tensor's shape, strides and dtype, on the host.

    Private: FakeTensor's constructor. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, empty, _HOST)


def fake_parameter(mode: Any, param: Tensor) -> Tensor:
    """The same as a parameter: `nn.Parameter` would run an operator for each.

    Private: `_is_param`, by which torch tells a parameter of a subclass. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    fake: Any = fake_like(mode, param)
    fake.requires_grad_(param.requires_grad)
    fake._is_param = True
    return fake  # type: ignore[no-any-return]


_HOST = torch.device("cpu")
_VIEWS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("view", "t", "permute", "expand", "unsqueeze", "detach", "alias", "_unsafe_view")
) | {torch.ops.aten.transpose.int, torch.ops.aten.slice.Tensor, torch.ops.aten.select.int}
# Of operators on tensors of some shapes, strides and dtypes: those of what they return.
_MOST = 1 << 16
_returned: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype] | None] = {}


class _Quick(FakeTensorMode):
    """Asks torch once for each kind of call; its own cache takes 0.1 ms to be asked.

    Private: `_subclasses.fake_tensor.in_kernel_invocation_manager`, inside of which a fake tensor is one on meta; and
    `avoid_device_init`. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """

    # Where there is no GPU torch would make up a device, so that forwards for one can be followed. Then the next backward of
    # this process starts a thread for it, and no process forked later can run a backward, as a check's ranks do.
    avoid_device_init = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := fake_device(func, args)) is not None:
            return device
        if kwargs or func.namespace != "aten" or (key := self._key(func, args)) is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func in _VIEWS:
            with in_kernel_invocation_manager(self):
                return FakeTensor(self, func(*args), _HOST)
        if key in _returned:
            if (told := _returned[key]) is None:
                return super().__torch_dispatch__(func, types, args, kwargs)
            shape, stride, dtype = told
            return FakeTensor(self, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), _HOST)
        out: Any = super().__torch_dispatch__(func, types, args, kwargs)
        plain = type(out) is FakeTensor and out.fake_device == _HOST and _is_functional(func) and out.constant is None
        own = plain and out.storage_offset() == 0 and not (out.is_conj() or out.is_neg())
        if len(_returned) == _MOST:
            _returned.clear()
        _returned[key] = (out.shape, out.stride(), out.dtype) if own else None
        return out

    def _key(self, func: Any, args: Any) -> Any:
        """None where an argument is not a plain tensor of this mode, a number or some of them."""
        key = [func, torch.get_default_dtype()]
        found = False
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                if arg.fake_mode is not self or arg.constant is not None or arg.fake_device != _HOST:
                    return None
                if arg.is_conj() or arg.is_neg():
                    return None
                found = True
                key.append((arg.shape, arg.stride(), arg.dtype))
            elif kind is list and all(type(each) is int for each in arg):
                key.append(tuple(arg))
            elif kind in _PLAIN:
                key.append((kind, arg))
            else:
                return None
        return tuple(key) if found else None


def fake_device(func: Any, args: Any) -> torch.device | None:
    """What a mode may answer at once: `tensor.device` of a tensor without values, for which autograd asks all modes several
    times for each operator. None for any other call.

    Private: FakeTensor.fake_device. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    asked = func is _DEVICE and type(args[0]) is FakeTensor
    return args[0].fake_device if asked else None


_DEVICE = torch.ops.prim.device.default
_PLAIN = frozenset((int, float, bool, str, torch.dtype, type(None)))
_DEPENDS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


def _is_functional(func: Any) -> bool:
    """Whether it returns memory of its own, of a shape that follows from the shapes of its arguments."""
    schema = func._schema
    aliases = schema.is_mutable or any(each.alias_info is not None for each in schema.returns)
    return not aliases and not any(tag in func.tags for tag in _DEPENDS)


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


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, no dispatch mode that is around sees operators, as one that counts them would.

    Private: torch.utils._python_dispatch, where torch.compile takes it from. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    before, _modes.off = modes_are_off(), True
    try:
        with _disable_current_modes():
            yield
    finally:
        _modes.off = before


def modes_are_off() -> bool:
    """Whether this thread is inside of `without_modes`: what a mode for functions asks, which stays where it is."""
    return getattr(_modes, "off", False)


_modes = threading.local()


def any_length(tensor: Tensor) -> None:
    """Let torch.compile take the tensor's first dim as any length, from its first call on.

    Private: torch._dynamo.maybe_mark_dynamic, which the documentation of dynamic shapes names. Checked: 2.11, 2.15. Replaced
    by: nothing yet.
    """
    torch._dynamo.maybe_mark_dynamic(tensor, 0)  # type: ignore[no-untyped-call, unused-ignore]


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


def prepend_forward_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """`register_forward_hook(hook, prepend=True)` for a module that is compiled later.

    Private: Module._forward_hooks, an OrderedDict: torch.compile names a hook by its number in the dict below it, in which
    what was moved to the front is last still, and guards on another hook (2.11). Checked: 2.11, 2.15. Replaced by: 2.12 or
    later.
    """
    module.register_forward_hook(hook, prepend=True)
    hooks = [*module._forward_hooks.items()]
    module._forward_hooks.clear()
    module._forward_hooks.update(hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether its forward runs as torch.compile makes it: of module.compile(), or of torch.compile(module).

    Private: Module._compiled_call_impl, and the class of the wrapper. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    from torch._dynamo import OptimizedModule

    return module._compiled_call_impl is not None or isinstance(module, OptimizedModule)


_to_compile = 0  # modules, so far


def allow_recompiles(modules: int) -> None:
    """Let torch.compile trace one forward for `modules` more modules: those with hooks of their own are traced one by one,
    and those of several runs of a process (actor, critic, reference) have one forward.

    Private: torch._dynamo.config.recompile_limit, 8 for the process, beyond which `fullgraph` fails, and that of all graphs
    of a forward together. Checked: 2.11, 2.15. Replaced by: torch.compile(recompile_limit=...) of 2.15.
    """
    import torch._dynamo.config as config

    global _to_compile
    _to_compile += modules
    config.recompile_limit = max(config.recompile_limit, 8 * _to_compile)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)


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


def keeps_context_in_backward() -> bool:
    """Whether a compiled block that runs again in backward has the context variables of its forward.

    Checked: not on 2.11; 2.15.
    """
    return torch.__version__ >= "2.15"


def knows_grouped_mm(dtype: torch.dtype, sizes: Iterable[int] = ()) -> bool:
    """Whether torch traces `grouped_mm` in that dtype without values, which its compiler does too, with rows of these sizes.

    Checked: on 2.11 its shape function refuses what its kernel takes, all but bf16; 2.15.
    """
    known = (torch.bfloat16,) if torch.__version__ < "2.15" else (torch.bfloat16, torch.float16, torch.float32)
    return dtype in known and all(size * dtype.itemsize % 16 == 0 for size in sizes)
