"""Private PyTorch names, imported here and nowhere else.

Each line says which versions it was checked against and what would replace it.
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

# Many tensors in one kernel, as torch.nn.utils.get_total_norm has them. Checked: 2.11, 2.15. What replaces them: loops.
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_


def global_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local shape, global offset) of this rank's shard.

    2.11, 2.15: exact for uneven shards and for FSDP over TP (_StridedShard). No public replacement yet.
    """
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def place_like(param: DTensor, local: Tensor, shape: tuple[int, ...] | None = None) -> DTensor:
    """`local`, where it is, as this rank's part of a tensor that is sharded as `param` is. shape: of the whole, if another.

    2.11, 2.15: the constructor FSDP2 uses; `DTensor.from_local` would move a host tensor to the mesh's device.
    """
    whole = torch.empty(tuple(param.shape) if shape is None else shape, dtype=local.dtype, device="meta")
    spec = DTensorSpec(
        param.device_mesh, param.placements, tensor_meta=TensorMeta(whole.shape, whole.stride(), local.dtype)
    )
    return DTensor(local, spec, requires_grad=False)


_PLACES_GRADIENTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


def local_shard(param: DTensor) -> Tensor:
    """This rank's part of a parameter, connected for autograd: its gradient is placed as `param` is.

    2.15: `to_local`. 2.11: that gives a gradient strides as if all parts were as large as this one; where they are not, the
    layout is not the parameter's, and autograd keeps a copy that is whole on every rank, made by a collective. Inside of
    compiled blocks it still does: see OwnPartsAdamW.
    """
    if _PLACES_GRADIENTS or torch.compiler.is_compiling():
        return param.to_local()
    part: Tensor = _OwnPart.apply(param)
    return part


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: DTensor) -> Tensor:
        ctx.param = param
        local = param.to_local()
        return local.view_as(local)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch's
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        # Contiguous, as the parameter's own part is: autograd keeps a gradient as it comes only if it lies as the parameter
        # does, and otherwise copies it, which for a DTensor is a collective.
        return place_like(ctx.param, grad.detach().contiguous())


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """One axis made of all axes of `mesh`. 2.11, 2.15: `_flatten` is still private; keep the returned object."""
    return mesh._flatten(name)


def twin_group(group: ProcessGroup, *, timeout: timedelta, backend: str | None = None) -> ProcessGroup:
    """Another group of the ranks of `group`, made by those alone. Wire: a broadcast of its name over `group`.

    2.11, 2.15: `new_group(use_local_synchronization=True)` names groups by counters of the process, which differ between
    ranks as soon as some made a group without the others: then it waits for ever. So the first rank gives the name.
    """
    name = [uuid.uuid4().hex]
    if not is_fake_group(group):
        dist.broadcast_object_list(name, group=group, group_src=0)
    original = distributed_c10d._process_group_name  # type: ignore[attr-defined]  # not in the stubs
    distributed_c10d._process_group_name = lambda *args, **kwargs: name[0]  # type: ignore[attr-defined, assignment]  # for one call
    try:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    finally:
        distributed_c10d._process_group_name = original  # type: ignore[attr-defined]  # put back
    assert isinstance(made, ProcessGroup)  # this rank is a member
    return made


def attend_flattening(groups: list[list[int]]) -> None:
    """What a rank outside of a mesh does while its ranks `flatten_mesh`: every rank of the world makes every group.

    2.11, 2.15: one `new_group` for each; a rank outside cannot slice or flatten the mesh itself.
    """
    for ranks in groups:
        dist.new_group(ranks)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """A mesh of several axes out of meshes of one root. 2.11, 2.15: `_concatenate` is still private."""
    return DeviceMesh._concatenate(meshes)


def find_units(module: FSDPModule) -> None:
    """Let the root find its units now, while all of them are in the tree, not at its first forward.

    2.11, 2.15: `_lazy_init` does nothing when called again.
    """
    module._get_fsdp_state()._lazy_init()


@contextmanager
def without_hooks(module: FSDPModule) -> Iterator[None]:
    """Inside, forwards neither gather nor free parameters: what is gathered stays so. Units that cast keep their hooks.

    2.11, 2.15: hooks of every unit's every forward ask whether there is something to do, which costs a small model more than
    its layers. `set_reshard_after_forward` is public, but what a unit did before can be read, and given back, only here.
    """
    find_units(module)
    assert isinstance(module, nn.Module)
    states = {child: child._get_fsdp_state() for child in module.modules() if isinstance(child, FSDPModule)}
    groups = [group for state in states.values() for group in _groups_of(state)]
    before = [group.post_forward_mesh_info for group in groups]
    casts = any(state._mp_policy.param_dtype or state._mp_policy.output_dtype for state in states.values())
    hooks: list[tuple[dict[int, Any], int, Any]] = []
    for child, state in {} if casts else states.items():
        for own, handle in (
            (child._forward_pre_hooks, state._pre_forward_hook_handle),
            (child._forward_hooks, state._post_forward_hook_handle),
        ):
            hooks.append((own, handle.id, own[handle.id]))
    module.set_reshard_after_forward(False)
    try:
        for own, id, _ in hooks:
            own[id] = lambda *_: None  # in its place, to keep the order
        yield
    finally:
        for own, id, hook in hooks:
            own[id] = hook
        for group, info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = info


