"""Private PyTorch names (and public ones with private behaviour): they are used here and nowhere else.

By subject: DTensor, meshes and process groups, collectives and waits, FSDP2, activation checkpointing (recompute), tensors
without values, storages, torch.compile. Each function says which private name it stands for, which versions of torch it was
checked against, and what replaces it once the older one is dropped: "nothing yet" means that torch 2.15 has no public way.
"""

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree
import torch.utils.checkpoint
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.checkpoint import _CachingTorchDispatchMode, _VersionWrapper, create_selective_checkpoint_contexts

from meshkit.core.waiting import marked, waiting

_c10d = torch.ops._c10d_functional

# What selective recompute may keep of communication. Checked: 2.11, 2.15. What replaces them: public functional collectives.
FUNCTIONAL_COLLECTIVES = frozenset(
    {
        _c10d.all_reduce.default,
        _c10d.all_gather_into_tensor.default,
        _c10d.reduce_scatter_tensor.default,
        _c10d.wait_tensor.default,
    }
)

# [Note: names that are imported as they are]
# Checked: 2.11, 2.15, for all of them.
# - DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode: tensors without values. Replaced by: nothing yet.
# - TorchDispatchMode: sees every operator below autograd. torch's own documentation uses it. Replaced by: nothing yet.
# - tree_flatten, tree_leaves, tree_map, tree_unflatten: nested containers of tensors. Replaced by: nothing yet.
# - foreach_norm, foreach_mul_: many tensors in one kernel, as torch.nn.utils.get_total_norm has them. Replaced by: loops.
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_

_c10d = torch.ops._c10d_functional  # see [Note: functional collectives without their wrappers]


# --------------------------------------------------------------------------------------------------------- DTensor


def global_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local shape, global offset) of this rank's shard; exact for uneven shards and for FSDP over TP (_StridedShard).

    Private: compute_local_shape_and_global_offset. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def dtensor_like(param: DTensor, local: Tensor, shape: tuple[int, ...] | None = None) -> DTensor:
    """A DTensor with the mesh and placements of `param`, of which `local` is this rank's shard, on whatever device it is.

    shape: of the full tensor, where it is not that of `param`.
    Private: DTensor's constructor and DTensorSpec, as FSDP2 uses them; `DTensor.from_local` would move a host tensor to the
    mesh's device. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    full = torch.empty(tuple(param.shape) if shape is None else shape, dtype=local.dtype, device="meta")
    spec = DTensorSpec(
        param.device_mesh, param.placements, tensor_meta=TensorMeta(full.shape, full.stride(), local.dtype)
    )
    return DTensor(local, spec, requires_grad=False)


# [Note: gradients of uneven shards]
# Autograd accumulates a gradient as it comes only if its layout is the parameter's; otherwise it copies it, and a copy of a
# DTensor to another layout is a collective that leaves the full gradient on every rank. On 2.11 the backward of `to_local`
# gives the gradient the strides that it would have if all shards were as large as this one, so an uneven shard falls into
# that. `_LocalShard` builds the gradient with the parameter's own spec. Compiled blocks use `to_local` all the same, and
# there the copy remains: `ShardedAdamW` (optim/fused.py) takes such gradients.
_TO_LOCAL_KEEPS_STRIDES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


def local_shard(param: DTensor) -> Tensor:
    """This rank's shard of a parameter, connected for autograd: its gradient has the placements of `param`.

    Private: nothing; `to_local` behaves otherwise. Checked: 2.11, 2.15. Replaced by: `to_local`, with 2.15.
    See [Note: gradients of uneven shards].
    """
    if _TO_LOCAL_KEEPS_STRIDES or torch.compiler.is_compiling():
        return param.to_local()
    shard: Tensor = _LocalShard.apply(param)
    return shard


class _LocalShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: DTensor) -> Tensor:
        ctx.param = param
        local = param.to_local()
        return local.view_as(local)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch's
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        # Contiguous, as the parameter's own shard is. See [Note: gradients of uneven shards].
        return dtensor_like(ctx.param, grad.detach().contiguous())


def clear_sharding_caches() -> None:
    """Drop the shardings that DTensor has cached for meshes that are gone: a later mesh of the same shape compares equal.

    Private: the lru_cache of the Python propagator, and a function for the cache in C++. Checked: 2.11, 2.15. Replaced by:
    nothing yet.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    for cached in (propagator.propagate_op_sharding, getattr(propagator, "_propagate_tensor_meta", None)):
        cache: Any = cached if hasattr(cached, "cache_clear") else getattr(cached, "cache", None)
        if hasattr(cache, "cache_clear"):
            cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


