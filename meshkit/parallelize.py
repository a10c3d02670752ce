"""From a plain module to one that trains on a mesh. The order of composition is this file."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshkit import _torch
from meshkit.auto_plan import auto_plan
from meshkit.errors import PlanError
from meshkit.lora import lora_of
from meshkit.memory.budget import Choice
from meshkit.memory.fp8 import fp8_linears
from meshkit.memory.linear_logits import chunk_head
from meshkit.memory.offload import offload_activations, offload_of
from meshkit.memory.optimizer import refuse_rounding
from meshkit.memory.policy import Budget, MemoryPolicy
from meshkit.memory.recompute import Treatment, refuse_treatments, treat, treatments
from meshkit.memory.regather import refuse_without_sequence, regions
from meshkit.memory.tiles import refuse_tiles, tile
from meshkit.mesh import Mesh
from meshkit.parallel.budget import choose_for_blocks
from meshkit.parallel.context import ContextPolicy, context_parallel
from meshkit.parallel.data import Zero, fully_shard, gather_around, kept_units, zero_stage
from meshkit.parallel.expert import ExpertPolicy, expert_layouts, expert_parallel, share_counts
from meshkit.parallel.pipeline import Cut, Generator, Schedule, pipeline_parallel, plan_pipeline, split_linears
from meshkit.parallel.tensor import tensor_parallel
from meshkit.parallel.tensor_layout import refuse_whole_stream, widest_heads
from meshkit.place import follow
from meshkit.plan import Plan, match_names
from meshkit.sharding import local_tensor
from meshkit.step import Run
from meshkit.whole import set_group


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    plan: Plan | None = None,
    memory: MemoryPolicy | None = None,
    zero: int | None = None,
    sequence: bool = False,
    context: ContextPolicy | None = None,
    experts: ExpertPolicy | None = None,
    schedule: Generator | Schedule | str = "1f1b",
    stages: Sequence[int] | None = None,
    compile: bool | str = False,
) -> Run:
    """Split the model over the mesh, in place, and return what runs it.

    model: any nn.Module with the same values on every rank, or on meta: then its shards are allocated on the mesh's
    device, filled with NaN until `init_weights` or `load_pretrained` gives them values.
    plan: what each module does; None asks `auto_plan`. memory: recompute and precision. zero: the ZeRO stage on dp_shard:
    3, or with pp 1, since many microbatches are in flight between gathering parameters and reducing gradients.
    experts: capacity, copies of busy experts, another dispatcher; see `ExpertPolicy`.
    sequence: with tp, hold the residual stream sharded along the sequence. context: with cp, how tokens are split and
    attention comes together. schedule: with pp, a name of `meshkit.schedules`, a function (ranks, microbatches) -> Schedule,
    or a table of yours; stages: blocks of each stage, default by parameters. compile: torch.compile each block; a string is
    the backend's name.
    Names of parameters do not change.
    Raises: PlanError for a plan that does not fit the model, buffers on meta,
    or values that differ between ranks; MeshError on a rank that is not of the mesh.
    """
    mesh.require_here("parallelize")
    plan = plan if plan is not None else auto_plan(model)
    memory = memory or MemoryPolicy()
    names = dict(model.named_modules())
    blocks = match_names(plan.blocks, names, what="module")
    units = match_names(plan.units, names, what="module")
    mlps = match_names(plan.mlps, names, what="module")
    _refuse_meta_buffers(model)
    _refuse_dropout(model, memory, compiled=bool(compile))
    named = dict(model.named_parameters())
    refuse_rounding(named, named.values(), memory.optimizer.stochastic_rounding)
    _move(model, mesh)
    _refuse_different_values(model, mesh)
    if memory.precision is not None and memory.precision.fp8 is not None:
        _refuse_fp8(memory, mesh, model)
        fp8_linears(model, blocks=blocks, policy=memory.precision.fp8, device=mesh.device, tp=mesh.spec.tp)
        names = dict(model.named_modules())
    compute = memory.precision.compute if memory.precision else next(model.parameters()).dtype
    pipelined = mesh.spec.pp > 1
    refuse_without_sequence(regather=memory.regather, sequence=sequence)
    sequence = sequence and mesh.spec.tp > 1
    if sequence:
        refuse_whole_stream(model, plan.tensor)
    zero = zero_stage(zero, pipelined=pipelined)
    head = None
    if memory.loss is not None:
        head = chunk_head(model, plan, memory.loss, tp=mesh.spec.tp, sequence=sequence, device=mesh.device)
    budgeted = isinstance(memory.recompute, Budget)
    cut, whole = None, _on_meta(model) if pipelined or budgeted else model
    if pipelined:
        cut = plan_pipeline(model, mesh.spec.pp, blocks=blocks, schedule=schedule, split=stages)
        _refuse_idle_ranks(model, cut, mesh.spec.pp)
        if cut.splits_backward and not compile:  # a compiled block's backward is one piece
            split_linears(model)

    treated, choice = _treatments(whole, mesh, plan, memory, blocks=blocks, sequence=sequence, compute=compute, cut=cut)
    refuse_treatments(treated, names)
    regather = sequence and (memory.regather or any(each.regather for each in treated.values()))
    tensor_parallel(model, mesh["tp"], plan=plan.tensor, sequence=sequence, regather=regather)
    for region in regions(model):  # a choice is for blocks only
        region.hooked = memory.regather
    context = context or ContextPolicy()
    context_parallel(
        model,
        mesh["cp"],
        **dataclasses.asdict(context),
        attention=plan.attention,
        heads=widest_heads(model, plan.tensor, size=mesh.spec.tp),
        multiple=mesh.spec.tp if sequence else 1,
        dtype=compute,
    )
    routed = expert_layouts(model, plan.tensor, ep=mesh.spec.ep, etp=mesh.spec.etp)
    refuse_tiles(
        memory,
        mlps=mlps,
        experts=routed,
        units=[*blocks, *units],
        compiled=bool(compile),
        splits_backward=cut is not None and cut.splits_backward,
    )
    apart = expert_parallel(model, mesh, plan=plan.tensor, sequence=sequence, policy=experts)
    share_counts(model, mesh, sequence=sequence)
    pipeline = None
    if cut is not None:
        pipeline = pipeline_parallel(model, mesh["pp"], cut, dtype=compute, parts=mesh.spec.tp if sequence else 1)
        held = set(pipeline.modules)
        blocks, units = [name for name in blocks if name in held], [name for name in units if name in held]
        apart = [name for name in apart if cut.runs(name, pipeline.rank)]
    _keep_less(model, memory, treated, blocks=blocks, mlps=mlps, compiled=bool(compile), device=mesh.device)
    if compile:
        _torch.allow_recompiles(len(blocks))
        for name in blocks:  # tokens go to their experts outside of graphs
            one_graph = not any(other.startswith(f"{name}.") for other in routed)
            names[name].compile(fullgraph=one_graph, backend="inductor" if compile is True else compile)
    keep = kept_units(blocks, units, head)
    for name in apart:
        # Routing weights are in fp32 at least, and stay so.
        fully_shard(names[name], mesh.expert_data, zero=zero, precision=memory.precision, cast_inputs=False)
        for block in blocks:
            if name.startswith(f"{block}."):
                gather_around(names[block], names[name], free=Zero(zero).reshard_after_forward and block not in keep)
    fully_shard(
        model,
        mesh.data,
        units=[*blocks, *units],
        keep=keep,
        apart=apart,
        zero=zero,
        precision=memory.precision,
    )
    _materialise(model, mesh.device)
    if mesh.group is not dist.group.WORLD:
        set_group(model, mesh.group)
    follow(model, [] if compile else blocks)
    return Run(
        model=model,
        whole=whole,
        mesh=mesh,
        plan=plan,
        memory=memory,
        zero=zero,
        sequence=sequence,
        context=context,
        experts=experts or ExpertPolicy(),
        blocks=blocks,
        schedule=schedule,
        stages=stages,
        pipeline=pipeline,
        recompute_choice=choice,
        offload=offload_of(model),
    )


def _treatments(
    whole: nn.Module,
    mesh: Mesh,
    plan: Plan,
    memory: MemoryPolicy,
    *,
    blocks: list[str],
    sequence: bool,
    compute: torch.dtype,
    cut: Cut | None,
) -> tuple[dict[str, Treatment], Choice | None]:
    """What becomes of each block, and what a budget came to. whole: what nothing has been done to yet, for a budget."""
    if not isinstance(memory.recompute, Budget):
        return treatments(memory, blocks), None
    choice = choose_for_blocks(
        whole,
        mesh.spec,
        plan=plan,
        memory=memory,
        blocks=blocks,
        sequence=sequence,
        compute=compute,
        device=mesh.device.type,
        cut=cut,
        at=mesh["pp"].get_local_rank(),
    )
    return choice.treatments, choice


def _keep_less(
    model: nn.Module,
    memory: MemoryPolicy,
    treated: dict[str, Treatment],
    *,
    blocks: list[str],
    mlps: list[str],
    compiled: bool,
    device: torch.device,
) -> None:
    """Recompute, feed-forwards in parts, and offload of what this rank's blocks still keep."""
    present = dict(model.named_modules())  # with pp, those of this rank's stages
    for name in blocks:
        treat(present[name], treated[name], compiled=compiled)
    tile(model, mlps=[name for name in mlps if name in present], tiles=memory.tiles)
    stay = [name for name in blocks if not treated[name].offload]
    if memory.offload is not None and not (isinstance(memory.recompute, Budget) and stay == blocks):
        # Those that stay have a place in the order, by which the others are fetched ahead.
        offload_activations(model, blocks=blocks, policy=memory.offload, keep=stay, device=device)


