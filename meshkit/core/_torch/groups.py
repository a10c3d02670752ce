"""Meshes and process groups: splitting, flattening, timeouts, a world that sends nothing, a lost peer's error."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]


def mesh_of_groups(
    device_type: str, ranks: Tensor, names: tuple[str, ...], groups: Sequence[ProcessGroup]
) -> DeviceMesh:
    """A DeviceMesh whose axes have these groups, in order; none on a rank outside of it. Makes no group.

    Private: DeviceMesh._init_process_groups. Checked: 2.11 (read, not run), 2.15. Replaced by: DeviceMesh.from_group, once it
    takes ranks outside.
    """
    with _groups_given(groups):
        return DeviceMesh(device_type, ranks, mesh_dim_names=names)


def flatten_mesh(mesh: DeviceMesh, name: str, group: ProcessGroup | None = None) -> DeviceMesh:
    """One axis made of all axes of `mesh`. What was flattened by this name before comes back.

    group: of its ranks; None makes new ones, which takes all ranks of the world.
    Private: DeviceMesh._flatten. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    with nullcontext() if group is None else _groups_given([group]):
        return mesh._flatten(name)


def nested_mesh(mesh: DeviceMesh, axis: str, sizes: dict[str, int], groups: Sequence[ProcessGroup]) -> DeviceMesh:
    """The same mesh with one axis as several, the slower one first. groups: of these, in order; makes none.

    Private: DeviceMesh._unflatten. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    with _groups_given(groups):
        place = (mesh.mesh_dim_names or ()).index(axis)  # by name, 2.11 refuses every axis that the mesh has
        return mesh._unflatten(place, tuple(sizes.values()), tuple(sizes))


@contextmanager
def _groups_given(groups: Sequence[ProcessGroup]) -> Iterator[None]:
    """Inside, a new DeviceMesh makes no groups and has these."""
    original = DeviceMesh.__dict__["_init_process_groups"]
    DeviceMesh._init_process_groups = staticmethod(lambda *args, **kwargs: [group.group_name for group in groups])  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        DeviceMesh._init_process_groups = original  # type: ignore[method-assign]  # put back


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """A mesh of several axes out of meshes of one root.

    Private: DeviceMesh._concatenate. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    return DeviceMesh._concatenate(meshes)


Partition = Sequence[Sequence[int]]
"""groups of ranks of the world that have no rank in common"""

# [Note: groups are split from the group of who makes them]
# Where the default group is bound to a device (always with torch 2.15's nccl), a group is an ncclCommSplit of its parent, in
# which all ranks of the parent take part, those that come into no group too. `new_group` splits the world, so that a mesh on
# a part of the world, or two ranks of a pipeline, would need ranks that know nothing of them; and it is one call for each
# group of an axis, of which `split_group` makes all at once. So groups are made by `split` alone: one call for each
# partition, the same on all ranks of the parent, which are just those that make it. A parent that cannot be split (a lazy
# communicator, a fake world) has no part in making a group: there each group is made by its members.


def split(
    parent: ProcessGroup, partitions: Sequence[Partition], *, timeout: timedelta, backend: str | None = None
) -> list[ProcessGroup | None]:
    """This rank's group of each partition, None where it is in none. Every rank of `parent` calls, with the same.

    backend: if not the parent's, with which the groups have no communicator in common then.
    Wire: a broadcast of names over `parent`; a split of its communicator for each partition.
    Private: distributed_c10d._process_group_name. Checked: 2.11, 2.15. Replaced by: a name as an argument of `split_group`
    and `new_group`. See [Note: names of process groups].
    """
    ranks, rank = dist.get_process_group_ranks(parent), dist.get_rank()
    of_parent = {each: index for index, each in enumerate(ranks)}
    by_split = backend is None and splits(parent)
    groups: list[ProcessGroup | None] = []
    group: Any
    for name, partition in zip(_names(parent, len(partitions)), partitions, strict=True):
        own = next((each for each in partition if rank in each), None)
        with _named(f"{name}/{own[0] if own else -1}"):
            if by_split:
                indices = [[of_parent[each] for each in group] for group in partition]
                group = dist.split_group(parent, indices, timeout=timeout)
            else:
                group = own and dist.new_group(
                    list(own), timeout=timeout, backend=backend, use_local_synchronization=True
                )
        # For "no member" torch has a constant, which is not a group.
        groups.append(group if isinstance(group, ProcessGroup) else None)
    return groups


