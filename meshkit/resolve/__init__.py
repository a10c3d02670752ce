"""Resolving a strategy: one place that decides and refuses.

`parallelize` executes a `Resolved`, `explain` prints it, `estimate`, `check` and the page build on it. So all of them refuse
the same strategies, with the same text.
"""

from meshkit.resolve._alike import resolve_alike
from meshkit.resolve._resolve import resolve
from meshkit.resolve._resolved import Resolved
from meshkit.resolve._together import resolve_together

__all__ = ["Resolved", "resolve", "resolve_alike", "resolve_together"]
