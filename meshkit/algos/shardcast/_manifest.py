"""The manifest of one version of a folder: its files, cut into shards, and the checksum (SHA-256) of each."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path, PurePosixPath

from meshkit.core.digests import digest_bytes
from meshkit.errors import CheckpointError

UNREADABLE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""what reading numbers and texts from JSON of others may raise"""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """version: a number that grows. files: (path in the folder, bytes), in order; shards are cut from them end to end.

    shards: the digest of each. signature: an HMAC of the rest under a secret that origin and receivers share, or "".
    """

    version: int
    files: tuple[tuple[str, int], ...]
    shard_bytes: int
    shards: tuple[str, ...]
    signature: str = ""

    @staticmethod
    def of(folder: str | os.PathLike[str], version: int, *, shard_bytes: int, secret: str) -> Manifest:
        """Reads all files of the folder once."""
        folder = Path(folder)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = tuple((path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths)
        count = -(-sum(size for _, size in files) // shard_bytes)
        plain = Manifest(version=version, files=files, shard_bytes=shard_bytes, shards=("",) * count)
        shards = tuple(digest_bytes(plain.read(folder, index)) for index in range(count))
        made = replace(plain, shards=shards)
        return replace(made, signature=made._hmac(secret)) if secret else made

    @staticmethod
    def from_json(text: str, *, secret: str) -> Manifest:
        """Raises: CheckpointError for no manifest, one that names files outside of its folder, or not signed by `secret`."""
        try:
            fields = json.loads(text)
            files = tuple((str(path).encode().decode(), int(size)) for path, size in fields["files"])
            manifest = Manifest(
                version=int(fields["version"]),
                files=files,
                shard_bytes=int(fields["shard_bytes"]),
                shards=tuple(map(str, fields["shards"])),
                signature=str(fields["signature"]).encode().decode(),
            )
        except UNREADABLE as error:
            raise CheckpointError(f"shardcast: what came is no manifest: {error}. Compare the address.") from error
        inside = [PurePosixPath(path) for path, size in files if 0 <= size < 1 << 63 and "\0" not in path]
        if len(inside) < len(files) or any(
            not path.parts or path.is_absolute() or ".." in path.parts for path in inside
        ):
            raise CheckpointError("shardcast: a manifest names files outside of its folder. Do not trust who sent it.")
        if manifest.shard_bytes < 1 or len(manifest.shards) != -(-manifest.total_bytes // manifest.shard_bytes):
            raise CheckpointError(
                "shardcast: a manifest has other shards than its files make. Do not trust who sent it."
            )
        if secret and not hmac.compare_digest(manifest._hmac(secret).encode(), manifest.signature.encode()):
            raise CheckpointError(
                f"shardcast: the manifest of version {manifest.version} is not signed by the secret. Give origin and "
                "receivers the same, or do not trust who sent it."
            )
        return manifest

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def digest(self) -> str:
        """Of all that it says: who has it from the origin itself needs no secret to know the manifest, and so the files."""
        return digest_bytes(self.to_json().encode())

    @property
    def total_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def pieces(self, shard: int) -> Iterator[tuple[str, int, int]]:
        """(file, offset in it, bytes) of a shard, in order."""
        start, stop = shard * self.shard_bytes, min((shard + 1) * self.shard_bytes, self.total_bytes)
        for (path, size), end in zip(self.files, self._ends, strict=True):
            first, last = max(start, end - size), min(stop, end)
            if first < last:
                yield path, first - (end - size), last - first

    def read(self, folder: str | os.PathLike[str], shard: int) -> bytes:
        parts = []
        for path, offset, size in self.pieces(shard):
            with (Path(folder) / path).open("rb") as stream:
                stream.seek(offset)
                parts.append(stream.read(size))
        return b"".join(parts)

    def write(self, folder: str | os.PathLike[str], shard: int, data: bytes) -> None:
        """Into files that have their sizes already."""
        start = 0
        for path, offset, size in self.pieces(shard):
            with (Path(folder) / path).open("r+b") as stream:
                stream.seek(offset)
                stream.write(data[start : start + size])
            start += size

    def make_files(self, folder: str | os.PathLike[str]) -> None:
        """Files of the right sizes and no others; what they hold already stays."""
        names = {path for path, _ in self.files}
        for old in Path(folder).rglob("*"):
            if old.is_file() and old.relative_to(folder).as_posix() not in names:
                old.unlink()
        for path, size in self.files:
            (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
            with (Path(folder) / path).open("ab") as stream:
                stream.truncate(size)

    def fits(self, folder: str | os.PathLike[str]) -> bool:
        """Whether all files are there in their sizes; their bytes are not read."""
        paths = [(Path(folder) / path, size) for path, size in self.files]
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)

    def holds(self, shard: int, data: bytes) -> bool:
        return digest_bytes(data) == self.shards[shard]

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(size for _, size in self.files))

    def _hmac(self, secret: str) -> str:
        text = json.dumps({**asdict(self), "signature": ""}, sort_keys=True)
        return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()
