"""What cannot run as it was asked for: one choice that the model or the mesh does not take, or two that do not meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from meshkit.core import _torch
from meshkit.errors import PlanError
from meshkit.lora import lora_of
from meshkit.mesh import MeshSpec
from meshkit.parallel.data import normalises_by_rows, refuse_unshardable, shard_units
from meshkit.parallel.expert import in_expert_view
from meshkit.parallel.pipeline import Cut
from meshkit.parallel.rows import of_rows, read_forward
from meshkit.parallel.state_writes import refuse_state_writes, state_writes
from meshkit.parallel.writes import refuse_backwards, refuse_swapped
from meshkit.program import Program, pointed_at
from meshkit.resolve._once import once
from meshkit.resolve._resolved import Resolved
from meshkit.strategy import Fp8, MemoryPolicy, Strategy


def refuse_other_mesh(strategy: Strategy, spec: MeshSpec) -> None:
    wanted = strategy.mesh  # an axis of -1 fits any size, as in `init_mesh`
    if isinstance(wanted, MeshSpec) and not wanted.fits(spec):
        raise PlanError(
            f"the strategy is for the mesh {_short(wanted)}, but this one is {_short(spec)}. Use "
            "init_mesh(strategy.mesh), or a strategy without mesh."
        )


def refuse_compiled(program: Program, spec: MeshSpec) -> None:
    """A model that is compiled as a whole: what ranks prove and send around its forward would be traced into its graph."""
    if spec.world_size > 1 and _torch.is_compiled(program.model):
        raise PlanError(
            f"parallelize: the model is compiled as a whole, by model.compile() or torch.compile(model), but on "
            f"{spec.world_size} ranks no graph holds what they do around its forward. Give the model as it was before, and "
            "compile=True, which compiles its blocks."
        )


def refuse_pointers(program: Program, spec: MeshSpec) -> None:
    """Sharding puts new parameters in place of a module's own; what else points at the old ones would not see it."""
    if spec.world_size == 1:
        return
    if (found := once(program, "pointers", lambda: next(pointed_at(program.model), None))) is not None:
        owner, attribute, param = found
        raise PlanError(
            f"{f'{owner}.{attribute}'.lstrip('.')!r} has {param!r} in a list, dict or closure: it would keep the parameter "
            "as it was before it is sharded, which gets no gradient. Keep the module in it, or use a torch.nn.ParameterList."
        )


def refuse_without_pp(strategy: Strategy, spec: MeshSpec) -> None:
    """A schedule and stages are about ranks of pp, of which a mesh with pp=1 has none to run them."""
    # [Note: choices without effect]
    # A choice that this run cannot do anything with is refused, since nobody would see that it was passed over. What holds on
    # an axis of one rank as it does on several is no such choice: a stream sharded over tp=1 (sequence), tokens split over
    # cp=1 (context) and parameters sharded over dp_shard=1 (zero) are as they were asked for. So one file fits many meshes,
    # and no recipe asks for the size of an axis. A schedule does not hold on one rank: no table is run there.
    if spec.pp == 1 and (changed := _changed(strategy.pipeline)):
        raise PlanError(
            f"{changed} on a mesh with pp=1: there is no pipeline that it could be about. Give the mesh pp, or leave "
            "pipeline away."
        )


def _changed(record: Any) -> str:
    """A record as the call that makes it, of what is not at its default; empty where all is."""
    told = [
        f"{each.name}={getattr(record, each.name)!r}"
        for each in fields(record)
        if getattr(record, each.name) != each.default
    ]
    return f"{type(record).__name__}({', '.join(told)})" if told else ""


def refuse_without_blocks(strategy: Strategy, blocks: Sequence[str]) -> None:
    """See [Note: choices without effect]. Overrides must match blocks anyway, and fp8 must find layers in them."""
    memory = strategy.memory
    recompute, offload, compiled = memory.recompute, memory.offload, strategy.compile
    asked = {
        f"recompute={recompute!r}": recompute != "none" and getattr(recompute, "mode", "") != "none",
        f"offload={offload!r}": offload is not None,
        f"compile={compiled!r}": bool(compiled),
    }
    given = [text for text, is_asked in asked.items() if is_asked]
    if given and not blocks:
        raise PlanError(
            f"{given[0]} is done block by block, but the plan names no blocks. Name the repeated modules, as "
            f"Plan(blocks=['layers.*']), or leave {given[0].partition('=')[0]} away."
        )