@contextmanager
def hiding_shape_propagation() -> Iterator[None]:
    """Inside, no dispatch mode sees how DTensor works out shapes, which it does on tensors of the *global* shape.

    Private: ShardingPropagator._propagate_tensor_meta_non_cached; `_disable_current_modes` is what torch.compile uses.
    Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def without_modes(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(self, *args, **kwargs)

    ShardingPropagator._propagate_tensor_meta_non_cached = without_modes  # type: ignore[method-assign]  # restored below
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = original  # type: ignore[method-assign]


@contextmanager
def detach_keeps_placements() -> Iterator[None]:
    """Inside, DTensor knows that `detach` keeps placements, and does not search all combinations of them.

    Private: the propagator's tables of strategies. Checked: 2.11, which knows, and 2.15: for each shape of a parameter FSDP2
    makes it search for 0.03 s on three axes and for 0.4 s on four. Replaced by: a rule for `detach` in torch.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    detach = torch.ops.aten.detach.default
    search = getattr(propagator, "op_single_dim_strategy_funcs", {}).pop(detach, None)
    if search is None:
        yield
        return
    propagator.op_strategy_funcs[detach] = _as_its_input
    try:
        yield
    finally:
        del propagator.op_strategy_funcs[detach]
        propagator.op_single_dim_strategy_funcs[detach] = search


def _as_its_input(schema: Any) -> OpStrategy:
    spec = schema.args_schema[0].strategies[0].output_spec
    return OpStrategy([OpSpec(output_specs=spec, input_specs=(spec,), redistribute_cost=[[0.0]])])


# --------------------------------------------------------------------------------------- meshes and process groups


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
    name = [uuid.uuid4().hex]
    if not is_fake_group(group):
        dist.broadcast_object_list(name, group=group, group_src=0)
    # [Note: names of process groups]
    # `new_group(use_local_synchronization=True)` names groups by counters of the process. They differ between ranks as soon
    # as some ranks made a group without the others, and ranks that meet in the store under different names wait for ever. So
    # the first rank of the group draws a name, and for this one call torch's function that counts is replaced by one that
    # returns it. No other thread makes groups meanwhile: making one is a collective, which only the main thread issues.
    original = distributed_c10d._process_group_name  # type: ignore[attr-defined]  # not in the stubs
    distributed_c10d._process_group_name = lambda *args, **kwargs: name[0]  # type: ignore[attr-defined, assignment]  # for one call
    try:
        ranks = dist.get_process_group_ranks(group)
        copy = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    finally:
        distributed_c10d._process_group_name = original  # type: ignore[attr-defined]  # put back
    assert isinstance(copy, ProcessGroup)  # this rank is a member
    return copy


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


# ------------------------------------------------------------------------------------------- collectives and waits

# [Note: functional collectives without their wrappers]
# The operators behind torch.distributed._functional_collectives have the same names and meaning in 2.11 and 2.15. The Python
# wrappers around them return AsyncCollectiveTensor, which breaks the backward of compiled regions in 2.15, and one was
# renamed between the two versions. So the operators are called directly, on contiguous tensors, which they read as memory
# lies. Each is waited for at once: with gloo the host waits; with NCCL the current stream does, while the host goes on.
# Messages that are to travel beside other work are sent by c10d with async_op instead. Replaced by: the wrappers, once
# compiled backwards take them.


def _wait(tensor: Tensor, what: str) -> Tensor:
    # torch.compile follows the first branch alone: it knows the answer, and has no way to trace a mark or a clock.
    if torch.compiler.is_compiling():
        compiled: Tensor = _c10d.wait_tensor(tensor)
        return compiled
    with waiting(what):
        done: Tensor = _c10d.wait_tensor(tensor) if _timed_waits is None else _timed(_c10d.wait_tensor, tensor)
    return done


def all_reduce_sum(tensor: Tensor, group_name: str) -> Tensor:
    return _wait(_c10d.all_reduce(tensor, "sum", group_name), "an all-reduce")


def all_gather_rows(tensor: Tensor, size: int, group_name: str) -> Tensor:
    """[n, ...] on each of `size` ranks to [size * n, ...]."""
    return _wait(_c10d.all_gather_into_tensor(tensor, size, group_name), "an all-gather")


def reduce_scatter_rows(tensor: Tensor, size: int, group_name: str) -> Tensor:
    """[size * n, ...] to this rank's [n, ...] of the sum."""
    return _wait(_c10d.reduce_scatter_tensor(tensor, "sum", size, group_name), "a reduce-scatter")


_timed_waits: tuple[int, list[float]] | None = None  # (thread, seconds of each of its waits)


