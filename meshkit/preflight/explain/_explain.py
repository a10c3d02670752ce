"""explain: parameters and collective traffic (communication volume) of one rank, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import nn

from meshkit.cluster import Cluster
from meshkit.errors import DataError, PlanError
from meshkit.mask import Mask
from meshkit.mesh import MeshSpec
from meshkit.optim.outer import OuterOptimizer, Policy
from meshkit.parallel.context import (
    attention_shape,
    chain_of,
    choose_for_rows,
    length_costs,
    microbatches_of,
    notes_of,
    notes_of_cache,
    notes_of_counted,
    plan_step,
)
from meshkit.parallel.expert import Placement, placements_of
from meshkit.parallel.pipeline import Cut, Path
from meshkit.preflight._arguments import full_coordinate, refuse_sizes, spec_of
from meshkit.preflight.explain._explanation import Explanation, Sent, TrafficLog
from meshkit.preflight.explain._links import link_notes
from meshkit.preflight.explain._period import period_of_model, period_of_run
from meshkit.preflight.explain._pipeline_table import PipelineTable
from meshkit.preflight.explain._rank import LocalBatch, RankModel, microbatch_mask
from meshkit.preflight.explain._traffic import (
    add_context,
    add_data,
    add_pipeline,
    add_scalars,
    add_scales,
    add_tied,
    add_whole,
)
from meshkit.preflight.explain._traffic_experts import add_balance, add_experts, add_step_balance, expert_notes
from meshkit.preflight.explain._traffic_tensor import add_tensor
from meshkit.program import read_program
from meshkit.resolve import Resolved, resolve
from meshkit.step import Run
from meshkit.strategy import Rule, Strategy


def explain(
    model: nn.Module | Run,
    spec: MeshSpec | str | None = None,
    strategy: Strategy | None = None,
    *,
    rows: int,
    seq_len: int,
    microbatches: int | None = None,
    mask: Mask | Sequence[Mask] | None = None,
    coordinate: dict[str, int] | None = None,
    device: str | None = None,
    outer: Policy | OuterOptimizer | None = None,
    cluster: Cluster | str | None = None,
    **choices: Any,
) -> Explanation:
    """What `parallelize(model, mesh, strategy)` will hold and send, for one optimizer step of one rank.

    model: the full model as `parallelize` gets it, on meta is enough; or a `Run`, which has its mesh and its strategy.
    spec: default, the strategy's mesh. strategy, or its choices by keyword: as `parallelize` takes them.
    rows, seq_len: this rank's [rows, seq_len] part of the step's batch; microbatches: gradient accumulation, how many parts
    it is run in; default: the strategy's, or 1.
    mask: who sees whom, one for all rows or one for each; default: causal. What context parallelism sends depends on it.
    coordinate: the rank's index on each axis, default 0; stages differ between ranks, and so do uneven shards.
    device: where it will run, "cuda" or "cpu": a `Budget` counts that device's kernels. Default: a GPU where there is one.
    outer: a policy of local updates, with which the run is on a replica of the mesh; of a run its outer optimizer.
    cluster: a `Cluster`, the name of a datasheet, or a file: notes then say in which way FSDP's collectives are faster by its
    links, and which axes send much over slow ones.
    Counts the forward and backward of `Run.forward_backward` with the default loss, and `clip_grad_norm`.
    Raises: PlanError as `parallelize` does, with the same text.
    """
    if isinstance(model, Run):
        if spec is not None or strategy is not None or choices:
            raise PlanError("explain: a Run has a mesh and a strategy. Leave them away, or give `run.full_model`.")
        resolved, period = model.resolved, None if outer is None else period_of_run(outer)
        placements = placements_of(model.model)
        strategy = resolved.strategy
    else:
        strategy, placements = Strategy.of(strategy, choices), None
        sizes, period = spec_of(spec, strategy), None
        replica = sizes if outer is None else replace(sizes, dp_replicate=1)
        resolved = resolve(read_program(model), strategy, replica, device_type=device or default_device())
        if outer is not None:
            coordinate = {axis: at for axis, at in full_coordinate(sizes, coordinate).items() if axis != "dp_replicate"}
            period = period_of_model(resolved, coordinate, outer, replicas=sizes.dp_replicate)
    count = (strategy.microbatches or 1) if microbatches is None else microbatches
    of_step = explain_resolved(
        resolved,
        rows=rows,
        seq_len=seq_len,
        microbatches=count,
        mask=mask,
        coordinate=coordinate,
        placements=placements,
    )
    if cluster is not None:
        links = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
        of_step = replace(of_step, choices=(*of_step.choices, *link_notes(of_step, links)))
    return replace(of_step, period=period)


def default_device() -> str:
    """The device type that a run here would use: "cuda" where there is a GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def explain_resolved(
    resolved: Resolved,
    *,
    rows: int,
    seq_len: int,
    microbatches: int = 1,
    mask: Mask | Sequence[Mask] | None = None,
    coordinate: dict[str, int] | None = None,
    placements: Mapping[str, Placement] | None = None,
) -> Explanation:
    """`explain` of a strategy that is resolved already, such as `run.resolved`. placements: of experts, as a run has them
    now; default: as it begins."""
    refuse_sizes(rows, seq_len, microbatches)
    resolved.refuse_tokens(seq_len)
    rank_model = RankModel(
        resolved=resolved, coordinate=full_coordinate(resolved.spec, coordinate), placements=placements
    )
    spec, cut, stage_rank = resolved.spec, resolved.cut, rank_model.at("pp")
    table = None
    if cut is not None:
        table = PipelineTable(cut=cut, ranks=spec.pp, microbatches=microbatches, rank=stage_rank)
        if microbatches != resolved.strategy.microbatches:  # else `resolve` has looked whether there is one
            _ = table.checked
    log = TrafficLog()
    paths = {} if table is None else dict(enumerate(table.paths))
    dynamic = spec.cp > 1 and rank_model.context.groups != "fixed"
    batches = (_dynamic_batches if dynamic else _batches)(rank_model, rows, seq_len, microbatches, mask)
    choices = list(dict.fromkeys(batch.note for _, batch in batches if batch.note))
    choices += notes_of(resolved.reading[1].whole, spec.cp)
    doors = resolved.reading[1]
    choices += notes_of_counted(doors.counted, spec.cp)
    choices += notes_of_cache(list(doors.sent), spec.cp) if doors.cached else []
    for indices, batch in batches:
        log.microbatches = indices
        _add_microbatch(log, rank_model, batch, paths)
    log.microbatches = ()
    if (choice := resolved.choice_of(stage_rank)) is not None:
        choices.append(str(choice))
    if rank_model.experts:
        choices += expert_notes(rank_model, resolved.strategy.experts)
    _add_step(log, rank_model, microbatches)
    return Explanation(
        spec=spec,
        params=[rank_model.row(name) for name in rank_model.params],
        sent=tuple(log.sent if cut is None else _passed(log.sent, cut, paths)),
        choices=tuple(choices),
        pipeline=table,
    )


