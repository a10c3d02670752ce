"""Custom operators: Python functions that autograd and torch.compile do not look into, whatever they send inside.

`@custom_op("name", fake=...)` registers a function as `meshkit::name`; `fake` gives the shapes of the results, to tracing and
to `estimate`. `watching_bodies` is for `observe` and others that want to see the messages inside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

# torch keeps the function in a private attribute of the operator.
_bodies: dict[str, Callable[..., Any]] = {}


def custom_op(name: str, *, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function of tensors, numbers and strings, whose results share no memory with its arguments."""

    def register(body: Callable[..., Any]) -> Any:
        # mutates_args=(): messages are received into buffers of the body's own, so the compiler need not copy any argument.
        operator = torch.library.custom_op(f"meshkit::{name}", body, mutates_args=())
        operator.register_fake(fake)
        _bodies[f"meshkit::{name}"] = body
        return operator

    return register


def body_of(name: str) -> Callable[..., Any] | None:
    """The function of our operator of that name; None for another operator."""
    return _bodies.get(name)


def watching_bodies(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Of a dispatch mode's `__torch_dispatch__`: it sees the operators inside of meshkit's own, and not those themselves."""

    @wraps(dispatch)
    def watched(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        body = body_of(func.name().partition(".")[0])
        if body is None:
            return dispatch(mode, func, types, args, kwargs)
        with mode:  # dispatch is off inside an operator
            return body(*args, **(kwargs or {}))

    return watched
