"""Files of transformers' models (weight conversion): which part of which tensor of the model each tensor of a file is.

In memory transformers stacks experts and joins projections; files have them apart, under names of their own. Its
save_pretrained knows how: that conversion runs here on tensors without values, and what it makes of them is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshkit.core import _torch
from meshkit.errors import PlanError


class Part(NamedTuple):
    """A part of a tensor of the model. at: index of its first dim, None for all. rows: of the next. transposed: the rest."""

    name: str
    at: int | None = None
    rows: slice | None = None
    transposed: bool = False


def file_parts(model: nn.Module, tensors: Mapping[str, Tensor], verb: str) -> dict[str, Part]:
    """By name in files, in the order of the model's tensors.

    Raises: PlanError for a conversion that computes, or that this version of transformers does not have.
    """
    empty: dict[int, Tensor] = {}
    for tensor in tensors.values():
        empty.setdefault(id(tensor), torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta"))
    try:
        from transformers.core_model_loading import revert_weight_conversion

        foreign: Any = model
        with _ViewsOnly():
            inside: dict[str, Tensor] = revert_weight_conversion(
                foreign, {name: empty[id(tensor)] for name, tensor in tensors.items()}
            )
    except Exception as error:
        raise PlanError(
            f"{verb}: transformers does not say how it writes a {type(model).__name__} ({type(error).__name__}: {error}). "
            "Use its own from_pretrained and save_pretrained, on the model before parallelize."
        ) from error
    # Several names of one tied tensor are one storage: a key that is the tensor's own name belongs to that name.
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(_torch.storage_key(empty[id(tensor)]), []).append(name)
    parts: dict[str, dict[str, Part]] = {name: {} for name in tensors}
    for key, view in inside.items():
        owners = names.get(_torch.storage_key(view))
        part = _part(key if key in owners else owners[0], view, tensors) if owners else None
        if part is None:
            raise PlanError(
                f"{verb}: {key!r} of a {type(model).__name__}'s files is no part of one tensor of the model. Use "
                "transformers' own from_pretrained and save_pretrained, on the model before parallelize."
            )
        parts[part.name][key] = part
    return {key: part for of_name in parts.values() for key, part in of_name.items()}


class _ViewsOnly(TorchFunctionMode):
    """Inside, nothing is copied for its layout, so that a view still says what it looks at."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _part(name: str, view: Tensor, tensors: Mapping[str, Tensor]) -> Part | None:
    """What a view of the tensor of that name looks at; None for what is no `Part`."""
    full = torch.empty(tuple(tensors[name].shape), device="meta")
    offset = int(view.storage_offset())
    at: int | None = None
    whole = full
    if view.ndim == full.ndim - 1 and full.numel():
        at, offset = divmod(offset, full.stride(0))
        whole = full[at]
    if not whole.ndim:
        return Part(name, at)
    for transposed in (False, True) if whole.ndim == 2 else (False,):
        shown = view.mT if transposed else view
        first, rest = divmod(offset, whole.stride(0)) if whole.numel() else (0, 0)
        same = shown.stride() == whole.stride() and shown.shape[1:] == whole.shape[1:] and not rest
        if same and first + len(shown) <= len(whole):
            rows = None if len(shown) == len(whole) else slice(first, first + len(shown))
            return Part(name, at, rows, transposed)
    return None
