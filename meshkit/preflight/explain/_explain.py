"""explain: parameters and collective traffic (communication volume) of one rank, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshkit.errors import PlanError
from meshkit.mask import Mask
from meshkit.mesh import MeshSpec
from meshkit.parallel.context import attention_shape, choose_for_rows, notes_of, notes_of_counted
from meshkit.parallel.pipeline import Checked, Cut, check, simulate
from meshkit.preflight._arguments import full_coordinate, refuse_sizes, spec_of
from meshkit.preflight.explain._explanation import Explanation, TrafficLog
from meshkit.preflight.explain._rank import LocalBatch, RankModel, microbatch_mask
from meshkit.preflight.explain._traffic import add_context, add_data, add_pipeline, add_scalars
from meshkit.preflight.explain._traffic_experts import add_balance, add_experts, expert_notes
from meshkit.preflight.explain._traffic_tensor import add_tensor
from meshkit.program import read_program
from meshkit.resolve import Resolved, resolve
from meshkit.step import Run
from meshkit.strategy import Strategy


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
    Counts the forward and backward of `Run.forward_backward` with the default loss, and `clip_grad_norm`.
    Raises: PlanError as `parallelize` does, with the same text.
    """
    if isinstance(model, Run):
        if spec is not None or strategy is not None or choices:
            raise PlanError("explain: a Run has a mesh and a strategy. Leave them away, or give `run.full_model`.")
        resolved = model.resolved
        strategy = resolved.strategy
    else:
        strategy = Strategy.of(strategy, choices)
        resolved = resolve(
            read_program(model), strategy, spec_of(spec, strategy), device_type=device or default_device()
        )
    count = (strategy.microbatches or 1) if microbatches is None else microbatches
    return explain_resolved(resolved, rows=rows, seq_len=seq_len, microbatches=count, mask=mask, coordinate=coordinate)


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
) -> Explanation:
    """`explain` of a strategy that is resolved already, such as `run.resolved`."""
    refuse_sizes(rows, seq_len, microbatches)
    resolved.refuse_tokens(seq_len)
    rank_model = RankModel(resolved=resolved, coordinate=full_coordinate(resolved.spec, coordinate))
    spec, cut, stage_rank = resolved.spec, resolved.cut, rank_model.at("pp")
    log = TrafficLog()
    # As `Run.parts` makes them: they differ by at most a row, and one without rows runs another row.
    batches = [
        _local_batch(
            rank_model,
            LocalBatch(max(1, len(row_ids)), seq_len, microbatch_mask(mask, row_ids.tolist(), tokens=seq_len)),
        )
        for row_ids in torch.arange(rows).tensor_split(microbatches)
    ]
    notes = list(dict.fromkeys(batch.note for batch in batches if batch.note))
    notes += notes_of(resolved.reading[1].whole, spec.cp)
    notes += notes_of_counted(resolved.reading[1].counted, spec.cp)
    for batch in batches:
        if spec.cp > 1:
            add_context(log, rank_model, batch)
        if resolved.layout is not None:
            add_tensor(log, rank_model, resolved.layout, batch)
        add_experts(log, rank_model, batch)
    # Below what is once a step, or depends on all of its microbatches.
    add_balance(log, rank_model, batches)
    if (choice := resolved.choice_of(stage_rank)) is not None:
        notes.append(str(choice))
    if rank_model.experts:
        notes += expert_notes(rank_model, resolved.strategy.experts)
    add_data(log, rank_model, microbatches)
    checked = None if cut is None else check(cut.generate(spec.pp, microbatches))
    if cut is not None and checked is not None:
        add_pipeline(log, rank_model, cut, checked, batches)
        notes.append(_pipeline_note(cut, checked, stage_rank))
    add_scalars(log, rank_model)
    table = [rank_model.row(name) for name in rank_model.params]
    return Explanation(
        spec=spec,
        params=table,
        messages=log.messages,
        reasons=log.reasons,
        notes=notes,
        schedule=None if checked is None else checked.schedule,
    )


def _local_batch(rank_model: RankModel, batch: LocalBatch) -> LocalBatch:
    """The tokens of the microbatch that this rank holds under context parallelism, and how attention is computed."""
    # How tokens are split depends on who sees whom, so it is decided for each microbatch, as `split_batch` does in the run.
    spec = rank_model.spec
    if spec.cp == 1:
        return batch
    config = getattr(rank_model.model, "config", None)
    mask = batch.mask if batch.mask is not None else Mask.causal(batch.tokens)
    choice, rows = choose_for_rows(
        mask,
        batch.rows,
        batch.tokens,
        spec.cp,
        rank_model.context,
        attention_shape(config, rank_model.resolved.heads, rank_model.compute),
        multiple=rank_model.resolved.sequence_multiple,
        window=rank_model.resolved.reading[1].window,
    )
    layout = choice.layout
    return LocalBatch(rows, layout.lengths[rank_model.at("cp")], mask, layout, f"cp={spec.cp}: {choice}")


def _pipeline_note(cut: Cut, checked: Checked, rank: int) -> str:
    table = checked.schedule
    blocks = " ".join(str(len(stage)) for stage in cut.stages.blocks)
    stages = ", ".join(map(str, cut.stages_of(rank)))
    simulation = simulate(table)
    return (
        f"pp={table.world}: {table.name}, stages of {blocks} blocks, this rank has {stages}; at equal times bubble rate "
        f"{simulation.bubble_rate:.3f}; at most {checked.peak_live[rank]} microbatches live here (rank by rank "
        f"{' '.join(map(str, checked.peak_live))})"
    )
