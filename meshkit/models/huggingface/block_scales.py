"""fp8 weights in blocks (DeepSeek-V3's `weight_scale_inv`): the scales of a folder, and the values of a region."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from meshkit.errors import CheckpointError
from meshkit.models.huggingface.config import CONFIG_FILE, read_json

SUFFIX = "_scale_inv"
FP8, SCALE_DTYPES = "F8_E4M3", ("F32", "BF16", "F16")
OTHERWISE = "Convert the folder to bf16 with the tools of those who published it."

Open = Callable[[Path], AbstractContextManager[Any]]


class BlockScales:
    """Which tensors of a folder have a scale for each block of their last two dims, and where it is.

    A value is that of the file in fp32 times its block's scale: what the published converter computes, which then rounds
    once to the dtype that is wanted. Blocks at the end of a row or column may be smaller.
    Source: DeepSeek-V3's inference/fp8_cast_bf16.py.
    """

    def __init__(self, folder: Path, files: Mapping[str, Path], parameters: Container[str], open_file: Open) -> None:
        """files: of each tensor in the folder. parameters: names that the model has itself, which are nobody's scale.

        Raises: CheckpointError for a folder that is quantised by another method.
        """
        weights = {key: key.removesuffix(SUFFIX) for key in files if key.endswith(SUFFIX) and key not in parameters}
        self._files = {weight: files[key] for key, weight in weights.items() if weight in files}
        self._open, self._config = open_file, folder / CONFIG_FILE
        config = read_json(self._config) if self._config.exists() else {}
        self._fields: dict[str, Any] = config.get("quantization_config") or {}
        method = self._fields.get("quant_method")
        if self._fields and method != "fp8":
            raise CheckpointError(
                f"{self._config}: quantization_config has quant_method={method!r}, and only 'fp8' in blocks is read. "
                f"{OTHERWISE}"
            )

    def is_scale(self, key: str) -> bool:
        return key.endswith(SUFFIX) and key.removesuffix(SUFFIX) in self._files

    def refuse(self, file: Path, key: str, stored: Any) -> bool:
        """Whether the tensor is fp8 with a scale that fits it, from headers alone.

        Raises: CheckpointError for one without the other, blocks of no size, and a scale of another shape or dtype.
        """
        if (stored.get_dtype() == FP8) != (key in self._files):
            lacking = f"is fp8, but the folder has no {key + SUFFIX!r}, its scale"
            other = f"has a scale, {key + SUFFIX!r}, but the dtype {stored.get_dtype()} and not {FP8}"
            raise CheckpointError(f"{file}: {key!r} {other if key in self._files else lacking}. {OTHERWISE}")
        if key not in self._files:
            return False
        shape = stored.get_shape()
        if len(shape) < 2:
            raise CheckpointError(f"{file}: {key!r} is fp8 of shape {tuple(shape)}, which has no blocks. {OTHERWISE}")
        sizes = self._block()
        blocks = (*shape[:-2], *(-(-length // size) for length, size in zip(shape[-2:], sizes, strict=True)))
        with self._open(self._files[key]) as reader:
            scale = reader.get_slice(key + SUFFIX)
            found, dtype = tuple(scale.get_shape()), scale.get_dtype()
        if found != blocks or dtype not in SCALE_DTYPES:
            raise CheckpointError(
                f"{self._files[key]}: {key + SUFFIX!r} has the shape {found} and the dtype {dtype}, but {key!r} of shape "
                f"{tuple(shape)} in blocks of {sizes[0]} x {sizes[1]} needs {blocks} in F32. {OTHERWISE}"
            )
        return True

    def read(self, file: Path, reader: Any, key: str, region: tuple[slice, ...]) -> Tensor:
        """The values of a region of the tensor, which may begin and end within blocks. reader: of its file."""
        values: Tensor = reader.get_slice(key)[region]
        if key not in self._files:
            return values
        # Only the blocks that the region touches, and of each row and column of the region the one that it lies in.
        spans = [range(part.start, part.stop) for part in region[-2:]]
        ends = [slice(at.start // size, -(-at.stop // size)) for at, size in zip(spans, self._block(), strict=True)]
        rows, columns = (
            torch.arange(at.start, at.stop) // size - end.start
            for at, end, size in zip(spans, ends, self._block(), strict=True)
        )
        here = self._files[key] == file
        with nullcontext(reader) if here else self._open(self._files[key]) as scales:
            scale: Tensor = scales.get_slice(key + SUFFIX)[(*region[:-2], *ends)]
        return values.float() * scale.float()[..., rows, :][..., columns]

    def _block(self) -> tuple[int, int]:
        block = self._fields.get("weight_block_size")
        if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
            raise CheckpointError(
                f"{self._config}: the weights are fp8, but quantization_config has weight_block_size={block!r}, not the rows "
                f"and columns of a block. {OTHERWISE}"
            )
        return cast(tuple[int, int], tuple(block))
