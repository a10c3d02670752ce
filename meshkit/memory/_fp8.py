"""fp8 training of linear layers, by torchao: products in fp8; parameters, gradients and the optimizer are unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshkit.core import _torch
from meshkit.errors import PlanError
from meshkit.strategy import Fp8

MULTIPLE = 16  # of both dims of a matrix that the hardware multiplies in fp8
# Ada and Hopper have fp8 products; scales for each row need Hopper's.
CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}


def plan_fp8(module: nn.Module, *, blocks: Sequence[str], policy: Fp8, device_type: str, tp: int = 1) -> list[str]:
    """Names of the linear layers in the blocks that will multiply in fp8. Changes nothing.

    They are the layers whose dims, split over tp, are multiples of 16; not heads, embeddings, routers or experts.
    Raises: PlanError without torchao, on hardware without fp8, and for a model in which no layer fits.
    """
    if not (dist.is_initialized() and _torch.is_fake_group(_torch.world())):  # whose host stands for GPUs
        refuse_fp8_hardware(policy, device_type)
    if find_spec("torchao") is None:
        raise PlanError(
            "Precision(fp8=...) needs torchao, which is not installed. Run: pip install 'meshkit[torchao]'."
        )
    chosen = chosen_linears(module, blocks=blocks, tp=tp)
    if not chosen:
        raise PlanError(
            f"Precision(fp8=...): no linear layer of the blocks has dims that are multiples of {MULTIPLE} on each of tp={tp} "
            "ranks. Use wider layers, a smaller tp, or leave fp8 away."
        )
    return chosen


def fp8_linears(module: nn.Module, *, linears: Iterable[str], policy: Fp8) -> None:
    """Let the named linear layers multiply in fp8, in place and before the module is split; `plan_fp8` chooses them.

    Forward and both products of backward, with scales from the largest absolute value of each tensor (tensorwise) or row
    (rowwise) of that moment. With tp a rank scales its own part, so numbers differ a little between meshes.
    Wire: with gather, FSDP gathers the layers' weights in one byte an element. Their maxima are all-reduced: inside of
    `shared_scales`, as in a run's step, all in one message; elsewhere one for each weight and gather.
    Source: torchao.float8; Micikevicius et al. 2022.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if policy.recipe == "tensorwise":
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=policy.gather, emulate=policy.emulate)
    else:
        config = Float8LinearConfig.from_recipe_name("rowwise")
        # torchao's record is frozen, and its recipes by name take no `emulate`.
        object.__setattr__(config, "emulate", policy.emulate)
    wanted = set(linears)
    convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name in wanted)


@contextmanager
def shared_scales(module: nn.Module) -> Iterator[None]:
    """Inside, gathers of fp8 weights use scales that are computed once, here. Nothing may write the weights inside.

    Wire: one all-reduce of a maximum for each weight over the shards, in one message; none without such weights.
    Source: torchao's precompute_float8_dynamic_scale_for_fsdp, whose scales are stale after the next optimizer step where
    nobody calls it again.
    """
    # By the table: to ask for a parametrized weight is to compute it, which spectral_norm counts as a step.
    held: list[Any] = [child._parameters.get("weight") for child in module.modules() if isinstance(child, nn.Linear)]
    weights = [weight for weight in held if isinstance(weight, DTensor)]
    # By attribute: torchao is not imported where nobody uses it.
    shards: list[Any] = [_torch.shard_object(weight) for weight in weights]
    shards = [shard for shard in shards if hasattr(shard, "_precomputed_scale")]
    if not shards:
        yield
        return
    from torchao.float8.float8_utils import amax_to_scale

    with torch.no_grad():
        maxima = torch.stack(_torch.foreach_norm([shard._tensor for shard in shards], torch.inf))
        mesh = weights[0].device_mesh
        if mesh.size(mesh.ndim - 1) > 1:  # else replicas alone, which have all rows
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=mesh.get_group(mesh.ndim - 1))
        scales = amax_to_scale(maxima, shards[0]._dtype)
    for shard, scale in zip(shards, scales.unbind(), strict=True):
        shard._precomputed_scale = scale
    try:
        yield
    finally:
        for shard in shards:
            shard._precomputed_scale = None


def chosen_linears(module: nn.Module, *, blocks: Sequence[str], tp: int) -> list[str]:
    """Names of the linear layers in the blocks that fp8 can multiply."""
    return [
        name
        for name, child in module.named_modules()
        # Exactly nn.Linear: torchao puts a layer of its own in place, and a subclass would lose its forward.
        if type(child) is nn.Linear
        and any(name.startswith(f"{block}.") for block in blocks)
        and child.in_features % (MULTIPLE * tp) == 0
        and child.out_features % (MULTIPLE * tp) == 0
    ]


def refuse_fp8_hardware(policy: Fp8, device_type: str) -> None:
    """Raise PlanError for a device without fp8. On a machine without GPUs a plan for GPUs passes: there is nothing to ask."""
    needed = CAPABILITY[policy.recipe]
    if policy.emulate or (device_type == "cuda" and not torch.cuda.is_available()):
        return
    capability = torch.cuda.get_device_capability() if device_type == "cuda" and torch.version.cuda else None
    if capability is None or capability < needed:
        has = f"has compute capability {capability[0]}.{capability[1]}" if capability else "is none"
        raise PlanError(
            f"Precision(fp8=Fp8(recipe={policy.recipe!r})): fp8 products need an NVIDIA GPU of compute capability "
            f"{needed[0]}.{needed[1]}, and {device_type} {has}. Leave fp8 away, or set emulate=True to round as fp8 "
            "does without the speed."
        )