def _groups_of(state: Any) -> list[FSDPParamGroup]:
    """2.15: a unit may have several groups of parameters; 2.11: one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def send_bytes_as_they_are() -> None:
    """Let FSDP2 shard parameters of whole numbers, which have no gradient, and gather them in their own dtype.

    2.15 does. 2.11 makes each shard a parameter that requires a gradient, if only for a moment, and casts all to the compute
    dtype.
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


def put_off_gradients(module: FSDPModule) -> None:
    """Let backwards leave their gradients whole until `finish_gradients`. Call it before the forwards.

    2.15: public `set_manual_backward_finalization`; 2.11: the same by leaving is_last_backward False.
    """
    module.set_is_last_backward(False)
    if hasattr(module, "set_manual_backward_finalization"):
        module.set_manual_backward_finalization(True)


def finish_gradients(module: FSDPModule) -> None:
    """Reduce the gradients that backwards have left, free whole parameters, and wait.

    2.15: public `finalize_backward`; 2.11: what torch.distributed.pipelining does at the end of its own schedules.
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


# [Note: functional collectives without their wrappers]
# The operators behind torch.distributed._functional_collectives, same names and meaning in 2.11 and 2.15. The Python
# wrappers around them return AsyncCollectiveTensor, which breaks the backward of compiled regions in 2.15, and one was
# renamed between the two versions. The tensor must be contiguous. Each is waited for at once: for gloo the host does, for
# NCCL the current stream, while the host goes on. What is to travel beside other work is sent by c10d with async_op.


def _wait(tensor: Tensor, what: str) -> Tensor:
    # torch.compile follows the first branch alone: it knows the answer, and has no way to trace a mark or a clock.
    if torch.compiler.is_compiling():
        compiled: Tensor = _c10d.wait_tensor(tensor)
        return compiled
    with waiting(what):
        done: Tensor = _c10d.wait_tensor(tensor) if _waits is None else _timed(_c10d.wait_tensor, tensor)
    return done


_waits: tuple[int, list[float]] | None = None  # thread, seconds of each of its waits


@contextmanager
def waits_timed() -> Iterator[list[float]]:
    """Inside, the seconds of each of this thread's waits for collectives and messages on the host, but for compiled ones.

    2.11, 2.15: every Python collective without async_op calls `Work.wait` of its class, as FSDP and all others do; there
    is no hook for it.
    """
    global _waits
    wait, outer = dist.Work.wait, _waits
    _waits = (threading.get_ident(), [])
    dist.Work.wait = lambda *args: _timed(wait, *args)  # type: ignore[assignment, method-assign]  # put back below
    try:
        yield _waits[1]
    finally:
        dist.Work.wait, _waits = wait, outer  # type: ignore[method-assign]  # put back


def mark_works() -> None:
    """From now on every `Work.wait` of this process is marked, a user's too, if nothing around it says more.

    2.11, 2.15: as for `waits_timed`, there is no hook. Where nobody reads marks, nobody calls this.
    """
    dist.Work.wait = marked(dist.Work.wait, "a collective or a message")  # type: ignore[method-assign]  # for good


def _timed(act: Callable[..., Any], *args: Any) -> Any:
    began = time.perf_counter()
    try:
        return act(*args)
    finally:
        if _waits is not None and _waits[0] == threading.get_ident():
            _waits[1].append(time.perf_counter() - began)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass, as a recomputed forward is. 2.11, 2.15: -1 outside of one."""
    return torch._C._current_graph_task_id() != -1


def all_reduce_sum(tensor: Tensor, group_name: str) -> Tensor:
    return _wait(_c10d.all_reduce(tensor, "sum", group_name), "an all-reduce")


def all_gather_rows(tensor: Tensor, size: int, group_name: str) -> Tensor:
    return _wait(_c10d.all_gather_into_tensor(tensor, size, group_name), "an all-gather")


def reduce_scatter_rows(tensor: Tensor, size: int, group_name: str) -> Tensor:
    return _wait(_c10d.reduce_scatter_tensor(tensor, "sum", size, group_name), "a reduce-scatter")


