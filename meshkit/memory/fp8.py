"""Linear layers that multiply in fp8, by torchao; parameters, their gradients and the optimizer stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from meshkit.errors import PlanError
from meshkit.memory.policy import Fp8

MULTIPLE = 16  # of both dims of a matrix that the hardware multiplies in fp8
CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}


def fp8_linears(
    module: nn.Module, *, blocks: Iterable[str], policy: Fp8, device: torch.device, tp: int = 1
) -> list[str]:
    """Let the linear layers in the blocks multiply in fp8, in place and before the module is split; returns their names.

    Those whose dims, split over tp, are multiples of 16: forward and both products of backward, with scales from the
    largest absolute value of each tensor (tensorwise) or row (rowwise) of that moment. With tp a rank scales its own part,
    so numbers differ a little between meshes. Heads, embeddings, routers and experts are not touched.
    Wire: with gather, FSDP gathers the layers' weights in one byte an element, and all-reduces one maximum for each.
    Raises: PlanError without torchao, on hardware without fp8, and for a model in which no layer fits.
    Source: torchao.float8; Micikevicius et al. 2022.
    """
    if not policy.emulate:
        _refuse_hardware(policy, device)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as missing:
        raise PlanError(
            "Precision(fp8=...) needs torchao, which is not installed. Run: pip install 'meshkit[torchao]'."
        ) from missing
    chosen = chosen_linears(module, blocks=list(blocks), tp=tp)
    if not chosen:
        raise PlanError(
            f"Precision(fp8=...): no linear layer of the blocks has dims that are multiples of {MULTIPLE} on each of tp={tp} "
            "ranks. Use wider layers, a smaller tp, or leave fp8 away."
        )
    if policy.recipe == "tensorwise":
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=policy.gather, emulate=policy.emulate)
    else:
        config = Float8LinearConfig.from_recipe_name("rowwise")
        object.__setattr__(config, "emulate", policy.emulate)
    wanted = set(chosen)
    convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name in wanted)
    return chosen


def chosen_linears(module: nn.Module, *, blocks: Sequence[str], tp: int) -> list[str]:
    """Names of the linear layers in the blocks that fp8 can multiply."""
    return [
        name
        for name, child in module.named_modules()
        if type(child) is nn.Linear
        and any(name.startswith(f"{block}.") for block in blocks)
        and child.in_features % (MULTIPLE * tp) == 0
        and child.out_features % (MULTIPLE * tp) == 0
    ]


def _refuse_hardware(policy: Fp8, device: torch.device) -> None:
    needed = CAPABILITY[policy.recipe]
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else None
    if found is None or found < needed:
        has = f"has compute capability {found[0]}.{found[1]}" if found else "is none"
        raise PlanError(
            f"Precision(fp8=Fp8(recipe={policy.recipe!r})): fp8 products need an NVIDIA GPU of compute capability "
            f"{needed[0]}.{needed[1]}, and {device} {has}. Leave fp8 away, or set emulate=True to round as fp8 does without "
            "the speed."
        )
