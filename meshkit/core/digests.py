"""Digests of files (SHA-256, XXH3): of one, and of those of a folder in a manifest beside them, looked at before they are
read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from meshkit.errors import MeshkitError

DIGESTS = "meshkit_digests.json"
FORMAT = "meshkit digests 1"
_CHUNK = 1 << 22
_THREADS = 8
_SETTLED_S = 2.0

# What was read and found right in this process: several models are often loaded from one folder. By all that changes when a
# file is written anew.
_SEEN: set[tuple[str, int, int, int, str]] = set()


FAST = "xxh3"
"""the kind for files that are large, and read by who wrote them: it shows damage at the speed of memory, and no intent"""


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_KINDS: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256, FAST: xxhash.xxh3_128, "crc32": _Crc32}


class RunningDigest:
    """The digest of bytes that come in pieces, and how many came.

    kind: "sha256", "xxh3" of 128 bits, or "crc32", of older manifests. Raises: KeyError for another.
    """

    def __init__(self, kind: str = "sha256") -> None:
        self._kind, self._sum, self.bytes = kind, _KINDS[kind](), 0

    def update(self, data: Any) -> None:
        self._sum.update(data)
        # Not len(data), which counts elements where an array of another item size is handed over.
        self.bytes += memoryview(data).nbytes

    @property
    def text(self) -> str:
        """Its kind, a colon, and hexadecimal digits: 64 of SHA-256."""
        return f"{self._kind}:{self._sum.hexdigest()}"


def digest_bytes(data: bytes, kind: str = "sha256") -> str:
    running = RunningDigest(kind)
    running.update(data)
    return running.text


def digest_file(path: Path, kind: str = "sha256") -> str:
    """Raises: KeyError for a kind that there is not."""
    running, chunk = RunningDigest(kind), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(chunk):
            running.update(chunk[:count])
    return running.text


def digest_json(value: Any) -> str:
    """Of the content, however it is indented: a manifest holds its own digest."""
    return digest_bytes(json.dumps(value, sort_keys=True).encode())


def shown(digest: str) -> str:
    """Enough of a digest to tell it from another by eye."""
    return digest.rpartition(":")[2][:12]


def add_digests(folder: Path, files: Mapping[str, Path]) -> None:
    """Write files, by the name that they have in the folder, into its manifest, beside those that are in it."""
    known: dict[str, Any] = {}
    with contextlib.suppress(MeshkitError):  # one that is damaged is written anew
        known = _read(folder, MeshkitError) or {}
    for name, path in files.items():
        known[name] = {"bytes": path.stat().st_size, "digest": digest_file(path)}
    body = {"format": FORMAT, "files": known}
    # A name for each process, and a rename: ranks may write the same at once, and nobody reads half of it.
    partial = folder / f".{DIGESTS}.{os.getpid()}.partial"
    partial.write_text(json.dumps({**body, "digest": digest_json(body)}, indent=1) + "\n")
    os.replace(partial, folder / DIGESTS)


def digest_all(folder: Path) -> None:
    """Write all files of a folder, and of folders in it, into its manifest."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != DIGESTS]
    add_digests(folder, {str(path.relative_to(folder)): path for path in paths})


def listed(folder: Path, error: type[MeshkitError]) -> list[str]:
    """The names in the folder's manifest; none where there is no manifest. Raises: `error` for a damaged one."""
    return sorted(_read(folder, error) or {})


def check_digests(folder: Path, names: Iterable[str], error: type[MeshkitError]) -> None:
    """Compare files of a folder with its manifest; in a folder without one, and of files that it does not list, nothing.

    Raises: `error` for a file that is listed and missing, or is not byte for byte what was written.
    """
    known = _read(folder, error)
    if known is None:
        return
    wanted = [name for name in dict.fromkeys(names) if name in known]
    if len(wanted) < 2:
        for name in wanted:
            _check(folder / name, known[name], error)
        return
    with ThreadPoolExecutor(min(_THREADS, len(wanted))) as threads:  # hashing lets other threads run
        for _ in threads.map(lambda name: _check(folder / name, known[name], error), wanted):
            pass


def _read(folder: Path, error: type[MeshkitError]) -> dict[str, Any] | None:
    path = folder / DIGESTS
    try:
        content = json.loads(path.read_bytes())
        body = {"format": content["format"], "files": content["files"]}
        if body["format"] != FORMAT:
            raise error(f"{path} has the format {body['format']!r}, but this version of meshkit reads {FORMAT!r}.")
        if set(content) == {"format", "files", "digest"} and content["digest"] == digest_json(body):
            files: dict[str, Any] = body["files"]
            return files
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror}.") from failure
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise error(f"{path} is damaged, so nothing says whether the files beside it are as written. {_MEANT}")


_MEANT = f"Get the folder again; if the change was meant, delete its {DIGESTS}, and it is read as any other folder."


def _check(path: Path, entry: Mapping[str, Any], error: type[MeshkitError]) -> None:
    try:
        status = path.stat()
        key = (str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino, entry["digest"])
        if key in _SEEN:
            return
        if not path.is_file() or status.st_size != entry["bytes"]:
            raise error(f"{path} has {status.st_size} bytes, but {entry['bytes']} were written. {_MEANT}")
        digest = digest_file(path)
    except FileNotFoundError:
        raise error(f"{path} is missing: {DIGESTS} lists it. {_MEANT}") from None
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror}.") from failure
    if digest != entry["digest"]:
        raise error(
            f"{path} is not what was written: its digest is {shown(digest)}, not {shown(entry['digest'])}. {_MEANT}"
        )
    # A file system tells times apart by some milliseconds: what was written just now may be written again at the same time.
    if time.time() - status.st_mtime > _SETTLED_S:
        _SEEN.add(key)
