"""Put together what one rank holds and sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshkit.errors import PlanError
from meshkit.mask import Mask
from meshkit.mesh import MeshSpec
from meshkit.parallel.context import attention_shape, choose_for_rows, model_window
from meshkit.parallel.pipeline import Checked, Cut, check, simulate
from meshkit.preflight.explain._explanation import Explanation, TrafficLog
from meshkit.preflight.explain._rank import Part, RankModel, part_masks
from meshkit.preflight.explain._traffic import add_context, add_data, add_pipeline, add_scalars
from meshkit.preflight.explain._traffic_experts import add_balance, add_experts, expert_notes
from meshkit.preflight.explain._traffic_tensor import add_tensor
from meshkit.program import read_program
from meshkit.resolve import Resolved, resolve
from meshkit.step import Run, refuse_microbatches
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

    model: whole, as `parallelize` gets it; on meta is enough. Or a `Run`, which has its mesh and its strategy. spec: default,
    the strategy's mesh. strategy, or its choices by keyword: as `parallelize` takes them.
    rows, seq_len: this rank's [rows, seq_len] part of the step's batch; microbatches: gradient accumulation, how many parts
    it is run in; default: the strategy's, or 1.
    mask: who sees whom, one for all rows or one for each, on which depends what context parallelism sends; default: causal.
    coordinate: the rank's place on each axis (stages differ between ranks, and so do sizes where shards are uneven);
    default 0 everywhere.
    device: where it will run, "cuda" or "cpu", whose kernels a `Budget` asks; default: a GPU where there is one.
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
        resolved = resolve(read_program(model), strategy, _spec(spec, strategy), device_type=device or default_device())
    count = (strategy.microbatches or 1) if microbatches is None else microbatches
    return explain_resolved(resolved, rows=rows, seq_len=seq_len, microbatches=count, mask=mask, coordinate=coordinate)


def default_device() -> str:
    """Where a run would be: a GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _spec(spec: MeshSpec | str | None, strategy: Strategy) -> MeshSpec:
    if spec is None:
        return strategy.mesh_for()
    wanted = MeshSpec.parse(spec) if isinstance(spec, str) else spec
    return wanted.resolve(wanted.world_size)


def explain_resolved(
    resolved: Resolved,
    *,
    rows: int,
    seq_len: int,
    microbatches: int = 1,
    mask: Mask | Sequence[Mask] | None = None,
    coordinate: dict[str, int] | None = None,
) -> Explanation:
    """`explain` of what was resolved before: `run.resolved`, for one."""
    refuse_microbatches(microbatches)
    held = RankModel(resolved=resolved, place=coordinate or {})
    spec, cut, at = resolved.spec, resolved.cut, held.at("pp")
    ledger = TrafficLog()
    parts = [
        _part(held, Part(max(1, len(part)), seq_len, part_masks(mask, part.tolist(), tokens=seq_len)))
        for part in torch.arange(rows).tensor_split(microbatches)
    ]
    notes = list(dict.fromkeys(part.note for part in parts if part.note))
    for part in parts:
        if spec.cp > 1:
            add_context(ledger, held, part)
        if resolved.layout is not None:
            add_tensor(ledger, held, resolved.layout, part)
        add_experts(ledger, held, part)
    add_balance(ledger, held, parts)
    if (choice := resolved.choice_of(at)) is not None:
        notes.append(str(choice))
    if held.experts:
        notes += expert_notes(held, resolved.strategy.experts)
    add_data(ledger, held, microbatches)
    checked = None if cut is None else check(cut.generate(spec.pp, microbatches))
    if cut is not None and checked is not None:
        add_pipeline(ledger, held, cut, checked, parts)
        notes.append(_pipeline_note(cut, checked, at))
    add_scalars(ledger, held)
    table = [held.row(name) for name in held.params]
    return Explanation(
        spec=spec,
        params=table,
        messages=ledger.messages,
        reasons=ledger.reasons,
        notes=notes,
        schedule=None if checked is None else checked.schedule,
    )


def _part(held: RankModel, part: Part) -> Part:
    """The part of the microbatch that this rank of `cp` holds."""
    spec = held.spec
    if spec.cp == 1:
        return part
    config = getattr(held.model, "config", None)
    mask = part.mask if part.mask is not None else Mask.causal(part.tokens)
    choice, alike = choose_for_rows(
        mask.windowed(model_window(config)),
        part.rows,
        part.tokens,
        spec.cp,
        held.context,
        attention_shape(config, held.resolved.heads, held.compute),
        multiple=held.resolved.sequence_multiple,
    )
    layout = choice.layout
    return Part(alike, layout.lengths[held.at("cp")], mask, layout, f"cp={spec.cp}: {choice}")


def _pipeline_note(cut: Cut, checked: Checked, rank: int) -> str:
    table = checked.schedule
    blocks = " ".join(str(len(stage)) for stage in cut.stages.blocks)
    own = ", ".join(map(str, cut.stages_of(rank)))
    simulation = simulate(table)
    return (
        f"pp={table.world}: {table.name}, stages of {blocks} blocks, this rank has {own}; at equal times bubble rate "
        f"{simulation.bubble_rate:.3f}; at most {checked.peak_live[rank]} microbatches live here (rank by rank "
        f"{' '.join(map(str, checked.peak_live))})"
    )
