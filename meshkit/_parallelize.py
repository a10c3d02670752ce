"""`parallelize`: from a plain module to one that trains on a mesh. This file is the order of composition.

`resolve` decides and refuses, this file executes. Pipeline stages are planned on the full model, and cut out after tensor,
context and expert parallelism, which know modules by their single-device names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from meshkit._guards import guards_of, rows_of, state_of
from meshkit._units import change_linears, keep_less, shard_units, watch
from meshkit.core.arguments import require
from meshkit.core.asked_once import AskedOnce
from meshkit.core.compile_blocks import compile_blocks
from meshkit.core.materialize import materialize, move, refuse_different_values
from meshkit.core.model_state import set_group, set_notes
from meshkit.core.optimizer_step import look_at_optimizers, parameters_before
from meshkit.core.software import versions
from meshkit.faults.location import register_modules
from meshkit.memory.offload import offload_of
from meshkit.mesh import Mesh
from meshkit.moving import move as move_run
from meshkit.parallel.context import context_parallel
from meshkit.parallel.data import find_units
from meshkit.parallel.expert import expert_parallel, share_counts
from meshkit.parallel.later import LaterChanges
from meshkit.parallel.old_parameters import OldParameters
from meshkit.parallel.parameter_hooks import take_hooks
from meshkit.parallel.pipeline import cut_stages, pipeline_of
from meshkit.parallel.tensor import tensor_parallel
from meshkit.parallel.tensor.apply import shard_without_ranks
from meshkit.parallel.tensor.regather import regions
from meshkit.parallel.writes import refuse_shared_memory
from meshkit.program import Example, read_program, without_values
from meshkit.resolve import Resolved, resolve_together
from meshkit.step import Run, compare_optimizers
from meshkit.strategy import Strategy


def parallelize(
    model: nn.Module, mesh: Mesh, strategy: Strategy | None = None, *, example: Example | None = None, **choices: Any
) -> Run:
    """Split the model over the mesh, in place, and return what runs it.

    model: any nn.Module with the same values on every rank, or on meta: then its shards are allocated on the mesh's
    device, filled with NaN until `init_weights` or `load_pretrained` gives them values.
    strategy: every choice; or some of them by keyword, as `parallelize(model, mesh, zero=2)`; see `Strategy`.
    example: `Example(args, kwargs)` of the model's forward, by which its program is read; by default token ids,
    where it takes those. With neither, the first forward shows what must be proved.
    Names of parameters do not change.
    Wire: one all-reduce of a sum for each parameter, which finds values that differ between ranks; a
    broadcast of what the first rank decided, and a gather of digests of what each was given.
    Raises: PlanError for what the model or the mesh cannot do as it was asked for, before anything is changed; PlanError for
    values that differ between ranks; MeshError on a rank that is not of the mesh.
    """
    require("parallelize", "mesh", mesh, Mesh)
    mesh.require_here("parallelize")
    mesh.agreement.note("parallelize", versions())
    # Read and resolved before anything is changed: a refusal leaves the model as it was.
    program = read_program(model, example).frozen()
    if mesh.spec.world_size > 1:
        refuse_shared_memory(model)
    return execute(model, mesh, resolve_together(program, Strategy.of(strategy, choices), mesh))


def execute(model: nn.Module, mesh: Mesh, resolved: Resolved) -> Run:
    """Change the model as was decided. Its program is that of this model, or of one of which this is a copy."""
    program, plan, sequence = resolved.program, resolved.plan, resolved.sequence
    asked = AskedOnce(mesh.group, program.model)
    hooks, before = take_hooks(model), parameters_before(model)
    move(model, mesh.device)
    refuse_different_values(model, mesh.group)
    change_linears(model, resolved)
    names, stage = dict(model.named_modules()), mesh["pp"].get_local_rank()
    tensor_parallel(model, mesh["tp"], plan=plan.tensor, sequence=sequence, regather=resolved.regathers(stage))
    for region in regions(model):  # inside of blocks, their treatment decides later
        region.hooked = resolved.memory.regather
    reader, doors = resolved.reading
    context_parallel(
        model,
        mesh["cp"],
        policy=resolved.strategy.context,
        attention=plan.attention,
        heads=resolved.heads,
        multiple=resolved.sequence_multiple,
        dtype=resolved.compute,
        reading=(replace(reader, asked=asked), doors),
    )
    expert_parallel(
        model,
        mesh["ep", "etp"],
        plan=plan.tensor,
        tp=mesh["tp"],
        sequence=sequence,
        policy=resolved.strategy.experts,
    )
    share_counts(model, mesh, sequence=sequence, full=program.model)
    guards = guards_of(resolved, asked)
    if resolved.cut is not None:
        on_rank = without_values(program.model)
        if resolved.layout is not None:
            shard_without_ranks(on_rank, "", resolved.layout, rank=mesh["tp"].get_local_rank())
        cut_stages(
            model,
            mesh["pp"],
            resolved.cut,
            full=program.model,
            on_rank=on_rank,
            device=mesh.device,
            dtype=resolved.compute if resolved.memory.precision is not None else None,
            closed=resolved.experts,
            guards=guards,
            called_twice=program.called_twice,
            data=mesh.tokens,
            asked=asked,
            place=mesh["tp"].get_local_rank(),
        )
    blocks = resolved.blocks_of(stage)
    keep_less(model, resolved, blocks, mesh)
    if resolved.strategy.compile:
        breaks = {name for name in blocks if any(other.startswith(f"{name}.") for other in resolved.experts)}
        compile_blocks({name: names[name] for name in blocks}, backend=resolved.strategy.compile, with_breaks=breaks)
    shard_units(model, mesh, resolved, names, blocks, resolved.units_of(stage))
    # Last: what was on meta is allocated as shards, so no rank ever holds the full model.
    materialize(model, mesh.device)
    # Now, while each parameter is in its place: FSDP takes what its first forward finds there for the parameter.
    find_units(model)
    if mesh.group is not dist.group.WORLD:
        set_group(model, mesh.group)
    set_notes(model, mesh.agreement)
    for guard in guards if resolved.cut is None else ():
        model.register_forward_pre_hook(guard, with_kwargs=True)
    register_modules(model, [] if resolved.strategy.compile else blocks)
    run = Run(model=model, mesh=mesh, resolved=resolved, pipeline=pipeline_of(model), offload=offload_of(model))
    run.later = LaterChanges(model, mesh, sequence=sequence)
    run.old = OldParameters(model, before)
    look_at_optimizers(model, before)
    compare_optimizers(run)
    run.hooks, run.units = hooks, watch(model, mesh, resolved, blocks, asked)
    run.mover = partial(move_run, parallelize)
    run.state, run.rows = state_of(model, resolved, guards, asked), rows_of(guards)
    return run
