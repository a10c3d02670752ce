"""Communication volume of expert parallelism (MoE): all-to-all of tokens to experts and back, counts for load balancing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshkit.core.sharding import even_part
from meshkit.models.experts import MoE
from meshkit.parallel.expert import (
    ExpertLayout,
    Placement,
    copy_bytes,
    copy_traffic,
    dispatch_traffic,
    even_routing,
    packed_traffic,
    padded_traffic,
)
from meshkit.preflight.explain._explanation import TrafficLog
from meshkit.preflight.explain._rank import LocalBatch, RankModel
from meshkit.preflight.explain._traffic import whole_axis
from meshkit.program import tensors
from meshkit.resolve import Resolved
from meshkit.strategy import ExpertPolicy


def add_experts(log: TrafficLog, rank_model: RankModel, batch: LocalBatch) -> None:
    """Dispatch and combine of one microbatch, as if tokens chose all experts equally often."""
    spec = rank_model.spec
    tokens = batch.rows * batch.tokens
    if spec.tp > 1:
        # With sequence parallelism ranks of tp have different tokens already; else each dispatches its part of the same.
        tokens = tokens // spec.tp if rank_model.sequence else len(even_part(tokens, spec.tp, rank_model.at("tp")))
    for name, layout in rank_model.experts.items():
        if not rank_model.runs(name):
            continue
        # Whatever recompute keeps: the exchange is no operator whose result could be kept, since the host reads row counts.
        again = rank_model.treatment(name).recompute.runs_block_again
        flows = rank_model.flow.leaves(name)
        chosen = _chosen(rank_model, name)
        if (max_rows := rank_model.resolved.strategy.experts.max_rows) is not None:
            traffic = padded_traffic(
                layout.experts,
                ep=spec.ep,
                etp=spec.etp,
                max_rows=max_rows,
                width=layout.width,
                itemsize=rank_model.compute.itemsize,
            )
        else:
            plan = even_routing(
                layout.experts,
                tokens * chosen,
                ep=spec.ep,
                etp=spec.etp,
                coordinate=rank_model.expert_coordinate,
                placement=rank_model.placement(name),
                nodes=rank_model.expert_nodes,
            )
            _add_copies(log, rank_model, name, layout, plan.table, again)
            traffic = dispatch_traffic(plan, width=layout.width, itemsize=rank_model.compute.itemsize)
        if spec.tp > 1 and not rank_model.sequence:
            _add_token_split(log, rank_model, name, batch, chosen, layout.width)
        for (axis, op, size), times in traffic.counts.items():
            log.add(axis, op, size, "tokens per expert, forward", times, module=name)
            log.add(axis, op, size, "tokens per expert, recompute", times * again, module=name)
        # Backward of an all-to-all is the opposite one: gradients of outputs go to the experts, those of inputs come back.
        for (axis, op, size), times in traffic.rows.items():
            log.add(axis, op, size, "tokens to experts, forward", times, module=name)
            log.add(axis, op, size, "tokens to experts, recompute", times * again, module=name)
            log.add(axis, op, size, "tokens to experts, backward", times * flows, module=name)
        _add_packed(log, rank_model, name, layout, again)


def _add_copies(
    log: TrafficLog, rank_model: RankModel, name: str, layout: ExpertLayout, placement: Placement, again: bool
) -> None:
    """Weights of copied experts and their gradients: exact, whatever tokens choose."""
    if not placement.copies_made:
        return
    module = rank_model.model.get_submodule(name)
    expert_bytes = copy_bytes(
        layout,
        {key: param.shape for key, param in module.named_parameters(recurse=False)},
        etp=rank_model.spec.etp,
        coordinate=rank_model.expert_coordinate,
        itemsize=rank_model.compute.itemsize,
    )
    weights, grads = copy_traffic(placement, rank_model.expert_coordinate[0], expert_bytes)
    trains = any(param.requires_grad for param in module.parameters(recurse=False))
    goes_back = trains or rank_model.flow.leaves(name)
    log.add("ep", "all_to_all", weights, "copies of experts, forward", int(weights > 0), module=name)
    # A block that runs again leaves them to its backward.
    phase = "recompute" if again else "backward"
    times = int(weights > 0 and (again or goes_back))
    log.add("ep", "all_to_all", weights, f"copies of experts, {phase}", times, module=name)
    log.add("ep", "all_to_all", grads, "gradients of copies, backward", int(grads > 0 and trains), module=name)


def _add_packed(log: TrafficLog, rank_model: RankModel, name: str, layout: ExpertLayout, again: bool) -> None:
    """Gate and up in one parameter: rows that other ranks of etp compute with."""
    module = rank_model.model.get_submodule(name)
    moved = packed_traffic(
        layout,
        {key: param.shape for key, param in module.named_parameters(recurse=False)},
        ep=rank_model.spec.ep,
        etp=rank_model.spec.etp,
        coordinate=rank_model.expert_coordinate,
        itemsize=rank_model.compute.itemsize,
    )
    trains = any(param.requires_grad for param in module.parameters(recurse=False))
    for forward, backward in moved:
        log.add("etp", "all_to_all", forward, "gate and up of experts, forward", module=name)
        log.add("etp", "all_to_all", forward, "gate and up of experts, recompute", int(again), module=name)
        log.add("etp", "all_to_all", backward, "gate and up of experts, backward", int(trains), module=name)


def _add_token_split(
    log: TrafficLog, rank_model: RankModel, name: str, batch: LocalBatch, chosen: int, width: int
) -> None:
    """Without sequence parallelism the ranks of tp have the same tokens: each dispatches a share, and gathers all outputs."""
    tp = rank_model.spec.tp
    # Parts differ by a row, and an all-gather takes equal ones: all are padded to the longest.
    longest = max(len(even_part(batch.rows * batch.tokens, tp, rank)) for rank in range(tp)) * tp
    size = longest * width * rank_model.compute.itemsize
    log.add("tp", "all_gather", size, "tokens of experts, forward", module=name)
    # Recompute sends again even where collectives are kept: these gathers are no operators whose results could be saved.
    again = rank_model.treatment(name).recompute.runs_block_again and not overlaps(rank_model, name)
    if again and _is_followed(rank_model.model, name):
        log.add("tp", "all_gather", size, "tokens of experts, recompute", module=name)
    if rank_model.flow.leaves(name):
        # Routers compute in fp32 at least, since close scores decide between experts (Fedus et al. 2022, section 2.4).
        weight = torch.promote_types(rank_model.compute, torch.float32).itemsize
        log.add("tp", "all_gather", size, "tokens of experts, backward", module=name)
        log.add("tp", "all_gather", longest * chosen * weight, "routing weights, backward", module=name)


def overlaps(rank_model: RankModel, experts: str) -> bool:
    """Whether shared experts overlap the all-to-all, and so run before the routed experts."""
    return rank_model.spec.ep > 1 and isinstance(rank_model.model.get_submodule(experts.rpartition(".")[0]), MoE)


def _is_followed(model: nn.Module, name: str) -> bool:
    """Whether a sibling with parameters comes after the module. Recompute stops at the last module that saved a tensor."""
    parent, _, key = name.rpartition(".")
    children = dict(model.get_submodule(parent).named_children())
    after = list(children)[list(children).index(key) + 1 :]
    return any(list(children[sibling].parameters()) for sibling in after)


def _chosen(rank_model: RankModel, name: str) -> int:
    """Experts per token (top-k), from the router beside them, or from what the experts are given; else 1."""
    parent = name.rpartition(".")[0]
    counts = [router.config.chosen for path, router in _routers(rank_model) if path.startswith(f"{parent}.")]
    read = {} if counts else rank_model.derived("choices of experts", lambda: _read_choices(rank_model.resolved))
    return int(counts[0]) if counts else read.get(name, 1)


def _read_choices(resolved: Resolved) -> dict[str, int]:
    """Of experts that take indices [N, K], K."""
    found = dict[str, int]()
    if (read := resolved.read()) is not None:
        for operation in read.operations:
            name = read.calls[operation.call].name
            indices = [ref for ref in tensors((operation.args, operation.kwargs)) if not ref.dtype.is_floating_point]
            if name in resolved.experts and operation.op == "experts" and indices:
                found[name] = int(indices[0].shape[-1])
    return found


def _routers(rank_model: RankModel) -> list[tuple[str, Any]]:
    def found() -> list[tuple[str, Any]]:
        return [
            (name, child)
            for name, child in rank_model.model.named_modules()
            if hasattr(child, "reduce_counts") and rank_model.runs(name)
        ]

    return rank_model.derived(("routers", rank_model.at("pp")), found)


def _token_axes(rank_model: RankModel) -> list[str]:
    """Axes along which ranks of one stage have different tokens."""
    large = "_".join(axis for axis in ("dp_replicate", "dp_shard", "cp") if getattr(rank_model.spec, axis) > 1)
    return [axis for axis in (large, "tp" if rank_model.sequence else "") if axis]


def add_balance(log: TrafficLog, rank_model: RankModel, batch: LocalBatch) -> None:
    """All-reduces of tokens per expert, for the auxiliary (load balancing) losses of one microbatch."""
    for name, router in _routers(rank_model):
        again = rank_model.treatment(name).recompute.runs_block_again
        losses = router.config.losses
        if not losses.balance or losses.per == "global":
            continue
        rows = batch.rows if losses.per == "sequence" else 1
        for axis in ["tp"] * rank_model.sequence if losses.per == "sequence" else _token_axes(rank_model):
            size = rows * router.config.experts * 8  # a number of 8 bytes for each expert, of each row if rows count
            log.add(axis, "all_reduce", size, "tokens per expert, forward", module=name)
            log.add(axis, "all_reduce", size, "tokens per expert, recompute", int(again), module=name)


def add_step_balance(log: TrafficLog, rank_model: RankModel) -> None:
    """All-reduces of tokens per expert, and of the auxiliary losses, that are once a step."""
    routers = _routers(rank_model)
    if rank_model.resolved.strategy.experts.max_rows is not None:
        log.add(whole_axis(rank_model.spec), "all_reduce", 8, "most rows of an exchange")
    if not routers:
        return
    # All routers in one message: a row each, as wide as the one with most experts.
    widest = max(router.config.experts for _, router in routers)
    kinds = {kind for _, router in routers for kind in ("balance", "z") if getattr(router.config.losses, kind)}
    for axis in _token_axes(rank_model):
        log.add(axis, "all_reduce", len(routers) * widest * 8, "tokens per expert of the step")
        log.add(axis, "all_reduce", len(kinds) * 8, "auxiliary losses")


def expert_notes(rank_model: RankModel, policy: ExpertPolicy) -> list[str]:
    """How the experts are computed, and that their messages depend on the routing."""
    first: Any = rank_model.model.get_submodule(next(iter(rank_model.experts)))
    notes = [f"experts: {first.kernel_text(rank_model.compute)}"] if hasattr(first, "kernel_text") else []
    if policy.max_rows is not None:
        notes.append(
            f"experts: each rank of ep is sent {policy.max_rows} rows in every call; a step that has more is refused"
        )
    elif rank_model.spec.ep * rank_model.spec.etp > 1:
        notes.append("experts: what is sent on ep and etp is what it would be if tokens chose all experts alike")
    routed = {name.rpartition(".")[0] for name, _ in _routers(rank_model)}
    if any(name.rpartition(".")[0] not in routed for name in rank_model.experts if rank_model.runs(name)):
        notes.append("experts: no router is known beside some of them, which are counted as if a token chose one")
    source = "the run" if rank_model.placements is not None else "ExpertPolicy(expected=...)"
    for name in rank_model.experts if policy.follows_load else ():
        if rank_model.runs(name) and (made := rank_model.placement(name).copies_made):
            notes.append(f"experts: {made} copies of {name!r}, chosen by the load of {source}")
    if policy.copies and policy.expected is None and rank_model.placements is None:
        notes.append("experts: copies follow the load, and none is known; give ExpertPolicy(expected=...), or a run")
    if policy.capacity is not None:
        notes.append(
            f"experts: more than {policy.capacity.factor} of the even share is dropped, which is not counted above"
        )
    return notes