@contextmanager
def waits_timed() -> Iterator[list[float]]:
    """Inside, the seconds of each of this thread's waits for collectives and messages on the host, but for compiled ones.

    Private: that every Python collective without async_op calls `Work.wait` of its class, FSDP's among them; there is no
    hook. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    global _timed_waits
    wait, outer = dist.Work.wait, _timed_waits
    _timed_waits = (threading.get_ident(), [])
    dist.Work.wait = lambda *args: _timed(wait, *args)  # type: ignore[assignment, method-assign]  # put back below
    try:
        yield _timed_waits[1]
    finally:
        dist.Work.wait, _timed_waits = wait, outer  # type: ignore[method-assign]  # put back


def _timed(act: Callable[..., Any], *args: Any) -> Any:
    began = time.perf_counter()
    try:
        return act(*args)
    finally:
        # Other threads (a watchdog's, an asynchronous checkpoint's) wait too: theirs are not counted.
        if _timed_waits is not None and _timed_waits[0] == threading.get_ident():
            _timed_waits[1].append(time.perf_counter() - began)


def mark_works() -> None:
    """From now on every `Work.wait` of this process is marked, a user's too, if nothing around it says more.

    For whoever reads marks, the watchdog: until it calls this, nothing is patched. Private, checked, replaced by: as for
    `waits_timed`.
    """
    dist.Work.wait = marked(dist.Work.wait, "a collective or a message")  # type: ignore[method-assign]  # for good


# ----------------------------------------------------------------------------------------------------------- FSDP2


def find_units(module: FSDPModule) -> None:
    """Let FSDP's root find its units now, while all of them are in the tree, not at its first forward.

    Private: FSDPState._lazy_init, which does nothing when called again. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    module._get_fsdp_state()._lazy_init()


@contextmanager
def without_hooks(module: FSDPModule) -> Iterator[None]:
    """Inside, forwards neither gather nor free parameters: what is gathered stays so. Units that cast keep their hooks.

    Hooks of every unit ask in each forward whether there is something to do, which costs a small model more than its layers.
    Private: the handles of FSDP's hooks, and where a unit keeps `set_reshard_after_forward`, which can be set publicly but
    not read. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    find_units(module)
    assert isinstance(module, nn.Module)
    states = {child: child._get_fsdp_state() for child in module.modules() if isinstance(child, FSDPModule)}
    groups = [group for state in states.values() for group in _groups_of(state)]
    before = [group.post_forward_mesh_info for group in groups]
    casts = any(state._mp_policy.param_dtype or state._mp_policy.output_dtype for state in states.values())
    replaced: list[tuple[dict[int, Any], int, Any]] = []
    for child, state in {} if casts else states.items():
        for hooks, handle in (
            (child._forward_pre_hooks, state._pre_forward_hook_handle),
            (child._forward_hooks, state._post_forward_hook_handle),
        ):
            replaced.append((hooks, handle.id, hooks[handle.id]))
    module.set_reshard_after_forward(False)
    try:
        for hooks, id, _ in replaced:
            # A stand-in rather than none: hooks run in the order of their dict, and a hook that is taken out and put back
            # would come last.
            hooks[id] = lambda *_: None
        yield
    finally:
        for hooks, id, hook in replaced:
            hooks[id] = hook
        for group, info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = info


def _groups_of(state: Any) -> list[FSDPParamGroup]:
    """2.15: a unit may have several groups of parameters; 2.11: one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def allow_integer_parameters() -> None:
    """Let FSDP2 shard parameters of whole numbers, which have no gradient, and gather them in their own dtype.

    Private: FSDPParam.init_dtype_attrs, and the `nn` of its module. Checked: 2.11, which makes each shard a parameter that
    requires a gradient, if only for a moment, and casts all to the compute dtype. Replaced by: FSDP2 itself, with 2.15.
    """
    if torch.__version__ >= "2.15" or _fsdp_param.nn is not nn:  # type: ignore[attr-defined]  # done before
        return

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    def init_dtypes(self: Any, policy: MixedPrecisionPolicy) -> None:
        cast(self, policy)
        if not self.orig_dtype.is_floating_point:
            self.param_dtype = None

    cast = _fsdp_param.FSDPParam.init_dtype_attrs
    _fsdp_param.FSDPParam.init_dtype_attrs = init_dtypes  # type: ignore[method-assign, assignment]  # 2.11 only
    _fsdp_param.nn = SimpleNamespace(Parameter=parameter, Module=nn.Module)  # type: ignore[attr-defined, assignment]  # same


