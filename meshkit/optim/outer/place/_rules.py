"""What a meeting place is told (quorum, grace period), and how replicas and it write to each other: lines of JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from meshkit.errors import PlanError

MOST_BYTES = 1 << 20
"""of a message"""
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MeetingRules:
    """replicas: the most that there may be, each with a slot, which says what part of the data it reads.

    quorum: the fewest that a meeting has, with those who come to it. grace_s: how long those who are there wait for the
    others, and how long one may say nothing before it counts as gone. exchange_s: how long an exchange, or handing a state
    on, may take. patience_s: how long those who are there wait for a quorum, before they end.
    """

    replicas: int
    quorum: int = 1
    grace_s: float = 30.0
    exchange_s: float = 600.0
    patience_s: float = 600.0

    def __post_init__(self) -> None:
        if self.replicas < 1 or not 1 <= self.quorum <= self.replicas:
            raise PlanError(
                f"meeting-place --replicas {self.replicas} --quorum {self.quorum}: a quorum is from 1 to the number of "
                "replicas."
            )
        for name in ("grace_s", "exchange_s", "patience_s"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise PlanError(f"meeting-place --{name.removesuffix('_s')} {value}: give seconds above 0.")

    @property
    def beat_s(self) -> float:
        """Between two signs of life, of which some may come late."""
        return min(1.0, self.grace_s / 5)


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Lines:
    """Messages out of the bytes of a connection, as they come."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[Message]:
        """Raises: ValueError for what is none."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > MOST_BYTES:
            raise ValueError("a message without end")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) and isinstance(message.get("is"), str) for message in messages):
            raise ValueError("not a message")
        return messages