def _refuse_dropout(model: nn.Module, memory: MemoryPolicy, *, compiled: bool) -> None:
    """Masks are of whole microbatches, looked up outside of the graph."""
    adapters = lora_of(model)
    if adapters is not None and adapters.dropout and (memory.tiles > 1 or compiled):
        asked = "compile" if compiled else f"tiles={memory.tiles}"
        raise PlanError(
            f"{asked} with lora(dropout={adapters.dropout}): a layer would not know which tokens of the microbatch it sees. "
            f"Leave {asked.partition('=')[0]} away, or use dropout=0."
        )


def _refuse_fp8(memory: MemoryPolicy, mesh: Mesh, model: nn.Module) -> None:
    assert memory.precision is not None and memory.precision.fp8 is not None
    if lora_of(model) is not None:
        raise PlanError(
            "Precision(fp8=...) on a model with adapters: adapted layers would not multiply in fp8. Leave fp8 away."
        )
    if mesh.spec.pp > 1:
        raise PlanError(
            f"Precision(fp8=...) with pp={mesh.spec.pp}: schedules that compute weights' gradients apart do not know fp8 "
            "layers. Use pp=1, or leave fp8 away."
        )
    if memory.precision.fp8.gather and mesh.spec.tp > 1:
        raise PlanError(
            f"Fp8(gather=True) with tp={mesh.spec.tp}: a weight that is split twice would be scaled by parts. "
            "Use gather=False."
        )
    if memory.precision.fp8.gather and memory.optimizer.offload is not None:
        raise PlanError(
            "Fp8(gather=True) with an optimizer on the host: writes into the wrapped weights would not be seen by their "
            "masters. Use gather=False."
        )


