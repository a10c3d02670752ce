"""Activation recompute: keep less in forward, run it again in backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from meshkit.core import _torch
from meshkit.core._torch import tree_flatten, tree_unflatten
from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError
from meshkit.parallel.tensor.regather import GATHER_REGION, regions
from meshkit.strategy import Budget, Kept, MemoryPolicy, Recompute, RecomputeMode

Policy = Callable[..., CheckpointPolicy | bool]
"""(ctx, operator, *args, **kwargs) -> what becomes of the operator's results; see torch.utils.checkpoint."""

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
    "product": frozenset(),  # no operator, but a place in a feed-forward
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

    mesh: the ranks over which the blocks communicate, whose collectives run again in backward: all of them must recompute
    the same blocks, and are asked once. None: they communicate with nobody.
    full keeps each block's input only; selective keeps also the results of the `OPERATORS` that it names; activation runs the
    elementwise middle of feed-forwards again; see `Recompute`.
    policy: a function of yours for selective recompute, in place of `mode`; what it moves to the host is refused.
    The random state is restored, so dropout draws the same mask. Gradients are bit-identical to mode "none" where kernels
    are deterministic.
    Wire: full repeats the block's forward collectives in backward; selective repeats those it does not keep; activation none.
    With a mesh, once an all-gather of what was asked for.
    Raises: PlanError for a block that is not in the module, or, with activation, has no feed-forward that it knows, and on
    every rank of the mesh if they ask for different things.
    Source: Chen et al. 2016; Korthikanti et al. 2022, section 5.
    """
    modules, names = dict(module.named_modules()), list(blocks)
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


def _refuse_different_calls(mesh: DeviceMesh, asked: str) -> None:
    """A block that runs again on some ranks only would wait for the others in backward."""
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        everybody: list[str] = [""] * group.size()
        dist.all_gather_object(everybody, asked, group=group)
        other = next((rank for rank, text in enumerate(everybody) if text != asked), None)
        if other is not None:
            raise PlanError(
                f"recompute: this rank recomputes {asked}, but rank {other} of the axis {everybody[other]}. Ask for the same "
                "blocks on every rank."
            )


@dataclass(frozen=True)
class Treatment:
    """What one block keeps for backward. regather: inputs of its regions are gathered again, not kept whole. offload: what is
    kept waits elsewhere.
    """

    recompute: Recompute = NONE
    regather: bool = False
    offload: bool = False


def treatments(memory: MemoryPolicy, blocks: Sequence[str]) -> dict[str, Treatment]:
    """Of each block, in the order of the whole model, for a policy that is no `Budget`."""
    assert not isinstance(memory.recompute, Budget)
    chosen, moved = spread(memory.recompute, blocks), may_move(memory, blocks)
    return {name: Treatment(chosen[name], memory.regather, name in moved) for name in blocks}


def may_move(memory: MemoryPolicy, blocks: Sequence[str]) -> frozenset[str]:
    """Those of the whole model's blocks that can be offloaded. Backward begins with the last blocks of the model, not with
    those of each stage.
    """
    return (
        frozenset() if memory.offload is None else frozenset(blocks[: max(0, len(blocks) - memory.offload.keep_last)])
    )


def refuse_treatments(treated: Mapping[str, Treatment], modules: Mapping[str, nn.Module]) -> None:
    """Raise PlanError for a block of the whole model that cannot be treated so, on every rank and whoever runs it."""
    for name, treatment in treated.items():
        if treatment.recompute.mode == "activation":
            feed_forwards(modules[name], name)


def treat(block: nn.Module, treatment: Treatment, *, compiled: bool = False) -> None:
    """Let the block keep so much, in place; `offload` is not done here. compiled: it will be compiled, where saved inputs
    cannot be replaced.
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
    """What becomes of each block: of every `every` blocks, the first is treated so."""
    if isinstance(mode, str):
        if mode not in get_args(RecomputeMode):
            choices = ", ".join(repr(choice) for choice in get_args(RecomputeMode))
            raise PlanError(f"recompute: mode={mode!r}: choose one of {choices}.")
        mode = Recompute(mode=mode)
    treated = replace(mode, every=1)
    return {name: NONE if index % mode.every else treated for index, name in enumerate(blocks)}


def _recompute_block(block: nn.Module, policy: Any, *, fresh: bool = False) -> None:
    """Recompute one block in place. policy: None keeps its input only. fresh: `policy` makes the policy of one forward."""
    forward = type(block).forward
    options: dict[str, Any] = {"use_reentrant": False}
    if policy is not None:
        _torch.ignore_profiler_marks()
        options["context_fn"] = partial(_contexts, policy) if fresh else partial(_selective, policy)
    for region in regions(block):
        region.hooked = False  # what is kept is decided here

    def recomputed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            # Dynamo knows `checkpoint` and makes it an operator of its graph. It does not trace context variables, and what
            # runs again has its values in the graph.
            return checkpoint(partial(forward, self), *args, **options, **kwargs)
        # See [Note: what a checkpoint keeps of its inputs].
        tensors, rebuild = _tensors_of(args, kwargs)

        def again(*tensors: Tensor) -> Any:
            args, kwargs = rebuild(tensors)
            return forward(self, *args, **kwargs)

        # By the time of backward another microbatch may have set them: run again with those of now.
        return checkpoint(partial(run_in_copy, copy_context(), again), *tensors, **options)

    patch_class(block, forward=recomputed_forward)


