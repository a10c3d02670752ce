"""The profile of a step: stages as `resolve` cut them, messages as `explain` says, operations as they were traced."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from meshkit.mask import Mask
from meshkit.parallel.expert import in_expert_view
from meshkit.parallel.pipeline import Cut
from meshkit.parallel.shardings import ranks_between
from meshkit.preflight._moved import traced_offload
from meshkit.preflight.explain import Hierarchical, Sent, explain_microbatch, explain_step
from meshkit.preflight.forecast._profile import Call, ModelProfile, Part, Profile, StepProfile
from meshkit.preflight.forecast._update import Update
from meshkit.resolve import Resolved

OUTSIDE = ""


def step_profile(
    resolved: Resolved,
    computed: ModelProfile,
    *,
    rows: int,
    seq_len: int,
    sequences: int,
    microbatches: int,
    mask: Mask | Sequence[Mask] | None = None,
) -> StepProfile:
    """rows, seq_len: of the rank that has most, in a step; sequences: of all ranks. computed: of one of its microbatches.

    Ranks of pp that run the same kinds of blocks are explained once.
    """
    spec, cut = resolved.spec, resolved.cut
    stages: list[tuple[Part, ...]] = [()] * (1 if cut is None else cut.stages.count)
    once: dict[Call, None] = {}
    known: dict[Hashable, dict[int, tuple[Part, ...]]] = {}
    for rank in range(spec.pp):
        of_rank = [0] if cut is None else cut.stages_of(rank)
        names = {stage: _names(stage, cut, computed) for stage in of_rank}
        alike = tuple(tuple(_kind(computed, name) for name in names[stage]) for stage in of_rank)
        if alike not in known:
            sent, held = explain_step(resolved, microbatches=microbatches, coordinate={"pp": rank})
            every = [name for stage in of_rank for name in names[stage]]
            calls = _calls(resolved, rank, every, max(1, -(-rows // microbatches)), seq_len, mask)
            known[alike] = _parts(resolved, sent, held, calls, computed, names)
            once |= dict.fromkeys(_once(sent))
        for stage, parts in zip(of_rank, known[alike].values(), strict=True):
            stages[stage] = parts
    schedule = None if cut is None else cut.checked(spec.pp, microbatches).schedule
    passing = (microbatches,) if schedule is None else schedule.passing
    skipped = sum(
        (microbatches - count) * sum(_flops(computed, name) for name in _names(stage, cut, computed))
        for stage, count in enumerate(passing)
    )
    return StepProfile(
        spec=spec,
        microbatches=microbatches,
        tokens=sequences * seq_len,
        flops=(computed.flops * microbatches - skipped) * spec.dp_replicate * spec.dp_shard * spec.cp * spec.tp,
        dtype=str(resolved.compute).removeprefix("torch."),
        stages=tuple(stages),
        schedule=schedule,
        crossing=() if cut is None else _crossing(resolved, cut, rows, seq_len, microbatches),
        once=tuple(once),
        update=Update.of(resolved.memory.optimizer, stages=cut is not None),
        offload=None if traced_offload(resolved) is None else resolved.memory.offload,
        unpriced=_unpriced(resolved),
    )


def _unpriced(resolved: Resolved) -> tuple[str, ...]:
    data = resolved.strategy.data
    doings = {
        "quantizing of what travels on wires of few bits": data.gather is not None or data.reduce is not None,
    }
    return tuple(doing for doing, done in doings.items() if done)


def _names(stage: int, cut: Cut | None, computed: ModelProfile) -> list[str]:
    """The parts of a stage in the order of their calls. What runs outside of all modules belongs to the last stage."""
    blocks, around = list(computed.blocks), [name for name in computed.around if name]
    if cut is None:
        first = [name for name in around if name in computed.before]
        return [*first, *blocks, *(name for name in around if name not in first), OUTSIDE]
    own = set(cut.stages.modules_of(stage))
    last = stage == cut.stages.count - 1

    def of_stage(name: str) -> bool:
        found = cut.stages.stage_of(name)
        return found == stage or (found is None and stage == 0)

    head = [name for name in around if of_stage(name) and stage == 0 and name not in cut.stages.tail]
    tail = [name for name in around if of_stage(name) and name not in head]
    return [*head, *(name for name in blocks if name in own), *tail, *([OUTSIDE] if last else [])]


def _flops(computed: ModelProfile, name: str) -> float:
    profile = computed.blocks.get(name) or computed.around.get(name)
    return 0.0 if profile is None else profile.flops()


def _kind(computed: ModelProfile, name: str) -> Hashable:
    profile = computed.blocks.get(name)
    return name if profile is None else id(profile)


def _calls(
    resolved: Resolved,
    rank: int,
    names: Sequence[str],
    rows: int,
    seq_len: int,
    mask: Mask | Sequence[Mask] | None,
) -> Mapping[str, tuple[Call, ...]]:
    """By part what a rank of pp sends in its first microbatch. What no data axis changes is kept with the decisions."""
    key = "calls", rank, tuple(names), rows, seq_len
    if mask is None and key in resolved.derived:
        kept: Mapping[str, tuple[Call, ...]] = resolved.derived[key]
        return kept
    calls: dict[str, list[Call]] = {name: [] for name in names}
    owners: dict[str, str] = {}
    for sent in explain_microbatch(resolved, rows=rows, seq_len=seq_len, mask=mask, coordinate={"pp": rank}):
        if sent.what != "hidden states":
            calls[_owner(sent.module, names, owners)].append(_call(sent))
    alike: dict[tuple[Call, ...], tuple[Call, ...]] = {}  # equal ones are one object, by which they are priced once
    made = {name: alike.setdefault(tuple(each), tuple(each)) for name, each in calls.items()}
    if mask is None:
        resolved.derived[key] = made
    return made


def _parts(
    resolved: Resolved,
    sent: Sequence[Sent],
    held: Mapping[str, tuple[int, int]],
    calls: Mapping[str, tuple[Call, ...]],
    computed: ModelProfile,
    names: Mapping[int, Sequence[str]],
) -> dict[int, tuple[Part, ...]]:
    every = [name for stage in names.values() for name in stage]
    owners: dict[str, str] = resolved.derived.setdefault(("owners", tuple(every)), {})
    data: dict[str, list[Call]] = {name: [] for name in every}
    whole = set[tuple[str, str, Hierarchical]]()
    for each in sent:
        if each.hierarchical is not None:
            # Chunks of both hops are one collective, which is priced as a pipeline.
            call, times = each.hierarchical
            if (key := (each.module, each.phase, call)) not in whole:
                whole.add(key)
                of_unit = Call(call.across, call.op, call.size, each.phase, times, call)
                data[_owner(each.module, every, owners)].append(of_unit)
        elif each.phase != "step" and not _is_tied(each):
            data[_owner(each.module, every, owners)].append(_call(each))
    shards = _sizes(resolved, held, every, owners)
    profiles = {**computed.blocks, **computed.around}
    nothing = Profile(ops=(), launches={})
    return {
        stage: tuple(
            Part(
                name=name,
                profile=profiles.get(name, nothing),
                calls=calls[name],
                data=tuple(data[name]),
                copied_bytes=_copied_bytes(data[name]),
                trained=shards[name][0],
                grad_bytes=shards[name][1],
                is_block=name in computed.blocks,
            )
            for name in of_stage
        )
        for stage, of_stage in names.items()
    }


def _owner(module: str, names: Sequence[str], known: dict[str, str]) -> str:
    """The part that holds the module; what no part holds belongs to the last, or first, of this rank."""
    if module not in known:
        inside = next((name for name in names if name and f"{module}.".startswith(f"{name}.")), None)
        known[module] = inside if inside is not None else OUTSIDE if OUTSIDE in names else names[0]
    return known[module]


def _call(sent: Sent) -> Call:
    message = sent.message
    return Call(message.axis, message.op, message.size, sent.phase, sent.count)


def _is_tied(sent: Sent) -> bool:
    return sent.message.axis == "pp" and not sent.microbatches


def _once(sent: Sequence[Sent]) -> Iterable[Call]:
    return (_call(each) for each in sent if each.phase == "step" or _is_tied(each))


def _copied_bytes(data: Sequence[Call]) -> float:
    """FSDP copies gathered parameters out of its buffer, and gradients, in the dtype of the sum, into one."""
    return float(sum(2 * call.size * call.count for call in data if call.op in ("all_gather", "reduce_scatter")))


def _sizes(
    resolved: Resolved, held: Mapping[str, tuple[int, int]], names: Sequence[str], owners: dict[str, str]
) -> dict[str, tuple[int, float]]:
    """Of each part (elements that this rank updates, bytes of its gradients that microbatches add up)."""
    accumulates = not resolved.shardings.reduces_every_microbatch
    trained = resolved.program.trained
    sizes = dict.fromkeys(names, (0, 0.0))
    row, spec = resolved.shardings, resolved.spec
    experts = tuple(f"{name}." for name in resolved.experts) if in_expert_view(spec) else ()
    shards = {each: ranks_between(spec, "none", row.states, experts=each) for each in (False, True)}
    for name, (kept, size) in held.items():
        if name not in trained:
            continue
        owner = _owner(name, names, owners)
        elements, grad_bytes = sizes[owner]
        local = size * shards[name.startswith(experts)] if accumulates else size
        sizes[owner] = elements + kept, grad_bytes + local
    return sizes


def _crossing(resolved: Resolved, cut: Cut, rows: int, seq_len: int, microbatches: int) -> tuple[tuple[int, int], ...]:
    """Bytes between each stage and the next in one microbatch, (forward, backward)."""
    spec = resolved.spec
    tokens = -(-seq_len // spec.cp) // (spec.tp if resolved.sequence else 1)
    found = cut.message_bytes(resolved.program.model, max(1, -(-rows // microbatches)), tokens, resolved.compute)
    return tuple((sum(size for size, _ in each), sum(size for size, goes_back in each if goes_back)) for each in found)