def _refuse_idle_ranks(model: nn.Module, cut: Cut, ranks: int) -> None:
    """A rank of pp that trains nothing would have an optimizer without parameters."""
    trained = [name for name, param in model.named_parameters(remove_duplicate=False) if param.requires_grad]
    for rank in range(ranks):
        if not any(cut.runs(name, rank) for name in trained):
            raise PlanError(
                f"parallelize: no parameter of the stages of pp rank {rank} requires a gradient. Train something in every "
                "stage, adapters in all layers for one, or use a mesh without pp."
            )


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy without values; what is tied stays tied."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    copies: dict[int, Tensor] = {}
    for tensor in tensors:
        empty = torch.empty_like(tensor, device="meta")
        copies[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, copies)


def _refuse_meta_buffers(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise PlanError(
                f"parallelize: buffer {name!r} is on meta, and its value cannot be recovered. Build the model under "
                "`with mk.models.meta_parameters():`, which keeps buffers real."
            )


def _move(model: nn.Module, mesh: Mesh) -> None:
    """Put real parameters and buffers on the mesh's device; parameters on meta stay there until they are shards."""
    for owner in model.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[key] = buffer.to(mesh.device)
    for param in model.parameters():
        if not param.is_meta:
            param.data = param.data.to(mesh.device)


def _refuse_different_values(model: nn.Module, mesh: Mesh) -> None:
    """Sharding keeps this rank's slice of this rank's values: they must be one model. Wire: one all-reduce of sums."""
    real = {name: param for name, param in model.named_parameters() if not param.is_meta}
    if not real or mesh.spec.world_size == 1:
        return
    sums = torch.stack([param.detach().double().abs().sum() for param in real.values()])
    extremes = torch.stack([sums, -sums])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.group)
    for name, high, low in zip(real, extremes[0], -extremes[1], strict=True):
        if high != low:
            raise PlanError(
                f"parallelize: the values of {name!r} differ between ranks. Call torch.manual_seed with one seed on every "
                "rank before building the model, or build it on meta and call init_weights."
            )


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Allocate what is on meta, filled with NaN so that a forgotten initialisation is seen. Tied stays tied."""
    meta = [param for param in model.parameters() if param.is_meta]
    if not meta:
        return
    if len(meta) != len(list(model.parameters())):
        raise PlanError(
            "parallelize: some parameters are on meta and some are not. Build the whole model in one place."
        )
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in model.modules():
        for key, param in owner.named_parameters(recurse=False):
            tied.setdefault(id(param), []).append((owner, key))
    buffers = [(owner, key, buffer) for owner in model.modules() for key, buffer in owner._buffers.items()]
    model.to_empty(device=device)
    for owner, key, buffer in buffers:
        owner._buffers[key] = buffer
    for (first, first_key), *others in tied.values():
        for owner, key in others:
            owner._parameters[key] = first._parameters[first_key]
    for param in model.parameters():
        _poison(param)


def _poison(param: Tensor) -> None:
    local = local_tensor(param)
    if local.is_floating_point():
        local.fill_(torch.nan)
    elif local.dtype == torch.uint8:
        local.fill_(255)  # a frozen weight's codes: four such bytes are a scale that is not a number
