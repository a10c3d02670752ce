"""Sharded tensors to and from files, through torch.distributed.checkpoint (DCP).

A file `__<rank>_0.distcp` holds what one rank wrote, and `index.json` says where each part of each tensor is. `.metadata`
says the same as a pickle, for PyTorch's own tools; of a folder that meshkit wrote it is not read here.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, WriteResult

from meshkit.checkpoint._agree import on_each_rank, shared_out
from meshkit.checkpoint._values import dtype_of
from meshkit.core import _torch
from meshkit.core.digests import FAST, RunningDigest
from meshkit.core.full_disk import no_space
from meshkit.errors import CheckpointError, MeshkitError
from meshkit.mesh import HostRanks

T = TypeVar("T")
INDEX, METADATA = "index.json", ".metadata"


@dataclass(frozen=True, kw_only=True)
class Part:
    """The shard of one tensor that this rank writes. offset, shape: where it begins in the full tensor, and its shape."""

    tensor: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Checksum:
    """Size and digest of a file as written, such as `xxh3:...`."""

    bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """What is in the folder: shape and dtype of each tensor by key, and the first key stored in each file."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    first_keys: dict[str, str]


# [Note: DCP's plans, and our own agreement]
# torch's `save` and `load` meet over a process group, in collectives of objects that bring all to each rank. Its planners
# and its storage are classes to be called, so plans travel here as everything of a checkpoint does, over `HostRanks`.


def write_parts(parts: dict[str, Part], folder: Path, ranks: HostRanks) -> dict[str, Checksum]:
    """Write every rank's parts and the index, synced to disk; returns size and checksum of this rank's own files.

    A part that several ranks hold is written by one of them. Wire: the plan to rank 0 and back, and what was written.
    Raises: CheckpointError, on every rank the same.
    """
    # Copying ahead would create an accelerator context in the background thread; the values are on the host already.
    writer = _Writer(folder, sync_files=True, per_thread_copy_ahead=0, overwrite=False)
    # DCP's writer takes no file system as an argument; it writes all its files through this attribute.
    files = writer.fs = _ChecksumFileSystem()
    planner, is_first, action = _PartPlanner(), ranks.rank == 0, f"writing {folder}"
    whole: list[Metadata] = []  # on rank 0

    def plan() -> SavePlan:
        planner.set_up_planner(dict(parts), writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        whole.append(metadata)
        return writer.prepare_global_plan(plans)

    def write() -> list[WriteResult]:
        written: list[WriteResult] = writer.write_data(planner.finish_plan(own), planner).wait()
        return written

    def finish(results: list[list[WriteResult]]) -> list[None]:
        _naming_rank(action, lambda: writer.finish(whole[0], results))()
        return [None] * ranks.size

    own = shared_out(ranks, action, plan, plan_all)
    shared_out(ranks, action, _naming_rank(action, write), finish)
    return files.checksums


def read_into(targets: dict[str, Tensor], reader: StorageReader, ranks: HostRanks, *, action: str) -> None:
    """Fill tensors, plain or DTensors on any mesh, in place (resharding on load).

    action: what is being done, for the error text. Wire: what went wrong. Raises: CheckpointError, on every rank the same.
    """
    planner = DefaultLoadPlanner()

    def plan() -> LoadPlan:
        metadata = reader.read_metadata()
        planner.set_up_planner(dict(targets), metadata, ranks.rank == 0)
        reader.set_up_storage_reader(metadata, ranks.rank == 0)
        return planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))

    planned = on_each_rank(ranks, action, _naming_rank(action, plan))
    on_each_rank(ranks, action, _naming_rank(action, lambda: reader.read_data(planned, planner).wait()))


def _naming_rank(action: str, act: Callable[[], T]) -> Callable[[], T]:
    """With errors that say what this rank did."""

    def named() -> T:
        try:
            return act()
        except MeshkitError as error:
            raise CheckpointError(f"{action} on rank {dist.get_rank()}: {error}") from error

    return named


def read_index(folder: Path, *, pickled: bool = False) -> Index:
    """pickled: from `.metadata`, which is a pickle, of which nothing but DCP's own records is read: of a folder that another
    program wrote, or an older meshkit. Raises: CheckpointError for one that says anything else."""
    metadata = FileReader(folder, pickled=pickled).read_metadata()
    tensors = {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        # What else DCP could store are pickled objects (BytesStorageMetadata); ours are in state.pt.
        if isinstance(entry, TensorStorageMetadata)
    }
    first: dict[str, tuple[int, str]] = {}
    for index, storage in metadata.storage_data.items():
        # The key at the lowest offset: a damaged file is named by something that a reader of the model knows.
        candidate = (storage.offset, index.fqn)
        first[storage.relative_path] = min(first.get(storage.relative_path, candidate), candidate)
    return Index(tensors=tensors, first_keys={file: key for file, (_, key) in first.items()})


