"""Load balancing of experts over ranks: counts of tokens per expert, summed for losses, for router biases and for logs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshkit.errors import PlanError
from meshkit.mesh import Mesh
from meshkit.moe.aux_loss import Collected, update_bias
from meshkit.moe.real_tokens import real_tokens
from meshkit.moe.replay import place_routers
from meshkit.parallel.expert._apply import in_expert_view
from meshkit.parallel.expert._dispatch import nodes_of
from meshkit.parallel.expert._placement import Placement

Noted = Sequence[tuple[Collected, float]]
"""(report of a forward, weight of its loss) for each forward of a step; weight 0 marks a stand-in for an empty microbatch."""


def token_groups(mesh: Mesh, *, sequence: bool) -> list[ProcessGroup]:
    """Process groups; an all-reduce over each in turn sums over all ranks of one stage that hold different tokens."""
    axes = [mesh.tokens, *([mesh["tp"]] if sequence else [])]
    return [axis.get_group() for axis in axes if axis.size() > 1]


def refuse_sequence_balance(module: nn.Module, *, cp: int) -> None:
    """Refuse a router that balances each sequence where cp > 1. Raises: PlanError."""
    for name, router in module.named_modules():
        config: Any = getattr(router, "config", None)
        losses = config.losses if hasattr(router, "reduce_counts") else None
        if losses is not None and losses.balance and losses.per == "sequence" and cp > 1:
            raise PlanError(
                f"the router {name!r} balances each sequence, but cp={cp} gives ranks tokens of several. Use "
                'AuxiliaryLosses(per="batch") or per="global".'
            )


def share_counts(module: nn.Module, mesh: Mesh, *, sequence: bool, full: nn.Module | None = None) -> None:
    """Let routers balance the tokens of all ranks, in place. full: the model as it was, for places in routing replay.

    Routers are modules with `reduce_counts`, as `meshkit.models.Router`: it becomes a sum over ranks. Their `real_tokens`
    tells padding, and their `near` becomes the list of experts on this rank's node.

    Wire, per forward of a router with a balance loss: per="sequence": an all-reduce of [B, E] counts over tp, with
    sequence=True; per="batch": one of E counts over each axis with other tokens; per="global": nothing.
    Raises: PlanError for per="sequence" with cp, whose ranks do not know where the rows of a stream begin.
    """
    refuse_sequence_balance(module, cp=mesh.spec.cp)
    routers: list[Any] = [child for child in module.modules() if hasattr(child, "reduce_counts")]
    tp = mesh["tp"]
    part, parts = (tp.get_local_rank(), tp.size()) if sequence else (0, 1)
    for router in routers:
        losses = router.config.losses
        groups = token_groups(mesh, sequence=sequence)
        if losses.per == "sequence":
            groups = [mesh["tp"].get_group()] if sequence else []
        router.reduce_counts = torch.compiler.disable(partial(_sum, groups=groups))  # a message, outside of graphs
        if token_groups(mesh, sequence=sequence):
            router.real_tokens = torch.compiler.disable(partial(_real_tokens, part=part, parts=parts))
        # Routing by locality is a choice of the mesh: experts on this node cost no slow link.
        ep = mesh["ep"] if in_expert_view(mesh.spec) else None
        owners = Placement.contiguous(router.config.experts, mesh.spec.ep).owners
        router.near = _near(owners, ep)
    if full is not None:
        place_routers(module, full, part=part, parts=parts)


def _near(owners: Sequence[int], ep: DeviceMesh | None) -> list[bool] | None:
    """For each expert, whether a rank of this node holds it; None if this holds for all."""
    if ep is None or ep.size() == 1:
        return None
    nodes = nodes_of(ep.get_group())
    near = [nodes[owner] == nodes[ep.get_local_rank()] for owner in owners]
    return None if all(near) else near


def place_near(model: nn.Module, experts: str, owners: Sequence[int], mesh: Mesh) -> None:
    """Tell the routers beside a module of experts, whose owners have changed, which experts are on this rank's node."""
    for name, router in model.named_modules():
        if hasattr(router, "reduce_counts") and name.rpartition(".")[0] == experts.rpartition(".")[0]:
            router.near = _near(owners, mesh["ep"])  # type: ignore[assignment]  # torch types attributes of modules as tensors