def defer_gradient_reduction(module: FSDPModule) -> None:
    """Let backwards leave their gradients unsharded until `reduce_deferred_gradients`. Call it before the forwards.

    Private: that is_last_backward=False leaves them so. Checked: 2.11, 2.15. Replaced by: set_manual_backward_finalization,
    public with 2.15.
    """
    module.set_is_last_backward(False)
    if hasattr(module, "set_manual_backward_finalization"):
        module.set_manual_backward_finalization(True)


def reduce_deferred_gradients(module: FSDPModule) -> None:
    """Reduce the gradients that backwards have left, free unsharded parameters, and wait.

    Private: what torch.distributed.pipelining does at the end of its own schedules on 2.11. Checked: 2.11, 2.15. Replaced by:
    finalize_backward, public with 2.15.
    """
    if hasattr(module, "finalize_backward"):
        module.finalize_backward()
        module.set_manual_backward_finalization(False)
        return
    # Every group reduces on FSDP's own stream, and the root's callback makes the compute stream wait for all of them before
    # anybody reads a gradient.
    module.set_is_last_backward(True)
    root = module._get_fsdp_state()
    for state in root._state_ctx.all_states:
        if state._fsdp_param_group:
            for param in state._fsdp_param_group.fsdp_params:
                if hasattr(param, "_unsharded_param"):  # all in the dtype of reduction, whichever backwards reached it
                    param.accumulate_unsharded_grad_if_needed()
                    param.to_accumulated_grad_if_needed()
            state._fsdp_param_group.post_backward()
    root._root_post_backward_final_callback()


@contextmanager
def around_fsdp(
    gathering: Callable[[], AbstractContextManager[None]],
    reducing: Callable[[], AbstractContextManager[None]],
    reduced: Callable[[list[Tensor]], None],
) -> Iterator[None]:
    """Inside, FSDP gathers parameters in `gathering()`, reduces gradients in `reducing()`, then `reduced` gets those.

    Private: methods of FSDPParamGroup by these names; there are no hooks around them. Checked: 2.11, 2.15. Replaced by:
    nothing yet.
    """
    originals = {
        name: getattr(FSDPParamGroup, name)
        for name in ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
    }

    def wrapped(name: str, around: Callable[[], AbstractContextManager[None]]) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            with around():
                out = originals[name](self, *args, **kwargs)
            if around is reducing:
                reduced(list(_gradients_of(self)))
            return out

        return method

    for name in originals:
        setattr(FSDPParamGroup, name, wrapped(name, gathering if "unshard" in name else reducing))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(FSDPParamGroup, name, original)


def _gradients_of(group: FSDPParamGroup) -> Iterator[Tensor]:
    """Sharded ones, unsharded ones, and those that add up in the dtype of reduction."""
    for param in group.fsdp_params:
        unsharded = getattr(param, "_unsharded_param", None)
        for grad in (
            param.sharded_param.grad,
            param.unsharded_accumulated_grad,
            None if unsharded is None else unsharded.grad,
        ):
            if grad is not None:
                yield grad.to_local() if isinstance(grad, DTensor) else grad


def own_memory(value: Any) -> Any:
    """A tensor that is a view, copied; anything else as it is. For what a module under FSDP returns.

    Private: Tensor._is_view. Checked: 2.11, and 2.15, where FSDP2 warns of a view and does not hook it. Replaced by: nothing
    yet.
    """
    return value.clone() if isinstance(value, Tensor) and value._is_view() else value


def register_pytree(
    node: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[[Any, Any], Any]
) -> None:
    """Let torch see the tensors in objects of a class. flatten: object -> (children, context).

    Private: register_pytree_node. Checked: 2.11, where FSDP2 finds by it what a module returns, and 2.15, where FSDP2 looks
    into dataclasses, but other parts of torch ask here. Replaced by: nothing yet.
    """
    torch.utils._pytree.register_pytree_node(node, flatten, unflatten)  # type: ignore[arg-type]  # torch's says Iterable


# ----------------------------------------------------------------------- autograd, activation checkpointing (recompute)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass, as a recomputed forward is.

    Private: torch._C._current_graph_task_id, -1 outside of one. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    return torch._C._current_graph_task_id() != -1


