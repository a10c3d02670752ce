"""The gradient of a parameter, wherever it is: `param.grad`, or held by an optimizer that takes it during backward.

An optimizer on the host moves gradients off the device while backward still runs. Clipping and the gradient norm then read
them where they are.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# An attribute of the parameter and no table by id: it goes when the parameter goes, and a new one never inherits it.
_KEY, _LATER = "_meshkit_gradient", "_meshkit_summed_later"

Reader = Callable[[], Tensor | None]


def gradient_of(param: Tensor) -> Tensor | None:
    """The gradient to measure, scale and step with: a DTensor if the parameter is one, perhaps on the host. Waits for it."""
    read: Reader | None = getattr(param, _KEY, None)
    return param.grad if read is None else read()


def set_gradient_reader(param: Tensor, read: Reader | None) -> None:
    """From now on `gradient_of(param)` is what `read()` returns; None: it is `param.grad` again."""
    setattr(param, _KEY, read)


def has_gradient_reader(param: Tensor) -> bool:
    """Whether an optimizer takes the gradient of this parameter during backward."""
    return getattr(param, _KEY, None) is not None


def sum_later(param: Tensor) -> None:
    """Its gradient is summed over ranks after the step's last backward: until then nobody takes it away."""
    setattr(param, _LATER, True)


def is_summed_later(param: Tensor) -> bool:
    return getattr(param, _LATER, False)
