"""Versions that a node of shardcast has, whole or in part, and which shards are there for others to take."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from meshkit.algos.shardcast._manifest import Manifest


@dataclass(eq=False)
class Version:
    """folder: where its files are; parts of them are holes until `present` says otherwise."""

    manifest: Manifest
    folder: Path
    present: set[int] = field(default_factory=set)
    ours: bool = True  # deleted when it is old
    complete: bool = False


class Store:
    """Thread-safe. folder: for the versions that are received, `version-N` when whole and `version-N.partial` before."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._versions: dict[int, Version] = {}
        self._changed = threading.Condition()

    def publish(self, manifest: Manifest, folder: Path) -> None:
        """A whole folder of somebody else's, which stays where it is."""
        shards = set(range(len(manifest.shards)))
        with self._changed:
            self._versions[manifest.version] = Version(manifest, folder, shards, ours=False, complete=True)
            self._changed.notify_all()

    def resume(self, manifests: list[Manifest]) -> None:
        """Whole versions of an earlier process in `folder`."""
        assert self.folder is not None
        with self._changed:
            for manifest in manifests:
                shards = set(range(len(manifest.shards)))
                folder = self.folder / f"version-{manifest.version}"
                self._versions[manifest.version] = Version(manifest, folder, shards, complete=True)

    def begin(self, manifest: Manifest) -> list[int]:
        """Make room for a version; returns the shards to get. What an earlier process received and is right, is there."""
        assert self.folder is not None
        partial = self.folder / f"version-{manifest.version}.partial"
        for other in self.folder.glob("version-*.partial"):
            if other != partial:
                shutil.rmtree(other, ignore_errors=True)
        begun = partial.exists()
        manifest.make_files(partial)
        shards = range(len(manifest.shards))
        present = {index for index in shards if begun and manifest.holds(index, manifest.read(partial, index))}
        with self._changed:
            self._versions[manifest.version] = Version(manifest, partial, present)
            self._changed.notify_all()
        return [index for index in range(len(manifest.shards)) if index not in present]

    def write(self, version: int, shard: int, data: bytes) -> None:
        """data: whose digest is right."""
        there = self._versions[version]
        there.manifest.write(there.folder, shard, data)
        with self._changed:
            there.present.add(shard)
            self._changed.notify_all()

    def finish(self, version: int) -> Path:
        """All shards are there: the folder gets its name."""
        there = self._versions[version]
        final = there.folder.with_suffix("")
        with self._changed:
            (final.parent / f"{final.name}.json").write_text(there.manifest.to_json())
            shutil.rmtree(final, ignore_errors=True)  # of an earlier process, and not whole
            there.folder.rename(final)
            there.folder, there.complete = final, True
            self._changed.notify_all()
        return final

    def keep(self, count: int) -> None:
        """Forget all but the newest versions; the files of those that were received are deleted."""
        with self._changed:
            old = [self._versions.pop(version) for version in sorted(self._versions)[:-count]]
        for there in old:
            if there.ours:
                shutil.rmtree(there.folder, ignore_errors=True)
                there.folder.with_suffix("").with_suffix(".json").unlink(missing_ok=True)

    def give_up(self, version: int) -> None:
        """A version that did not come whole. What came stays on disk until another is begun."""
        with self._changed:
            self._versions.pop(version)

    @property
    def versions(self) -> list[int]:
        with self._changed:
            return sorted(self._versions)

    def get(self, version: int) -> Version | None:
        with self._changed:
            return self._versions.get(version)

    def read(self, version: int, shard: int, *, wait_s: float) -> bytes | None:
        """The shard; None if it has not come after `wait_s`. Raises: KeyError where there is no such version or shard."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                there = self._versions[version]
                if not 0 <= shard < len(there.manifest.shards):
                    raise KeyError(shard)
                if shard in there.present:
                    break
                if not self._changed.wait(deadline - time.monotonic()):
                    return None
            try:
                return there.manifest.read(there.folder, shard)
            except FileNotFoundError:
                raise KeyError(version) from None

    def wait(self, newer_than: int, timeout_s: float) -> tuple[int, Path] | None:
        """The newest whole version, once it is newer than that; None after `timeout_s`."""

        def newest() -> int:
            return max((v for v, there in self._versions.items() if there.complete), default=-1)

        with self._changed:
            if not self._changed.wait_for(lambda: newest() > newer_than, timeout_s):
                return None
            return newest(), self._versions[newest()].folder
