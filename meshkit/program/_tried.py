"""Operators that no rule knows, tried on values: whether one of a part gives the part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshkit.core._torch import tree_leaves, tree_map
from meshkit.program._records import Operation, TensorRef, tensors
from meshkit.program._states import Slice

_LARGEST = 1 << 20


def keeps_parts(full: Operation, slices: Sequence[Slice]) -> bool | None:
    """Whether the operator, given those slices of its arguments, or others of that size, returns slices of what it returns of
    all of them.

    None where it cannot be tried: on whole numbers, large tensors, or if it writes or draws.
    """
    refs = tensors((full.args, full.kwargs))
    indices = next((part.indices for part in slices if part.indices is not None), None)
    if indices is None or isinstance(full.op, str) or full.op._schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in full.op.tags:
        return None
    if any(not ref.dtype.is_floating_point or torch.Size(ref.shape).numel() > _LARGEST for ref in refs):
        return None
    generator = torch.Generator().manual_seed(0)
    dim = next(part.dim for part in slices if part.indices is not None)
    size = next(ref.shape[dim] for ref, part in zip(refs, slices, strict=True) if part.indices is not None)
    others = torch.tensor([index for index in range(size) if index not in indices.tolist()])[-len(indices) :]
    for own_indices in (indices, others) if len(others) == len(indices) else (indices,):
        values = [torch.rand(ref.shape, generator=generator, dtype=torch.float64) + 0.5 for ref in refs]
        parts = [
            value if part.indices is None else value.index_select(part.dim, own_indices)
            for value, part in zip(values, slices, strict=True)
        ]
        try:
            whole, own = (_outputs(full, each) for each in (values, parts))
        except Exception:  # of sizes among its arguments, or a dtype
            return None
        if not all(_is_part(a, b, own_indices) for a, b in zip(whole, own, strict=True)):
            return False
    return True


def _outputs(operation: Operation, values: Sequence[Tensor]) -> list[Tensor]:
    left = iter(values)
    args, kwargs = tree_map(
        lambda leaf: next(left) if isinstance(leaf, TensorRef) else leaf, (operation.args, dict(operation.kwargs))
    )
    with torch.no_grad():
        return [each for each in tree_leaves(operation.op(*args, **kwargs)) if isinstance(each, Tensor)]


def _is_part(whole: Tensor, own: Tensor, indices: Tensor) -> bool:
    if whole.shape == own.shape:
        return torch.allclose(whole, own)
    return any(
        own.shape == (found := whole.index_select(dim, indices)).shape and torch.allclose(found, own)
        for dim in range(whole.ndim)
        if whole.shape[dim] > int(indices.max())
    )
