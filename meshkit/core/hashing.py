"""Whole numbers of 64 bits for texts, the same in every process: Python's own hash differs between them."""

from __future__ import annotations

import hashlib


def hash64(text: str) -> int:
    """From 0 to 2^64 - 1."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def signed64(value: int) -> int:
    """The number that int64 has for `value` modulo 2^64."""
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value