def ignore_profiler_marks() -> None:
    """Let selective checkpoints look past `record_function`, which FSDP's hooks call more often when a block runs again.

    Private: SAC_IGNORED_OPS, the operators that they do not count. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    profiler = torch.ops.profiler
    marks = (profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction)
    torch.utils.checkpoint.SAC_IGNORED_OPS.update(marks)


def selective_contexts(policy: Callable[..., Any]) -> tuple[Any, Any]:
    """The contexts of `checkpoint(context_fn=)` for a selective policy, whose kept results go through saved_tensors_hooks.

    The hooks are those around the checkpoint, an offload's: kept results go through them as all else that waits for backward.
    Private: _CachingTorchDispatchMode. Checked: 2.11, where kept results pass the hooks by, and 2.15. Replaced by:
    checkpoint(respect_saved_tensors_hooks=True) of 2.15, once it waits: it packs a result as soon as the operator returns.
    See [Note: what is on the wire is not packed].
    """
    caching, cached = create_selective_checkpoint_contexts(policy)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and not torch.compiler.is_compiling():
        caching.__class__ = _CachingThroughHooks
        caching.hooks, caching.in_flight = hooks, {}
    return caching, cached


# [Note: what is on the wire is not packed]
# A collective returns before its message has come, and an offload that packs the result copies it: on its own stream, which
# does not follow the wire. So results of collectives are held back until `wait_tensor` is called on their storage, whose
# result is the same storage, and both are packed then: the offload moves them once.


class _CachingThroughHooks(_CachingTorchDispatchMode):
    """2.11 keeps results in a list for each operator, 2.15 in a dict by number of call."""

    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
    in_flight: dict[int, list[Any]]  # results of collectives that nobody has waited for, by address of the storage
    respect_saved_tensors_hooks = property(
        lambda self: False, lambda self, value: None
    )  # 2.15 sets it, and warns at None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._newest(func, args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        kept = self._newest(func, args)
        wrappers = [] if kept is before else [leaf for leaf in tree_leaves(kept) if type(leaf) is _VersionWrapper]
        wrappers = [wrapper for wrapper in wrappers if isinstance(wrapper.val, Tensor)]
        # See [Note: what is on the wire is not packed].
        if func is _c10d.wait_tensor.default:
            wrappers += self.in_flight.pop(args[0].untyped_storage()._cdata, [])
        elif func.namespace == _c10d.all_reduce.default.namespace:
            for wrapper in wrappers:
                self.in_flight.setdefault(wrapper.val.untyped_storage()._cdata, []).append(wrapper)
            return out
        pack, unpack = self.hooks
        # As torch does it: aliases made below autograd share a version counter only with this key.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            for wrapper in wrappers:
                wrapper.val = _packed(pack(wrapper.val), unpack)
                wrapper.__class__ = _PackedWrapper
        return out

    def _newest(self, func: Any, args: Any) -> Any:
        """What was kept last of the operator; None if nothing was."""
        if not hasattr(self, "func_counter"):
            return (self.storage.get(func) or [None])[-1]
        entries = self.storage.get(torch.utils.checkpoint._sac_storage_key(func, args))
        return next(reversed(entries.values())) if entries else None


class _PackedWrapper(_VersionWrapper):
    def get_val(self, allow_cache_entry_mutation: bool) -> Any:
        value: Any = self.val
        return value()


def _packed(value: Any, unpack: Callable[[Any], Tensor]) -> Callable[[], Tensor]:
    return lambda: unpack(value)


# ----------------------------------------------------------------------------------------- tensors without values


def fake_mode() -> Any:
    """Inside, new tensors have shapes and no values.

    Private: torch._subclasses, where torch.compile takes it from. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: Any) -> bool:
    """A tensor without values. Private: FakeTensor. Checked: 2.11, 2.15. Replaced by: nothing yet."""
    return isinstance(value, FakeTensor)


def is_fake_type(kind: type) -> bool:
    """`is_fake` of a class."""
    return issubclass(kind, FakeTensor)


def wraps_tensors(kind: type) -> bool:
    """A class that runs operators by itself on the tensors it is made of, as DTensor does.

    Private: nothing but that `__torch_dispatch__` says it. Checked: 2.11, 2.15.
    """
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not None and dispatch is not Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


# -------------------------------------------------------------------------------------------------------- storages


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


# --------------------------------------------------------------------------------------------------- torch.compile


def allow_recompiles(modules: int) -> None:
    """Let torch.compile trace one forward for `modules` modules: those with hooks of their own are traced one by one.

    Private: torch._dynamo.config.recompile_limit, 8 for the process, beyond which `fullgraph` fails. Checked: 2.11, 2.15.
    Replaced by: torch.compile(recompile_limit=...) of 2.15.
    """
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, 8 * modules)


# 2.11, 2.15: the documentation of the memory visualiser tells users to call these two, but their names still start with an
# underscore, and nothing public replaces them.


def record_memory_history(enabled: bool) -> None:
    torch.cuda.memory._record_memory_history("all" if enabled else None)


def dump_memory_snapshot(path: Path) -> None:
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