def splits(parent: ProcessGroup) -> bool:
    """Whether torch makes groups of ranks of `parent` by splitting it.

    Private: bound_device_id, supports_splitting. Checked: 2.11 (read, not run), 2.15. Replaced by: nothing yet.
    """
    if is_fake_group(parent):
        return False
    if (device := parent.bound_device_id) is not None:
        return parent._get_backend(device).supports_splitting
    # gloo needs no device, since 2.15. There the path of nccl runs on a laptop.
    return _GLOO_SPLITS and dist.get_backend(parent) == "gloo"


_GLOO_SPLITS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


def _names(group: ProcessGroup, count: int) -> list[str]:
    """Names for groups, the same on all ranks of `group`."""
    names = [uuid.uuid4().hex for _ in range(count)]
    if names and group.size() > 1 and not is_fake_group(group):
        dist.broadcast_object_list(names, group=group, group_src=0)
    return names


@contextmanager
def _named(name: str) -> Iterator[None]:
    # [Note: names of process groups]
    # Torch names groups by counters of the process. They differ between ranks as soon as some ranks made a group without the
    # others, and ranks that meet in the store under different names wait for ever. So the first rank of the parent draws a
    # name, and for this one call torch's function that counts is replaced by one that returns it. No other thread makes
    # groups meanwhile: making one is a collective, which only the main thread issues.
    original = distributed_c10d._process_group_name  # type: ignore[attr-defined]  # not in the stubs
    distributed_c10d._process_group_name = lambda *args, **kwargs: name  # type: ignore[attr-defined, assignment]  # for one call
    try:
        yield
    finally:
        distributed_c10d._process_group_name = original  # type: ignore[attr-defined]  # put back


def world() -> ProcessGroup:
    """The default process group. Raises: AssertionError before it is there.

    Private: nothing; `dist.group.WORLD` is typed as if it could be None. Checked: 2.11, 2.15.
    """
    group = dist.group.WORLD
    assert group is not None
    return group


def world_store() -> Any:
    """The store that the world was made with. Private: _get_default_store. Checked: 2.11, 2.15. Replaced by: nothing yet."""
    return dist.distributed_c10d._get_default_store()


def process_group(name: str) -> ProcessGroup:
    """The process group of that `group_name`.

    Private: _resolve_process_group, by which functional collectives find theirs. Checked: 2.11, 2.15. Replaced by: nothing
    yet.
    """
    return _resolve_process_group(name)  # type: ignore[arg-type]


def group_of_call(args: tuple[Any, ...]) -> ProcessGroup:
    """The process group among the arguments of a c10d operator: boxed (c10d::) or by name (_c10d_functional::).

    Private: ScriptObject._type and ProcessGroup.unbox. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return ProcessGroup.unbox(arg)
    return process_group(next(arg for arg in reversed(args) if isinstance(arg, str)))


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long an operation of the group may take; 10 minutes for a fake one, whose operations take no time, and for one
    that does not say.

    Private: the options of its backend; on 2.11 those of other people do not show them. Checked: 2.11, 2.15. Replaced by:
    nothing yet.
    """
    options: Any = getattr(group._get_backend(group._device_types[0]), "options", None)
    return timedelta(minutes=10) if options is None or is_fake_group(group) else options._timeout


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Private: _set_default_timeout of each backend. Checked: 2.11, 2.15. Replaced by: dist.set_timeout of 2.15."""
    if is_fake_group(group):
        return
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timeout)


def start_fake_world(world_size: int, rank: int) -> None:
    """A default process group that sends nothing.

    Private: the store in torch.testing._internal, and fake_collectives, which gives c10d operators on tensors without values.
    Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    from torch.distributed._tools import fake_collectives  # noqa: F401  # imported for what it registers
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # DTensor works out shapes on fake tensors, for which torch makes up a device where there is none. A process whose first
    # backward comes later starts a thread for it, and none that is forked from it can run one, as a check's ranks do.
    if not torch.accelerator.is_available():
        torch.zeros((), requires_grad=True).clone().backward()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def is_fake_group(group: ProcessGroup) -> bool:
    """Private: "fake" as the name of that backend. Checked: 2.11, 2.15. Replaced by: nothing yet."""
    return dist.get_backend(group) == "fake"


def says_peer_is_lost(error: BaseException) -> bool:
    """Whether an error, or one that caused it, only says that another rank is gone or does not come.

    Private: texts of gloo's RuntimeErrors; NCCL and stores have classes. Checked: 2.11, 2.15. Replaced by: a class for
    gloo's.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and _LOST.search(str(seen))):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


_LOST = re.compile(r"connection (closed|reset|refused)|broken pipe|timed? ?out|socket (closed|timeout)", re.IGNORECASE)
