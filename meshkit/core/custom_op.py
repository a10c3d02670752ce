"""Python functions as operators of torch: opaque to autograd and torch.compile, whatever they send inside.

An operator is defined in two steps: `@operator("name")` registers the function as `meshkit::name` with its fake, which
gives the shapes of the results, and `gradient` tells autograd its backward. `body_of` finds the function again, for
`observe`, which wants to see the messages inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_bodies: dict[str, Callable[..., Any]] = {}


def custom_op(name: str, *, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function of tensors, numbers and strings, whose results share no memory with its arguments."""

    def register(body: Callable[..., Any]) -> Any:
        made = torch.library.custom_op(f"meshkit::{name}", body, mutates_args=())
        made.register_fake(fake)
        _bodies[f"meshkit::{name}"] = body
        return made

    return register


def body_of(name: str) -> Callable[..., Any] | None:
    """The function behind `meshkit::name`, or None for another operator."""
    return _bodies.get(name)
