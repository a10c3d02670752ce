"""Recording what a rank asks of its communicators, in the order of its host, while it runs on any backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh, distributed_c10d

from meshkit.core import _torch
from meshkit.core._torch import TorchDispatchMode, tree_leaves
from meshkit.core.custom_op import watching_bodies
from meshkit.mesh import HostRanks, Mesh
from meshkit.preflight._collectives import BETWEEN_TWO, NAMES, SAME_SIZE, SPACES, WAITS
from meshkit.preflight._where import where
from meshkit.preflight.observe import Axes
from meshkit.preflight.order._calls import Call, Event, Group, HostWait, Part, Wait

# [Note: what is seen of a call]
# A dispatch mode sees every operator of c10d, and those that read a value. It does not see which works belong to which call,
# what is a batch, and what is of objects, which travel on the device, for which the host waits then. Those are told by the
# functions of torch.distributed, which are wrapped inside the context, as is `Work.wait`. So are those that make groups: on
# communicators a group is a split of its parent, for which the hosts of all ranks of the parent wait, whether they come into
# it or not. What ranks tell each other between their hosts (`mesh.HostRanks`) is one call of all of them.
_RETURN_WORKS = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "all_to_all_single",
    "isend",
    "irecv",
)
_MAKERS = (dist, distributed_c10d, device_mesh)  # DeviceMesh has names of its own for what makes groups
_OF_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier")
_READ_VALUES = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")


@contextmanager
def recording(mesh: Mesh | None) -> Iterator[list[Event]]:
    """Inside, the calls of this rank are added to the list, after the first uses of the mesh's groups.

    mesh: None to record how meshes are made. For one thread, which backward on CPU uses too.
    """
    recorder = _Recorder(mesh)
    with ExitStack() as stack:
        wrappers = {
            **dict.fromkeys(_RETURN_WORKS, recorder.with_works),
            **dict.fromkeys(_OF_OBJECTS, recorder.with_objects),
            "batch_isend_irecv": recorder.with_batch,
        }
        makers = {"new_group": recorder.with_new_group, "split_group": recorder.with_split}
        for name, wrap in (wrappers | makers).items():
            function = wrap(getattr(dist, name))  # one for all modules: a batch compares its functions
            for owner in _MAKERS if name in makers else _MAKERS[:2]:
                stack.enter_context(patch.object(owner, name, function))
        for name in ("reduce", "broadcast", "scatter"):
            stack.enter_context(patch.object(HostRanks, name, recorder.with_hosts(name, getattr(HostRanks, name))))
        stack.enter_context(patch.object(dist.Work, "wait", recorder.with_wait(dist.Work.wait)))
        stack.enter_context(patch.object(Tensor, "tolist", recorder.with_host_wait(Tensor.tolist)))
        stack.enter_context(recorder)
        yield recorder.events


def gathered(events: Sequence[Event], mesh: Mesh | None) -> list[list[Event]]:
    """The events of every rank of the world, empty for ranks that the mesh has not. Wire: a gather of objects, over the mesh,
    or over the world without one."""
    group, ranks = (mesh.group, mesh.ranks) if mesh is not None else (_torch.world(), range(dist.get_world_size()))
    every: list[list[Event]] = [[] for _ in ranks]
    dist.all_gather_object(every, list(events), group=group)
    by_rank = dict(zip(ranks, every, strict=True))
    return [by_rank.get(rank, []) for rank in range(max(ranks) + 1)]


class _Recorder(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Blocks are compiled under this mode, which sees what the compiled code sends."""
        return True

    def __init__(self, mesh: Mesh | None) -> None:
        super().__init__()
        self._axes, self._groups = Axes(mesh) if mesh is not None else None, dict[str, Group]()
        self.events: list[Event] = [
            Call("all_reduce", self._group(group), 1, where="init_mesh") for group in (mesh.groups if mesh else ())
        ]
        self._works: dict[int, tuple[int, Any]] = {}  # call of a work, which is kept so that no other has its id
        self._results: dict[int, int] = {}  # call of a functional collective's result, by its memory
        self._batch: list[tuple[Part, dist.ProcessGroup]] | None = None
        self._on_host = 0

    # ------------------------------------------------------------------------------------------------------- operators

    @watching_bodies
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        space, _, op = name.partition("::")
        reads = name in _READ_VALUES and not self._on_host
        if not reads and space not in SPACES:
            return func(*args, **(kwargs or {}))
        if any(map(_torch.is_fake, tree_leaves((args, kwargs)))):  # of a forward that is only read
            return func(*args, **(kwargs or {}))
        if reads:
            self.events.append(HostWait(where()))
            return func(*args, **(kwargs or {}))
        if op == "wait_tensor":
            self._wait(self._results.get(args[0].data_ptr()))
        if op in WAITS or self._on_host:
            return func(*args, **(kwargs or {}))
        known = len(self.events)
        self._call(NAMES.get(op, op), args)
        result = func(*args, **(kwargs or {}))
        if space == "_c10d_functional" and len(self.events) > known:
            self._results |= {leaf.data_ptr(): known for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result

    def _call(self, op: str, args: tuple[Any, ...]) -> None:
        group = _torch.group_of_call(args)
        if group.size() == 1:
            return
        tensor = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), torch.empty(0))
        known = self._group(group)
        if op in BETWEEN_TWO:
            peer = known.ranks[next(arg for arg in args if isinstance(arg, int))]
            part = Part("send" if op == "send" else "recv", peer, tensor.nbytes)
            if self._batch is not None:
                self._batch.append((part, group))
            else:
                self.events.append(Call("p2p", known, parts=(part,), batched=False, where=where()))
            return
        size, dtype = (tensor.numel(), str(tensor.dtype)) if op in SAME_SIZE else (None, "")
        self.events.append(Call(op, known, size, dtype, where=where()))

    def _group(self, group: dist.ProcessGroup) -> Group:
        name = group.group_name
        if name not in self._groups:
            axis = self._axes.of(group) if self._axes is not None else ""
            self._groups[name] = Group(name, tuple(dist.get_process_group_ranks(group)), axis)
        return self._groups[name]

    def _wait(self, call: int | None) -> None:
        if call is not None:
            self.events.append(Wait(call))

    # ------------------------------------------------------------------------------------- functions of torch.distributed

    def with_works(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = len(self.events)
            result = function(*args, **kwargs)
            if isinstance(result, dist.Work) and self._batch is None and len(self.events) > before:
                self._works[id(result)] = len(self.events) - 1, result
            return result

        return call

    def with_batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(ops: Any) -> Any:
            self._batch = []
            try:
                works = function(ops)
                if self._batch:
                    group = self._group(self._batch[0][1])
                    self.events.append(Call("p2p", group, parts=tuple(part for part, _ in self._batch), where=where()))
                    self._works |= {id(work): (len(self.events) - 1, work) for work in works}
            finally:
                self._batch = None
            return works

        return call

    def with_objects(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.events.append(HostWait(where()))
            return result

        return call

    def with_hosts(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(ranks: HostRanks, *args: Any) -> Any:
            if not ranks.alone:
                self.events.append(
                    Call(f"{name} between hosts", self._group(ranks.parent), on_host=True, where=where())
                )
            self._on_host += 1
            try:
                return function(ranks, *args)
            finally:
                self._on_host -= 1

        return call

    def with_split(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def split_group(parent_pg: Any = None, split_ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._split(parent_pg or _torch.world(), split_ranks)
            return function(parent_pg, split_ranks, *args, **kwargs)

        return split_group

    def with_new_group(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            world = _torch.world()
            wanted = list(range(world.size())) if ranks is None else sorted(ranks)
            alone = bool(kwargs.get("use_local_synchronization"))
            splits = backend is None and _torch.splits(world)
            if splits and (not alone or world.rank() in wanted):
                self._split(world, [wanted])
            group = function(ranks, timeout, backend, *args, **kwargs)
            if not splits and isinstance(group, dist.ProcessGroup):  # its members meet
                self.events.append(Call("make the group", self._group(group), on_host=True, where=where()))
            return group

        return new_group

    def _split(self, parent: dist.ProcessGroup, ranks: Sequence[Sequence[int]]) -> None:
        self.events.append(Call(f"split into {list(ranks)}", self._group(parent), on_host=True, where=where()))

    def with_wait(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wait(work: Any, *args: Any) -> Any:
            last = len(self.events) - 1
            known = self._works.get(id(work))
            if known is not None:
                self._wait(known[0])
            elif last >= 0 and isinstance(call := self.events[last], Call) and not call.on_host:
                self._wait(last)  # of a call that waits for itself, before it returns
            return function(work, *args)

        return wait

    def with_host_wait(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def read(tensor: Tensor) -> Any:
            if not self._on_host:
                self.events.append(HostWait(where()))
            return function(tensor)

        return read
