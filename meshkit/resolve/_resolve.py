"""Resolving a strategy (planning, validation): all decisions that follow from a program, a strategy and a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

import torch

from meshkit.core.uncollected import uncollected
from meshkit.errors import PlanError
from meshkit.lora import lora_of, with_adapters, without_adapters
from meshkit.loss.linear_logits import plan_head
from meshkit.memory import plan_fp8, refuse_mixed_tokens, refuse_mlp_chunks, refuse_treatments
from meshkit.mesh import MeshSpec
from meshkit.parallel.context import Doors, plan_context, refuse_counted, refuse_whole_tokens
from meshkit.parallel.expert import plan_experts, refuse_sequence_balance
from meshkit.parallel.other_calls import refuse_other_calls
from meshkit.parallel.parameter_hooks import refuse_hooks
from meshkit.parallel.pipeline import (
    Cut,
    Staged,
    generator_of,
    place_stages,
    refuse_more_stages,
    stage_model,
)
from meshkit.parallel.pipeline.schedules import NAMES
from meshkit.parallel.rows import of_rows, refuse_mixed_rows
from meshkit.parallel.shardings import shardings_of
from meshkit.parallel.state_writes import refuse_of_microbatches
from meshkit.parallel.tensor.derive import derive_plan
from meshkit.parallel.tensor.layout import TensorLayout, refuse_whole_stream, tensor_layout
from meshkit.parallel.tensor.proof import closed_of, prove_layout
from meshkit.parallel.tensor.regather import refuse_without_sequence
from meshkit.parallel.tensor.replicate import replicate_unproved
from meshkit.parallel.writes import refuse_writes
from meshkit.plan import Plan, match_table
from meshkit.program import Example, Program, ReadingError, Unproved, example_of, outline, with_positions
from meshkit.resolve._names import Names, name_modules
from meshkit.resolve._once import once
from meshkit.resolve._refusals import (
    refuse_backend,
    refuse_batch_norm,
    refuse_compiled,
    refuse_complex,
    refuse_dropout,
    refuse_fp8,
    refuse_fp8_shards,
    refuse_idle_ranks,
    refuse_meta,
    refuse_other_mesh,
    refuse_pointers,
    refuse_units,
    refuse_wires,
    refuse_without_blocks,
    refuse_without_pp,
    refuse_writes_of_state,
)
from meshkit.resolve._resolved import Resolved
from meshkit.resolve._treatments import choose, treat_blocks
from meshkit.strategy import Strategy


@uncollected()
def resolve(program: Program, strategy: Strategy, spec: MeshSpec, *, device_type: str = "cpu") -> Resolved:
    """Decide everything about the model on the mesh; changes nothing. Pure: the same on every rank.

    spec: without a -1. device_type: "cuda" or "cpu", the device of the run: a `Budget` prices its kernels.
    Raises: PlanError for a strategy of another mesh, and for whatever cannot run as it was asked for, with what to change;
    Unproved for a plan on tp that is not shown to compute what one device computes.
    """
    # The order of refusals: first those that read the strategy alone, then those that match names, then those that lay out
    # tensors, and a `Budget`, which runs blocks on fake tensors for seconds, last. So what is wrong is told at once, and with
    # several things wrong the text is about the simplest.
    refuse_other_mesh(strategy, spec)
    refuse_compiled(program, spec)
    refuse_without_pp(strategy, spec)
    names = once(program, ("names", strategy.plan), lambda: name_modules(program, strategy.plan))
    refuse_without_blocks(strategy, names.blocks)
    if spec.pp > 1 and names.blocks and strategy.pipeline.stages is None and strategy.pipeline.schedule in NAMES:
        refuse_more_stages(names.blocks, _stages_of(strategy.pipeline.schedule, spec.pp))
    refuse_meta(program)
    refuse_pointers(program, spec)
    refuse_complex(program)
    refuse_hooks(program.model, offloaded=strategy.memory.optimizer.offload is not None)
    refuse_batch_norm(program, spec, strategy.microbatches or 1)
    refuse_backend(strategy.compile, spec)
    refuse_dropout(program, strategy.memory, compiled=bool(strategy.compile))
    strategy.memory.optimizer.refuse_misfit({name: param.dtype for name, param in program.parameters.items()})

    compute, fp8 = _plan_products(program, strategy, spec, names, device_type)
    refuse_without_sequence(regather=strategy.memory.regather, sequence=strategy.sequence)
    sequence = strategy.sequence and spec.tp > 1
    if sequence and strategy.plan is not None:
        refuse_whole_stream(program.model, names.plan.tensor)
    example = _example(program, spec) if spec.tp > 1 else None
    if example is not None:
        plan = once(
            program,
            ("proved", strategy.plan, strategy.unproved, spec.tp, spec.cp > 1, sequence),
            lambda: _prove(program, names, strategy, spec, example, sequence=sequence, auto=strategy.plan is None),
        )
        names = replace(names, plan=plan)
    experts = plan_experts(program.model, names.plan.tensor, strategy.experts, ep=spec.ep, etp=spec.etp, tp=spec.tp)
    closed = dict.fromkeys(experts, "experts")  # which sort tokens, and are proved apart
    given = example or program.example or example_of(program.model)
    ranks, rows = spec.pp * spec.dp_replicate * spec.dp_shard > 1, None
    if given is not None and (ranks or (strategy.microbatches or 1) > 1):
        read = refuse_mixed_rows(
            program,
            given,
            blocks=names.blocks,
            closed=closed,
            ranks=ranks,
            first=lambda read: None if ranks else refuse_of_microbatches(read, strategy.microbatches or 1),
        )
        rows = given if read else None
    if sequence:  # of a derived plan
        refuse_whole_stream(program.model, names.plan.tensor)
    refuse_wires(strategy)
    shardings = shardings_of(strategy, spec)
    head = _plan_head(program, strategy, spec, names, sequence=sequence, device_type=device_type)
    cut = _plan_cut(program, strategy, spec, names, example, closed)
    layout = once(
        program,
        ("layout", names.plan, spec.tp, sequence),
        lambda: _tensor_layout(program, names.plan, spec, sequence=sequence),
    )

    def refuse_doors(doors: Doors) -> None:
        if sequence:
            refuse_whole_tokens(doors)
        refuse_counted(doors, sequence=sequence, compiled=bool(strategy.compile), tp=spec.tp)

    reading = plan_context(
        program,
        strategy.context,
        size=spec.cp,
        attention=names.plan.attention,
        closed=closed,
        unproved=strategy.unproved,
        blocks=names.blocks or None,
        fits=refuse_doors,
    )
    refuse_sequence_balance(program.model, cp=spec.cp)

    choices = choose(
        program, strategy, spec, names, fp8=fp8, sequence=sequence, compute=compute, device=device_type, cut=cut
    )
    treated = treat_blocks(strategy, names, choices)
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
    if strategy.memory.mlp_chunks > 1:
        _prove_chunks(program, names, given, closed, strategy.memory.mlp_chunks)
    resolved = Resolved(
        program=program,
        strategy=strategy,
        spec=spec,
        **vars(names),
        shardings=shardings,
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
        outline=None if example is None or layout is None else _outline(program, example, layout),
        rows=rows,
    )
    refuse_units(resolved)
    refuse_writes_of_state(resolved)
    if given is not None and spec.pp * spec.tp * spec.cp == 1:  # where such a forward is not refused anyway
        refuse_other_calls(
            program,
            given,
            closed=closed,
            repeated=resolved.repeated,
            microbatches=strategy.microbatches or 1,
        )
    return resolved


def _plan_products(
    program: Program, strategy: Strategy, spec: MeshSpec, names: Names, device_type: str
) -> tuple[torch.dtype, Sequence[str]]:
    """The dtype of matrix products, and the linear layers that multiply in fp8."""
    precision = strategy.memory.precision
    if precision is None:
        return program.dtype, []
    if precision.fp8 is None:
        return precision.compute, []
    refuse_fp8(precision.fp8, program, strategy.memory, spec)
    fp8 = plan_fp8(program.model, blocks=names.blocks, policy=precision.fp8, device_type=device_type, tp=spec.tp)
    refuse_fp8_shards(precision.fp8, program, fp8, spec)
    return precision.compute, fp8


def _plan_head(
    program: Program, strategy: Strategy, spec: MeshSpec, names: Names, *, sequence: bool, device_type: str
) -> str | None:
    loss = strategy.memory.loss
    if loss is None:
        return None
    return plan_head(program.model, names.plan, loss, tp=spec.tp, sequence=sequence, device_type=device_type)


def _plan_cut(
    program: Program,
    strategy: Strategy,
    spec: MeshSpec,
    names: Names,
    example: Example | None,
    closed: Mapping[str, str],
) -> Cut | None:
    """The pipeline stages. With the number of microbatches known, its table is checked too: else the first step does it."""
    if spec.pp == 1:
        return None
    policy = strategy.pipeline
    read = None
    if (given := example or program.example or example_of(program.model)) is not None:
        try:
            read = program.read(given, closed)
        except ReadingError:
            if program.example is not None:
                raise  # else it takes something else

    read_with = frozenset(closed), spec.tp, spec.cp > 1

    def staged(count: int) -> Staged:
        return once(
            program,
            ("stages", count, policy.stages, names.blocks, read_with),
            lambda: stage_model(
                program.model,
                count,
                blocks=names.blocks,
                split=policy.stages,
                example=program.example,
                closed=closed,
                read=read,
            ),
        )

    cut = place_stages(staged, spec.pp, policy.schedule)
    refuse_idle_ranks(program, cut, spec.pp)
    if strategy.microbatches is not None:
        cut.checked(spec.pp, strategy.microbatches)
    return cut


def _stages_of(schedule: str, ranks: int) -> int:
    """Each rank has as many as one rank alone would have; a table of thousands of ranks takes seconds."""
    return ranks * _stages_of_rank(schedule)


@lru_cache
def _stages_of_rank(schedule: str) -> int:
    return generator_of(schedule)(1, 2).stages


def _prove_chunks(
    program: Program, names: Names, given: Example | None, closed: Mapping[str, str], chunks: int
) -> None:
    def prove() -> None:
        read = None
        if given is not None:
            with suppress(PlanError):  # of a model that cannot be read the feed-forwards may be
                read = program.read(of_rows(given, 2), closed)  # as rows were looked at
        refuse_mixed_tokens(program.modules, read, mlps=names.mlps, chunks=chunks)

    once(program, ("tokens of mlps", tuple(names.mlps), chunks), prove)


def _outline(program: Program, example: Example, layout: TensorLayout) -> str:
    closed = closed_of(layout)
    key = "outline", example.key, tuple(closed.items())
    return once(program, key, lambda: outline(program.read(example, closed)))


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
    if spec.cp > 1 and program.example is None:  # whose ranks say which tokens they have
        example = with_positions(program.model, example)
    try:
        once(program, ("writes", example.key), lambda: refuse_writes(program.read(example, {}), program.model))
    except ReadingError as error:
        if program.example is None:
            return None
        raise PlanError(
            f"parallelize(example=...): the model does not run on it: {error}. Give the arguments of its forward, by name."
        ) from error
    return example


def _prove(
    program: Program,
    names: Names,
    strategy: Strategy,
    spec: MeshSpec,
    example: Example,
    *,
    sequence: bool,
    auto: bool,
) -> Plan:
    """The plan, proved on an axis of tp. auto: what is unproved of a derived plan is split otherwise, or left whole."""

    def proved(layout: TensorLayout) -> None:
        prove_layout(program, layout, example, blocks=names.blocks)

    if auto and lora_of(program.model) is not None:
        # Adapters are split as their layers are: what these are is derived without them, and the whole is proved.
        bare = Program(without_adapters(program.model), program.example)
        plan = _prove(bare, name_modules(bare, None), strategy, spec, example, sequence=sequence, auto=True)
        plan = with_adapters(plan, program.model)
        proved(tensor_layout(program.model, plan.tensor, size=spec.tp, sequence=sequence))
        return plan
    if auto:
        try:
            return derive_plan(program, names.plan, example, proved, size=spec.tp, sequence=sequence)
        except Unproved as error:
            change = "sequence=False" if sequence else f"tp=1 instead of tp={spec.tp}, or a plan of your own"
            text = f"{error} No derived plan of {type(program.model).__name__} is proved. Use {change}."
            raise Unproved(text, error.module, error.before) from error
    if strategy.unproved == "replicate":
        return replicate_unproved(program, names.plan, proved, size=spec.tp, sequence=sequence)
    try:
        proved(tensor_layout(program.model, names.plan.tensor, size=spec.tp, sequence=sequence))
    except Unproved as error:
        text = f"{error} Change the plan there, or leave such modules whole with unproved='replicate'."
        raise Unproved(text, error.module, error.before) from error
    return names.plan
