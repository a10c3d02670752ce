"""Messages between trainer and rollout workers: JSON over HTTP, signed by a secret that both know (HMAC)."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import secrets
import socket
import time
from typing import Any
from urllib.parse import urlsplit

from meshkit.errors import PlanError, StepError

SIGNATURE = "X-Meshkit-Signature"
UNREADABLE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""what reading JSON of others may raise"""


class Unreachable(Exception):
    """The other side does not answer now; it may later."""


class Rejoin(Exception):
    """The trainer has started anew. See [Note: lives of a trainer]."""


def signature(secret: str, path: str, body: bytes) -> str:
    return hmac.new(secret.encode(), path.encode() + b"\0" + body, hashlib.sha256).hexdigest()


class Link:
    """A worker's or validator's side: `ask` the trainer, over one connection that is made anew where it breaks.

    role: as errors call it. timeout_s: of an answer. patience_s: how long the trainer may not answer, as while it starts
    anew.
    """

    def __init__(self, address: str, *, secret: str, role: str, patience_s: float, timeout_s: float = 30.0) -> None:
        parts = urlsplit(address)
        if parts.scheme != "http" or parts.hostname is None:
            raise PlanError(f"{role}: {address!r} is no address. Give one as http://trainer:8000.")
        self.host, self._port = parts.hostname, parts.port or 80
        self._secret, self._timeout_s = secret, timeout_s
        self._role, self._patience_s = role, patience_s
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, path: str, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a message. Raises: Unreachable; StepError where the trainer refuses it, with its reason."""
        body = json.dumps(message).encode()
        headers = {SIGNATURE: signature(self._secret, path, body), "Content-Type": "application/json"}
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection(self.host, self._port, timeout=self._timeout_s)
            self._connection.request("POST", path, body, headers)
            response = self._connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            raise StepError(f"the trainer refuses: {text[:500].decode(errors='replace')}")
        try:
            answer = json.loads(text)
        except UNREADABLE as error:
            raise StepError(f"what came from {self.host}:{self._port} is no answer of a trainer: {error}.") from error
        if not isinstance(answer, dict):
            raise StepError(f"what came from {self.host}:{self._port} is no answer of a trainer.")
        return answer

    def ask_patiently(self, path: str, message: dict[str, Any]) -> dict[str, Any]:
        """As `ask`, again and again while the trainer does not answer. Raises: Rejoin; StepError when patience ends."""
        end = time.monotonic() + self._patience_s
        while True:
            try:
                answer = self.ask(path, message)
                if "rejoin" in answer:
                    raise Rejoin
                return answer
            except Unreachable as error:
                if time.monotonic() > end:
                    raise StepError(
                        f"{self._role}: the trainer has not answered {path} for {self._patience_s:.0f} s: {error}. Look "
                        "whether it lives, and at its address."
                    ) from error
                time.sleep(1.0)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def node_name(process: int) -> str:
    """Of a worker or validator. Drawn, in part: nobody can guess another's, and bring what is then held against it."""
    return f"{socket.gethostname()}-{process}-{secrets.token_hex(8)}"
