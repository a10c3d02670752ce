"""The process of a meeting place: connections of all ranks, and a TCPStore, over which those that meet find each other."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

import torch.distributed as dist

from meshkit.errors import PlanError
from meshkit.optim.outer.place._messages import Lines, checked, encode
from meshkit.optim.outer.place._place import Place
from meshkit.optim.outer.place._rules import MeetingRules

MOST_PORT = 65535
LOOK_S = 0.02
LINGER_S = 2.0  # after the run has ended, for those who still come to be told


class PlaceServer:
    """Listens on `port` and, for the store, on the next one; with port 0 on two that are free."""

    def __init__(self, rules: MeetingRules, *, port: int, say: Callable[[str], None]) -> None:
        if not 0 <= port < MOST_PORT:
            raise PlanError(
                f"meeting-place --port {port}: give one from 1 to {MOST_PORT - 1}, as the next one is used too, or 0 for two "
                "that are free."
            )
        try:
            self._listener = socket.create_server(("", port), backlog=1024)
            self.store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", port + 1 if port else 0, is_master=True, wait_for_workers=False, use_libuv=True
            )
        except (OSError, RuntimeError) as error:
            raise PlanError(
                f"meeting-place --port {port}: {error}. Choose another one; the next one is used too."
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self.place = Place(rules, say, store_port=self.store.port)
        self._rules, self._selector = rules, selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lines: dict[int, Lines] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._number, self._next_beat = 0, 0.0

    def run(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Until the run has ended."""
        ended_at: float | None = None
        while not until():
            for key, _ in self._selector.select(LOOK_S):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            now = time.monotonic()
            self.place.tick(now)
            if now >= self._next_beat:
                self._next_beat = now + self._rules.beat_s
                self.place.outbox += [(connection, {"is": "beat"}) for connection in self._sockets]
            self._send()
            if self.place.over:
                ended_at = ended_at or now
                if now - ended_at > LINGER_S:
                    return

    def close(self) -> None:
        for connection in list(self._sockets):
            self._close(connection)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            accepted, _ = self._listener.accept()
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._number += 1
            self._sockets[self._number], self._lines[self._number] = accepted, Lines()
            self._selector.register(accepted, selectors.EVENT_READ, self._number)

    def _read(self, connection: int) -> None:
        if connection not in self._sockets:
            return
        try:
            received = self._sockets[connection].recv(1 << 16)
            messages = self._lines[connection].feed(received)
            for message in messages:
                self.place.hear(connection, checked(message), time.monotonic())
        except BlockingIOError:
            return
        except (OSError, ValueError):  # gone, or nobody who belongs here
            received = b""
        if not received:
            self._end(connection)

    def _send(self) -> None:
        while self.place.outbox:
            connection, message = self.place.outbox.pop(0)
            if connection not in self._sockets:
                continue
            if message is None:
                self._close(connection)
                continue
            try:
                # Small messages to a reader that does nothing else: where the buffer is full, it has long been silent.
                self._sockets[connection].sendall(encode(message))
            except OSError:
                self._end(connection)

    def _end(self, connection: int) -> None:
        self._close(connection)
        self.place.lose(connection, time.monotonic())

    def _close(self, connection: int) -> None:
        closed = self._sockets.pop(connection, None)
        self._lines.pop(connection, None)
        if closed is not None:
            self._selector.unregister(closed)
            closed.close()
