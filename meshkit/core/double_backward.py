"""Double backward (create_graph=True, as a gradient penalty needs): what can be differentiated twice, and what refuses it.

Autograd runs a backward with grad mode on where its result is to be differentiated again, and off in an ordinary step. A
backward that is another collective goes through that one's own node then (see `collectives`); any other is
`once_differentiable` here, which raises before anything wrong is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from meshkit.errors import PlanError


def is_differentiated_again() -> bool:
    """In a backward: whether its result will be differentiated. Never while code is compiled: torch refuses it there."""
    return not torch.compiler.is_compiling() and torch.is_grad_enabled()


def not_twice(what: str, change: str) -> PlanError:
    return PlanError(
        f"create_graph=True (double backward, as of a gradient penalty; torch.func.grad has it too): {what} {change}, or "
        "leave the second derivative away: take a difference of two forwards for it."
    )


def once_differentiable(what: str, change: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a backward that is not differentiable itself: it raises PlanError if it is to be.

    what: a sentence that says what of it is not. change: what to use instead.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def checked(*args: Any) -> Any:
            if is_differentiated_again():
                raise not_twice(what, change)
            return backward(*args)

        return checked

    return decorate
