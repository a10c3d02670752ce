"""Resolving a strategy (planning, validation): all decisions and refusals that follow from a program, a strategy and a mesh.

`parallelize` executes a `Resolved`, `explain` prints it, `estimate`, `check` and the page build on it. So all of them refuse
the same strategies, with the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from meshkit.core import _torch
from meshkit.errors import MeshkitError, PlanError
from meshkit.lora import lora_of
from meshkit.loss.linear_logits import plan_head
from meshkit.memory import Treatment, fp8_linears, may_move, plan_fp8, refuse_mlp_chunks, refuse_treatments, treatments
from meshkit.memory.budget.choose import Choice
from meshkit.memory.budget.profile import choose_for_blocks
from meshkit.mesh import Mesh, MeshSpec
from meshkit.parallel.context import Doors, Reader, plan_context
from meshkit.parallel.data import normalises_by_rows, refuse_unshardable, whole_parameters, zero_stage
from meshkit.parallel.expert import ExpertLayout, in_expert_view, plan_experts, refuse_sequence_balance
from meshkit.parallel.parameter_hooks import refuse_hooks
from meshkit.parallel.pipeline import Cut, check, plan_pipeline
from meshkit.parallel.tensor.derive import derive_plan
from meshkit.parallel.tensor.layout import TensorLayout, refuse_whole_stream, tensor_layout, widest_heads
from meshkit.parallel.tensor.proof import prove_layout
from meshkit.parallel.tensor.regather import refuse_without_sequence
from meshkit.plan import Plan, match_names, match_table
from meshkit.plan.auto import auto_plan
from meshkit.program import Example, Program, ReadingError, example_of
from meshkit.strategy import BlockOverride, Budget, Fp8, MemoryPolicy, Recompute, Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class Resolved:
    """The decisions for every rank. Names are those of the single-device model.

    program: the model before anything is split, on a copy without values. strategy: as it was given; the other fields follow
    from it. blocks, units, mlps: modules that the plan names. zero: the ZeRO stage. sequence: whether the residual stream is
    sharded along the sequence. compute: the dtype of matrix products. fp8: linear layers that multiply in fp8. head: the
    output head, with a chunked loss; else None. layout: of parameters and calls on tp; None without tp. reading: how
    attention reaches over the ranks of cp. experts: modules of routed experts. cut: the pipeline stages; None without pp.
    treatments: for each block, what it keeps for backward and where. choices: what a `Budget` chose, on each rank of pp;
    empty without one.
    """

    program: Program
    strategy: Strategy
    spec: MeshSpec
    plan: Plan
    blocks: tuple[str, ...]
    units: tuple[str, ...]
    mlps: tuple[str, ...]
    zero: int
    sequence: bool
    compute: torch.dtype
    fp8: tuple[str, ...]
    head: str | None
    layout: TensorLayout | None
    reading: tuple[Reader, Doors]
    experts: Mapping[str, ExpertLayout]
    cut: Cut | None
    treatments: Mapping[str, Treatment]
    choices: tuple[Choice, ...]
    example: Example | None

    @property
    def memory(self) -> MemoryPolicy:
        return self.strategy.memory

    @cached_property
    def whole(self) -> frozenset[str]:
        """Parameters that every data rank keeps whole, under all of their names; those of experts have ranks of their own."""
        params = dict(self.program.model.named_parameters(remove_duplicate=False))
        inside = tuple(f"{name}." for name in self.experts)
        return frozenset(name for name in whole_parameters(params) if not name.startswith(inside))

    def regathers(self, pp_rank: int) -> bool:
        """Whether tensor-parallel regions of that rank of pp keep sharded inputs, all of them or those of some block."""
        blocks = (self.treatments[name] for name in self.blocks_of(pp_rank))
        return self.sequence and (self.memory.regather or any(each.regather for each in blocks))

    @cached_property
    def heads(self) -> tuple[int, int, int] | None:
        """(query heads, key/value heads, head_dim) on the rank of tp that has most heads."""
        return widest_heads(self.program.model, self.plan.tensor, size=self.spec.tp)

    @property
    def sequence_multiple(self) -> int:
        """The number of tokens of a rank of cp is a multiple of this."""
        return self.spec.tp if self.sequence else 1

    def refuse_tokens(self, seq_len: int) -> None:
        """Raises: PlanError for rows whose tokens the ranks of tp cannot share evenly. With cp rows are padded."""
        if self.spec.cp == 1 and seq_len % self.sequence_multiple:
            raise PlanError(
                f"seq_len={seq_len} with sequence=True: the {self.spec.tp} ranks of tp cannot share {seq_len} tokens evenly. "
                f"Pad rows to a multiple of {self.spec.tp}, or use sequence=False."
            )

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes weight gradients separately from input gradients (zero bubble)."""
        return self.cut is not None and self.cut.splits_backward

    def runs(self, name: str, pp_rank: int) -> bool:
        """Whether that rank of pp runs the module, or holds the parameter."""
        return self.cut is None or self.cut.runs(name, pp_rank)

    def blocks_of(self, pp_rank: int) -> list[str]:
        return self._in_one_stage(self.blocks, pp_rank)

    def units_of(self, pp_rank: int) -> list[str]:
        return self._in_one_stage(self.units, pp_rank)

    def _in_one_stage(self, names: Sequence[str], pp_rank: int) -> list[str]:
        """The names of modules that are inside of one stage of that rank. Modules cut by stages belong to the root unit."""
        if self.cut is None:
            return list(names)
        stages = self.cut.stages
        present = {name for stage in self.cut.stages_of(pp_rank) for name in stages.modules_of(stage)}
        return [name for name in names if name in present]

    def experts_of(self, pp_rank: int) -> list[str]:
        """Modules of experts that are sharded over other ranks than the rest of the model."""
        return [name for name in self.experts if in_expert_view(self.spec) and self.runs(name, pp_rank)]

    def choice_of(self, pp_rank: int) -> Choice | None:
        """What a `Budget` chose for that rank of pp; `str()` is a table. None without a budget."""
        # Without pp there is one choice, of all ranks.
        return self.choices[pp_rank if len(self.choices) > 1 else 0] if self.choices else None


