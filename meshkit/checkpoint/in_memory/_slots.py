"""Slots of an in-memory checkpoint: a rank's shards at one step in a file of a RAM disk (tmpfs), which outlives the process.

    rank-00003.5f0c.0.data     the values of its shards, one after the other
    rank-00003.5f0c.0.json     what they are, with their sum; there only while the values are whole

5f0c names the life, one start of the job. Two slots of each rank, .0 and .1, are written in turn: one is whole whenever a
process is killed. Those of the life before go when there is something newer. Beside those of the ranks of this host lie
copies of those of other hosts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshkit.checkpoint._dcp import Part
from meshkit.checkpoint._state import dtype_name
from meshkit.checkpoint._values import dtype_of
from meshkit.core.digests import digest_json
from meshkit.core.full_disk import telling_of_a_full_disk
from meshkit.core.word_sum import word_sum
from meshkit.errors import CheckpointError

SLOTS = 2
ALIGNED = 64  # bytes to which each shard begins, so that any dtype may view them


@dataclass(frozen=True, kw_only=True)
class Shard:
    """dtype, shape: of the whole tensor. offset, sizes: of this part of it. first: its first byte in the slot."""

    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a slot holds. origin, life: of the folder of checkpoints, and of the start of the job that wrote it; slots of one
    step belong together where both are the same. ranks: that saved. sum: of the words of its bytes. state, tensors: what is
    not a shard, as `Snapshot.encode` gives it, the tensors as a safetensors file in hexadecimal.
    """

    origin: str
    life: str
    step: int
    rank: int
    ranks: int
    mesh: dict[str, int]
    shards: dict[str, Shard]
    state: Any
    tensors: str
    config: str
    nbytes: int
    sum: int

    @property
    def group(self) -> tuple[int, str, int]:
        """Of slots that are one checkpoint."""
        return self.step, self.life, self.ranks

    def encode(self) -> bytes:
        body = asdict(self)
        return json.dumps({**body, "digest": digest_json(body)}).encode()


def decode_header(data: bytes) -> Header | None:
    """None for one that is not byte for byte what was written."""
    try:
        body = json.loads(data)
        if body.pop("digest") != digest_json(body):
            return None
        body["shards"] = {key: _shard(**entry) for key, entry in body["shards"].items()}
        return Header(**body)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _shard(dtype: str, shape: list[int], offset: list[int], sizes: list[int], first: int) -> Shard:
    return Shard(dtype=dtype, shape=tuple(shape), offset=tuple(offset), sizes=tuple(sizes), first=first)


def lay_out(parts: Mapping[str, Part]) -> tuple[dict[str, Shard], int]:
    """(where each part lies in a slot, bytes of the slot)."""
    shards, first = {}, 0
    for key, part in parts.items():
        shard = Shard(
            dtype=dtype_name(part.tensor.dtype),
            shape=tuple(part.shape),
            offset=tuple(part.offset),
            sizes=tuple(part.tensor.shape),
            first=first,
        )
        shards[key] = shard
        first += -(-shard.nbytes // ALIGNED) * ALIGNED
    return shards, max(first, ALIGNED)


def views(buffer: Tensor, shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """The shards in the bytes of a slot, uint8 [bytes]; no copies."""
    return {
        key: buffer[shard.first : shard.first + shard.nbytes].view(dtype_of(shard.dtype)).reshape(shard.sizes)
        for key, shard in shards.items()
    }


class Slot:
    """One slot of a rank, in the folder of this host."""

    def __init__(self, folder: Path, rank: int, life: str, number: int) -> None:
        name = f"rank-{rank:05d}.{life}.{number}"
        self.data, self._header = folder / f"{name}.data", folder / f"{name}.json"
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> None:
        """Have so many bytes, uint8 [size] in `buffer`. Memory is taken now: none is missing in the middle of a save.

        Raises: CheckpointError where the RAM disk has not so many.
        """
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.clear()
        folder = self.data.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(folder):
            raise CheckpointError(f"InMemory: {folder} is another user's. Delete it, or give another folder=.")
        with telling_of_a_full_disk(CheckpointError, f"InMemory: {folder}", folder, size), self.data.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        self.buffer = torch.from_file(str(self.data), shared=True, size=size, dtype=torch.uint8)

    def clear(self) -> None:
        """What it holds is not whole from now on."""
        self._header.unlink(missing_ok=True)

    def remove(self) -> None:
        self.clear()
        self.data.unlink(missing_ok=True)

    def complete(self, header: bytes) -> None:
        """What it holds is whole."""
        partial = self._header.with_suffix(".partial")
        partial.write_bytes(header)
        os.replace(partial, self._header)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A slot that says that it is whole."""

    path: Path
    header: Header

    def read(self) -> Tensor | None:
        """Its bytes, uint8, mapped and not copied; None where they are not what was written."""
        try:
            if self.path.stat().st_size != self.header.nbytes:
                return None
            buffer = torch.from_file(str(self.path), shared=False, size=self.header.nbytes, dtype=torch.uint8)
        except (OSError, RuntimeError):
            return None
        return buffer if int(word_sum(buffer)) == self.header.sum else None


def find(folder: Path, origin: str) -> list[Found]:
    """The whole slots of this host, written for this folder of checkpoints."""
    found = []
    for path in sorted(folder.glob("rank-*.json")) if folder.is_dir() and _is_ours(folder) else []:
        named = re.fullmatch(_NAME, path.stem)
        with contextlib.suppress(OSError):
            header = decode_header(path.read_bytes())
            if named is None or header is None or header.origin != origin:
                continue
            if (header.rank, header.life) == (int(named["rank"]), named["life"]):
                found.append(Found(path=path.with_suffix(".data"), header=header))
    return found


def _is_ours(folder: Path) -> bool:
    """Anybody can make a folder on the RAM disk, and what is loaded from it is believed."""
    return folder.stat().st_uid == os.getuid()


def host_name() -> str:
    """Machines may share a name, and containers a kernel."""
    return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def remove(folder: Path, *, keeping: Callable[[str, str], bool]) -> None:
    """All slots of this host, but those of which (name, life) are to be kept. Other ranks of the host may do the same."""
    for path in sorted(folder.glob("rank-*")) if folder.is_dir() else []:
        named = re.fullmatch(_NAME, path.stem)
        if named is None or not keeping(path.stem, named["life"]):
            path.unlink(missing_ok=True)


def remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


_NAME = r"rank-(?P<rank>\d{5,})\.(?P<life>[0-9a-f]+)\.\d"
