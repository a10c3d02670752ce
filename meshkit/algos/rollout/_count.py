"""What is a count of tokens, answers or pages."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex


def is_count(value: object) -> bool:
    """A whole number of at least 1, also of NumPy; not a float, which a count of tokens never equals."""
    return isinstance(value, SupportsIndex) and not isinstance(value, bool) and index(value) >= 1
