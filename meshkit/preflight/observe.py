"""observe: count the collectives that code really sends, and its peak of memory, to compare with `explain` and `estimate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from meshkit.core import _torch
from meshkit.core._torch import TorchDispatchMode, tree_leaves
from meshkit.core.calls import axis_of
from meshkit.core.custom_op import watching_bodies
from meshkit.mesh import DENSE_AXES, Mesh
from meshkit.mesh.host import HOSTS
from meshkit.parallel.expert import in_expert_view
from meshkit.preflight.explain import Message

# Operator -> (collective, position of the tensor whose size counts).
_OPERATORS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::send": ("send", 0),
    "c10d::allgather_": ("all_gather", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),  # what inductor makes of it
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
}


@contextmanager
def observe(mesh: Mesh) -> Iterator[Counter[Message]]:
    """Count every collective of this rank inside the context, by axis, kind and size; those of compiled code too.

    But not what ranks tell each other between their hosts (`mesh.host`), which takes nothing of the device's links.
    """
    messages: Counter[Message] = Counter()
    with _Observer(Axes(mesh), messages):
        yield messages


class _Observer(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Blocks are compiled under this mode, which sees what the compiled code sends."""
        return True

    def __init__(self, axes: Axes, messages: Counter[Message]) -> None:
        super().__init__()
        self.axes, self.messages = axes, messages

    @watching_bodies
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        # A functional collective calls the process group in C++, not the c10d operator, so none is counted twice.
        if name == "c10d::alltoall_base_":
            self._count_all_to_all(*args)
        elif name in _OPERATORS:
            op, position = _OPERATORS[name]
            size = _bytes(args[position])
            if name == "_c10d_functional::all_gather_into_tensor":
                size *= args[1]  # its argument is one shard
            self._count(op, size, _torch.group_of_call(args))
        return func(*args, **(kwargs or {}))

    def _count_all_to_all(self, output: Tensor, sent: Tensor, *rest: Any) -> None:
        """Count the rows that go to other ranks."""
        group = _torch.group_of_call(rest)
        splits = rest[2]
        local_rows = splits[dist.get_rank(group)] if splits else sent.shape[0] // group.size()
        self._count("all_to_all", (sent.shape[0] - local_rows) * _bytes(sent[:1]), group)

    def _count(self, op: str, size: int, group: dist.ProcessGroup) -> None:
        if size and axis_of(group.group_name) != HOSTS:
            self.messages[Message(self.axes.of(group), op, size)] += 1


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value)


class Axes:
    """The mesh axis of a process group: by the group itself, since two axes may have the same ranks, else by its ranks, which
    may be some of an axis'.

    An axis of all ranks is one group in both views, and has the name of the dense one.
    """

    def __init__(self, mesh: Mesh) -> None:
        def large(*axes: str) -> tuple[str, ...]:
            return tuple(axis for axis in axes if getattr(mesh.spec, axis) > 1)

        meshes: dict[tuple[str, ...], DeviceMesh] = {
            large("dp_replicate", "dp_shard", "cp"): mesh.tokens,
            large("dp_shard", "cp"): mesh.shard,
            **{(axis,): mesh[axis] for axis in large("pp", "dp_replicate", "dp_shard", "cp", "tp")},
        }
        if in_expert_view(mesh.spec):
            meshes[large("ep", "etp")] = mesh.expert_ranks
            meshes |= {(axis,): mesh[axis] for axis in large("edp", "ep", "etp")}
        groups = [("_".join(names), axis.get_group()) for names, axis in meshes.items() if names]
        groups.append(("_".join(large(*DENSE_AXES)) or "mesh", mesh.group))
        if mesh.members is not None:  # those that were made for a sharding of some parts
            groups += [("_".join(key), group) for key, group in mesh.members.by_axes.items() if group.size() > 1]
        self.groups = [group for _, group in groups]
        self._by_name = {group.group_name: name for name, group in reversed(groups)}
        self._by_ranks = {tuple(dist.get_process_group_ranks(group)): name for name, group in reversed(groups)}

    def of(self, group: dist.ProcessGroup) -> str:
        ranks = tuple(dist.get_process_group_ranks(group))
        if (name := self._by_name.get(group.group_name) or self._by_ranks.get(ranks)) is None:
            around = [axis for axis in self._by_ranks if set(axis).issuperset(ranks)]
            name = self._by_ranks[min(around, key=len)] if around else str(ranks)
        return name


class Peak(TorchDispatchMode):
    """A context. bytes: the peak of the results of operators that ran inside, counted after every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._known: set[int] = set()
        self._results: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        }
        self._known |= inputs - self._results.keys()
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._known:
                # A weak reference: counting must not keep alive what it counts.
                self._results[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._results = {key: entry for key, entry in self._results.items() if not entry[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._results.values()))
        return out
