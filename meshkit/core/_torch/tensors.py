"""Tensors: nested containers of them (pytrees), many in one kernel (foreach), storages, the memory history of CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

# Taken over as they are. Checked: 2.11, 2.15, for all of them.
# - tree_flatten, tree_leaves, tree_map, tree_unflatten: nested containers of tensors. Replaced by: nothing yet.
# - foreach_copy_, foreach_mul_, foreach_norm: many tensors in one kernel, as torch.nn.utils.get_total_norm has them. Replaced
#   by: loops.
foreach_copy_ = torch._foreach_copy_
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_


def register_pytree(
    node: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[[Any, Any], Any]
) -> None:
    """Let torch see the tensors in objects of a class. flatten: object -> (children, context).

    Private: register_pytree_node. Checked: 2.11, where FSDP2 finds by it what a module returns, and 2.15, where FSDP2 looks
    into dataclasses, but other parts of torch ask here. Replaced by: nothing yet.
    """
    torch.utils._pytree.register_pytree_node(node, flatten, unflatten)  # type: ignore[arg-type]  # torch's says Iterable


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share memory, as long as one of them lives, on meta too.

    Private: UntypedStorage._cdata; the public `data_ptr` is 0 for every tensor on meta. Checked: 2.11, 2.15. Replaced by:
    nothing yet.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


@contextmanager
def reporting_resizes(resized: Callable[[UntypedStorage], None]) -> Iterator[None]:
    """Inside, `resized` gets every storage whose size was changed from Python, as FSDP does to free parameters.

    Private: nothing but the patch: `resize_` of a storage is no operator, so no dispatch mode sees it. Checked: 2.11, 2.15.
    Replaced by: nothing yet.
    """
    original = UntypedStorage.resize_

    def resize(self: UntypedStorage, size: int) -> Any:
        out = original(self, size)
        resized(self)
        return out

    UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        UntypedStorage.resize_ = original  # type: ignore[method-assign]


# 2.11, 2.15: the documentation of the memory visualiser tells users to call these two, but their names still start with an
# underscore, and nothing public replaces them.


def record_memory_history(enabled: bool) -> None:
    torch.cuda.memory._record_memory_history("all" if enabled else None)


def dump_memory_snapshot(path: Path) -> None:
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