def explain_step(
    resolved: Resolved, *, microbatches: int, coordinate: dict[str, int] | None = None
) -> tuple[tuple[Sent, ...], dict[str, tuple[int, int]]]:
    """Of `explain_resolved` what is sent once a step, or depends on all of its microbatches; and of each parameter the
    (elements, bytes) that the rank keeps.
    """
    rank_model = RankModel(resolved=resolved, coordinate=full_coordinate(resolved.spec, coordinate))
    log = TrafficLog()
    _add_step(log, rank_model, microbatches)
    return tuple(log.sent), rank_model.held()


def explain_microbatch(
    resolved: Resolved,
    *,
    rows: int,
    seq_len: int,
    mask: Mask | Sequence[Mask] | None = None,
    coordinate: dict[str, int] | None = None,
) -> tuple[Sent, ...]:
    """Of `explain_resolved` what is sent in the first of its microbatches, which has so many rows."""
    rank_model = RankModel(resolved=resolved, coordinate=full_coordinate(resolved.spec, coordinate))
    log = TrafficLog()
    log.microbatches = (0,)
    dynamic = resolved.spec.cp > 1 and rank_model.context.groups != "fixed"
    ((_, batch),) = (_dynamic_batches if dynamic else _batches)(rank_model, rows, seq_len, 1, mask)
    paths = {} if resolved.cut is None else {0: tuple(range(resolved.cut.stages.count))}
    _add_microbatch(log, rank_model, batch, paths)
    return tuple(log.sent)


def _add_microbatch(log: TrafficLog, rank_model: RankModel, batch: LocalBatch, paths: Mapping[int, Path]) -> None:
    resolved = rank_model.resolved
    if resolved.spec.cp > 1:
        add_context(log, rank_model, batch)
    if resolved.layout is not None:
        add_tensor(log, rank_model, resolved.layout, batch)
    add_experts(log, rank_model, batch)
    add_balance(log, rank_model, batch)
    if resolved.cut is not None:
        add_pipeline(log, rank_model, resolved.cut, batch, paths)


def _passed(sent: Sequence[Sent], cut: Cut, paths: Mapping[int, Path]) -> Iterator[Sent]:
    """Without what modules of a stage would send for microbatches that skip it, and at all where every one does."""
    for each in sent:
        stage = cut.stages.stage_of(each.module)
        passing = [index for index in each.microbatches or paths if stage is None or stage in paths[index]]
        if passing:
            yield replace(each, microbatches=tuple(passing)) if each.microbatches else each


