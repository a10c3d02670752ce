"""Nodes of shardcast: the origin, where the trainer publishes versions, and relays, which get them and serve them on.

A generator is a relay that serves nobody, or does. There is no common process group: nodes know addresses alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from meshkit.algos.shardcast._fetch import Gone, Upstreams
from meshkit.algos.shardcast._manifest import Manifest
from meshkit.algos.shardcast._serve import Server
from meshkit.algos.shardcast._store import Store
from meshkit.errors import CheckpointError

SHARD_BYTES = 64 * 2**20


class Origin:
    """Serves versions of a model, each a folder as `Run.export` or `save_pretrained` write it. A context.

    port: 0 takes a free one, see `address`. secret: signs manifests, so that no relay can pass off other weights.
    """

    def __init__(
        self,
        *,
        host: str = "",
        port: int = 0,
        shard_bytes: int = SHARD_BYTES,
        keep: int = 2,
        secret: str = "",
    ) -> None:
        if shard_bytes < 1 or keep < 1:
            raise CheckpointError(f"Origin(shard_bytes={shard_bytes}, keep={keep}): each is at least 1.")
        self._store, self._shard_bytes, self._keep, self._secret = Store(), shard_bytes, keep, secret
        self._server = Server(self._store, host, port)
        self.port = self._server.port

    def publish(self, folder: str | os.PathLike[str], version: int) -> Manifest:
        """Let others have the folder from now on; it must stay as it is while it is among the last `keep` versions.

        Reads it once, for the checksums. Raises: CheckpointError for a version that is not newer than all before.
        """
        folder = Path(folder)
        if version <= (newest := max(self._store.versions, default=-1)):
            raise CheckpointError(
                f"publish: version {version} is not newer than {newest}, which receivers have. Count up."
            )
        manifest = Manifest.of(folder, version, shard_bytes=self._shard_bytes, secret=self._secret)
        if not manifest.shards:
            raise CheckpointError(f"publish: {folder} has no files, or empty ones. Give the folder of a model.")
        self._store.publish(manifest, folder)
        self._store.keep(self._keep)
        return manifest

    def close(self) -> None:
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Relay:
    """Gets each newest version from other nodes, and serves its shards on while the rest still comes. A context.

    upstreams: addresses as "http://host:port", the nearest first; each shard is asked of the first that has not failed, and
    of the others where that does not answer, does not have it, or gives one with a wrong checksum: so a relay that dies or
    lies is gone round. Name the origin last, and no relay is needed to live.
    folder: for versions, `version-N` when whole. A restarted relay goes on with the shards that it has.
    port: None serves nobody, 0 takes a free one. keep: versions; older ones are deleted. streams: shards asked for at a time.
    secret: of the origin; manifests without its signature are refused.
    Raises: CheckpointError for an upstream that is no address, and for numbers out of range.
    """

    def __init__(
        self,
        upstreams: Sequence[str],
        folder: str | os.PathLike[str],
        *,
        host: str = "",
        port: int | None = None,
        keep: int = 2,
        streams: int = 4,
        poll_s: float = 1.0,
        timeout_s: float = 30.0,
        secret: str = "",
    ) -> None:
        folder = Path(folder)
        if not upstreams:
            raise CheckpointError(
                "Relay: no upstreams. Give the address of the origin, or of other relays, or of both."
            )
        if min(keep, streams) < 1 or min(poll_s, timeout_s) <= 0:
            raise CheckpointError(
                f"Relay(keep={keep}, streams={streams}, poll_s={poll_s}, timeout_s={timeout_s}): each is positive."
            )
        self._folder, self._keep, self._streams, self._poll_s, self._secret = folder, keep, streams, poll_s, secret
        folder.mkdir(parents=True, exist_ok=True)
        self._store, self._closed = Store(folder), threading.Event()
        self.upstreams = Upstreams(upstreams, timeout_s=timeout_s, closed=self._closed)
        self._store.resume(self._whole())
        self._server = None if port is None else Server(self._store, host, port)
        self.port = None if self._server is None else self._server.port
        self.trouble = ""
        """why the last try to get a version failed; empty after one that did not"""
        self._thread = threading.Thread(target=self._follow, name="shardcast relay", daemon=True)
        self._thread.start()

    def wait(self, *, newer_than: int = -1, timeout_s: float = 600.0) -> tuple[int, Path]:
        """(version, folder) of the newest whole version, as soon as it is newer than that.

        The folder is deleted when `keep` newer versions are there: load it before. Raises: CheckpointError after the timeout.
        """
        found = self._store.wait(newer_than, timeout_s)
        if found is None:
            why = self.trouble or "no upstream has one"
            raise CheckpointError(
                f"Relay.wait: no version newer than {newer_than} in {timeout_s:.0f} s: {why}. Look at {self.upstreams}."
            )
        return found

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _whole(self) -> list[Manifest]:
        """Versions of an earlier process. What a crash left in pieces, or another secret signed, is got again."""
        manifests = []
        for path in sorted(self._folder.glob("version-*.json")):
            with suppress(CheckpointError, UnicodeDecodeError):
                manifest = Manifest.from_json(path.read_text(), secret=self._secret)
                if path.stem == f"version-{manifest.version}" and manifest.fits(path.with_suffix("")):
                    manifests.append(manifest)
        return manifests

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                self._get_newest()
                self.trouble = ""
            except Exception as error:  # a thread that ended would leave who waits without a word
                self.trouble = f"{type(error).__name__}: {error}"
            self._closed.wait(self._poll_s)

    def _get_newest(self) -> None:
        """The newest version that is right: one that nobody has, or of a wrong manifest, keeps back no other."""
        failed: Gone | CheckpointError | None = None
        for version in self.upstreams.newer_than(max(self._store.versions, default=-1)):
            try:
                return self._get(version)
            except (Gone, CheckpointError) as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _get(self, version: int) -> None:
        manifest = self.upstreams.manifest(version, secret=self._secret)
        _receive(manifest, self._store, self.upstreams, self._streams)
        self._store.keep(self._keep)


def fetch(
    upstreams: Sequence[str],
    folder: str | os.PathLike[str],
    version: int,
    *,
    digest: str,
    streams: int = 4,
    timeout_s: float = 30.0,
) -> Path:
    """Get one version, also one that is not the newest, as `version-N` of a folder; what is there whole is not got again.

    upstreams, streams, timeout_s: as of a `Relay`. digest: of the version's `Manifest`, as the origin's job says it: it is
    what is held against what comes, so that no secret is needed, and nobody who has one can pass off other weights.
    Raises: CheckpointError where no upstream has it, or none a right one.
    """
    folder = Path(folder)
    whole, beside = folder / f"version-{version}", folder / f"version-{version}.json"
    if whole.is_dir() and beside.is_file():
        manifest = Manifest.from_json(beside.read_text(), secret="")
        if manifest.digest == digest and manifest.fits(whole):
            return whole
    nodes = Upstreams(upstreams, timeout_s=timeout_s, closed=threading.Event())
    try:
        return _receive(nodes.manifest(version, digest=digest), Store(folder), nodes, streams)
    except (Gone, OSError) as error:
        raise CheckpointError(f"fetch: version {version} did not come: {error}. Look at {nodes}.") from error


def _receive(manifest: Manifest, store: Store, upstreams: Upstreams, streams: int) -> Path:
    """All shards that the store lacks of a version, which is whole then."""
    missing = store.begin(manifest)

    def get(shard: int) -> None:
        store.write(manifest.version, shard, upstreams.shard(manifest, shard))

    try:
        # In order: what is served on first is what came first.
        with ThreadPoolExecutor(streams, thread_name_prefix="shardcast") as pool:
            list(pool.map(get, missing))
    except BaseException:
        store.give_up(manifest.version)  # the next try begins with what came
        raise
    return store.finish(manifest.version)