def resolve(
    program: Program, strategy: Strategy, spec: MeshSpec, *, device_type: str = "cpu", proved: Plan | None = None
) -> Resolved:
    """Decide everything about the model on the mesh; changes nothing. Pure: the same on every rank.

    spec: without a -1. device_type: "cuda" or "cpu", the device of the run: a `Budget` prices its kernels. proved: the plan,
    where another rank has proved it already, which takes seconds.
    Raises: PlanError for a strategy of another mesh, and for whatever cannot run as it was asked for, with what to change;
    Unproved for a plan on tp that is not shown to compute what one device computes.
    """
    # The order of refusals: first those that read the strategy alone, then those that match names, then those that lay out
    # tensors, and a `Budget`, which runs blocks on fake tensors for seconds, last. So what is wrong is told at once, and with
    # several things wrong the text is about the simplest.
    _refuse_other_mesh(strategy, spec)
    _refuse_without_pp(strategy, spec)
    names = _name_modules(program, strategy, proved)
    _refuse_without_blocks(strategy, names.blocks)
    _refuse_meta(program)
    _refuse_complex(program)
    refuse_hooks(program.model, offloaded=strategy.memory.optimizer.offload is not None)
    _refuse_batch_norm(program, spec)
    _refuse_backend(strategy.compile)
    _refuse_dropout(program, strategy.memory, compiled=bool(strategy.compile))
    strategy.memory.optimizer.refuse_misfit({name: param.dtype for name, param in program.parameters.items()})

    compute, fp8 = _plan_products(program, strategy, spec, names, device_type)
    refuse_without_sequence(regather=strategy.memory.regather, sequence=strategy.sequence)
    sequence = strategy.sequence and spec.tp > 1
    if sequence and strategy.plan is not None:
        refuse_whole_stream(program.model, names.plan.tensor)
    example = _example(program, spec) if spec.tp > 1 else None
    if proved is None and example is not None:
        plan = _prove(program, names, spec, example, sequence=sequence, auto=strategy.plan is None)
        names = replace(names, plan=plan)
    if sequence:  # of a derived plan
        refuse_whole_stream(program.model, names.plan.tensor)
    zero = zero_stage(strategy.zero, pipelined=spec.pp > 1)
    head = _plan_head(program, strategy, spec, names, sequence=sequence, device_type=device_type)
    cut = _plan_cut(program, strategy, spec, names, example)
    layout = _tensor_layout(program, names.plan, spec, sequence=sequence)
    experts = plan_experts(program.model, names.plan.tensor, strategy.experts, ep=spec.ep, etp=spec.etp, tp=spec.tp)
    reading = plan_context(
        program,
        strategy.context,
        size=spec.cp,
        attention=names.plan.attention,
        closed=dict.fromkeys(experts, "experts"),
    )
    refuse_sequence_balance(program.model, cp=spec.cp)

    choices = _choose(
        program, strategy, spec, names, fp8=fp8, sequence=sequence, compute=compute, device=device_type, cut=cut
    )
    treated = _treatments(strategy, names, choices)
    refuse_treatments(treated, program.modules)
    refuse_mlp_chunks(
        strategy.memory,
        mlps=names.mlps,
        experts=experts,
        units=[*names.blocks, *names.units],
        treated=treated,
        compiled=bool(strategy.compile),
        splits_backward=cut is not None and cut.splits_backward,
    )
    resolved = Resolved(
        program=program,
        strategy=strategy,
        spec=spec,
        **vars(names),
        zero=zero,
        sequence=sequence,
        compute=compute,
        fp8=tuple(fp8),
        head=head,
        layout=layout,
        reading=reading,
        experts=experts,
        cut=cut,
        treatments=treated,
        choices=tuple(choices),
        example=example,
    )
    _refuse_unshardable(resolved)
    return resolved


