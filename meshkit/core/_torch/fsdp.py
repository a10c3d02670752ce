"""FSDP2: its units, hooks, deferred reduction of gradients, and what it expects of returned tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param, _fsdp_state
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from meshkit.errors import PlanError

from .autograd import in_functional_grad
from .handed import Handed

# Before 2.15 what goes into the reduction of a unit's gradients is held longer. Private: nothing; FSDP2 behaves otherwise.
# Checked: 2.11, 2.15. Replaced by: 2.15.
REDUCES_AS_2_15 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


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


# Dynamo does not trace FSDP's hooks: 2.15; 2.11.
_untraced: Any = vars(_fsdp_common).get("_dynamo_disable") or vars(_fsdp_state)["disable_if_config_true"]


def keep_containers(module: FSDPModule) -> None:
    """Let what the module's forward changes of lists, dicts and dataclasses that it is called with be there for the caller:
    FSDP hands copies on.

    Private: the handles of FSDP's hooks around forwards, and what lets dynamo leave them out. Checked: 2.11, 2.15. Replaced
    by: nothing yet.
    """
    assert isinstance(module, nn.Module)
    state = module._get_fsdp_state()
    before_number, after_number = state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id
    before: Callable[..., Any] = module._forward_pre_hooks[before_number]
    after: Callable[..., Any] = module._forward_hooks[after_number]
    handed: list[Handed] = []

    def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handed.clear()  # of a forward that raised
        try:
            made = before(module, args, kwargs)
        except TypeError as error:
            if "first argument must be callable" not in str(error):
                raise
            raise PlanError(
                f"fully_shard: {type(module).__name__} is called with a defaultdict, of which FSDP can make no copy. Give it "
                "a dict."
            ) from error
        if made is not None and (copies := Handed((args, tuple(kwargs.values())), (made[0], tuple(made[1].values())))):
            handed.append(copies)
        return made

    def post_forward(*args: Any, **kwargs: Any) -> Any:
        if handed:
            handed.pop().write_back()
        return after(*args, **kwargs)

    module._forward_pre_hooks[before_number] = _untraced(pre_forward)
    module._forward_hooks[after_number] = _untraced(post_forward)


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

    Private: what torch.distributed.pipelining does at the end of its own schedules on 2.11; for 2.15, what marks a unit whose
    gradients wait, which a backward does that goes through the output of some unit. Checked: 2.11, 2.15. Replaced by:
    finalize_backward, public with 2.15.
    """
    if hasattr(module, "finalize_backward"):
        for state in module._get_fsdp_state()._state_ctx.all_states:
            for group in _groups_of(state):
                group._post_backward_pending |= not all(map(_lacks_gradient, group.fsdp_params))
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


def abandon_step(module: FSDPModule) -> None:
    """After an error in a forward or backward: free gathered parameters, and forget gradients that are not reduced yet.

    Gradients of shards stay. Nothing is sent.
    Private: for 2.11, where FSDP keeps what lives from one hook to the next, and those gradients. 2.15 has reset_iter_state,
    which is public and takes gradients of shards too. Checked: 2.11, 2.15. Replaced by: reset_iter_state, where only 2.15 is.
    """
    find_units(module)
    root = module._get_fsdp_state()
    states = root._state_ctx.all_states
    shards = [param.sharded_param for state in states for group in _groups_of(state) for param in group.fsdp_params]
    grads = [shard.grad for shard in shards]
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
    else:
        root._state_ctx.iter_forward_root = None
        root._state_ctx.post_backward_final_callback_queued = False
        comms: Any = root._comm_ctx
        comms.post_forward_order.clear()
        if comms.reduce_scatter_state is not None:
            root._device_handle.current_stream().wait_event(comms.reduce_scatter_state.event)
            comms.reduce_scatter_state = None
        for state in states:
            state._training_state = TrainingState.IDLE
            for group in _groups_of(state):
                group._training_state = TrainingState.IDLE
                group.finalize_backward()
                group._partial_reduce_output = None
                group._to_sharded()
                params: list[Any] = group.fsdp_params
                for param in params:
                    param.unsharded_accumulated_grad = None
                    if hasattr(param, "_unsharded_param"):
                        param._unsharded_param.grad = None
    for shard, grad in zip(shards, grads, strict=True):
        shard.grad = grad


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