def register_pytree(
    node: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[[Any, Any], Any]
) -> None:
    """Let torch see the tensors in objects of a class. flatten: object -> (children, context).

    2.11: FSDP2 finds what a module returns so. 2.15: it looks into dataclasses instead, and other parts of torch here.
    """
    torch.utils._pytree.register_pytree_node(node, flatten, unflatten)  # type: ignore[arg-type]  # torch's says Iterable


def storage_key(tensor: Tensor) -> int:
    """The same for tensors that share memory, as long as one of them lives, on meta too.

    2.11, 2.15: `_cdata`; the public `data_ptr` is 0 for every tensor on meta.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def ignore_profiler_marks() -> None:
    """Let selective checkpoints look past `record_function`, which FSDP's hooks call more often the second time.

    2.11, 2.15: `SAC_IGNORED_OPS` is what they do not count; there is no argument for it.
    """
    profiler = torch.ops.profiler
    marks = (profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction)
    torch.utils.checkpoint.SAC_IGNORED_OPS.update(marks)


def selective_contexts(policy: Callable[..., Any]) -> tuple[Any, Any]:
    """What `checkpoint(context_fn=)` wants for a selective policy, whose kept results go through the saved_tensors_hooks
    around the checkpoint, as everything else that waits for backward does.

    2.11: they pass the hooks by. 2.15: `checkpoint(respect_saved_tensors_hooks=True)` sends them through, but as soon as an
    operator returns: the result of a functional collective would be copied before its message has come.
    """
    caching, cached = create_selective_checkpoint_contexts(policy)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and not torch.compiler.is_compiling():
        caching.__class__ = _CachingThroughHooks
        caching.hooks, caching.under_way = hooks, {}
    return caching, cached


# [Note: what is on the wire is not packed]
# A collective returns before its message has come, and an offload that packs the result copies it: on its own stream, which
# does not follow the wire. So results of collectives are held back until `wait_tensor` is called on their storage, whose
# result is the same storage, and both are packed then: the offload moves them once.


class _CachingThroughHooks(_CachingTorchDispatchMode):
    """2.11, 2.15: how results are kept is private: a list for each operator, or a dict by number of call."""

    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
    under_way: dict[int, list[Any]]  # results of collectives that nobody has waited for, by address of the storage
    respect_saved_tensors_hooks = property(
        lambda self: False, lambda self, value: None
    )  # 2.15 sets it, and warns at None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._kept(func, args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        kept = self._kept(func, args)
        wrappers = [] if kept is before else [leaf for leaf in tree_leaves(kept) if type(leaf) is _VersionWrapper]
        wrappers = [wrapper for wrapper in wrappers if isinstance(wrapper.val, Tensor)]
        # See [Note: what is on the wire is not packed].
        if func is _c10d.wait_tensor.default:
            wrappers += self.under_way.pop(args[0].untyped_storage()._cdata, [])
        elif func.namespace == _c10d.all_reduce.default.namespace:
            for wrapper in wrappers:
                self.under_way.setdefault(wrapper.val.untyped_storage()._cdata, []).append(wrapper)
            return out
        pack, unpack = self.hooks
        # As torch does it: aliases made below autograd share a version counter only with this key.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            for wrapper in wrappers:
                wrapper.val = _packed(pack(wrapper.val), unpack)
                wrapper.__class__ = _PackedWrapper
        return out

    def _kept(self, func: Any, args: Any) -> Any:
        """The newest entry for the operator; None if there is none."""
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


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long an operation of the group may take. 2.11, 2.15: every backend has it, no public way to read it.

    The fake backend, whose operations take no time, has none.
    """
    options: Any = group._get_backend(group._device_types[0]).options
    return timedelta(minutes=10) if options is None or is_fake_group(group) else options._timeout


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """2.15: public `torch.distributed.set_timeout`; 2.11: per backend."""
    if is_fake_group(group):
        return
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timeout)


def world_store() -> Any:
    """The store that the world was made with. 2.11, 2.15: no public way to it."""
    return dist.distributed_c10d._get_default_store()


def world() -> ProcessGroup:
    """The default process group. 2.11, 2.15: `dist.group.WORLD` is typed as if it could be none."""
    group = dist.group.WORLD
    assert group is not None
    return group


def lost_others(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone, or does not come.

    2.11, 2.15: NCCL and stores have classes for it, gloo raises RuntimeError.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and _LOST.search(str(seen))):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


_LOST = re.compile(r"connection (closed|reset|refused)|broken pipe|timed? ?out|socket (closed|timeout)", re.IGNORECASE)