@dataclass(frozen=True)
class _Names:
    """The plan, and the modules of the model that it names."""

    plan: Plan
    blocks: tuple[str, ...]
    units: tuple[str, ...]
    mlps: tuple[str, ...]


def _name_modules(program: Program, strategy: Strategy, proved: Plan | None) -> _Names:
    plan = proved or strategy.plan or auto_plan(program.model)
    blocks, units, mlps = (
        tuple(match_names(patterns, program.modules, what="module"))
        for patterns in (plan.blocks, plan.units, plan.mlps)
    )
    return _Names(plan, blocks, units, mlps)


def _plan_products(
    program: Program, strategy: Strategy, spec: MeshSpec, names: _Names, device_type: str
) -> tuple[torch.dtype, Sequence[str]]:
    """The dtype of matrix products, and the linear layers that multiply in fp8."""
    precision = strategy.memory.precision
    if precision is None:
        return program.dtype, []
    if precision.fp8 is None:
        return precision.compute, []
    _refuse_fp8(precision.fp8, program, strategy.memory, spec)
    fp8 = plan_fp8(program.model, blocks=names.blocks, policy=precision.fp8, device_type=device_type, tp=spec.tp)
    return precision.compute, fp8


def _plan_head(
    program: Program, strategy: Strategy, spec: MeshSpec, names: _Names, *, sequence: bool, device_type: str
) -> str | None:
    loss = strategy.memory.loss
    if loss is None:
        return None
    return plan_head(program.model, names.plan, loss, tp=spec.tp, sequence=sequence, device_type=device_type)


