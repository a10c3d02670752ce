"""Activation checkpointing (activation recompute): keep less in forward, run parts of it again in backward."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from meshkit.core import _torch
from meshkit.core.arguments import require
from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError
from meshkit.memory._arguments import Changes, tensors_of
from meshkit.parallel.tensor.regather import GATHER_REGION, regions
from meshkit.plan.match import listed
from meshkit.strategy import Budget, Kept, MemoryPolicy, Recompute, RecomputeMode

Policy = Callable[..., CheckpointPolicy | bool]
"""(ctx, operator, *args, **kwargs) -> save the operator's results or recompute them; see torch.utils.checkpoint."""

_aten = torch.ops.aten

# What "selective" can keep: results that cost a matrix product, an attention, or a message to another rank.
OPERATORS: dict[Kept, frozenset[Any]] = {
    "matmul": frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default}),
    "attention": frozenset(
        {
            _aten._scaled_dot_product_flash_attention.default,
            _aten._scaled_dot_product_flash_attention_for_cpu.default,
            _aten._scaled_dot_product_efficient_attention.default,
            _aten._scaled_dot_product_cudnn_attention.default,
        }
    ),
    "product": frozenset(),  # not an operator but a step of a feed-forward: see `recompute_activations`
    "collective": _torch.FUNCTIONAL_COLLECTIVES,
}
NONE = Recompute(mode="none")


def recompute(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    blocks: Iterable[str],
    mode: RecomputeMode | Recompute = "full",
    policy: Policy | None = None,
) -> nn.Module:
    """Activation checkpointing: recompute the named blocks in backward, in place; names of parameters do not change.

    mesh: the ranks with which the blocks communicate. Collectives run again in backward, so all of these ranks must recompute
    the same blocks; this is checked once. None: the blocks do not communicate.
    mode: full keeps each block's input only; selective also keeps the results of the `OPERATORS` that it names; activation
    recomputes the elementwise middle of feed-forwards; see `Recompute`.
    policy: your own function for selective recompute, in place of `mode`. It may not choose CPU offload.
    The random state is restored, so dropout draws the same mask. Gradients are bit-identical to mode "none" where kernels
    are deterministic.
    Wire: full repeats the block's forward collectives in backward; selective repeats those it does not keep; activation none.
    With a mesh, once an all-gather of the arguments.
    Raises: PlanError for a block that is not in the module; with activation, for a block without a gated feed-forward; and on
    every rank of the mesh if ranks recompute different blocks.
    Source: Chen et al. 2016; Korthikanti et al. 2022, section 5.
    """
    require("recompute", "module", module, nn.Module)
    require("recompute", "mesh", mesh, DeviceMesh, NoneType)
    modules, names = dict(module.named_modules()), list(listed(blocks, where="recompute", argument="blocks"))
    if mesh is not None:
        _refuse_different_calls(mesh, f"{names} by {mode if policy is None else 'a policy'}")
    for name in names:
        if name not in modules:
            raise PlanError(f"recompute: there is no block {name!r}. The first modules are {list(modules)[1:4]}.")
    for name, chosen in spread(mode, names).items():
        if policy is not None:
            _recompute_block(modules[name], partial(_checked, policy))
        elif chosen.mode != "none":
            treat(modules[name], Treatment(chosen, regather=any(regions(modules[name]))))
    return module


def _refuse_different_calls(mesh: DeviceMesh, call: str) -> None:
    """Raise unless all ranks recompute the same: collectives that only some ranks repeat in backward would hang."""
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        calls: list[str] = [""] * group.size()
        dist.all_gather_object(calls, call, group=group)
        other = next((rank for rank, text in enumerate(calls) if text != call), None)
        if other is not None:
            raise PlanError(
                f"recompute: this rank recomputes {call}, but rank {other} of the axis {calls[other]}. Ask for the same "
                "blocks on every rank."
            )


@dataclass(frozen=True)
class Treatment:
    """How one block saves activation memory.

    regather: inputs of its tensor-parallel regions are saved as shards and gathered again. offload: saved tensors wait on
    the host or on disk.
    """

    recompute: Recompute = NONE
    regather: bool = False
    offload: bool = False


def treatments(memory: MemoryPolicy, blocks: Sequence[str]) -> dict[str, Treatment]:
    """The treatment of each block, in the order of the full model, for a policy that is no `Budget`."""
    assert not isinstance(memory.recompute, Budget)
    chosen, moved = spread(memory.recompute, blocks), may_move(memory, blocks)
    return {name: Treatment(chosen[name], memory.regather, name in moved) for name in blocks}


def may_move(memory: MemoryPolicy, blocks: Sequence[str]) -> frozenset[str]:
    """Names of the blocks that may be offloaded: all but the last `keep_last` of the full model, not of each stage.

    Backward starts with those, so their activations would come back at once.
    """
    return (
        frozenset() if memory.offload is None else frozenset(blocks[: max(0, len(blocks) - memory.offload.keep_last)])
    )


