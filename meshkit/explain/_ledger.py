"""What is counted."""

from __future__ import annotations

from collections import Counter

from meshkit.explain._explanation import Message


class Ledger:
    def __init__(self) -> None:
        self.messages: Counter[Message] = Counter()
        self.reasons: dict[tuple[str, str], Counter[str]] = {}

    def add(self, axis: str, op: str, size: int, why: str, times: int = 1) -> None:
        if times and size:
            self.messages[Message(axis, op, size)] += times
            self.reasons.setdefault((axis, op), Counter())[why] += size * times