def refuse_complex(program: Program) -> None:
    """Reductions, gradient norms and AdamW are of real numbers."""
    for name, param in program.parameters.items():
        if param.is_complex():
            raise PlanError(
                f"parallelize: parameter {name!r} is {str(param.dtype).removeprefix('torch.')}, and gradients are reduced "
                "and clipped as real numbers. Keep it as real ones (torch.view_as_real), and make it complex in forward."
            )


def refuse_batch_norm(program: Program, spec: MeshSpec, microbatches: int) -> None:
    """In training, BatchNorm normalises by the rows that it is given: here those of one rank and one microbatch."""
    if spec.dp_replicate * spec.dp_shard * spec.cp * spec.pp * microbatches == 1:
        return
    for name, module in program.modules.items():
        if normalises_by_rows(module, synced=microbatches > 1):
            raise PlanError(
                f"parallelize: {name!r} is a {type(module).__name__} in training mode, which normalises by the rows of one "
                "rank and microbatch instead of all. Use nn.GroupNorm or nn.LayerNorm, freeze it by .eval() if it has "
                "running statistics, or with dp on GPUs nn.SyncBatchNorm.convert_sync_batchnorm(model)."
            )


def refuse_units(resolved: Resolved) -> None:
    """What `fully_shard` would refuse on some rank, told by all ranks and before anything is changed."""
    program, spec = resolved.program, resolved.spec
    # One rank on the data axes shards nothing, unless FSDP is there for its mixed precision, or for experts.
    sharded = spec.dp_replicate * spec.dp_shard * spec.cp > 1 or resolved.memory.precision is not None
    cut = None if resolved.cut is None else (resolved.cut.stages, resolved.cut.placement)
    example = None if resolved.example is None else resolved.example.key
    known = resolved.whole, frozenset(resolved.experts), resolved.blocks, resolved.units, example
    key = "units", sharded, spec.edp > 1, in_expert_view(spec), cut, known
    once(program, key, lambda: _refuse_units(resolved, sharded=sharded))


def _refuse_units(resolved: Resolved, *, sharded: bool) -> None:
    program, spec = resolved.program, resolved.spec
    params = dict(program.model.named_parameters(remove_duplicate=False))
    for rank in range(spec.pp):
        experts = resolved.experts_of(rank)
        if sharded or (experts and spec.edp > 1):
            local = {name: param for name, param in params.items() if resolved.runs(name, rank)}
            local = {name: param for name, param in local.items() if name not in resolved.whole}
            units = [*experts, *resolved.blocks_of(rank), *resolved.units_of(rank)]
            refuse_unshardable(local, units)
            _refuse_in_units(resolved, shard_units(local, units))
    if spec.pp > 1 and (read := resolved.read()) is not None:
        refuse_backwards(read, program.model, resolved.blocks, staged=True)


def _refuse_in_units(resolved: Resolved, units: Sequence[str]) -> None:
    """Of a model that can be read; the other's units look for themselves when they run."""
    if (read := resolved.read()) is not None:
        refuse_swapped(read, resolved.program.model, units)
        refuse_backwards(read, resolved.program.model, units)


def refuse_writes_of_state(resolved: Resolved) -> None:
    """Where the program has been read. Else the first step shows it: see `StateGuard` and `StateWatch`."""
    program, closed = resolved.program, dict.fromkeys(resolved.experts, "experts")
    if resolved.rows is not None:
        found = read_forward(program, of_rows(resolved.rows, 2), closed)
        read = None if found is None else found[0]
    else:
        read = None if resolved.example is None else program.read(resolved.example, {})
    if read is not None:
        refuse_state_writes(state_writes(read), resolved.repeated, resolved.strategy.microbatches or 1)


def _short(spec: MeshSpec) -> str:
    return spec.text or "of one rank"


def refuse_meta(program: Program) -> None:
    # A parameter on meta gets its value from `init_weights` or a checkpoint. A buffer (rotary frequencies, a causal mask) was
    # computed by the constructor, which nobody can run again.
    for name, buffer in program.model.named_buffers():
        if buffer.is_meta:
            raise PlanError(
                f"parallelize: buffer {name!r} is on meta, and its value cannot be recovered. Build the model under "
                "`with mk.models.meta_parameters():`, which keeps buffers real."
            )