def _plan_cut(
    program: Program, strategy: Strategy, spec: MeshSpec, names: _Names, example: Example | None
) -> Cut | None:
    """The pipeline stages. With the number of microbatches known, its table is checked too: else the first step does it."""
    if spec.pp == 1:
        return None
    policy = strategy.pipeline
    cut = plan_pipeline(
        program.model,
        spec.pp,
        blocks=names.blocks,
        schedule=policy.schedule,
        split=policy.stages,
        example=program.example,
        read=program.read(example, {}) if example is not None else None,
    )
    _refuse_idle_ranks(program, cut, spec.pp)
    if strategy.microbatches is not None:
        check(cut.generate(spec.pp, strategy.microbatches))
    return cut


def _tensor_layout(program: Program, plan: Plan, spec: MeshSpec, *, sequence: bool) -> TensorLayout | None:
    if spec.tp > 1:
        return tensor_layout(program.model, plan.tensor, size=spec.tp, sequence=sequence)
    # Nothing to lay out, but a typo in the plan shows without tp too.
    match_table(plan.tensor, dict(program.model.named_modules(remove_duplicate=False)), what="module")
    return None


def _example(program: Program, spec: MeshSpec) -> Example | None:
    """By what the program is read. None where nothing is known that the forward takes: the first forward shows it then.

    Raises: PlanError for an example that was given and does not run.
    """
    example = program.example or example_of(program.model, multiple=4 * spec.tp)
    if example is None:
        return None
    try:
        program.read(example, {})
    except ReadingError as error:
        if program.example is None:
            return None
        raise PlanError(
            f"parallelize(example=...): the model does not run on it: {error}. Give the arguments of its forward, by name."
        ) from error
    return example


def _prove(program: Program, names: _Names, spec: MeshSpec, example: Example, *, sequence: bool, auto: bool) -> Plan:
    """The plan, proved on an axis of tp. auto: what is unproved of a derived plan is split otherwise, or left whole."""

    def proved(layout: TensorLayout) -> None:
        prove_layout(program, layout, example, blocks=names.blocks)

    if auto:
        return derive_plan(program, names.plan, example, proved, size=spec.tp, sequence=sequence)
    proved(tensor_layout(program.model, names.plan.tensor, size=spec.tp, sequence=sequence))
    return names.plan


def resolve_together(program: Program, strategy: Strategy, mesh: Mesh) -> Resolved:
    """`resolve` on every rank of the mesh. A plan on tp is proved by the first rank alone, and the others are told.

    Wire: on tp, a broadcast of the plan.
    """

    def resolved(proved: Plan | None) -> Resolved:
        return resolve(program, strategy, mesh.spec, device_type=mesh.device.type, proved=proved)

    if mesh.spec.tp == 1 or _torch.is_fake_group(mesh.group):
        return resolved(None)
    own: Resolved | None = None
    told: list[Plan | MeshkitError | None] = [None]
    if dist.get_rank(mesh.group) == 0:
        # The refusal travels too: the others would wait for a rank that has raised.
        try:
            own = resolved(None)
            told = [own.plan]
        except MeshkitError as error:
            told = [error]
    dist.broadcast_object_list(told, group=mesh.group, group_src=0, device=mesh.device)
    if isinstance(told[0], MeshkitError):
        raise told[0]
    return own or resolved(told[0])


# ------------------------------------------------------------------------------------------ what blocks do for memory


def _choose(
    program: Program,
    strategy: Strategy,
    spec: MeshSpec,
    names: _Names,
    *,
    fp8: Sequence[str],
    sequence: bool,
    compute: torch.dtype,
    device: str,
    cut: Cut | None,
) -> Sequence[Choice]:
    """What a `Budget` chooses, on each rank of pp; nothing without one."""
    if not isinstance(strategy.memory.recompute, Budget):
        return ()
    precision = strategy.memory.precision
    return choose_for_blocks(
        _priced(program, fp8, precision.fp8 if precision is not None else None),
        spec,
        plan=names.plan,
        memory=strategy.memory,
        blocks=names.blocks,
        sequence=sequence,
        compute=compute,
        device=device,
        cut=cut,
    )