def _real_tokens(scores_BTE: Tensor, part: int, parts: int) -> Tensor | None:
    return real_tokens(scores_BTE.shape[1], scores_BTE.device, part=part, parts=parts)


def _sum(counts: Tensor, groups: list[ProcessGroup]) -> Tensor:
    # A clone: all-reduce works in place, and the counts are the router's.
    counts = counts.clone()
    for group in groups:
        dist.all_reduce(counts, group=group)
    return counts


def step_counts(model: nn.Module, noted: Noted, mesh: Mesh, *, sequence: bool) -> dict[str, Tensor]:
    """Tokens per expert [E] of each router of this rank, over all forwards of a step and all ranks.

    A router with a buffer `last_counts` (for per="global") gets them copied into it.

    Wire: one all-reduce of [routers, E] over each axis with other tokens; without routers nothing.
    """
    counts_of: dict[nn.Module, Tensor] = {}
    for report, weight in noted:
        for router, counts in report.counts.items():
            # An empty microbatch runs a row too, so that all ranks issue the same collectives; its tokens are no tokens.
            counts = counts * int(weight != 0)
            counts_of[router] = counts_of[router] + counts if router in counts_of else counts
    # One message for all routers: rows are padded to the widest router.
    names = {router: name for name, router in model.named_modules() if router in counts_of}
    if not names:
        return {}
    widest = max(len(counts) for counts in counts_of.values())
    stacked = torch.stack(
        [nn.functional.pad(counts_of[router], (0, widest - len(counts_of[router]))) for router in names]
    )
    stacked = _sum(stacked, token_groups(mesh, sequence=sequence))
    summed = {name: row[: len(counts_of[router])] for (router, name), row in zip(names.items(), stacked, strict=True)}
    for router, name in names.items():
        if getattr(router, "last_counts", None) is not None:
            # In place, since it is a registered buffer of the router.
            router.last_counts.copy_(summed[name])
    return summed


def step_losses(noted: Noted, mesh: Mesh, tokens: Tensor, *, sequence: bool) -> dict[str, Tensor]:
    """Auxiliary losses of a step per token, the same on all ranks of a stage. Wire: an all-reduce of a few numbers."""
    sums: dict[str, Tensor] = {}
    for report, weight in noted:
        for name, loss in report.losses.items():
            # In fp64, so that the number in the log does not depend on how many microbatches it is summed over.
            value = loss.detach().double() * weight
            sums[name] = sums[name] + value if name in sums else value
    if not sums:
        return {}
    values = _sum(torch.stack(list(sums.values())), token_groups(mesh, sequence=sequence)) / tokens
    return dict(zip(sums, values, strict=True))


def step_dropped(noted: Noted, mesh: Mesh) -> Tensor:
    """The share of (token, choice) pairs that were dropped in a step, over all ranks and stages.

    Wire: an all-reduce of two numbers over each axis with other tokens, over tp (its ranks dispatch shares) and over pp.
    """
    calls = [call for report, weight in noted if weight for call in report.dropped]
    dropped = torch.stack([dropped for dropped, _ in calls]).sum() if calls else torch.zeros(()).to(mesh.device)
    sums = torch.stack([dropped.double(), torch.full_like(dropped, sum(pairs for _, pairs in calls)).double()])
    stages = [mesh["pp"].get_group()] if mesh.spec.pp > 1 else []
    # Over tp also without sequence parallelism: each of its ranks dispatches a share of the same tokens.
    sums = _sum(sums, [*token_groups(mesh, sequence=mesh.spec.tp > 1), *stages])
    return sums[0] / sums[1].clamp(min=1)


def update_biases(model: nn.Module, counts: dict[str, Tensor], *, speed: float) -> None:
    """Move the bias of every router that has one towards the experts that got fewer tokens; see `update_bias`."""
    for name, router in model.named_modules():
        bias = getattr(router, "e_score_correction_bias", None)
        if name in counts and bias is not None:
            update_bias(bias, counts[name], speed=speed)