@dataclass(frozen=True)
class BeforeReduction:
    """A trained parameter of a unit. lacks: it has no gradient to reduce. fresh: nor one that was reduced before."""

    name: str
    lacks: bool
    fresh: bool


def before_reductions(module: FSDPModule, missing: Callable[[list[BeforeReduction]], list[bool]]) -> None:
    """Before this unit's gradients are reduced, give a gradient of zeros to those parameters of which `missing` says so.

    Private: FSDPParamGroup.post_backward, its `reduce_grads`, and where FSDPParam keeps a gradient; there is no hook before a
    reduction, and `set_reduce_scatter_unused_params` of 2.15 fills those too that no rank has used. Checked: 2.11, 2.15.
    Replaced by: nothing yet.
    """

    def around(group: FSDPParamGroup) -> None:
        def post_backward(*unused: Any) -> None:
            trained = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
            if group.reduce_grads and trained:
                filled = missing(
                    [
                        BeforeReduction(str(param._param_fqn), _lacks_gradient(param), param.sharded_param.grad is None)
                        for param in trained
                    ]
                )
                for param, fill in zip(trained, filled, strict=True):
                    if fill:
                        param._unsharded_param.grad = torch.zeros_like(param._unsharded_param)
            type(group).post_backward(group, *unused)  # as it is now: a tracker may have wrapped it since

        group.post_backward = post_backward  # type: ignore[method-assign]  # of this group alone

    for group in _groups_of(module._get_fsdp_state()):
        around(group)


def keep_class_name(module: FSDPModule) -> None:
    """Let the class that FSDP gives a unit have the name of the unit's own, which a forward may ask for.

    Private: that its last base is that class. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    type(module).__name__ = type(module).__bases__[-1].__name__


def before_gathers(
    module: FSDPModule, replaced: Callable[[nn.Module, str], None], differentiated: Callable[[], None]
) -> None:
    """Before a forward of this unit, call `replaced(owner, key)` for a parameter in whose place another tensor is, and
    `differentiated()` inside of torch.func.grad, where FSDP of torch 2.11 cannot gather.

    FSDP would put its own over that. Not in `without_hooks`, where it does not. A shard in place of a parameter that is
    gathered, as torch.func.functional_call puts it back after its call, is replaced by that.
    Private: FSDPParamGroup.pre_forward, since a hook would be traced where a block is compiled, and where FSDPParam
    keeps its parameters. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """

    def around(group: FSDPParamGroup) -> None:
        def pre_forward(*args: Any) -> Any:
            if in_functional_grad():
                differentiated()
            for param in group.fsdp_params:
                info, own = param._module_info, (param.sharded_param, getattr(param, "_unsharded_param", None))
                tied = zip(info.shared_modules, info.shared_param_names, strict=True)
                for owner, key in ((info.module, info.param_name), *tied):
                    there = owner._parameters.get(key)
                    if not any(there is each for each in own):
                        replaced(owner, key)
                    if group.is_unsharded and there is param.sharded_param:
                        owner._parameters[key] = param._unsharded_param
            return type(group).pre_forward(group, *args)

        group.pre_forward = pre_forward  # type: ignore[method-assign, assignment]  # of this group alone

    for group in _groups_of(module._get_fsdp_state()):
        around(group)


def before_unit_backwards(module: FSDPModule, act: Callable[[], None]) -> None:
    """Call `act` at the beginning of each backward of this unit.

    Private: FSDPParamGroup.pre_backward; a hook on what the unit returns would be traced where a block is compiled. Checked:
    2.11, 2.15. Replaced by: nothing yet.
    """

    def around(group: FSDPParamGroup) -> None:
        def pre_backward(*args: Any) -> Any:
            act()
            return type(group).pre_backward(group, *args)

        group.pre_backward = pre_backward  # type: ignore[method-assign, assignment]  # of this group alone

    for group in _groups_of(module._get_fsdp_state()):
        around(group)


def after_unit_backwards(module: FSDPModule, act: Callable[[], None]) -> None:
    """Call `act` at the end of each backward of this unit, when what it does not keep is freed.

    Private: FSDPParamGroup.post_backward; there is no hook after it. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    for group in _groups_of(module._get_fsdp_state()):
        kind: Any = type(group)

        class Acting(kind):  # type: ignore[misc]  # of a class that another function may have changed
            def post_backward(self, *unused: Any) -> None:
                super().post_backward(*unused)
                act()

        group.__class__ = Acting


