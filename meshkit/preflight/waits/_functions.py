"""Functions of torch that say on which device a tensor is made or moved to, which on CPU no operator tells."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshkit.core import _torch
from meshkit.preflight._where import TORCH
from meshkit.preflight.waits._lies import Memory
from meshkit.preflight.waits._operators import Operators

# [Note: what stands for the device]
# On CPU all tensors have the device `cpu`. Inside of a recording the mesh, and tensors that would lie on its device, say
# `cpu:0`, which is not equal to it, to all but torch's own code. Where a call is given `cpu:0` its result lies on the device,
# and torch is told `cpu`. So code that asks for `meshkit.core.to_device.HOST` takes the way that it would take on a GPU, and
# `.to()` copies.
DEVICE = torch.device("cpu", 0)
_PLAIN = torch.device("cpu")

_OF_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)
_FACTORIES = (
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace, torch.eye, torch.empty_strided),
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.scalar_tensor, torch.from_numpy, torch.frombuffer),
    *_OF_VALUES,
)
_LIKE = (
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
    *(Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor),
)
_DEVICE_OF = Tensor.device.__get__  # type: ignore[attr-defined]


class Functions(TorchFunctionMode):
    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self.operators, self.lies = operators, operators.lies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _DEVICE_OF:  # another object each time
            return self._device_of(args[0])
        if self.operators.silent or any(map(_torch.is_fake, args)):
            return func(*map(_plain, args), **{key: _plain(value) for key, value in kwargs.items()})
        if func in _FACTORIES:
            return self._made(func, args, kwargs)
        if func in _LIKE:
            return self._made_like(func, args, kwargs)
        if func is Tensor.to:
            return self._moved(args, kwargs)
        if func is Tensor.cpu:
            return self._copied(args[0], _PLAIN, non_blocking=kwargs.get("non_blocking", False))
        if func is Tensor.pin_memory:
            pinned = args[0].clone()
            self.lies[pinned] = "pinned"
            return pinned
        if func is Tensor.is_pinned:
            return self.lies[args[0]] == "pinned"
        if func is Tensor.tolist and self.lies[args[0]] == "device":
            self.operators.wait("tolist")
        return func(*map(_plain, args), **{key: _plain(value) for key, value in kwargs.items()})

    def _device_of(self, tensor: Tensor) -> torch.device:
        device: torch.device = _DEVICE_OF(tensor)
        on_device = device == _PLAIN and not _torch.is_fake(tensor) and self.lies[tensor] == "device"
        return DEVICE if on_device and not _asked_by_torch() else device

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        if device is not None and torch.device(device).type == "meta":
            return func(*args, **kwargs)
        values = args[0] if args else kwargs.get("data")
        if isinstance(values, Tensor) and func in (torch.as_tensor, torch.asarray):
            return self._copied(values, device, dtype=kwargs.get("dtype"))
        made = func(*args, **{key: _plain(value) for key, value in kwargs.items()})
        self._lay(made, func, device, pinned=pinned)
        return made

    def _made_like(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        made = func(*args, **{key: _plain(value) for key, value in kwargs.items()})
        device = kwargs.get("device")
        if device is None:
            of = self.lies[args[0]]
            if func is Tensor.new_tensor and of == "device":
                self.operators.copied(made, blocking=True, what="a list")
            if of is not None:
                self.lies[made] = of
        else:
            self._lay(made, func, device, pinned=False)
        return made

    def _lay(self, made: Tensor, func: Any, device: Any, *, pinned: bool) -> None:
        # torch's own code knows the device by its type alone.
        if device == DEVICE or (device is not None and _asked_by_torch()):
            self.lies[made] = "device"
            if func in _OF_VALUES or func is Tensor.new_tensor:
                self.operators.copied(made, blocking=True, what="a list")
        elif not isinstance(device, torch.device):  # of one that was noted before the recording nothing is known
            self.lies[made] = "pinned" if pinned else "pageable"

    def _moved(self, args: Any, kwargs: dict[str, Any]) -> Tensor:
        tensor, *rest = args
        rest += [kwargs[key] for key in ("device", "dtype", "other") if key in kwargs]
        device: Any = None
        dtype = None
        flags = [each for each in rest if isinstance(each, bool)]
        for each in rest:
            if isinstance(each, Tensor):
                there = self.lies[each]
                device, dtype = DEVICE if there == "device" else None if there is None else _PLAIN, each.dtype
            elif isinstance(each, torch.dtype):
                dtype = each
            elif isinstance(each, torch.device | str):
                device = torch.device(each)
        if device is not None and device.type != "cpu":
            elsewhere: Tensor = tensor.to(*args[1:], **kwargs)
            return elsewhere
        copy = kwargs.get("copy", len(flags) > 1 and flags[1])
        plain = {"memory_format": kwargs["memory_format"]} if "memory_format" in kwargs else {}
        non_blocking = kwargs.get("non_blocking", bool(flags) and flags[0])
        return self._copied(tensor, device, dtype=dtype, non_blocking=non_blocking, copy=copy, **plain)

    def _copied(
        self,
        tensor: Tensor,
        device: Any,
        *,
        dtype: Any = None,
        non_blocking: bool = False,
        copy: bool = False,
        **plain: Any,
    ) -> Tensor:
        """The tensor where it is wanted; a new one if it lies elsewhere."""
        of = self.lies[tensor]
        to: Memory | None = (
            None if device is None or _asked_by_torch() else "device" if device == DEVICE else "pageable"
        )
        crosses = to is not None and (to == "device") != (of == "device") and (of is not None or to == "device")
        moved: Tensor = tensor.to(dtype or tensor.dtype, copy=copy or crosses, **plain)
        if crosses:
            if to == "device":
                self.operators.copied(tensor, blocking=not non_blocking or of != "pinned", what="a tensor")
            elif non_blocking:
                to = "pinned"  # torch takes pinned memory for it
            else:
                self.operators.wait("copy to the host")
            assert to is not None
            self.lies[moved] = to
        return moved


def _plain(value: Any) -> Any:
    return _PLAIN if isinstance(value, torch.device) and value == DEVICE else value


def _asked_by_torch() -> bool:
    """Whether the code that called is torch's own, or what stands for it; other function modes only pass calls on."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or frame.f_code.co_name == "__torch_function__"
    ):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(TORCH)
