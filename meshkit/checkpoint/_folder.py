"""The folder of checkpoints: complete and unfinished steps, manifest, digests, atomic publish by rename.

step-00000010/            complete: gets this name by a rename, as the very last act of a save
    manifest.json         what the rest must be; see Manifest
    index.json, *.distcp  tensors: where each part is, and what each rank wrote (torch.distributed.checkpoint)
    .metadata             the index as a pickle, for PyTorch's tools; not read here
    state.json, state.safetensors   optimizer options, schedule, data position, extra
    config.json           the configuration
.incomplete-step-...      a save that is under way, or was killed; removed by the next save
.removed-step-...         one that `keep` is deleting, or was killed at it; removed by the next save
abandoned-step-...        newer than the one a run went back to; yours to delete
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from meshkit.checkpoint._dcp import Checksum
from meshkit.core.digests import FAST, digest_bytes, digest_file, digest_json, shown
from meshkit.errors import CheckpointError

FORMAT = 3
SHA256 = 2  # digests of files are SHA-256: read, and not written any more
PICKLED = 1  # CRC-32 of files, .metadata and state.pt: read, and not written any more
MANIFEST = "manifest.json"
INCOMPLETE = ".incomplete-"
REMOVED = ".removed-"
ABANDONED = "abandoned-"


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def complete_steps(folder: Path) -> list[int]:
    """Oldest first. Looks at names alone: a step has its name only once it is complete."""
    if not folder.is_dir():
        return []
    # Eight digits sort as numbers in a listing; from step 10^8 on there are more.
    matches = (re.fullmatch(r"step-(\d{8,})", entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


# A killed save leaves a folder without its final name. The next save deletes it, on rank 0 and before any rank
# writes; no other save can be under way, since a run's saves are written one after the other.
def clear_leftovers(folder: Path) -> None:
    """Delete the folders that a killed save or a killed deletion left."""
    for entry in folder.iterdir():
        if entry.name.startswith((INCOMPLETE, REMOVED)):
            shutil.rmtree(entry)


def make_temporary(folder: Path, step: int) -> Path:
    """Make an empty `.incomplete-` folder to write in, after deleting those of killed saves."""
    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder)
    temporary = temporary_of(folder, step)
    temporary.mkdir()
    return temporary


def temporary_of(folder: Path, step: int) -> Path:
    """Where a step is written before it is complete."""
    return folder / f"{INCOMPLETE}{step_name(step)}"


def publish(temporary: Path, final: Path) -> None:
    """Rename a written folder to its final name. The rename is atomic, so a checkpoint of that name is always complete.

    Folder entries are synced before and after, which makes this hold after a power cut too.
    """
    # The files are synced when written. Their entries in the folder are synced here, before the name that vouches for them.
    _sync_folder(temporary)
    os.rename(temporary, final)
    _sync_folder(final.parent)


def set_aside(folder: Path, step: int) -> None:
    """Rename a step to `abandoned-step-...`, with a number where that name is taken."""
    names = (f"{ABANDONED}{step_name(step)}" + (f"-{copy}" if copy else "") for copy in count())
    # Its entry is synced with the publishing that follows at once: both renames are in one folder.
    os.rename(folder / step_name(step), next(folder / name for name in names if not (folder / name).exists()))


def keep_newest(folder: Path, keep: int | None) -> None:
    """Delete all but the newest `keep`. Renamed first: a checkpoint half deleted does not look complete."""
    # Oldest first, so a kill in between leaves the newest.
    for step in complete_steps(folder)[:-keep] if keep else []:
        removed = folder / f"{REMOVED}{step_name(step)}"
        os.rename(folder / step_name(step), removed)
        shutil.rmtree(removed)


@dataclass(frozen=True, kw_only=True)
class File:
    """bytes and digest of a file, and the first key stored in it."""

    bytes: int
    digest: str
    first_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of `manifest.json`: what the checkpoint is, and size and digest of its files.

    tensors: parameters and persistent buffers by name, as [shape, dtype]. mesh: size of each axis.
    """

    format: int
    step: int
    world_size: int
    mesh: dict[str, int]
    torch: str
    tensors: dict[str, tuple[tuple[int, ...], str]]
    files: dict[str, File]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    body = asdict(manifest)
    write_file(folder / MANIFEST, json.dumps({**body, "digest": digest_json(body)}, indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """Raises: CheckpointError if it is not there, not what was written, of another format, or of another step."""
    path = folder / MANIFEST
    try:
        body: dict[str, Any] = json.loads(path.read_bytes())
        # Before the digest: a later format may compute it otherwise, and is not damaged.
        if (format_ := body.get("format")) not in (FORMAT, SHA256, PICKLED):
            raise CheckpointError(
                f"{path} has format {format_}, but this version of meshkit reads the formats {PICKLED} to {FORMAT}. Read it "
                "with the version that wrote it."
            )
        written = body.pop("crc32" if format_ == PICKLED else "digest")
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint was changed after it was complete.") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    if (_body_crc32(body) if format_ == PICKLED else digest_json(body)) != written:
        raise CheckpointError(f"{path} is damaged: its content does not match its digest.")
    if format_ == PICKLED:
        for file in body["files"].values():
            file["digest"] = f"crc32:{file.pop('crc32'):08x}"
    if step_name(body["step"]) != folder.name:
        raise CheckpointError(
            f"{folder} is not the step that its name says: it was saved as {step_name(body['step'])}. Give it that name "
            "again."
        )
    body["tensors"] = {name: (tuple(shape), dtype) for name, (shape, dtype) in body["tensors"].items()}
    body["files"] = {name: File(**file) for name, file in body["files"].items()}
    return Manifest(**body)


def _body_crc32(body: dict[str, Any]) -> int:
    """Of a manifest of the format PICKLED."""
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def check_file(path: Path, file: File) -> None:
    """Raises: CheckpointError unless the file is byte for byte what was written."""
    first_key = f" The first key in it is {file.first_key!r}." if file.first_key else ""
    if not path.exists():
        raise CheckpointError(f"{path} is missing.{first_key}")
    # The size first: a truncated file of many GiB is found without reading it.
    if (size := path.stat().st_size) != file.bytes:
        raise CheckpointError(f"{path} has {size} bytes, but {file.bytes} were written.{first_key}")
    if (digest := digest_file(path, file.digest.partition(":")[0])) != file.digest:
        raise CheckpointError(
            f"{path} is damaged: its digest is {shown(digest)}, not {shown(file.digest)} as written.{first_key}"
        )


def checksum_file(path: Path) -> Checksum:
    return Checksum(bytes=path.stat().st_size, digest=digest_file(path, FAST))


def share_files(files: dict[str, File], ranks: int) -> list[list[str]]:
    """The files that each rank checks: the largest first, each to the rank with the fewest bytes so far (greedy)."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    # The name breaks ties: every rank computes all shares for itself and must come to the same.
    for name in sorted(files, key=lambda name: (-files[name].bytes, name)):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        loads[rank] += files[name].bytes
    return shares


def write_file(path: Path, data: bytes) -> Checksum:
    """Write and sync to disk."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return Checksum(bytes=len(data), digest=digest_bytes(data, FAST))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