@dataclass(frozen=True, kw_only=True)
class UnitParameter:
    """A parameter of a unit, in the order in which FSDP lines them up.

    shape: as this rank computes with it, all ranks' rows. part: of the rows that a rank sends, padded to the first rank's.
    dtype: in which it is gathered. param: the shard.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[int, ...]
    dtype: torch.dtype
    param: DTensor


def unit_parameters(module: FSDPModule) -> list[UnitParameter]:
    """The parameters of a unit. Call it after `find_units`, which gives them their names.

    Private: where FSDPParam keeps sizes and dtypes. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    return [
        UnitParameter(
            name=str(param._param_fqn),
            shape=tuple(param._orig_size),
            part=tuple(param.padded_sharded_param_size),
            dtype=param.param_dtype or param.orig_dtype,
            param=param.sharded_param,  # type: ignore[arg-type]  # a DTensor, once it is sharded
        )
        for group in _groups_of(module._get_fsdp_state())
        for param in group.fsdp_params
    ]


class _NoReplicas(ProcessGroup):
    """A group over which nothing is summed."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def allreduce(self, tensors: Any, options: Any = None) -> None:  # type: ignore[override]  # nothing to wait for
        pass


def note_reductions(
    module: FSDPModule, note: Callable[[list[int]], None], replicas: Callable[[Tensor], None] | None
) -> None:
    """Before this unit's gradients are reduced, call `note` with the places in `unit_parameters` of those that there are.

    replicas: sums what was reduced over replicas, in place, where FSDP would with an all-reduce; None leaves it to FSDP.
    Private: FSDPParamGroup.post_backward and, with 2.15, _take_unsharded_grads_to_reduce: what is called to reduce gets one
    flat tensor and is not told whose gradients are in it; and _all_reduce_process_group: the public all-reduce hook comes
    after FSDP's own all-reduce, and there is none in its place. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    takes = hasattr(FSDPParamGroup, "_take_unsharded_grads_to_reduce")
    nobody = None if replicas is None else _NoReplicas()
    if replicas is not None:
        module.set_all_reduce_hook(replicas)

    groups = _groups_of(module._get_fsdp_state())
    kind: Any = type(groups[0]) if groups else FSDPParamGroup

    class Noting(kind):  # type: ignore[misc]  # of a class that another function may have changed
        @property
        def _all_reduce_process_group(self) -> ProcessGroup:
            return super()._all_reduce_process_group if nobody is None else nobody

        def post_backward(self, *unused: Any) -> None:
            if not takes:
                note([place for place, param in enumerate(self.fsdp_params) if not _lacks_gradient(param)])
            super().post_backward(*unused)

        def _take_unsharded_grads_to_reduce(self) -> Any:
            params, grads = super()._take_unsharded_grads_to_reduce()
            places = {id(param): place for place, param in enumerate(self.fsdp_params)}
            note([places[id(param)] for param in params])
            return params, grads

    for group in groups:
        group.__class__ = Noting


def _lacks_gradient(param: Any) -> bool:
    if getattr(param, "unsharded_accumulated_grad", None) is not None:
        return False
    unsharded = getattr(param, "_unsharded_param", None)
    return unsharded is None or unsharded.grad is None


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


def unsharded_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Name -> what FSDP gathers a parameter into, whose `.grad` backward writes; of those that were gathered before.

    Private: where FSDPParam keeps it. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    return {
        str(param._param_fqn): param._unsharded_param
        for child in module.modules()
        if isinstance(child, FSDPModule)
        for group in _groups_of(child._get_fsdp_state())
        for param in group.fsdp_params
        if hasattr(param, "_unsharded_param")
    }


def gather_once(module: nn.Module) -> None:
    """Gather every FSDP unit and free it again: afterwards it has the tensors that `unsharded_parameters` names."""
    units = [child for child in module.modules() if isinstance(child, FSDPModule)]
    for unit in units:
        unit.unshard()
        unit.reshard()


def own_memory(value: Any) -> Any:
    """A tensor that is a view, copied; anything else as it is. For what a module under FSDP returns.

    Private: Tensor._is_view. Checked: 2.11, and 2.15, where FSDP2 warns of a view and does not hook it. Replaced by: nothing
    yet.
    """
    return value.clone() if isinstance(value, Tensor) and value._is_view() else value