def _priced(program: Program, fp8: Sequence[str], policy: Fp8 | None) -> torch.nn.Module:
    """The model whose blocks a `Budget` prices, with the linear layers that the run will have (fp8)."""
    if not fp8 or policy is None:
        return program.model
    # On a copy: resolve changes nothing, and `parallelize` changes the linears of the real model itself.
    copy = program.frozen().model
    fp8_linears(copy, linears=fp8, policy=policy)
    return copy


def _treatments(strategy: Strategy, names: _Names, choices: Sequence[Choice]) -> dict[str, Treatment]:
    """What each block keeps for backward: as the budget chose, or as the policy says, with the overrides put in."""
    if isinstance(strategy.memory.recompute, Budget):
        if strategy.overrides:
            raise PlanError(
                "Strategy(overrides=...) with a Budget: the budget chooses for every block. Leave one of them away."
            )
        return {name: treatment for choice in choices for name, treatment in choice.treatments.items()}
    # Of all blocks, not of one stage's: `every` and `keep_last` count over the full model.
    treated = treatments(strategy.memory, names.blocks)
    overridden = match_table(strategy.overrides, treated, what="block")
    treated |= {name: _overridden(name, treated, override, strategy.memory) for name, override in overridden.items()}
    _refuse_idle_offload(strategy.memory, treated)
    return treated


def _overridden(
    name: str, treated: Mapping[str, Treatment], override: BlockOverride, memory: MemoryPolicy
) -> Treatment:
    """The block's treatment with its override put in. Raises: PlanError for an offload that the block cannot have."""
    treatment = treated[name]
    if override.recompute is not None:
        # every=1: a block that is named is treated, whatever its place in a run of `every` blocks.
        mode = override.recompute
        chosen = Recompute(mode=mode) if isinstance(mode, str) else replace(mode, every=1)
        treatment = replace(treatment, recompute=chosen)
    if override.offload is None:
        return treatment
    if override.offload and memory.offload is None:
        raise PlanError(
            f"overrides: {name!r} offload=True, but nothing says where to. Give "
            "MemoryPolicy(offload=ActivationOffload()) too."
        )
    if override.offload and name not in may_move(memory, list(treated)):
        raise PlanError(
            f"overrides: {name!r} offload=True, but ActivationOffload(keep_last=...) keeps it. Give a smaller keep_last."
        )
    return replace(treatment, offload=override.offload)


# --------------------------------------------------------------------------------------------------------- refusals


def _refuse_other_mesh(strategy: Strategy, spec: MeshSpec) -> None:
    wanted = strategy.mesh  # an axis of -1 fits any size, as in `init_mesh`
    if isinstance(wanted, MeshSpec) and any(
        size not in (-1, getattr(spec, axis)) for axis, size in vars(wanted).items()
    ):
        raise PlanError(
            f"the strategy is for the mesh {_short(wanted)}, but this one is {_short(spec)}. Use "
            "init_mesh(strategy.mesh), or a strategy without mesh."
        )


def _refuse_without_pp(strategy: Strategy, spec: MeshSpec) -> None:
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


def _refuse_without_blocks(strategy: Strategy, blocks: Sequence[str]) -> None:
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


def _refuse_idle_offload(memory: MemoryPolicy, treated: Mapping[str, Treatment]) -> None:
    """See [Note: choices without effect]."""
    if memory.offload is not None and not any(treatment.offload for treatment in treated.values()):
        raise PlanError(
            f"ActivationOffload(keep_last={memory.offload.keep_last}) keeps all of the {len(treated)} blocks that are not "
            "overridden, so nothing is offloaded. Give a smaller keep_last, or leave offload away."
        )


def _refuse_complex(program: Program) -> None:
    """Reductions, gradient norms and AdamW are of real numbers."""
    for name, param in program.parameters.items():
        if param.is_complex():
            raise PlanError(
                f"parallelize: parameter {name!r} is {str(param.dtype).removeprefix('torch.')}, and gradients are reduced "
                "and clipped as real numbers. Keep it as real ones (torch.view_as_real), and make it complex in forward."
            )