def _keep_all_but_regions(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of compiled blocks that keep everything but the gathered inputs of regions."""
    if operator is GATHER_REGION:
        return CheckpointPolicy.MUST_RECOMPUTE
    views = any(
        result.alias_info is not None for result in operator._schema.returns
    )  # to save one is to save the whole
    return CheckpointPolicy.PREFER_RECOMPUTE if views else CheckpointPolicy.PREFER_SAVE


class _KeepExpensive:
    """The policy of one forward: what `chosen` keeps."""

    def __init__(self, chosen: Recompute, regather: bool) -> None:
        self.chosen, self.regather = chosen, regather
        self.kept = frozenset[Any]().union(*(OPERATORS[kind] for kind in chosen.keep))
        # torch 2.11 asks again in recompute, where counting goes on by itself.
        self.matmuls: Counter[bool] = Counter()

    def __call__(self, ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if self.regather and operator is GATHER_REGION:
            return CheckpointPolicy.MUST_RECOMPUTE
        if self.chosen.every_second_matmul and operator in OPERATORS["matmul"]:
            self.matmuls[ctx.is_recompute] += 1
            if self.matmuls[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        # Each of our own operators is an attention over ranks, or a message of one.
        ours = operator.namespace == "meshkit" and bool({"attention", "collective"} & set(self.chosen.keep))
        return CheckpointPolicy.MUST_SAVE if ours or operator in self.kept else CheckpointPolicy.PREFER_RECOMPUTE


def _checked(policy: Policy, ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    found = policy(ctx, operator, *args, **kwargs)
    if found in (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD):
        raise PlanError(
            f"recompute: the policy answers {found} for {operator}, which torch would run again without a word. Use "
            "MemoryPolicy(offload=ActivationOffload()), or let the policy save or recompute."
        )
    if isinstance(found, bool):
        return CheckpointPolicy.MUST_SAVE if found else CheckpointPolicy.PREFER_RECOMPUTE
    return found


def _contexts(make: Callable[[], Policy]) -> Any:
    return _torch.selective_contexts(make())


def _selective(policy: Policy) -> Any:
    return _torch.selective_contexts(policy)


def _tensors_of(args: Any, kwargs: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors among arguments, also those passed by name or in a tuple, and how to put others in their places."""
    # [Note: what a checkpoint keeps of its inputs]
    # A checkpoint without reentry saves its positional tensors through autograd, so that an offload around it moves them; a
    # tensor by name or inside of a tuple would stay on the device in a closure, for as long as the graph lives.
    leaves, structure = tree_flatten((args, kwargs), is_leaf=_is_leaf)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[place] for place in places]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        filled = list(rest)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return tree_unflatten(filled, structure)

    return tensors, rebuild


def _is_leaf(value: Any) -> bool:
    """Look into plain containers only: what a mask or a cache is made of is its own affair."""
    return type(value) not in (tuple, list, dict)


def run_in_copy(variables: Context, function: Any, *args: Any) -> Any:
    """Call the function with the context variables of another moment."""
    return variables.copy().run(function, *args)


# The elementwise middle of gated feed-forwards, made again in backward: half of what a feed-forward keeps, for little.
#
# Of F features a token, down(silu(gate) * up) keeps gate, up, silu(gate) and the product: 4 F. All but the first two
# are one pass over memory away. Source: Shazeer 2020 for the layer; Korthikanti et al. 2022, section 5, for keeping
# what is dear to make.


def recompute_activations(block: nn.Module, *, keep_product: bool) -> None:
    """Let the block's feed-forwards keep gate and up only, or with keep_product also their product, in place.

    A feed-forward is a module with the steps `product(gate, up)` and `finish(gate, up)`, as `GatedMLP` has them: the latter
    calls the former, and one linear layer on what it gives. That layer does not run again: recompute stops at its input.
    Raises: PlanError for a block without one.
    """
    found = feed_forwards(block)
    step = "product" if keep_product else "finish"
    for child in found:
        patch_class(child, **{step: _made_again(getattr(type(child), step))})


def feed_forwards(block: nn.Module, name: str = "") -> list[nn.Module]:
    """Those whose middle can be made again. Raises: PlanError if there is none."""
    found = [child for child in block.modules() if hasattr(type(child), "product") and hasattr(type(child), "finish")]
    if not found:
        kind = type(block).__name__
        raise PlanError(
            f"recompute='activation': {f'{name!r}, a {kind},' if name else kind} has no feed-forward with the "
            "steps `product` and `finish`, as mk.models' GatedMLP has them; routed experts have not. Use "
            "recompute='selective'."
        )
    return found


def _made_again(step: Any) -> Any:
    def again(self: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return step(self, gate, up)
        return checkpoint(partial(step, self), gate, up, use_reentrant=False, preserve_rng_state=False)

    return again
