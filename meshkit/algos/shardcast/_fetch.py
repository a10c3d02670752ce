"""Shards from other nodes of shardcast over HTTP: of the first that answers rightly, round those that fail."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Sequence

from meshkit.algos.shardcast._manifest import UNREADABLE, Manifest
from meshkit.errors import CheckpointError

PAUSE_S = 0.2
OFFERED = 4
"""versions of one upstream that are tried: of an honest one more are not kept, and a liar may name any number"""
UNREACHABLE = (OSError, http.client.HTTPException)


class Gone(Exception):
    """No upstream has the version any more: a newer one is there, or nobody who has it lives."""


class Upstreams:
    """The nodes that a relay asks. failed: how often each did not answer, or answered wrongly. Thread-safe.

    timeout_s: of one request; and how long a shard is asked for of all before the try is given up.
    Raises: CheckpointError for an address that is none.
    """

    def __init__(self, addresses: Sequence[str], *, timeout_s: float, closed: threading.Event) -> None:
        self._addresses, self._timeout_s, self._closed = list(map(_checked, addresses)), timeout_s, closed
        self.failed: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        """bytes of right shards from each"""
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return ", ".join(f"{each} ({self.failed[each]} failures)" for each in self._addresses)

    def newer_than(self, version: int) -> list[int]:
        """The newer versions that any of them says it has or is getting, the newest first; of each the last few.

        Raises: OSError where none answers.
        """
        found, answered, last = set[int](), False, OSError("no upstream answers")
        for address in self._order():
            try:
                said = sorted(map(int, json.loads(self._get(f"{address}/versions"))))
                found.update(said[-OFFERED:])
                answered = True
            except (*UNREACHABLE, *UNREADABLE) as error:
                last = OSError(f"{address}: {error}")
        if not answered:
            raise last
        return sorted((each for each in found if each > version), reverse=True)

    def manifest(self, version: int, *, secret: str = "", digest: str = "") -> Manifest:
        """digest: of the manifest, where it is known. Raises: CheckpointError for one that is not right, of whoever gave it,
        where no other has a right one; Gone where nobody has one."""
        wrong: CheckpointError | None = None
        for address in self._order():
            try:
                manifest = Manifest.from_json(self._get(f"{address}/{version}/manifest").decode(), secret=secret)
                if manifest.version != version:
                    raise CheckpointError(f"shardcast: {address} gives version {manifest.version} as {version}.")
                if digest and manifest.digest != digest:
                    raise CheckpointError(f"shardcast: {address} gives a version {version} that is not the origin's.")
                return manifest
            except CheckpointError as error:
                self._note_failure(address)
                wrong = error
            except (*UNREACHABLE, UnicodeDecodeError):
                continue
        raise wrong or Gone(f"nobody has version {version}")

    def shard(self, manifest: Manifest, shard: int) -> bytes:
        """Bytes whose digest is that of the manifest. Raises: Gone if nobody has the version; OSError after `timeout_s`."""
        deadline = time.monotonic() + self._timeout_s
        why = ""
        while time.monotonic() < deadline and not self._closed.is_set():
            missing = 0
            for address in self._order():
                try:
                    data = self._get(f"{address}/{manifest.version}/shards/{shard}")
                except urllib.error.HTTPError as error:
                    missing += error.code == 404
                    why = f"{address}: {error}"  # on its way there (503), or not there: no fault of its
                    continue
                except UNREACHABLE as error:
                    self._note_failure(address)
                    why = f"{address}: {error}"
                    continue
                if manifest.holds(shard, data):
                    with self._lock:
                        self.received[address] += len(data)
                    return data
                self._note_failure(address)
                why = f"{address}: shard {shard} of version {manifest.version} has a wrong checksum"
            if missing == len(self._addresses):
                raise Gone(f"nobody has version {manifest.version} any more")
            self._closed.wait(PAUSE_S)
        raise OSError(f"shard {shard} of version {manifest.version} did not come in {self._timeout_s:.0f} s; {why}")

    def _order(self) -> list[str]:
        """Those that failed least first, and of those the nearest."""
        with self._lock:
            return sorted(self._addresses, key=lambda address: self.failed[address])

    def _note_failure(self, address: str) -> None:
        with self._lock:
            self.failed[address] += 1

    def _get(self, url: str) -> bytes:
        # No proxy: nodes are given by their own addresses.
        with _OPENER.open(url, timeout=self._timeout_s) as response:
            data: bytes = response.read()
            return data


def _checked(address: str) -> str:
    try:
        parts = urllib.parse.urlsplit(address)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:  # a port that is none
        wrong = True
    if wrong:
        raise CheckpointError(f"shardcast: {address!r} is no address of a node. Write it as http://host:8000.")
    return address.rstrip("/")


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