def refuse_treatments(treated: Mapping[str, Treatment], modules: Mapping[str, nn.Module]) -> None:
    """Raise PlanError for a block that cannot have its treatment; on every rank, also on those that do not run the block."""
    for name, treatment in treated.items():
        if treatment.recompute.mode == "activation":
            feed_forwards(modules[name], name)


def repeated(treated: Mapping[str, Treatment], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The modules of which some forward runs again in backward -> why a write there is wrong, and what to change."""
    found = dict[str, str]()
    for name, treatment in treated.items():
        mode = treatment.recompute.mode
        if mode == "activation":
            inside = {id(child) for child in feed_forwards(modules[name], name)}
            names = [each for each, module in modules.items() if id(module) in inside]
        else:
            names = [name] if mode != "none" else []
        why = (
            f"recompute={mode!r} runs the forward of {name!r} again in backward, so it is written twice. Leave recompute "
            f"away for this block (Strategy(overrides={{{name!r}: BlockOverride(recompute='none')}}), without a Budget)."
        )
        found |= dict.fromkeys(names, why)
    return found


def treat(block: nn.Module, treatment: Treatment, *, compiled: bool = False) -> None:
    """Apply recompute and regather to the block, in place; offload is applied by `offload_activations`.

    compiled: the block will be compiled. In its graph saved inputs cannot be swapped for shards by hooks, so regather becomes
    a recompute policy.
    """
    chosen, regather = treatment.recompute, treatment.regather
    if chosen.mode == "full":
        _recompute_block(block, None)
    elif chosen.mode == "selective":
        _recompute_block(block, partial(_KeepExpensive, chosen, regather), fresh=True)
    else:
        if chosen.mode == "activation":
            recompute_activations(block, keep_product=chosen.keeps("product"))
        if regather and compiled and any(regions(block)):
            _recompute_block(block, _keep_all_but_regions)
        for region in regions(block):
            region.hooked = regather


def spread(mode: RecomputeMode | Recompute, blocks: Sequence[str]) -> dict[str, Recompute]:
    """The `Recompute` of each block: of each run of `every` blocks the first is recomputed, the others are not."""
    if isinstance(mode, str):
        if mode not in get_args(RecomputeMode):
            choices = ", ".join(repr(choice) for choice in get_args(RecomputeMode))
            raise PlanError(f"recompute: mode={mode!r}: choose one of {choices}.")
        mode = Recompute(mode=mode)
    treated = replace(mode, every=1)
    return {name: NONE if index % mode.every else treated for index, name in enumerate(blocks)}


def _recompute_block(block: nn.Module, policy: Any, *, fresh: bool = False) -> None:
    """Recompute one block in place. policy: None keeps its input only. fresh: `policy` makes the policy of one forward."""
    given = type(block).forward
    forward = _without_cache(given)
    options: dict[str, Any] = {"use_reentrant": False}
    if policy is not None:
        _torch.ignore_profiler_marks()
        options["context_fn"] = partial(_contexts, policy) if fresh else partial(_selective, policy)
    for region in regions(block):
        region.hooked = False  # the checkpoint decides what is kept: the region's saved-tensor hook would undo it

    def recomputed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return given(self, *args, **kwargs)
        if torch.compiler.is_compiling() and not breaks:
            # Dynamo turns `checkpoint` into an operator of its graph. It cannot trace context variables and needs none: their
            # present values are constants of the graph, also of the part that runs again.
            return checkpoint(partial(forward, self), *args, **options, **kwargs)
        return checkpointed(self, *args, **kwargs)

    def checkpointed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # See [Note: what a checkpoint keeps of its inputs].
        tensors, rebuild = tensors_of(args, kwargs)
        first = [Changes(type(self).__name__, args, kwargs)]  # not kept: it holds tensors

        def again(*tensors: Tensor) -> Any:
            args, kwargs = rebuild(tensors)
            if not first:
                return forward(self, *args, **kwargs)
            changes = first.pop()
            changes.begin(args, kwargs)
            output = forward(self, *args, **kwargs)
            changes.end()
            return output

        # Context variables (masks, random keys) may belong to another microbatch by the time of backward, so the recompute
        # runs in a copy of the context of this forward.
        return checkpoint(partial(run_in_copy, copy_context(), again), *tensors, **options)

    # Around a graph that breaks dynamo calls `checkpoint` as it is, but has chosen the way of one in a graph before. Here the
    # checkpoint is outside of graphs, and what it runs is compiled.
    breaks = any(hasattr(child, "reduce_counts") for child in block.modules())
    if breaks:
        checkpointed = torch.compiler.disable(checkpointed, recursive=False)
    patch_class(block, forward=recomputed_forward)


_CACHES = ("past_key_values", "cache", "past_key_value", "layer_past")  # arguments of transformers' blocks


def _without_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a block that runs again in backward, where it would find its own keys in the cache that it put them into
    (config.use_cache=True, the default of transformers). Training reads none, so it is given none."""
    parameters = inspect.signature(forward).parameters
    names = list(parameters)
    places = [names.index(name) for name in _CACHES if name in names]
    if not places and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return forward

    @functools.wraps(forward)
    def forward_without_cache(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_given(each) if place in places else each for place, each in enumerate(args))
        return forward(*args, **{name: _given(each) if name in _CACHES else each for name, each in kwargs.items()})

    return forward_without_cache


def _given(value: Any) -> Any:
    """None for a cache of transformers; what else has such a name is the model's own."""
    of_theirs = any(base.__module__ == "transformers.cache_utils" for base in type(value).__mro__)
    return None if of_theirs and not getattr(value, "keeps_nothing", False) else value


def _keep_all_but_regions(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of compiled blocks with regather: save everything except the gathered inputs of regions."""
    if operator is GATHER_REGION:
        return CheckpointPolicy.MUST_RECOMPUTE
    # A saved view keeps the whole storage of its base alive, while running a view again costs nothing.
    views = any(result.alias_info is not None for result in operator._schema.returns)
    return CheckpointPolicy.PREFER_RECOMPUTE if views else CheckpointPolicy.PREFER_SAVE


class _KeepExpensive:
    """Selective activation checkpointing: the policy of one forward, which saves the results that `chosen` names."""

    def __init__(self, chosen: Recompute, regather: bool) -> None:
        self.chosen, self.regather = chosen, regather
        self.kept = frozenset[Any]().union(*(OPERATORS[kind] for kind in chosen.keep))
        # Counted apart for forward and recompute: torch 2.11 calls the policy again in recompute, and both must agree.
        self.matmuls: Counter[bool] = Counter()

    def __call__(self, ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if self.regather and operator is GATHER_REGION:
            return CheckpointPolicy.MUST_RECOMPUTE
        if self.chosen.every_second_matmul and operator in OPERATORS["matmul"]:
            self.matmuls[ctx.is_recompute] += 1
            if self.matmuls[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        # meshkit's own operators are attention over ranks, or messages of it.
        ours = operator.namespace == "meshkit" and bool({"attention", "collective"} & set(self.chosen.keep))
        return CheckpointPolicy.MUST_SAVE if ours or operator in self.kept else CheckpointPolicy.PREFER_RECOMPUTE


def _checked(policy: Policy, ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    decision = policy(ctx, operator, *args, **kwargs)
    if decision in (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD):
        raise PlanError(
            f"recompute: the policy answers {decision} for {operator}, which torch would run again without a word. Use "
            "MemoryPolicy(offload=ActivationOffload()), or let the policy save or recompute."
        )
    if isinstance(decision, bool):
        return CheckpointPolicy.MUST_SAVE if decision else CheckpointPolicy.PREFER_RECOMPUTE
    return decision


def _contexts(make: Callable[[], Policy]) -> Any:
    return _torch.selective_contexts(make())


def _selective(policy: Policy) -> Any:
    return _torch.selective_contexts(policy)


def run_in_copy(variables: Context, function: Any, *args: Any) -> Any:
    """Call the function in a copy of the context `variables`; a copy, since a context cannot be entered twice at a time."""
    return variables.copy().run(function, *args)


# [Note: recompute of activation functions]
# Of a feed-forward with F hidden features, down(silu(gate) * up) saves gate, up, silu(gate) and the product for backward: 4 F
# for each token. The last two follow from gate and up by one pass over memory, so recomputing them halves the memory at
# little cost. Source: Shazeer 2020 for the layer; Korthikanti et al. 2022, section 5, for saving what is expensive.


def recompute_activations(block: nn.Module, *, keep_product: bool) -> None:
    """Let the block's feed-forwards keep gate and up only, or with keep_product also their product, in place.

    A feed-forward is a module with the methods `product(gate, up)` and `finish(gate, up)`, as `GatedMLP` has them; `finish`
    applies one linear layer to `product`. The linear layer does not run again: early stop ends recompute at its input.
    Raises: PlanError for a block without one. See [Note: recompute of activation functions].
    """
    step = "product" if keep_product else "finish"
    for child in feed_forwards(block):
        patch_class(child, **{step: _recomputed(getattr(type(child), step))})


def feed_forwards(block: nn.Module, name: str = "") -> list[nn.Module]:
    """The feed-forwards of a block whose middle can be recomputed. Raises: PlanError if there is none."""
    children = [
        child for child in block.modules() if hasattr(type(child), "product") and hasattr(type(child), "finish")
    ]
    if not children:
        kind = type(block).__name__
        raise PlanError(
            f"recompute='activation': {f'{name!r}, a {kind},' if name else kind} has no feed-forward with the "
            "steps `product` and `finish`, as mk.models' GatedMLP has them; routed experts have not. Use "
            "recompute='selective'."
        )
    return children


def _recomputed(step: Any) -> Any:
    def again(self: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return step(self, gate, up)
        return checkpoint(partial(step, self), gate, up, use_reentrant=False, preserve_rng_state=False)

    return again
