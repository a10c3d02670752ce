"""Data parallelism: FSDP, HSDP, ZeRO-1, 2 and 3, and plain replication (DDP), on PyTorch's FSDP2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from types import NoneType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as _fully_shard

from meshkit.core import _torch
from meshkit.core._torch import tree_leaves
from meshkit.core.arguments import require
from meshkit.core.double_backward import is_differentiated_again, not_twice
from meshkit.core.sharding import local_tensor
from meshkit.errors import PlanError
from meshkit.parallel.hops import before_microbatch_in_hops, forget_copies, gathers_again, go_by_nodes, reduce_in_hops
from meshkit.parallel.shardings import ShardMesh, zero_row
from meshkit.parallel.wires import quantize_wires
from meshkit.parallel.writes import swapped
from meshkit.plan.match import listed
from meshkit.strategy import DataPolicy, Precision, Shardings


def shard_units(names: Mapping[str, torch.Tensor], units: Iterable[str]) -> list[str]:
    """The FSDP units that can be gathered on their own: those that share no parameter with the rest of the model.

    names: parameters under all of their names. A tied embedding and head, for example, stay together in the root unit.
    """
    inside: dict[str, Counter[int]] = {unit: Counter() for unit in units}
    for name, param in names.items():
        for unit in accumulate(name.split(".")[:-1], "{}.{}".format):
            if unit in inside:
                inside[unit][id(param)] += 1
    everywhere = Counter(map(id, names.values()))
    return [unit for unit, found in inside.items() if found and all(everywhere[key] == found[key] for key in found)]


def normalises_by_rows(module: nn.Module, *, synced: bool = False) -> bool:
    """Whether its next forward normalises by this rank's rows alone, as BatchNorm in training mode does; or with synced, by
    those of all ranks, which is one microbatch."""
    return (
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and (synced or not isinstance(module, nn.SyncBatchNorm))
        and (module.training or module.running_mean is None)
    )


MINOR = 0.1
"""of a unit's elements, that may have another dtype than the rest"""


def whole_parameters(params: Mapping[str, torch.Tensor], units: Sequence[str]) -> list[str]:
    """Those that a run keeps whole on every rank: without a first dim that could be split, scalars and empty ones; and the
    few of a unit that have another dtype than its rest, as a router in fp32 in a block in bf16.

    params: under all of their names. Their gradients are summed by `reduce_whole`.
    """
    # FSDP reduces the gradients of a unit in one buffer. A unit of their own inside of a block would be gathered and freed in
    # the midst of it; this costs their bytes on each rank: 7 MB a layer for 256 experts and 7,168 features.
    undivided = {name for name, param in params.items() if not (param.ndim and param.numel())}
    elements: dict[str, Counter[torch.dtype]] = {}
    trained = {name: param for name, param in params.items() if param.requires_grad and name not in undivided}
    unit_of = _unit_of(params, units) if len({param.dtype for param in trained.values()}) > 1 else {}
    for name, unit in unit_of.items():
        if name in trained:
            elements.setdefault(unit, Counter())[trained[name].dtype] += trained[name].numel()
    minor = {
        id(params[name])
        for name, unit in unit_of.items()
        if name in trained and elements[unit][trained[name].dtype] <= MINOR * elements[unit].total()
    }
    return [name for name, param in params.items() if name in undivided or id(param) in minor]


