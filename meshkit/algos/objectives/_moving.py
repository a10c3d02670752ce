"""A reference that follows the policy."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshkit.errors import PlanError
from meshkit.sharding import local_tensor


@torch.no_grad()
def update_reference(reference: nn.Module, policy: nn.Module, *, alpha: float = 0.6) -> None:
    """reference <- alpha policy + (1 - alpha) reference, each parameter in place; alpha=1 is the hard update, a copy.

    Both have parameters of the same names, shapes and layout; the reference may have another dtype, to which it is rounded.
    Call it between steps, on every rank. Buffers stay. Log-probabilities of the reference that were
    computed before are stale after it. Wire: nothing.
    Raises: PlanError for alpha outside (0, 1], other names, shapes or layouts; before anything is changed.
    Source: Gorbatovski et al. 2024 (2404.09656), soft and hard update; alpha=0.6 and 512 steps are TRL's defaults.
    """
    if not 0 < alpha <= 1:
        raise PlanError(f"update_reference: alpha={alpha} is the policy's share. Use (0, 1]; 1 copies the policy.")
    old, new = dict(reference.named_parameters()), dict(policy.named_parameters())
    if old.keys() != new.keys():
        apart = sorted(old.keys() ^ new.keys())
        raise PlanError(f"update_reference: only one model has {apart[0]!r}, of {len(apart)} such parameters.")
    for name, target in old.items():
        for what, of in (("shape", lambda p: tuple(p.shape)), ("layout", _layout)):
            if of(target) != of(new[name]):
                raise PlanError(
                    f"update_reference: {name!r} has {what} {of(target)} in the reference and {of(new[name])} in the policy. "
                    "Build both with the same mesh and plan."
                )
    for name, target in old.items():
        own, other = local_tensor(target), local_tensor(new[name])
        own.copy_(other if alpha == 1 else torch.lerp(own.to(other.dtype), other, alpha))


def _layout(parameter: nn.Parameter) -> str:
    if not isinstance(parameter, DTensor):
        return "plain"
    return f"{parameter.placements} on {parameter.device_mesh.mesh_dim_names}"