class FileReader(FileSystemReader):
    """Reads an index of DCP's records that names files of its folder alone: a checkpoint is data, and runs nothing.

    pickled: by the `.metadata` of a folder without an index, see `read_index`.
    """

    def __init__(self, folder: Path, *, pickled: bool) -> None:
        super().__init__(folder)
        self._pickled = pickled

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / (METADATA if self._pickled else INDEX)
        try:
            if self._pickled:
                with path.open("rb") as file:
                    metadata = _torch.read_dcp_metadata(file)
            else:
                metadata = _metadata_of(json.loads(path.read_bytes()))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing. Give a folder that {_WRITERS[self._pickled]} wrote.") from None
        except (
            *(pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, LookupError, RecursionError),
            *(MemoryError, OverflowError, ImportError, RuntimeError),  # of a damaged pickle
        ) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
        for storage in metadata.storage_data.values():
            if Path(storage.relative_path).name != storage.relative_path:
                raise CheckpointError(
                    f"{path} is damaged: it names {storage.relative_path!r}, which is not in its folder."
                )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


_WRITERS = {True: "torch.distributed.checkpoint", False: "meshkit"}


def _index_of(metadata: Metadata, places: Mapping[MetadataIndex, Any]) -> dict[str, Any]:
    """As JSON: of each tensor its dtype, its shape, and of each chunk [offsets, sizes, file, first byte, bytes].

    places: where each chunk was written. On torch 2.11 the writer puts them into a copy of the metadata alone.
    """
    return {
        key: {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "shape": list(entry.size),
            "chunks": [
                [list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset, place.length]
                for chunk in entry.chunks
                for place in (places[MetadataIndex(key, chunk.offsets)],)
            ],
        }
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _metadata_of(index: dict[str, Any]) -> Metadata:
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for key, entry in index.items():
        chunks = []
        for offsets, sizes, file, first, length in entry["chunks"]:
            chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)))
            places[MetadataIndex(key, offsets)] = _torch.dcp_storage_info(file, first, length)
        properties = TensorProperties(dtype=dtype_of(entry["dtype"]))
        tensors[key] = TensorStorageMetadata(properties=properties, size=torch.Size(entry["shape"]), chunks=chunks)
    return Metadata(state_dict_metadata=tensors, storage_data=places)


class _Writer(FileSystemWriter):
    """Says of a full disk that it is full: torch's writer of tensors forgets why a write failed, and speaks of positions."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        parts = [item.tensor_data for item in plan.items if item.tensor_data is not None]
        needed = sum(part.chunk.sizes.numel() * part.properties.dtype.itemsize for part in parts)
        with self._telling(needed):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank of the group, when all have written."""
        with self._telling(None):
            super().finish(metadata, results)
            places = {result.index: result.storage_data for of_rank in results for result in of_rank}
            with (Path(self.path) / INDEX).open("w") as file:
                json.dump(_index_of(metadata, places), file)
                file.flush()
                os.fsync(file.fileno())

    @contextmanager
    def _telling(self, needed: int | None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            first = self.fs.failed if isinstance(self.fs, _ChecksumFileSystem) else None
            if (told := no_space(first or error, Path(self.path), needed)) is None:
                raise
            raise CheckpointError(told) from error


class _PartPlanner(DefaultSavePlanner):
    """Plans from `Part`s: no DTensor is needed, so the values may be host copies that outlive the step."""

    def __init__(self) -> None:
        # The keys are flat already, and flattening would look into each Part.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(key, part) for key, part in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        # DCP would look the tensor up by index in a DTensor; a Part is the one shard of its key on this rank.
        tensor: Tensor = self.state_dict[index.fqn].tensor
        return tensor


def _write_item(key: str, part: Part) -> WriteItem:
    return WriteItem(
        # The offset tells shards of a key apart. Where ranks offer the same one, DCP's global plan keeps one of them.
        index=MetadataIndex(key, part.offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(part.offset), sizes=part.tensor.shape),
            properties=TensorProperties(dtype=part.tensor.dtype),
            size=torch.Size(part.shape),
        ),
    )


class _ChecksumFileSystem(FileSystem):
    """Computes checksums of the bytes on their way to the disk, so that any later change to a file is recognised."""

    def __init__(self) -> None:
        self.checksums: dict[str, Checksum] = {}
        self.failed: OSError | None = None  # what the system said of the first write that failed

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            checked = _ChecksumStream(stream)
            try:
                yield checked
            finally:
                self.failed = self.failed or checked.failed
        if Path(path).suffix == ".distcp":
            # After the file is closed. The index is left out: rank 0 writes it, and its digest is taken from disk.
            self.checksums[Path(path).name] = Checksum(bytes=checked.digest.bytes, digest=checked.digest.text)


class _ChecksumStream:
    """A file that is written forwards only: a seek would make the running checksum wrong."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.digest = RunningDigest(FAST)
        self.failed: OSError | None = None

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        try:
            written: int = self._stream.write(data)
        except OSError as error:
            self.failed = self.failed or error
            raise
        return written

    def __getattr__(self, name: str) -> Any:
        if name in ("seek", "truncate"):
            raise AttributeError(f"a summed file is written forwards: no {name}")
        return getattr(self._stream, name)