@contextmanager
def restored_on_error(params: Sequence[torch.Tensor], before: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """Where the step fails, whole parameters have the gradients again that they had before: those of its ranks differ."""
    try:
        yield
    except BaseException:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad
        raise


def reduce_whole(params: Sequence[torch.Tensor], before: Sequence[torch.Tensor | None], mesh: DeviceMesh) -> None:
    """Sum the gradients of whole parameters over the mesh, after the step's last backward.

    before: what each gradient was before the step; only what the step added is summed. A parameter that no rank used keeps
    what it was.
    Wire: one all-reduce for each dtype, with a number more for each parameter: whether it was used.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, param in enumerate(params):
        if param.requires_grad:
            by_dtype.setdefault(param.dtype, []).append(index)
    for indices in by_dtype.values():
        # A rank whose rows did not use a parameter takes part with zeros.
        grads = [torch.zeros_like(params[i]) if (grad := params[i].grad) is None else grad for i in indices]
        local = [local_tensor(grad) for grad in grads]
        used = local[0].new_tensor([params[i].grad is not None for i in indices])
        flat = torch.cat([*(each.reshape(-1) for each in local), used])
        if mesh.size() > 1:
            dist.all_reduce(flat, group=mesh.get_group())
        sizes = [*(grad.numel() for grad in local), len(indices)]
        *sums, uses = flat.split(sizes)
        was_used = [True] * len(indices) if _torch.is_fake(uses) else uses.tolist()
        for index, grad, part, summed, use in zip(indices, grads, local, sums, was_used, strict=True):
            earlier = before[index]
            if not use:
                params[index].grad = earlier
                continue
            part.copy_(summed.view(part.shape))
            params[index].grad = grad if earlier is None else earlier + grad


def refuse_unshardable(params: Mapping[str, torch.Tensor], units: Sequence[str]) -> None:
    """Raises: PlanError for a parameter that FSDP2 does not take, and for a unit with many parameters of a second dtype.

    params: under all of their names; shapes, strides and dtypes are read. units: inner ones first.
    """
    # FSDP2 says the same, but raw, in the middle of changing the model, and for dtypes in the first forward only, where ranks
    # of other stages wait already.
    for name, param in params.items():
        shape, strides = list(param.shape), list(param.stride())
        if not shape or not param.numel():
            kind = "is a scalar" if not shape else f"is empty, of shape {shape}"
            raise PlanError(
                f"fully_shard: parameter {name!r} {kind}, and FSDP shards the first dim. Name it in "
                "fully_shard(whole=...) and sum its gradient, give it the shape [1], or use parallelize, which does so."
            )
        if not param.is_contiguous():
            raise PlanError(
                f"fully_shard: parameter {name!r} of shape {shape} has the strides {strides}, as a view has, and FSDP shards "
                "contiguous memory. Make it by nn.Parameter(value.contiguous())."
            )
    first_of_unit: dict[str, tuple[str, torch.dtype]] = {}
    for name, unit in _unit_of(params, units).items():
        if not params[name].requires_grad:
            continue  # only gradients share a buffer, which has one dtype
        dtype = params[name].dtype
        first, first_dtype = first_of_unit.setdefault(unit, (name, dtype))
        if dtype != first_dtype:
            where = repr(unit) if unit else "the root unit"
            narrow = min(dtype, first_dtype, key=lambda each: each.itemsize)
            raise PlanError(
                f"fully_shard: {where} has parameters in two dtypes: {first!r} is {_short(first_dtype)} and {name!r} "
                f"{_short(dtype)}, and FSDP reduces a unit's gradients in one buffer. Give them one dtype (of parallelize "
                f"{MINOR:.0%} of a unit may have another): "
                f"model.to({narrow}), or fp32 and a Precision, which computes in 16 bits. Outside of blocks a unit of their "
                "own will do (Plan(units=...))."
            )


def _unit_of(params: Mapping[str, torch.Tensor], units: Sequence[str]) -> dict[str, str]:
    """parameter -> the unit that holds it, "" for the root; a tied one under its first name only."""
    alone = {*shard_units(params, units)}
    first_names: dict[int, str] = {}
    for name, param in params.items():
        first_names.setdefault(id(param), name)
    return {
        name: next(
            (unit for unit in reversed([*accumulate(name.split(".")[:-1], "{}.{}".format)]) if unit in alone), ""
        )
        for name in first_names.values()
    }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | ShardMesh,
    *,
    units: Iterable[str] = (),
    keep_gathered: Iterable[str] = (),
    ignored: Iterable[str] = (),
    whole: Iterable[str] = (),
    zero: int | Shardings = 3,
    precision: Precision | None = None,
    cast_inputs: bool = True,
    policy: DataPolicy | None = None,
) -> nn.Module:
    """Shard parameters, gradients and optimizer state over the mesh, in place; uneven sizes are fine.

    mesh: one axis to shard over, or two: replicate × shard (HSDP). A shard axis of size 1 replicates parameters (DDP).
    Or what `shard_mesh` makes of a row, with the groups of its hops; in a loop of your own call `before_microbatch` then.
    units: names of submodules that are gathered and freed one at a time (the blocks); the rest is the root unit, which is not
    freed after forward, since backward needs it first. keep_gathered: units not freed after forward for the same reason (see
    `kept_units`).
    ignored: names of submodules that are not sharded: another call shards them over another mesh, or none does.
    whole: names of parameters that every rank keeps whole, such as scalars. Their gradients are this rank's own: sum them
    yourself after backward, as `parallelize` does.
    zero: 3, 2 or 1, or a row of `Shardings`, of which such a stage is the name. precision: compute and reduction dtypes;
    parameters and optimizer state keep their own.
    cast_inputs: units cast floating-point inputs to the compute dtype. False where some inputs are wider on purpose.
    policy: in how many bits parameters and gradients travel over the shard axis, see `DataPolicy`.
    Gradients are **summed** over the mesh, not averaged: divide the loss by the tokens of the whole step.
    Wire, per unit: all-gather of its parameters in compute dtype, reduce-scatter of its gradients in reduction dtype, and
    with replicas an all-reduce of the gradient shard. With `DataPolicy(gather=...)` the all-gather is of
    quantized blocks; with `reduce=...` an all-to-all of quantized blocks replaces the reduce-scatter.
    Raises: PlanError for an unknown stage, a unit that is not in the module, a unit that is sharded already, and a parameter
    that FSDP2 cannot shard.
    Source: Rajbhandari et al. 2020; Zhao et al. 2023.
    """
    row = zero if isinstance(zero, Shardings) else zero_row(zero)
    require("fully_shard", "module", module, nn.Module)
    require("fully_shard", "mesh", mesh, DeviceMesh, ShardMesh)
    require("fully_shard", "precision", precision, Precision, NoneType)
    require("fully_shard", "policy", policy, DataPolicy, NoneType)
    levels = mesh if isinstance(mesh, ShardMesh) else ShardMesh(mesh=mesh)
    _refuse_other_nodes(levels, policy)
    mesh = levels.mesh
    modules = dict(module.named_modules())
    units = _submodules(modules, "units", units)
    kept = _submodules(modules, "keep_gathered", keep_gathered)
    ignored = _submodules(modules, "ignored", ignored)
    if not_units := [name for name in kept if name not in units]:
        raise PlanError(
            f"fully_shard(keep_gathered=...): {not_units[0]!r} is no unit, so it is not gathered on its own. Name it in "
            "units too."
        )
    if mesh.size() == 1 and precision is None and not any(isinstance(child, FSDPModule) for child in module.modules()):
        return module
    if not all(param.is_floating_point() for param in module.parameters()):
        _torch.allow_integer_parameters()
    casts = MixedPrecisionPolicy()
    if precision is not None:  # reduce_dtype explicitly: its default changed meaning between 2.11 and 2.15
        casts = MixedPrecisionPolicy(
            param_dtype=precision.compute, reduce_dtype=precision.reduce, cast_forward_inputs=cast_inputs
        )
    _refuse_sharded(modules, units)
    kind, names = type(module).__name__, dict(module.named_parameters(remove_duplicate=False))
    ignored_params = {param for name in ignored for param in modules[name].parameters()}
    ignored_params |= {names[name] for name in _whole(names, whole)}
    inner = [modules[name] for name, child in modules.items() if isinstance(child, FSDPModule)]
    not_mine = {id(param) for child in inner for param in child.parameters()} | set(map(id, ignored_params))
    refuse_unshardable({name: param for name, param in names.items() if id(param) not in not_mine}, units)
    # Inner units first: each call takes the parameters of its module that no earlier call has taken; the root takes the rest.
    with _torch.detach_keeps_placements():
        for name in shard_units(names, units):
            reshard = row.frees_parameters and name not in kept
            _fully_shard(
                modules[name], mesh=mesh, mp_policy=casts, reshard_after_forward=reshard, ignored_params=ignored_params
            )
        _fully_shard(module, mesh=mesh, mp_policy=casts, reshard_after_forward=False, ignored_params=ignored_params)
    where = {child: name for name, child in modules.items()}

    def refuse(owner: nn.Module, key: str) -> None:
        raise swapped(kind, f"{where[owner]}.{key}".lstrip("."))

    for unit in (module, *(modules[name] for name in shard_units(names, units))):
        assert isinstance(unit, FSDPModule)
        _torch.keep_class_name(unit)
        _torch.keep_containers(unit)
        _torch.before_gathers(unit, refuse, _not_twice)
        _torch.before_unit_backwards(unit, _refuse_twice)
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_gradient_divide_factor(1.0)
            child.set_force_sum_reduction_for_comms(
                True
            )  # a divide factor alone selects PREMUL_SUM, which gloo has not
    for name in ("", *shard_units(names, units)):
        frees = row.frees_parameters and bool(name) and name not in kept
        quantize_wires(modules[name], mesh, policy or DataPolicy(), levels.gather, frees=frees)
        if levels.reduce is not None:
            reduce_in_hops(modules[name], levels.reduce)
        if policy is not None and levels.hierarchical is not None:
            go_by_nodes(
                modules[name],
                levels.hierarchical,
                gathers=levels.gather is None,
                reduces=levels.reduce is None,
                chunk_bytes=policy.chunk_bytes,
            )
    return module


def _refuse_other_nodes(levels: ShardMesh, policy: DataPolicy | None) -> None:
    """Raises: PlanError where the mesh and the policy do not say the same of how collectives go."""
    by_nodes = policy is not None and policy.is_hierarchical
    if by_nodes != levels.by_nodes:
        does, lacks = ("its policy", "its mesh") if by_nodes else ("its mesh", "its policy")
        raise PlanError(
            f"fully_shard: {does} has hierarchical collectives and {lacks} has not. Make the mesh by "
            "shard_mesh(mesh, row, policy=policy) of meshkit.parallel.shardings, and give the same policy."
        )


def _refuse_twice() -> None:
    if is_differentiated_again():
        _not_twice()


def _not_twice() -> NoReturn:
    raise not_twice(
        "FSDP frees gathered parameters after a first backward, and a second one would read them.",
        "Use a mesh of tp alone, without a Precision",
    )


def _submodules(modules: Mapping[str, nn.Module], argument: str, names: Iterable[str]) -> list[str]:
    """The names of an argument of `fully_shard`, each once. Raises: PlanError for one that is no submodule."""
    given = listed(names, where="fully_shard", argument=argument)
    for name in given:
        if name not in modules:
            raise PlanError(
                f"fully_shard({argument}=...): there is no submodule {name!r}. The first ones are {list(modules)[1:4]}."
            )
    return list(dict.fromkeys(given))


def _whole(names: Mapping[str, nn.Parameter], given: Iterable[str]) -> list[str]:
    wanted = list(listed(given, where="fully_shard", argument="whole"))
    for name in wanted:
        if name not in names:
            raise PlanError(
                f"fully_shard(whole=...): there is no parameter {name!r}. The first ones are {list(names)[:3]}."
            )
    return wanted


def _refuse_sharded(modules: Mapping[str, nn.Module], units: Sequence[str]) -> None:
    """Raises: PlanError for a unit that FSDP2 has taken before. Inner modules may be: see `ignored`."""
    for name in ("", *units):
        if isinstance(modules[name], FSDPModule):
            where = repr(name) if name else "the module"
            raise PlanError(
                f"fully_shard: {where} is sharded already. Call it once for each module, with all of its units."
            )


def gather_around(block: nn.Module, inner: nn.Module, *, free: bool) -> None:
    """Gather the parameters of `inner`, an FSDP unit inside of the block, before the block's forward and before its backward.

    free: free them after forward. See [Note: gathers outside of recompute].
    """
    # [Note: gathers outside of recompute]
    # Selective recompute requires that a block issues the same operators when it runs again. The hooks of an inner unit
    # gather only what is not gathered yet, which may differ between the two runs. So its gathers move to the edges of the
    # block: before its forward, and to a hook on the gradient of its output, which runs before anything of the block runs
    # again.
    if not isinstance(inner, FSDPModule):
        return
    inner.set_reshard_after_forward(False)
    if free:
        gathers_again(inner)

    def after(module: nn.Module, args: Any, out: Any) -> None:
        if free:
            inner.reshard()
        hidden = next(
            (value for value in tree_leaves(out) if isinstance(value, torch.Tensor) and value.requires_grad), None
        )
        if hidden is not None:
            hidden.register_hook(lambda grad: inner.unshard())

    block.register_forward_pre_hook(lambda module, args: inner.unshard())
    block.register_forward_hook(after)


def prefetch_gathers(units: Sequence[Sequence[nn.Module]]) -> None:
    """Gather the units of a block while the block before it runs, in backward those of the block after it, in place.

    units: of each block in order, itself first; those that are no FSDP units do not count.
    Wire: the same gathers, each a block earlier. Parameters of two blocks are gathered at a time.
    """
    # [Note: gathers and a host that waits]
    # FSDP queues the gather of a block when the host comes to it, which hides it as long as the host runs ahead of the
    # device. In a block with routed experts the host waits for the counts of rows: the next block's gather would be queued
    # after that, with nothing left to hide it behind. Asked for ahead, it is queued when the block begins.
    sharded: list[list[FSDPModule]] = [
        [unit for unit in of_block if isinstance(unit, FSDPModule)] for of_block in units
    ]
    for before, after in pairwise(sharded):
        if before and after:
            before[0].set_modules_to_forward_prefetch(after)
            after[0].set_modules_to_backward_prefetch(before)


def kept_units(blocks: Sequence[str], units: Sequence[str], head: str | None = None) -> set[str]:
    """The last block and the last further unit (the head): backward begins with them, so freeing them saves nothing.

    head: the head's name where a chunked loss reads its weight after the model's forward; units that contain it are kept too.
    """
    around_head = [unit for unit in (*blocks, *units) if head is not None and f"{head}.".startswith(f"{unit}.")]
    return {*blocks[-1:], *units[-1:], *around_head}


def before_microbatch(module: nn.Module, *, row: Shardings, first: bool, last: bool) -> None:
    """Tell FSDP what to keep and what to reduce in the backward of this microbatch. No-op on a module not sharded.

    How often, for one optimizer step of k microbatches, with `Shardings`:

    | parameters      | gathered, per unit                                   | held in between         |
    |-----------------|------------------------------------------------------|-------------------------|
    | "none"          | once, over the ranks of states                       | whole                   |
    | as states       | forward and backward, 2k                             | nothing                 |
    | between         | once over the ranks outside of that level, 2k inside | a secondary copy's part |

    | gradients       | reduced, per unit                                    | added up in between     |
    |-----------------|------------------------------------------------------|-------------------------|
    | "none"          | once, over the ranks of states                       | whole                   |
    | as states       | every microbatch, k                                  | shards                  |
    | between         | k inside of that level, once over the ranks outside  | the level's parts       |
    """
    if not isinstance(module, FSDPModule):
        return
    # A loss may call a unit before the model's own forward, and the first one called would be taken for the root.
    _torch.find_units(module)
    # After the last microbatch's backward FSDP waits for its reductions, and resets the order in which it prefetches units.
    # Earlier ones leave reduce-scatters in flight on FSDP's stream, beside the next microbatch's forward.
    module.set_is_last_backward(last)
    module.set_requires_gradient_sync(last or row.reduces_every_microbatch)
    # Over replicas once a step: until then FSDP accumulates shards that were reduced over dp_shard only.
    module.set_requires_all_reduce(last)
    module.set_reshard_after_backward(last or row.frees_parameters)
    before_microbatch_in_hops(module, first=first, last=last)


def find_units(module: nn.Module) -> None:
    """Let FSDP's root register all of its units now, before the model runs with some of its modules replaced."""
    if isinstance(module, FSDPModule):
        _torch.find_units(module)


def before_pipeline(module: nn.Module) -> None:
    """For a step with many microbatches in flight: gather parameters once, and reduce no gradients until `after_pipeline`."""
    # FSDP's root registers the units that it sees at its first forward, and stages run with the blocks of other stages
    # swapped out: so it must look before.
    find_units(module)
    if isinstance(module, FSDPModule):
        # Unsharded gradients accumulate until `after_pipeline` and are reduced once a step: backwards of microbatches
        # interleave, and each would reduce.
        module.set_requires_gradient_sync(False)
        module.set_reshard_after_backward(False)
        _torch.defer_gradient_reduction(module)


def after_pipeline(module: nn.Module) -> None:
    """Reduce the gradients of all microbatches at once, and free unsharded parameters."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(True)
        module.set_reshard_after_backward(True)
        _torch.reduce_deferred_gradients(module)


def after_inference(module: nn.Module) -> None:
    """Free the parameters that a forward without backward left gathered. No-op if not sharded."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()
    forget_copies(module)


@contextmanager
def abandoned_on_error(module: nn.Module) -> Iterator[None]:
    """Around the microbatches of a step: an error in one frees what is gathered and drops gradients not reduced yet.

    So a caller who catches it may go on: neither would what it gathered be read once parameters are written (a checkpoint is
    loaded), nor would its gradients be in the next step. Gradients of shards stay until `zero_grad`. No-op if not sharded.
    """
    try:
        yield
    except BaseException:
        if isinstance(module, FSDPModule):
            with suppress(RuntimeError):  # of a device that answers nothing any more: the first error is the one to see
                _torch.abandon_step(module)
            forget_copies(module)
        raise


@contextmanager
def kept_gathered(module: nn.Module) -> Iterator[None]:
    """Gather all parameters now, so that forwards inside send none of them. No-op if not sharded.

    Call `after_inference` afterwards. Blocks still gather and free experts as `gather_around` says.
    """
    if not isinstance(module, FSDPModule):
        yield
        return
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.unshard()
    with _torch.without_hooks(module):
        yield


def reduction_dtype(param: torch.Tensor, precision: Precision | None) -> torch.dtype:
    """The dtype a gradient travels in."""
    return precision.reduce if precision is not None else param.dtype
