"""What replicas may tell a meeting place (schema, validation): a message that is none is refused where it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MOST_BYTES = 1 << 20
"""of a message"""
MOST_RANKS = 1 << 20
MOST_FACTS = 64
Message = dict[str, Any]


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _text(most: int) -> Callable[[Any], bool]:
    """That can be printed in a line."""
    return lambda value: isinstance(value, str) and len(value) <= most and value.isprintable()


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _facts(value: Any) -> bool:
    text = _text(1 << 16)
    return (
        isinstance(value, dict)
        and len(value) <= MOST_FACTS
        and all(text(each) for pair in value.items() for each in pair)
    )


def _newest(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_whole(0, 1 << 62), value))


SAID: dict[str, dict[str, Callable[[Any], bool]]] = {
    "hello": {
        "token": lambda value: value is None or _text(64)(value),
        "rank": _whole(0, MOST_RANKS),
        "ranks": _whole(1, MOST_RANKS),
        "host": _text(255),
    },
    "beat": {},
    "ready": {"facts": _facts, "newest": _newest, "can_go_back": _flag},
    "here": {"key": _text(200), "last": _flag, "finite": _flag},
    "done": {"attempt": _whole(0, 1 << 62), "why": _text(1000)},
    "fetched": {},
    "leave": {},
}
"""By its word, the values of a message of a replica."""


def checked(message: Message) -> Message:
    """A message of a replica. Raises: ValueError for one that it cannot have sent."""
    fields = SAID.get(message["is"])
    if fields is None:
        raise ValueError(f"{message['is']!r} is no word of a replica")
    for name, holds in fields.items():
        if name not in message or not holds(message[name]):
            raise ValueError(f"{message['is']!r} with {name}={str(message.get(name))[:100]!r}")
    return message


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Lines:
    """Messages out of the bytes of a connection, as they come."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[Message]:
        """Raises: ValueError for what is none."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        if max(map(len, (*lines, self._rest))) > MOST_BYTES:
            raise ValueError("a message without end")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("a message without a bottom") from error
        if not all(isinstance(message, dict) and isinstance(message.get("is"), str) for message in messages):
            raise ValueError("not a message")
        return messages
