"""Messages between ranks that do not wait for each other (message queue), by the store that the world was made with."""

from __future__ import annotations

import pickle
from typing import Any

from meshkit.core import _torch


class Mailbox:
    """A log of messages that any rank appends to and one reads, and values by key. name: unique in the world.

    Nothing waits, so no order of calls can be a deadlock. All goes through the process of the store, on one rank: it is for
    tokens and numbers, not for weights.
    """

    def __init__(self, name: str) -> None:
        self._store, self._name, self._read = _torch.world_store(), name, 0

    def append(self, message: object) -> None:
        """Wire: two requests to the store."""
        number = self._store.add(f"{self._name}/messages", 1)
        self._store.set(f"{self._name}/message/{number}", pickle.dumps(message))

    def new(self) -> list[Any]:
        """Messages since the last call, in order. Wire: a request, and two for each message."""
        messages = []
        while self.has(key := f"message/{self._read + 1}"):
            messages.append(self.get(key))
            self.delete(key)
            self._read += 1
        return messages

    def has(self, key: str) -> bool:
        found: bool = self._store.check([f"{self._name}/{key}"])
        return found

    def put(self, key: str, value: object) -> None:
        self._store.set(f"{self._name}/{key}", pickle.dumps(value))

    def get(self, key: str) -> Any:
        """Of a key that is there."""
        return pickle.loads(self._store.get(f"{self._name}/{key}"))

    def delete(self, key: str) -> None:
        self._store.delete_key(f"{self._name}/{key}")
