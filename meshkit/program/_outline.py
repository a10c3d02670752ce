"""The outline of a program: what two readings of one model have alike if they differ in sizes alone."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any

from meshkit.core._torch import tree_flatten
from meshkit.program._records import Operation, TensorRef, Trace, tensors


def computing(trace: Trace) -> list[Operation]:
    """Less those that only look at memory in another way, or copy it, which may depend on strides."""
    kept = []
    for operation in trace.operations:
        read = {ref.storage for ref in tensors((operation.args, operation.kwargs))}
        if operation.name.startswith("aten.clone") or any(ref.storage in read for ref in tensors(operation.outputs)):
            continue
        kept.append(operation)
    return kept


def outline(trace: Trace) -> str:
    """A digest of the operations with their places, and of their arguments but for sizes."""
    listed = [(each.name, each.where, _arguments(each)) for each in computing(trace)]
    return hashlib.sha256(repr(listed).encode()).hexdigest()


def _arguments(operation: Operation) -> Hashable:
    schema = [] if isinstance(operation.op, str) else operation.op._schema.arguments
    named = {each.name: value for each, value in zip(schema, operation.args, strict=False)} | dict(operation.kwargs)
    # A whole number may be a size, and a float one over a size; a dim is named so.
    return tuple((name, _plain(value, exact="dim" in name)) for name, value in named.items())


def _plain(tree: Any, *, exact: bool) -> Hashable:
    leaves, shape = tree_flatten(tree)
    return str(shape), tuple(_leaf(leaf, exact) for leaf in leaves)


def _leaf(leaf: Any, exact: bool) -> Hashable:
    if isinstance(leaf, TensorRef):
        return len(leaf.shape), leaf.dtype
    if isinstance(leaf, bool | str) or (exact and isinstance(leaf, int)):
        return leaf
    return type(leaf).__name__
