"""Communication volume of one optimizer step: collectives of data, context and pipeline parallelism on one rank.

It is read from the same tables that `parallelize` executes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch

from meshkit.errors import PlanError
from meshkit.loss.linear_logits import head_of
from meshkit.mesh import EXPERT_AXES, MeshSpec
from meshkit.mesh.agreement import MEETING_BYTES
from meshkit.mesh.groups import TOKENS
from meshkit.parallel.context import Layout, Shape, attention_shape, halo_traffic, state_traffic, traffic
from meshkit.parallel.data import kept_units, reduction_dtype, shard_units
from meshkit.parallel.expert import in_expert_view
from meshkit.parallel.hierarchical import chunks_of
from meshkit.parallel.pipeline import Cut, Path
from meshkit.parallel.shardings import axes_between, axes_outside, hierarchical_axes
from meshkit.parallel.tensor.heads import attention_heads
from meshkit.parallel.wires import gathered_bytes, reduced_bytes, replica_bytes
from meshkit.preflight.explain._explanation import Hierarchical, Message, TrafficLog
from meshkit.preflight.explain._rank import LocalBatch, LocalParam, RankModel
from meshkit.strategy import Level


def add_context(log: TrafficLog, rank_model: RankModel, batch: LocalBatch) -> None:
    """The cp axis in the forward and backward of one microbatch."""
    assert batch.layout is not None
    _add_whole(log, rank_model, batch)
    _add_lines(log, rank_model, batch)
    _add_mixers(log, rank_model, batch)
    for module, shape, layout in _attentions(rank_model, batch):
        if not rank_model.runs(module):
            continue
        forward, backward = traffic(layout, rank_model.at("cp"), shape)
        recompute = rank_model.treatment(module).recompute
        # Attention over ranks is one operator, its messages inside: kept as the one or as the other, it does not run again.
        again = not (recompute.keeps("attention") or recompute.keeps("collective"))
        for (op, size), count in forward.items():
            log.add("cp", op, size, "attention, forward", count, module=module)
            log.add("cp", op, size, "attention, recompute", count * again, module=module)
        for (op, size), count in backward.items():
            log.add("cp", op, size, "attention, backward", count * rank_model.flow.attends(module), module=module)


def _attentions(rank_model: RankModel, batch: LocalBatch) -> Iterator[tuple[str, Shape, Layout]]:
    """(module, its shape on this rank, what it sees) of each layer of attention: by the plan, or as it was read."""
    assert batch.layout is not None
    whole = tuple(f"{name}." for name in rank_model.resolved.reading[1].whole)  # which sends before it attends
    layers = attention_heads(rank_model.model, rank_model.plan.tensor, size=rank_model.spec.tp)
    calls = rank_model.resolved.reading[1].calls
    if not layers and calls is not None and (rank_model.spec.tp == 1 or not calls):
        for call in calls:
            if f"{call.module}.".startswith(whole):
                continue
            shape = attention_shape(None, (call.heads, call.kv_heads, call.width), rank_model.compute)
            yield call.module, replace(shape, rows=batch.rows), batch.layout.seen_by(call.pattern)
        return
    if not layers:
        raise PlanError(
            "explain: the plan names no attention() modules, so what they send on cp is not known. Give them the style "
            "attention() in the plan's tensor table, with the names of their projections, or enter(query=...) where keys and "
            "values come out of a latent."
        )
    patterns = {call.module: call.pattern for call in calls or ()}
    sent = rank_model.resolved.reading[1].sent
    for module, heads in layers.items():
        by_hand = module in sent and module not in patterns
        if by_hand or f"{module}.".startswith(whole):
            continue
        shape = attention_shape(None, heads[rank_model.at("tp")], rank_model.compute)
        yield module, replace(shape, rows=batch.rows), batch.layout.seen_by(patterns.get(module))


def _add_whole(log: TrafficLog, rank_model: RankModel, batch: LocalBatch) -> None:
    """Modules that run on all tokens: these are gathered, and their gradients scattered."""
    assert batch.layout is not None
    tokens = max(batch.layout.lengths) * rank_model.spec.cp
    for module, whole in rank_model.resolved.reading[1].whole.items():
        if not rank_model.runs(module):
            continue
        again = not rank_model.treatment(module).recompute.keeps("collective")
        for size, trains in whole.sent(batch.rows, tokens, rank_model.compute):
            log.add("cp", "all_gather", size, "all tokens of a module, forward", module=module)
            log.add("cp", "all_gather", size, "all tokens of a module, recompute", int(again), module=module)
            # What nothing before it trains has no gradient.
            log.add(
                "cp",
                "reduce_scatter",
                size,
                "all tokens of a module, backward",
                int(trains and rank_model.flow.enters(module)),
                module=module,
            )


def _add_mixers(log: TrafficLog, rank_model: RankModel, batch: LocalBatch) -> None:
    """States of recurrent mixers that go to other ranks, and the tokens that their short convolutions read there."""
    layout, doors, rank = batch.layout, rank_model.resolved.reading[1], rank_model.at("cp")
    assert layout is not None
    sums = torch.promote_types(rank_model.compute, torch.float32).itemsize
    whole = tuple(f"{name}." for name in doors.whole)
    for mixer in doors.mixers:
        if not rank_model.runs(mixer.module) or f"{mixer.module}.".startswith(whole):
            continue
        # A rank of tp has whole heads, of which it has a share: tp divides them.
        styles = rank_model.layout.styles if rank_model.layout is not None else {}
        style = styles.get(mixer.module)
        tp = rank_model.spec.tp if style is not None and style.kind == "enter" else 1
        if mixer.channels:
            token = batch.rows * mixer.channels // tp * rank_model.compute.itemsize
            forward, backward = halo_traffic(layout, rank, width=mixer.width, token_bytes=token)
            what = "tokens of a short convolution"
        else:
            forward, backward = state_traffic(layout, rank, state_bytes=batch.rows * prod(mixer.state) // tp * sums)
            what = "states of a mixer"
        recompute = rank_model.treatment(mixer.module).recompute
        # As attention over ranks, it is one operator with its messages inside.
        again = not (recompute.keeps("attention") or recompute.keeps("collective"))
        for (op, size), count in forward.items():
            log.add("cp", op, size, f"{what}, forward", count, module=mixer.module)
            log.add("cp", op, size, f"{what}, recompute", count * again, module=mixer.module)
        for (op, size), count in backward.items():
            log.add("cp", op, size, f"{what}, backward", count * mixer.trains, module=mixer.module)


def _add_lines(log: TrafficLog, rank_model: RankModel, batch: LocalBatch) -> None:
    """What lines send that are about all tokens: sums, or keys, values and counts to gather; and what a cache gathers."""
    assert batch.layout is not None
    tokens = max(batch.layout.lengths) * rank_model.spec.cp
    for module, sent in rank_model.resolved.reading[1].sent.items():
        if not rank_model.runs(module):
            continue
        again = not rank_model.treatment(module).recompute.keeps("collective")
        for each in sent:
            what = "keys, values and counts" if each.gather else "sums over the tokens"
            there, back = ("all_gather", "reduce_scatter") if each.gather else ("all_reduce", "all_reduce")
            size = each.size(batch.rows, tokens, rank_model.compute)
            log.add("cp", there, size, f"{what}, forward", module=module)
            log.add("cp", there, size, f"{what}, recompute", int(again), module=module)
            log.add("cp", back, size, f"{what}, backward", int(each.trains), module=module)


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """An FSDP unit, "" is the root. kind: units of one kind have equal parameters. resharded: whether ZeRO-3 frees what it
    gathered before backward. flows: whether a gradient goes through it. prefetched: whether it is gathered in backward
    nevertheless, for once.
    """

    name: str
    params: tuple[LocalParam, ...]
    kind: Hashable
    resharded: bool
    flows: bool
    prefetched: bool


def add_data(log: TrafficLog, rank_model: RankModel, microbatches: int) -> None:
    """ZeRO (FSDP) and replicas: all-gathers of parameters, reduce-scatters and all-reduces of gradients."""
    sizes: dict[Hashable, _UnitBytes] = {}
    for unit in rank_model.derived(("units", rank_model.place), lambda: _units(rank_model)):
        if unit.kind not in sizes:
            sizes[unit.kind] = _unit_bytes(rank_model, unit.params)
        _add_unit(log, rank_model, unit, sizes[unit.kind], microbatches)


@dataclass(frozen=True, kw_only=True)
class _UnitBytes:
    """gathered: the result of an all-gather of all parts. reduced: the input of a reduce-scatter of whole gradients, or with
    a quantized wire what leaves the rank for an all-to-all. replicas: (collective, bytes) of what sums over replicas that
    which is left of it.
    """

    gathered: int
    reduced: int
    replicas: tuple[tuple[str, int], ...]


def _add_unit(log: TrafficLog, rank_model: RankModel, unit: _Unit, sizes: _UnitBytes, microbatches: int) -> None:
    # How often: Rajbhandari et al. 2020, section 7, with k microbatches in place of one; see `before_microbatch`.
    row, policy, experts = rank_model.shardings, rank_model.resolved.strategy.data, unit.params[0].expert
    gathers = microbatches if row.frees_parameters else 1
    reductions = microbatches if row.reduces_every_microbatch else 1
    again = (microbatches if unit.flows else int(unit.prefetched)) * unit.resharded * row.frees_parameters

    def hops(level: Level) -> tuple[tuple[str, int], tuple[str, int]]:
        """(axis, size) of what goes inside of the level, and of what goes outside of it once a step."""
        inner: Level = row.states if level == "none" else level
        return (
            rank_model.axis(axes_between("none", inner, experts=experts)),
            rank_model.axis(axes_between(inner, row.states, experts=experts)),
        )

    (axis, inner), (outer_axis, outer) = hops(row.parameters)
    if outer > 1:
        # The secondary copy: of all parts that the inner ranks share, this rank's.
        log.add(
            outer_axis,
            "all_gather",
            sizes.gathered // inner,
            "secondary copies of parameters, forward",
            module=unit.name,
        )
    nodes = hierarchical_axes(row, rank_model.spec, experts=experts) if policy.is_hierarchical else None

    def add(axis: str, op: str, size: int, why: str, times: int, *, one_hop: bool) -> None:
        if nodes is None or not one_hop:
            log.add(axis, op, size, why, times, module=unit.name)
        else:
            _add_hierarchical(log, rank_model, nodes, Message(axis, op, size), why, times, module=unit.name)

    if inner > 1:
        add(axis, "all_gather", sizes.gathered, "parameters, forward", gathers, one_hop=outer == 1)
        add(axis, "all_gather", sizes.gathered, "parameters, backward", again, one_hop=outer == 1)
    (axis, inner), (outer_axis, outer) = hops(row.gradients)
    op = "reduce_scatter" if policy.reduce is None else "all_to_all"
    if inner > 1:
        add(axis, op, sizes.reduced, "gradients, backward", reductions, one_hop=outer == 1)
    if outer > 1:
        log.add(outer_axis, op, sizes.reduced // inner, "sums of microbatches, backward", module=unit.name)
    outside, copies = rank_model.axis(axes_outside(row.states, experts=experts))
    if copies > 1:
        # HSDP: replicas sum what the reduce-scatter has left of the gradients, a shard, and do so once a step.
        for op, size in sizes.replicas:
            log.add(outside, op, size, "gradients, backward", module=unit.name)


def _add_hierarchical(
    log: TrafficLog,
    rank_model: RankModel,
    axes: tuple[tuple[str, ...], tuple[str, ...]],
    flat: Message,
    why: str,
    times: int,
    *,
    module: str,
) -> None:
    """The chunks of a gather or reduction that goes inside of nodes and across. axes: of both hops."""
    (inside, inner), (across, outer) = map(rank_model.axis, axes)
    chunk_bytes = rank_model.resolved.strategy.data.chunk_bytes
    op = flat.op
    of_all = Hierarchical(axis=flat.axis, op=op, size=flat.size, inside=inside, across=across, chunk_bytes=chunk_bytes)
    call = of_all, times
    for chunk, count in Counter(chunks_of(flat.size // (inner * outer), chunk_bytes)).items():
        log.add(across, op, outer * chunk, why, times * count, module=module, hierarchical=call)
        log.add(inside, op, inner * outer * chunk, why, times * count, module=module, hierarchical=call)


def _unit_bytes(rank_model: RankModel, params: Sequence[LocalParam]) -> _UnitBytes:
    # [Note: what a size is]
    # An all-gather's is its result and a reduce-scatter's its input, both the whole tensor, as the profiler and NCCL's tests
    # count them. A ring moves (n - 1) / n of that in and out of each rank, and an all-reduce twice that: it is the two.
    _, shards, _ = rank_model.sharded_over(params[0])
    policy, trained = rank_model.resolved.strategy.data, [param for param in params if param.trains]
    part = sum(_part(param, shards) * _reduced_dtype(rank_model, param).itemsize for param in trained)
    parts = [_part(param, shards) for param in trained]
    _, replicas = rank_model.axis(axes_outside(rank_model.shardings.states, experts=params[0].expert))
    sent = [
        (_part(param, shards), torch.uint8 if param.fp8 else _gathered_dtype(rank_model, param)) for param in params
    ]
    gathered = gathered_bytes(sent, policy.gather) * shards
    if policy.reduce is None:
        return _UnitBytes(gathered=gathered, reduced=part * shards, replicas=(("all_reduce", part),))
    chunk = replica_bytes(parts, replicas, policy.reduce)
    return _UnitBytes(
        gathered=gathered,
        reduced=reduced_bytes(parts, policy.reduce) * (shards - 1),
        replicas=(("all_to_all", chunk * (replicas - 1)), ("all_gather", chunk * replicas)),
    )


def add_whole(log: TrafficLog, rank_model: RankModel) -> None:
    """The all-reduces of `reduce_whole`: the gradients of each dtype, and a number for each, once a step."""
    axis, size = rank_model.axis(TOKENS)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for param in rank_model.params.values():
        if param.whole and param.trains:
            by_dtype.setdefault(param.dtype, []).append(param.numel)
    for dtype, elements in by_dtype.items():
        log.add(
            axis,
            "all_reduce",
            (sum(elements) + len(elements)) * dtype.itemsize,
            "gradients of parameters kept whole, backward",
            int(size > 1),
        )


def add_scales(log: TrafficLog, rank_model: RankModel) -> None:
    """The all-reduce of the maxima of all weights that are gathered in fp8, once a step; see `shared_scales`."""
    weights = [param for param in rank_model.params.values() if param.fp8]
    if weights:
        axis, shards, _ = rank_model.sharded_over(weights[0])
        size = len(weights) * weights[0].dtype.itemsize
        log.add(axis, "all_reduce", size, "scales of fp8 weights", int(shards > 1))


def _gathered_dtype(rank_model: RankModel, param: LocalParam) -> torch.dtype:
    """The dtype in which a parameter is gathered. Codes of low-bit weights are sent as they are."""
    precision = rank_model.memory.precision
    return precision.compute if precision is not None and param.dtype.is_floating_point else param.dtype


def _reduced_dtype(rank_model: RankModel, param: LocalParam) -> torch.dtype:
    return reduction_dtype(torch.empty(0, dtype=param.dtype), rank_model.memory.precision)


def _units(rank_model: RankModel) -> list[_Unit]:
    """Those that have parameters; the root is last."""
    # Under all of their names: a tied parameter whose second name is outside of a unit keeps that unit in the root.
    names = {
        name: param
        for name, param in rank_model.model.named_parameters(remove_duplicate=False)
        if rank_model.runs(name)
    }
    blocks, units = rank_model.blocks, rank_model.units
    expert_units = [name for name in rank_model.experts if rank_model.runs(name) and in_expert_view(rank_model.spec)]
    head = None if rank_model.memory.loss is None else head_of(rank_model.model, rank_model.plan)
    keep_gathered = kept_units(blocks, units, head)
    # FSDP prefetches the next unit in backward, also the last one before the first gradient, which backward does not use. It
    # stays gathered for the forward of the next microbatch: one more gather in all, not one a microbatch.
    prefetched = rank_model.flow.last_without_gradient([*blocks, *units])
    rest, found = {name: param for name, param in rank_model.params.items() if not param.whole}, []
    # Experts first, as `parallelize` shards them first: what a unit has taken, none around it takes.
    for unit in (*expert_units, *shard_units(names, [*blocks, *units]), ""):
        inside = [name for name in rest if name.startswith(f"{unit}." * bool(unit))]
        if not inside:
            continue
        params = tuple(rest.pop(name) for name in inside)
        # Experts are gathered and freed with their block: see [Note: gathers outside of recompute].
        owner = next((block for block in blocks if unit.startswith(f"{block}.")), unit)
        found.append(
            _Unit(
                name=unit,
                params=params,
                kind=tuple(param.kind for param in params),
                resharded=bool(unit) and owner not in keep_gathered,
                flows=rank_model.flow.leaves(owner),
                prefetched=unit == prefetched,
            )
        )
    return found


def _part(param: LocalParam, shards: int) -> int:
    """Elements that a rank sends of the parameter: of its shard, padded to the first rank's, as FSDP2 does."""
    # Collectives into one tensor take equal parts from all ranks, so the last, smaller shard is padded in the message.
    return -(-param.shape[0] // shards) * prod(param.shape[1:])


def add_pipeline(
    log: TrafficLog, rank_model: RankModel, cut: Cut, batch: LocalBatch, paths: Mapping[int, Path]
) -> None:
    """Pipeline parallelism: hidden states and their gradients that this rank sends in one microbatch.

    Whatever the schedule: each microbatch crosses each cut on its path once in forward and once in backward. paths: of each
    of the log's microbatches.
    """
    rank = rank_model.at("pp")
    # With sequence parallelism a stage ends in the middle of the residual stream, where each rank of tp has its tokens only.
    token_shards = rank_model.spec.tp if rank_model.sequence else 1
    crossing = cut.message_bytes(rank_model.model, batch.rows, batch.tokens // token_shards, rank_model.compute)
    alike: dict[Path, list[int]] = {}
    for index in log.microbatches:
        alike.setdefault(paths[index], []).append(index)
    every = log.microbatches
    for path, indices in alike.items():
        log.microbatches = tuple(indices)
        for before, after in pairwise(path):
            source, target = cut.placement[before], cut.placement[after]
            if source == rank != target:
                for size, _ in crossing[before]:
                    log.add("pp", "send", size, "hidden states, forward")
            if target == rank != source:
                for size, has_gradient in crossing[before]:
                    log.add("pp", "send", size, "hidden states, backward", int(has_gradient))
    log.microbatches = every


def add_tied(log: TrafficLog, rank_model: RankModel, cut: Cut) -> None:
    """Gradients of parameters that the first and the last stage both hold."""
    rank = rank_model.at("pp")
    if rank in cut.ends:
        # Each end has summed the gradient of its use over its data ranks: the two shards are alike, and cross once.
        for names in cut.copied:
            row = rank_model.row(names[0] if rank == cut.ends[0] else names[1])
            log.add("pp", "send", row.rank_bytes, "gradients of tied parameters, backward")


def add_scalars(log: TrafficLog, rank_model: RankModel) -> None:
    """The all-reduces of a few numbers over the mesh, in which ranks agree: see `meshkit.mesh.agreement`."""
    if rank_model.spec.world_size > 1:
        # The tokens must be known before the first backward, which divides by them, and the loss is known after all.
        for what in ("tokens", "loss", "gradient norm"):
            log.add(whole_axis(rank_model.spec), "all_reduce", MEETING_BYTES, what)


def whole_axis(spec: MeshSpec) -> str:
    """The name of the axis of all ranks: that of a dense or an expert axis that has them all, or of all dense ones."""
    large = [axis for axis, size in spec.sizes().items() if size > 1]
    alone = [axis for axis in EXPERT_AXES if getattr(spec, axis) == spec.world_size and in_expert_view(spec)]
    return alone[0] if len(large) > 1 and alone else "_".join(large)
