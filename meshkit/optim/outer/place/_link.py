"""A rank's connection to the meeting place: messages as they come, and signs of life (heartbeats) from a thread."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from meshkit.errors import MeetingError, PlanError
from meshkit.optim.outer.place._messages import Lines, Message, encode

LOOK_S = 0.1
CONNECT_S = 60.0  # for the place to be there, which may be started together with the replicas
AT_FIRST_S = 60.0  # that it may say nothing, before it has told its rules


class PlaceLink:
    """`messages` come in order; where the connection is lost, one that `is` "lost" with `why`, and nothing afterwards.

    told: gets what the place says to people. It runs on the thread.
    """

    def __init__(self, address: str, *, told: Callable[[str], None]) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise PlanError(f"--meeting-place {address!r} is no address. Give one as host:29600.")
        self.address, self.host, self._told = address, host.strip("[]"), told
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.beat_s, self.silence_s = 1.0, AT_FIRST_S
        self._socket = self._connect(int(port))
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="meeting place", daemon=True)
        self._thread.start()

    def _connect(self, port: int) -> socket.socket:
        end = time.monotonic() + CONNECT_S
        while True:
            try:
                made = socket.create_connection((self.host, port), timeout=10.0)
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return made
            except OSError as error:
                if time.monotonic() > end:
                    raise MeetingError(
                        f"no meeting place answers at {self.address} for {CONNECT_S:.0f} s: {error}. Start it: python -m "
                        "meshkit meeting-place"
                    ) from error
                time.sleep(0.2)

    def send(self, word: str, **values: Any) -> None:
        """A failure shows in what comes: "lost"."""
        with contextlib.suppress(OSError), self._lock:
            self._socket.sendall(encode({"is": word, **values}))

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)
        self._socket.close()

    def _run(self) -> None:
        why = self._listen()
        if not self._closed:
            self.messages.put({"is": "lost", "why": why})

    def _listen(self) -> str:
        """Why it ended."""
        lines, heard, beat_at = Lines(), time.monotonic(), 0.0
        while True:
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + self.beat_s
                self.send("beat")
            try:
                if select.select([self._socket], [], [], min(LOOK_S, self.beat_s))[0]:
                    received = self._socket.recv(1 << 16)
                    if not received:
                        return "it closed the connection"
                    heard = time.monotonic()
                    for message in lines.feed(received):
                        if message["is"] == "said":
                            self._told(message["text"])
                        elif message["is"] != "beat":
                            self.messages.put(message)
            except (OSError, ValueError) as error:
                return f"{type(error).__name__}: {error}"
            if (silent_s := time.monotonic() - heard) > self.silence_s:
                if silent_s > self.silence_s + 2 * LOOK_S + self.beat_s:  # this process stood still: listen once more
                    heard = time.monotonic()
                    continue
                return f"it said nothing for {self.silence_s:g} s"
