"""torch.distributed.checkpoint (DCP): its index without running code that a file names."""

from __future__ import annotations

import enum
import pickle
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

_KNOWN = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    # Of the folder that it was written to.
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "collections": ("OrderedDict",),
}


def read_dcp_metadata(file: BinaryIO) -> Metadata:
    """The content of a `.metadata` file, which is a pickle: one that names anything else than DCP's records is not read.

    Raises: pickle.UnpicklingError for another name, before anything of it runs.
    Private: the names that torch writes there. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    found: Any = _Records(file).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
    return found


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's index does")
        found = super().find_class(module, name)
        return _Properties if found is TensorProperties else found


def _member(kind: Any, name: str) -> Any:
    """What Python 3.11.0 to 3.11.3 write of an enum's member: getattr(kind, name)."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}, which no checkpoint's index does")
    return kind[name]


class _Properties(TensorProperties):
    """As any torch writes them: 2.15 adds strides, which 2.11 does not take and no reader asks for."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[:5])


def dcp_storage_info(file: str, offset: int, length: int) -> Any:
    """Where a part of a tensor lies in a folder of DCP, as its reader takes it.

    Private: torch.distributed.checkpoint.filesystem._StorageInfo. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    return _StorageInfo(file, offset, length)
