"""Tensors: nested containers of them (pytrees), many in one kernel (foreach), storages, the memory history of CUDA."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten

# Taken over as they are. Checked: 2.11, 2.15, for all of them.
# - tree_flatten, tree_unflatten: nested containers of tensors. Replaced by: nothing yet.
# - foreach_copy_, foreach_mul_, foreach_norm: many tensors in one kernel, as torch.nn.utils.get_total_norm has them. Replaced
#   by: loops.
foreach_copy_ = torch._foreach_copy_
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a nested container, in torch's order.

    Private: SUPPORTED_NODES, the containers that torch knows, and its own tree_leaves for those that are no plain tuple, list
    or dict, which are walked here: reading a program asks for the leaves of ten thousand arguments, and torch's walk took
    18 to 31 % of it. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    leaves: list[Any] = []
    _add_leaves(tree, leaves)
    return leaves


def _add_leaves(tree: Any, leaves: list[Any]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list:
        for each in tree:
            _add_leaves(each, leaves)
    elif kind is dict:
        for each in tree.values():
            _add_leaves(each, leaves)
    elif is_container(kind):
        leaves += torch.utils._pytree.tree_leaves(tree)
    else:
        leaves.append(tree)


def is_container(kind: type) -> bool:
    """tuples of other classes: torch knows those with names by their fields."""
    return kind in torch.utils._pytree.SUPPORTED_NODES or (kind is not tuple and issubclass(kind, tuple))


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The nested container with `function` of each leaf in its place; see `tree_leaves`."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([tree_map(function, each) for each in tree])
    if kind is dict:
        return {key: tree_map(function, each) for key, each in tree.items()}
    return torch.utils._pytree.tree_map(function, tree) if is_container(kind) else function(tree)


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


def tracks_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a schedule has put its own `step` on the optimizer, by which it sees that one was made.

    Private: _wrapped_by_lr_sched, which torch.optim.lr_scheduler sets. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def track_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let schedules see the steps of an optimizer that has another class than when they were made.

    Private: as `tracks_steps`, and _opt_called. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    of = weakref.ref(optimizer)  # else the optimizer would hold itself

    def step(*args: Any, **kwargs: Any) -> Any:
        stepped: Any = of()
        stepped._opt_called = True
        return type(stepped).step(stepped, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a function's attribute
    optimizer.step = step  # type: ignore[method-assign]  # as torch does