def refuse_backend(asked: bool | str, spec: MeshSpec) -> None:
    # torch.compile refuses it too, but when half of the model is changed. exclude_tags=(): backends for debugging as well.
    if isinstance(asked, str) and asked not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise PlanError(
            f"compile={asked!r} is no backend of torch.compile. Use True, which is inductor, or one of {', '.join(known)}."
        )
    # On 2.11 a graph of that backend gives no gradient to what goes into a Function whose forward sends.
    if asked == "eager" and torch.__version__ < "2.15" and max(spec.tp, spec.ep, spec.etp) > 1:
        raise PlanError(
            f"compile='eager' of torch {torch.__version__} loses gradients where a block sends, as on tp. Use 'aot_eager', "
            "which compiles nothing either, or True."
        )


def refuse_dropout(program: Program, memory: MemoryPolicy, *, compiled: bool) -> None:
    """Dropout on adapters looks up the masks of a full microbatch: chunks and compiled graphs do not know their tokens."""
    adapters = lora_of(program.model)
    if adapters is not None and adapters.dropout and (memory.mlp_chunks > 1 or compiled):
        asked = "compile" if compiled else f"mlp_chunks={memory.mlp_chunks}"
        raise PlanError(
            f"{asked} with lora(dropout={adapters.dropout}): a layer would not know which tokens of the microbatch it sees. "
            f"Leave {asked.partition('=')[0]} away, or use dropout=0."
        )


def refuse_fp8(policy: Fp8, program: Program, memory: MemoryPolicy, spec: MeshSpec) -> None:
    if lora_of(program.model) is not None:
        raise PlanError(
            "Precision(fp8=...) on a model with adapters: adapted layers would not multiply in fp8. Leave fp8 away."
        )
    if spec.pp > 1:
        raise PlanError(
            f"Precision(fp8=...) with pp={spec.pp}: schedules that compute weights' gradients apart do not know fp8 "
            "layers. Use pp=1, or leave fp8 away."
        )
    if policy.gather and spec.tp > 1:
        raise PlanError(
            f"Fp8(gather=True) with tp={spec.tp}: a weight that is split twice would be scaled by parts. Use gather=False."
        )
    if policy.gather and memory.optimizer.offload is not None:
        raise PlanError(
            "Fp8(gather=True) with an optimizer on the host: writes into the wrapped weights would not be seen by their "
            "masters. Use gather=False."
        )


def refuse_wires(strategy: Strategy) -> None:
    """See [Note: choices without effect]: a message has one wire."""
    data, precision = strategy.data, strategy.memory.precision
    if data.gather is not None and precision is not None and precision.fp8 is not None and precision.fp8.gather:
        raise PlanError(
            f"DataPolicy(gather={data.gather!r}) with Fp8(gather=True): weights travel in fp8 already. Leave one of them "
            "away."
        )


def refuse_fp8_shards(policy: Fp8, program: Program, linears: Sequence[str], spec: MeshSpec) -> None:
    """torchao gives FSDP a rank's rows in fp8 without the padding that an all-gather of unequal shards needs."""
    shards = spec.dp_shard * spec.cp
    for name in linears if policy.gather else ():
        rows = len(program.model.get_parameter(f"{name}.weight"))
        if rows % shards:
            raise PlanError(
                f"Fp8(gather=True): the {rows} rows of {name!r} are no multiple of the {shards} ranks that share them, and "
                "fp8 gathers take equal shards. Use gather=False, or a dp_shard and cp that divide the rows."
            )


def refuse_idle_ranks(program: Program, cut: Cut, ranks: int) -> None:
    """A rank of pp that trains nothing would have an optimizer without parameters."""
    # `trained` has tied parameters under each of their names: a head that is the embedding trains on the last rank too.
    for rank in range(ranks):
        if not any(cut.runs(name, rank) for name in program.trained):
            raise PlanError(
                f"parallelize: no parameter of the stages of pp rank {rank} requires a gradient. Train something in every "
                "stage, adapters in all layers for one, or use a mesh without pp."
            )
