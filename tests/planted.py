"""Hooks that stand for faults of the machine: a run, which looks at what later hooks do, does not see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def of_the_machine(hook: Callable[..., Any]) -> Callable[..., Any]:
    def planted(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    planted.__module__ = "meshkit.planted"
    return planted