def _refuse_batch_norm(program: Program, spec: MeshSpec) -> None:
    """In training, BatchNorm normalises by the rows that it is given: here those of one rank and one microbatch."""
    if spec.dp_replicate * spec.dp_shard * spec.cp * spec.pp == 1:
        return
    for name, module in program.modules.items():
        if normalises_by_rows(module):
            raise PlanError(
                f"parallelize: {name!r} is a {type(module).__name__} in training mode, which normalises by the rows of one "
                "rank and microbatch instead of all. Use nn.GroupNorm or nn.LayerNorm, freeze it by .eval() if it has "
                "running statistics, or with dp on GPUs nn.SyncBatchNorm.convert_sync_batchnorm(model)."
            )


def _refuse_unshardable(resolved: Resolved) -> None:
    """What `fully_shard` would refuse on some rank, told by all ranks and before anything is changed."""
    program, spec = resolved.program, resolved.spec
    # One rank on the data axes shards nothing, unless FSDP is there for its mixed precision, or for experts.
    sharded = spec.dp_replicate * spec.dp_shard * spec.cp > 1 or resolved.memory.precision is not None
    params = dict(program.model.named_parameters(remove_duplicate=False))
    for rank in range(spec.pp):
        experts = resolved.experts_of(rank)
        if sharded or (experts and spec.edp > 1):
            local = {name: param for name, param in params.items() if resolved.runs(name, rank)}
            local = {name: param for name, param in local.items() if name not in resolved.whole}
            refuse_unshardable(local, [*experts, *resolved.blocks_of(rank), *resolved.units_of(rank)])


def _short(spec: MeshSpec) -> str:
    return " ".join(f"{axis}={size}" for axis, size in vars(spec).items() if size != 1) or "of one rank"


def _refuse_meta(program: Program) -> None:
    # A parameter on meta gets its value from `init_weights` or a checkpoint. A buffer (rotary frequencies, a causal mask) was
    # computed by the constructor, which nobody can run again.
    for name, buffer in program.model.named_buffers():
        if buffer.is_meta:
            raise PlanError(
                f"parallelize: buffer {name!r} is on meta, and its value cannot be recovered. Build the model under "
                "`with mk.models.meta_parameters():`, which keeps buffers real."
            )


def _refuse_backend(asked: bool | str) -> None:
    # torch.compile refuses it too, but when half of the model is changed. exclude_tags=(): backends for debugging as well.
    if isinstance(asked, str) and asked not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise PlanError(
            f"compile={asked!r} is no backend of torch.compile. Use True, which is inductor, or one of {', '.join(known)}."
        )


def _refuse_dropout(program: Program, memory: MemoryPolicy, *, compiled: bool) -> None:
    """Dropout on adapters looks up the masks of a full microbatch: chunks and compiled graphs do not know their tokens."""
    adapters = lora_of(program.model)
    if adapters is not None and adapters.dropout and (memory.mlp_chunks > 1 or compiled):
        asked = "compile" if compiled else f"mlp_chunks={memory.mlp_chunks}"
        raise PlanError(
            f"{asked} with lora(dropout={adapters.dropout}): a layer would not know which tokens of the microbatch it sees. "
            f"Leave {asked.partition('=')[0]} away, or use dropout=0."
        )


def _refuse_fp8(policy: Fp8, program: Program, memory: MemoryPolicy, spec: MeshSpec) -> None:
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


def _refuse_idle_ranks(program: Program, cut: Cut, ranks: int) -> None:
    """A rank of pp that trains nothing would have an optimizer without parameters."""
    # `trained` has tied parameters under each of their names: a head that is the embedding trains on the last rank too.
    for rank in range(ranks):
        if not any(cut.runs(name, rank) for name in program.trained):
            raise PlanError(
                f"parallelize: no parameter of the stages of pp rank {rank} requires a gradient. Train something in every "
                "stage, adapters in all layers for one, or use a mesh without pp."
            )