def process_group(name: str) -> ProcessGroup:
    """The process group of that `group_name`. 2.11, 2.15: how functional collectives find theirs; not public."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def group_of_call(args: tuple[Any, ...]) -> ProcessGroup:
    """The process group among the arguments of a c10d operator: boxed (c10d::) or by name (_c10d_functional::).

    2.11, 2.15: no public way to read either.
    """
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return ProcessGroup.unbox(arg)
    return process_group(next(arg for arg in reversed(args) if isinstance(arg, str)))


# What `estimate` needs: a world without ranks, tensors without values, and a look into what FSDP allocates.


def start_fake_world(world_size: int, rank: int) -> None:
    """A default process group that sends nothing. 2.11, 2.15: the store is still in torch.testing._internal."""
    from torch.distributed._tools import fake_collectives  # noqa: F401  # c10d operators on tensors without values
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def is_fake_group(group: ProcessGroup) -> bool:
    """2.11, 2.15: "fake" is a registered backend."""
    return dist.get_backend(group) == "fake"


def forget_shardings() -> None:
    """Drop what DTensor has learnt of meshes that are gone: a later mesh of the same shape equals them.

    2.11, 2.15: the cache of the Python propagator is an lru_cache; the one in C++ has a private function.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    for cached in (propagator.propagate_op_sharding, getattr(propagator, "_propagate_tensor_meta", None)):
        cache: Any = cached if hasattr(cached, "cache_clear") else getattr(cached, "cache", None)
        if hasattr(cache, "cache_clear"):
            cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


def fake_mode() -> Any:
    """Tensors with shapes and no values. 2.11, 2.15: `torch._subclasses` is where torch.compile takes it from."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: Any) -> bool:
    """A tensor without values. 2.11, 2.15: no public name."""
    return isinstance(value, FakeTensor)


@contextmanager
def propagating_separately() -> Iterator[None]:
    """Inside, no dispatch mode sees how DTensor works out shapes, which it does on tensors of the *global* shape.

    2.11, 2.15: one private method does it; `_disable_current_modes` is what torch.compile uses.
    """
    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def apart(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(self, *args, **kwargs)

    ShardingPropagator._propagate_tensor_meta_non_cached = apart  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = original  # type: ignore[method-assign]


@contextmanager
def detaching_as_placed() -> Iterator[None]:
    """Inside, DTensor knows that detaching keeps placements, and does not search all combinations of them.

    2.15: for each shape of a parameter FSDP2 has it search for 0.03 s on three axes and for 0.4 s on four. 2.11 knows.
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


@contextmanager
def while_resizing(resized: Callable[[UntypedStorage], None]) -> Iterator[None]:
    """Inside, `resized` hears of every storage whose size was changed from Python, as FSDP does to free parameters.

    2.11, 2.15: it is no operator, so no dispatch mode sees it.
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


@contextmanager
def while_sharding(
    gathering: Callable[[], AbstractContextManager[None]],
    reducing: Callable[[], AbstractContextManager[None]],
    reduced: Callable[[list[Tensor]], None],
) -> Iterator[None]:
    """Inside, FSDP gathers parameters in `gathering()`, reduces gradients in `reducing()`, and then tells which it holds.

    2.11, 2.15: the three methods have these names; there are no hooks around them.
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
    for param in group.fsdp_params:
        kept = (param.unsharded_accumulated_grad, getattr(param, "_unsharded_param", None))
        for grad in (param.sharded_param.grad, kept[0], None if kept[1] is None else kept[1].grad):
            if grad is not None:
                yield grad.to_local() if isinstance(grad, DTensor) else grad


def unviewed(value: Any) -> Any:
    """A tensor that is a view of another as one of its own; anything else as it is.

    2.15: FSDP2 refuses, by a warning, to watch a view that a module returns.
    """
    return value.clone() if isinstance(value, Tensor) and value._is_view() else value


def is_fake_type(kind: type) -> bool:
    """See `is_fake`."""
    return issubclass(kind, FakeTensor)


def wraps_tensors(kind: type) -> bool:
    """A class that does operators by itself on tensors it is made of, as DTensor does."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not None and own is not Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


def allow_recompiles(functions: int) -> None:
    """Let torch.compile trace one forward for so many modules: those with hooks of their own are traced one by one.

    2.11, 2.15: the limit is 8, of the process; then `fullgraph` fails. 2.15 has torch.compile(recompile_limit=...).
    """
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, 8 * functions)


# 2.11, 2.15: the documentation of the memory visualiser tells users to call these two, but their names still start with an
# underscore, and nothing public replaces them.


def record_memory_history(enabled: bool) -> None:
    torch.cuda.memory._record_memory_history("all" if enabled else None)


def dump_memory_snapshot(path: Path) -> None:
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