def _add_step(log: TrafficLog, rank_model: RankModel, microbatches: int) -> None:
    add_step_balance(log, rank_model)
    add_scales(log, rank_model)
    add_data(log, rank_model, microbatches)
    add_whole(log, rank_model)
    if rank_model.cut is not None:
        add_tied(log, rank_model, rank_model.cut)
    add_scalars(log, rank_model)


def _batches(
    rank_model: RankModel, rows: int, seq_len: int, microbatches: int, mask: Mask | Sequence[Mask] | None
) -> list[tuple[tuple[int, ...], LocalBatch]]:
    """(the microbatches that are like it, a microbatch) of a step."""
    return [
        (
            indices,
            _local_batch(
                rank_model, LocalBatch(max(1, len(row_ids)), seq_len, microbatch_mask(mask, row_ids, tokens=seq_len))
            ),
        )
        for row_ids, indices in _microbatches(rows, microbatches, mask)
    ]


def _dynamic_batches(
    rank_model: RankModel, rows: int, seq_len: int, microbatches: int, mask: Mask | Sequence[Mask] | None
) -> list[tuple[tuple[int, ...], LocalBatch]]:
    """The same with dynamic groups, whose plan is of the whole step; the note prints it, and those of other rules.

    A microbatch without documents runs a token on each rank.
    """
    resolved, policy, doors = rank_model.resolved, rank_model.context, rank_model.resolved.reading[1]
    tokens = min(resolved.spec.cp, seq_len)
    spare = replace(_local_batch(rank_model, LocalBatch(1, tokens, Mask.documents([1] * tokens))), note="")
    if not rows:
        return [(tuple(range(microbatches)), spare)]
    of_rows = microbatch_mask(mask, list(range(rows)), tokens=seq_len) or Mask.causal(seq_len)
    stream = of_rows if of_rows.tokens == rows * seq_len else Mask.joined([of_rows] * rows)
    costs = length_costs(resolved.program, policy, doors, resolved.heads, resolved.compute)
    assert policy.groups != "fixed"
    plans, lines = {}, []
    for rule in (policy.groups, *(each for each in get_args(Rule) if each != policy.groups)):
        try:
            plans[rule] = plan_step(
                stream, resolved.spec.cp, microbatches, rule, policy, costs, pace=resolved.pace, window=doors.window
            )
        except DataError:
            if rule == policy.groups:
                raise
        else:
            lines.append(str(plans[rule][0]))
    plan, documents = plans[policy.groups]
    note = f"cp={resolved.spec.cp}: documents shared out {'; '.join(lines)}"
    found: list[tuple[tuple[int, ...], LocalBatch]] = []
    for index, part in enumerate(microbatches_of(stream, plan, documents, multiple=resolved.sequence_multiple)):
        if part is None:
            found.append(((index,), spare))
        else:
            tokens = part.layout.lengths[rank_model.at("cp")]
            found.append(((index,), LocalBatch(1, tokens, part.layout.mask, part.layout, note)))
    return found


def _microbatches(
    rows: int, microbatches: int, mask: Mask | Sequence[Mask] | None
) -> list[tuple[list[int], tuple[int, ...]]]:
    """(rows of a microbatch, the microbatches that are like it), as `Run.parts` makes them: they differ by at most a row.

    One without rows runs another row. Where each row has a mask of its own no two microbatches are alike.
    """
    alike: dict[int, tuple[list[int], list[int]]] = {}
    for index, row_ids in enumerate(torch.arange(rows).tensor_split(microbatches)):
        key = len(row_ids) if mask is None or isinstance(mask, Mask) else index
        alike.setdefault(key, (row_ids.tolist(), []))[1].append(index)
    return [(row_ids, tuple(indices)) for row_ids, indices in alike.values()]


def _local_batch(rank_model: RankModel, batch: LocalBatch) -> LocalBatch:
    """The tokens of the microbatch that this rank holds under context parallelism, and how attention is computed."""
    # How tokens are split depends on who sees whom, so it is decided for each microbatch, as `split_batch` does in the run.
    spec = rank_model.spec
    if not rank_model.context.reaches(spec.cp):
        return batch
    config, doors = getattr(rank_model.model, "config", None), rank_model.resolved.reading[1]
    mask = batch.mask if batch.mask is not None else Mask.causal(batch.tokens)
    choice, rows = choose_for_rows(
        mask,
        batch.rows,
        batch.tokens,
        spec.cp,
        rank_model.context,
        attention_shape(config, rank_model.resolved.heads, rank_model.compute),
        multiple=rank_model.resolved.sequence_multiple,
        window=doors.window,
        attends=doors.attends,
    )
    layout = choice.layout
    note = f"cp={spec.cp}: {choice}"
    if doors.mixers:
        states, messages = chain_of(layout)
        note += f"; for each recurrent mixer ranks send {states} states, in {messages} messages one after another"
    return LocalBatch(rows, layout.lengths[rank_model.at("cp")], mask, layout, note)
