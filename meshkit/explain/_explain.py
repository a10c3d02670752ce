"""Put together what one rank holds and sends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from meshkit.auto_plan import auto_plan
from meshkit.errors import PlanError
from meshkit.explain._explanation import Explanation
from meshkit.explain._held import Held, Part, part_masks
from meshkit.explain._ledger import Ledger
from meshkit.explain._sent import add_context, add_data, add_pipeline, add_scalars
from meshkit.explain._sent_experts import add_balance, add_experts, expert_notes
from meshkit.explain._sent_tensor import add_tensor
from meshkit.mask import Mask
from meshkit.memory.policy import Budget, MemoryPolicy
from meshkit.memory.recompute import refuse_treatments, treatments
from meshkit.memory.regather import refuse_without_sequence
from meshkit.memory.tiles import refuse_tiles
from meshkit.mesh import MeshSpec
from meshkit.parallel.budget import choose_for_blocks
from meshkit.parallel.context import ContextPolicy, attention_shape, choose_for_rows, model_window
from meshkit.parallel.data import zero_stage
from meshkit.parallel.expert import ExpertPolicy, expert_layouts
from meshkit.parallel.pipeline import Checked, Cut, Generator, Schedule, check, plan_pipeline, simulate
from meshkit.parallel.tensor_layout import refuse_whole_stream, tensor_layout, widest_heads
from meshkit.plan import Plan, match_names
from meshkit.whole import whole_of


def explain(
    model: nn.Module,
    spec: MeshSpec,
    *,
    plan: Plan | None = None,
    rows: int,
    seq_len: int,
    microbatches: int = 1,
    memory: MemoryPolicy | None = None,
    zero: int | None = None,
    sequence: bool = False,
    context: ContextPolicy | None = None,
    experts: ExpertPolicy | None = None,
    schedule: Generator | Schedule | str = "1f1b",
    stages: Sequence[int] | None = None,
    mask: Mask | Sequence[Mask] | None = None,
    coordinate: dict[str, int] | None = None,
    device: str | None = None,
) -> Explanation:
    """What `parallelize(model, mesh, plan=..., ...)` will hold and send, for one optimizer step of one rank.

    model: whole, as `parallelize` gets it; on meta is enough.
    plan: None asks `auto_plan`, as there.
    rows, seq_len: this rank's [rows, seq_len] part of the step's batch; microbatches: how many parts it is run in.
    mask: who sees whom, one for all rows or one for each, on which depends what context parallelism sends; default: causal.
    coordinate: the rank's place on each axis (stages differ between ranks, and so do sizes where shards are uneven);
    default 0 everywhere.
    device: whose kernels a `Budget` asks; default: a GPU where there is one.
    Counts the forward and backward of `Run.forward_backward` with the default loss, and `clip_grad_norm`.
    Raises: PlanError as `parallelize` does.
    """
    if whole_of(model) is not None:
        raise PlanError(
            "explain: this model has the stages of one rank of pp only. Give it the whole one: `run.whole`, or the model "
            "before parallelize."
        )
    place = coordinate or {}
    plan = plan if plan is not None else auto_plan(model)
    memory = memory or MemoryPolicy()
    refuse_without_sequence(regather=memory.regather, sequence=sequence)
    sequence = sequence and spec.tp > 1
    if sequence:
        refuse_whole_stream(model, plan.tensor)
    layout = tensor_layout(model, plan.tensor, size=spec.tp, sequence=sequence) if spec.tp > 1 else None
    names = dict(model.named_modules())
    blocks = match_names(plan.blocks, names, what="module")
    units = match_names(plan.units, names, what="module")
    mlps = match_names(plan.mlps, names, what="module")
    cut = plan_pipeline(model, spec.pp, blocks=blocks, schedule=schedule, split=stages) if spec.pp > 1 else None
    at = place.get("pp", 0)
    choice = None
    if isinstance(memory.recompute, Budget):
        choice = choose_for_blocks(
            model,
            spec,
            plan=plan,
            memory=memory,
            blocks=blocks,
            sequence=sequence,
            compute=memory.precision.compute if memory.precision else next(model.parameters()).dtype,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            cut=cut,
            at=at,
        )
    treated = choice.treatments if choice is not None else treatments(memory, blocks)
    refuse_treatments(treated, names)
    held = Held(
        model=model,
        plan=plan,
        spec=spec,
        memory=memory,
        zero=zero_stage(zero, pipelined=cut is not None),
        sequence=sequence,
        context=context or ContextPolicy(),
        place=place,
        layout=layout,
        cut=cut,
        blocks=[name for name in blocks if cut is None or cut.runs(name, at)],
        units=[name for name in units if cut is None or cut.runs(name, at)],
        experts=expert_layouts(model, plan.tensor, ep=spec.ep, etp=spec.etp),
        treated=treated,
        tiled=mlps if memory.tiles > 1 else [],
    )
    refuse_tiles(
        memory,
        mlps=mlps,
        experts=held.experts,
        units=[*blocks, *units],
        splits_backward=cut is not None and cut.splits_backward,
    )
    ledger = Ledger()
    parts = [
        _part(held, Part(max(1, len(part)), seq_len, part_masks(mask, part.tolist(), tokens=seq_len)))
        for part in torch.arange(rows).tensor_split(microbatches)
    ]
    notes = list(dict.fromkeys(part.note for part in parts if part.note))
    for part in parts:
        if spec.cp > 1:
            add_context(ledger, held, part)
        if layout is not None:
            add_tensor(ledger, held, layout, part)
        add_experts(ledger, held, part)
    add_balance(ledger, held, parts)
    if choice is not None:
        notes.append(str(choice))
    if held.experts:
        notes += expert_notes(held, experts or ExpertPolicy())
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


def _part(held: Held, part: Part) -> Part:
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
        attention_shape(config, widest_heads(held.model, held.plan.tensor, size=spec.tp), held.compute),
        multiple=spec.tp if held.sequence else 1,
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
