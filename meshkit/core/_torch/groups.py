"""Meshes and process groups: flattening, copies, timeouts, a world that sends nothing, a lost peer's error."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """One axis made of all axes of `mesh`. Keep the returned object: each call makes a new group.

    Private: DeviceMesh._flatten. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    return mesh._flatten(name)


def join_flattening(groups: list[list[int]]) -> None:
    """Take part in `flatten_mesh` on a rank outside of the mesh: every rank of the world makes every group.

    Private: that flattening is one `new_group` a group; a rank outside cannot slice or flatten the mesh itself. Checked:
    2.11, 2.15. Replaced by: nothing yet.
    """
    for ranks in groups:
        dist.new_group(ranks)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """A mesh of several axes out of meshes of one root.

    Private: DeviceMesh._concatenate. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    return DeviceMesh._concatenate(meshes)


def copy_group(group: ProcessGroup, *, timeout: timedelta, backend: str | None = None) -> ProcessGroup:
    """Another group of the ranks of `group`, made by those alone. Wire: a broadcast of its name over `group`.

    Private: distributed_c10d._process_group_name. Checked: 2.11, 2.15. Replaced by: a name as an argument of `new_group`.
    See [Note: names of process groups].
    """
    (name,) = _names(group, 1)
    return _named_group(name, dist.get_process_group_ranks(group), timeout=timeout, backend=backend)


def pair_groups(
    group: ProcessGroup, ways: Sequence[tuple[int, int]], *, timeout: timedelta
) -> dict[tuple[int, int], ProcessGroup]:
    """A group of its own for each pair of ranks of `group` that has this rank; every rank calls, with the same pairs.

    Wire: a broadcast of their names over `group`. Private: as `copy_group`.
    """
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    named = zip(ways, _names(group, len(ways)), strict=True)
    return {
        way: _named_group(name, sorted(ranks[each] for each in way), timeout=timeout)
        for way, name in named
        if own in way
    }


def _names(group: ProcessGroup, count: int) -> list[str]:
    """Names for groups, the same on all ranks of `group`."""
    names = [uuid.uuid4().hex for _ in range(count)]
    if names and not is_fake_group(group):
        dist.broadcast_object_list(names, group=group, group_src=0)
    return names


def _named_group(name: str, ranks: list[int], *, timeout: timedelta, backend: str | None = None) -> ProcessGroup:
    """A group that its members alone make."""
    # [Note: names of process groups]
    # `new_group(use_local_synchronization=True)` names groups by counters of the process. They differ between ranks as soon
    # as some ranks made a group without the others, and ranks that meet in the store under different names wait for ever. So
    # the first rank of the group draws a name, and for this one call torch's function that counts is replaced by one that
    # returns it. No other thread makes groups meanwhile: making one is a collective, which only the main thread issues.
    original = distributed_c10d._process_group_name  # type: ignore[attr-defined]  # not in the stubs
    distributed_c10d._process_group_name = lambda *args, **kwargs: name  # type: ignore[attr-defined, assignment]  # for one call
    try:
        group = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    finally:
        distributed_c10d._process_group_name = original  # type: ignore[attr-defined]  # put back
    assert isinstance(group, ProcessGroup)  # this rank is a member
    return group


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
    """How long an operation of the group may take; 10 minutes for a fake one, whose operations take no time.

    Private: the options of its backend; every backend has them. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    options: Any = group._get_backend(group._device_types[0]).options
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
