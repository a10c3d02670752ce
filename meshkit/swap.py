"""Change what a module's class does without changing the module: same object, same parameters, same names."""

from __future__ import annotations

from typing import Any

from torch import nn


def swap_class(module: nn.Module, **namespace: Any) -> None:
    """Give `module` a subclass of its own class with `namespace` in it, under the same name.

    A subclass, not attributes of the instance, so that copies of the module stay whole; this is how FSDP2 does it.
    """
    base = type(module)
    module.__class__ = type(base.__name__, (base,), {"__module__": base.__module__, **namespace})
