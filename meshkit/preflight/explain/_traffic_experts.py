"""What is sent for routed experts: tokens to them and back, and counts of who got how many."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshkit.core.sharding import even_part
from meshkit.models.experts import MoE
from meshkit.parallel.expert import dispatch_traffic, even_routing
from meshkit.preflight.explain._explanation import TrafficLog
from meshkit.preflight.explain._rank import Part, RankModel
from meshkit.strategy import ExpertPolicy


def add_experts(ledger: TrafficLog, held: RankModel, part: Part) -> None:
    """The way of tokens to their experts in one microbatch, as if they chose all alike."""
    spec = held.spec
    own = part.rows * part.tokens
    if spec.tp > 1:
        own = own // spec.tp if held.sequence else len(even_part(own, spec.tp, held.at("tp")))
    for name, layout in held.experts.items():
        if not held.runs(name):
            continue
        again = held.treatment(name).recompute.runs_block_again
        flows = held.flow.leaves(name)
        chosen = _chosen(held, name)
        plan = even_routing(layout.experts, own * chosen, ep=spec.ep, etp=spec.etp, coordinate=held.expert_place)
        told = dispatch_traffic(plan, width=layout.width, itemsize=held.compute.itemsize)
        if spec.tp > 1 and not held.sequence:
            _add_token_parts(ledger, held, name, part, chosen, layout.width)
        for (axis, op, size), times in told.counts.items():
            ledger.add(axis, op, size, "tokens per expert, forward", times)
            ledger.add(axis, op, size, "tokens per expert, recompute", times * again)
        for (axis, op, size), times in told.rows.items():
            ledger.add(axis, op, size, "tokens to experts, forward", times)
            ledger.add(axis, op, size, "tokens to experts, recompute", times * again)
            ledger.add(axis, op, size, "tokens to experts, backward", times * flows)


def _add_token_parts(ledger: TrafficLog, held: RankModel, name: str, part: Part, chosen: int, width: int) -> None:
    """Without sequence parallelism the ranks of tp have the same tokens: each brings a part, and gets all outputs."""
    tp = held.spec.tp
    longest = max(len(even_part(part.rows * part.tokens, tp, rank)) for rank in range(tp)) * tp
    size = longest * width * held.compute.itemsize
    ledger.add("tp", "all_gather", size, "tokens of experts, forward")
    # What runs again sends again, whatever is kept: these are no operators whose results could be.
    again = held.treatment(name).recompute.runs_block_again and not overlaps(held, name)
    if again and _is_followed(held.model, name):
        ledger.add("tp", "all_gather", size, "tokens of experts, recompute")
    if held.flow.leaves(name):
        weight = torch.promote_types(held.compute, torch.float32).itemsize
        ledger.add("tp", "all_gather", size, "tokens of experts, backward")
        ledger.add("tp", "all_gather", longest * chosen * weight, "routing weights, backward")


def overlaps(held: RankModel, experts: str) -> bool:
    """Do shared experts run while rows travel, and so before the experts?"""
    return held.spec.ep > 1 and isinstance(held.model.get_submodule(experts.rpartition(".")[0]), MoE)


def _is_followed(model: nn.Module, name: str) -> bool:
    """Does a module with parameters come after this one, beside it? Recompute stops at the last that has saved something."""
    around, _, key = name.rpartition(".")
    children = dict(model.get_submodule(around).named_children())
    after = list(children)[list(children).index(key) + 1 :]
    return any(list(children[other].parameters()) for other in after)


def _chosen(held: RankModel, name: str) -> int:
    """Experts that a token chooses, as the router beside them says."""
    around = name.rpartition(".")[0]
    found = [router.config.chosen for other, router in _routers(held) if other.startswith(f"{around}.")]
    return int(found[0]) if found else 1


def _routers(held: RankModel) -> list[tuple[str, Any]]:
    return [
        (name, child)
        for name, child in held.model.named_modules()
        if hasattr(child, "reduce_counts") and held.runs(name)
    ]


def _token_axes(held: RankModel) -> list[str]:
    """Whose ranks have different tokens of one stage."""
    large = "_".join(axis for axis in ("dp_replicate", "dp_shard", "cp") if getattr(held.spec, axis) > 1)
    return [axis for axis in (large, "tp" if held.sequence else "") if axis]


def add_balance(ledger: TrafficLog, held: RankModel, parts: list[Part]) -> None:
    """Counts of tokens per expert: for losses in each forward, and of the step."""
    routers = _routers(held)
    for name, router in routers:
        again = held.treatment(name).recompute.runs_block_again
        losses = router.config.losses
        if not losses.balance or losses.per == "global":
            continue
        for part in parts:
            rows = part.rows if losses.per == "sequence" else 1
            for axis in ["tp"] * held.sequence if losses.per == "sequence" else _token_axes(held):
                size = rows * router.config.experts * 8
                ledger.add(axis, "all_reduce", size, "tokens per expert, forward")
                ledger.add(axis, "all_reduce", size, "tokens per expert, recompute", int(again))
    if not routers:
        return
    widest = max(router.config.experts for _, router in routers)
    kinds = {kind for _, router in routers for kind in ("balance", "z") if getattr(router.config.losses, kind)}
    for axis in _token_axes(held):
        ledger.add(axis, "all_reduce", len(routers) * widest * 8, "tokens per expert of the step")
        ledger.add(axis, "all_reduce", len(kinds) * 8, "auxiliary losses")


def expert_notes(held: RankModel, policy: ExpertPolicy) -> list[str]:
    """How the experts are computed, and that their messages depend on the routing."""
    first: Any = held.model.get_submodule(next(iter(held.experts)))
    notes = [f"experts: {first.kernel_text(held.compute)}"] if hasattr(first, "kernel_text") else []
    if held.spec.ep * held.spec.etp > 1:
        notes.append("experts: what is sent on ep and etp is what it would be if tokens chose all experts alike")
    around = {name.rpartition(".")[0] for name, _ in _routers(held)}
    if any(name.rpartition(".")[0] not in around for name in held.experts if held.runs(name)):
        notes.append("experts: no router is known beside some of them, which are counted as if a token chose one")
    if policy.hot:
        notes.append(f"experts: {policy.hot} of each layer are copied to all ranks of ep, which is not counted above")
    if policy.capacity is not None:
        notes.append(
            f"experts: more than {policy.capacity.factor} of the even share is dropped, which is not counted above"
        )
    return notes
