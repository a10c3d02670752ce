"""Where a parameter's gradient is: with the parameter, or with an optimizer that takes it away during backward."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_KEY = "_meshkit_gradient"

Read = Callable[[], Tensor | None]


def gradient_of(param: Tensor) -> Tensor | None:
    """The gradient to measure, scale and step with; of a sharded parameter a DTensor, perhaps on the host. Waits for it."""
    read: Read | None = getattr(param, _KEY, None)
    return param.grad if read is None else read()


def read_gradient_by(param: Tensor, read: Read | None) -> None:
    """From now on `gradient_of(param)` asks `read`; None: it is `param.grad` again."""
    setattr(param, _KEY, read)
