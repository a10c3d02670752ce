"""compose: the peak of every pipeline rank in milliseconds, of blocks that were traced once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from torch import nn

from meshkit.errors import MeshkitError
from meshkit.mask import Mask
from meshkit.parallel.data import kept_units
from meshkit.parallel.expert import in_expert_view
from meshkit.parallel.pipeline import Cut
from meshkit.parallel.shardings import hierarchical_ranks, hops_between, ranks_between
from meshkit.preflight._inner import inner_mesh
from meshkit.preflight._moved import traced_offload
from meshkit.preflight._thin import alike_blocks, kinds_of_blocks
from meshkit.preflight.estimate._composed import Composed, ComposedRank
from meshkit.preflight.estimate._estimate import CUDA_GRANULE, Kernels, estimate
from meshkit.preflight.estimate._exactness import not_composed, within
from meshkit.preflight.estimate._fsdp import Buffers
from meshkit.preflight.estimate._moving import Moved, Moving, in_memory, most_stored, moved_of, waiting_of
from meshkit.preflight.estimate._parts import Parts, parts_of, units_around
from meshkit.preflight.estimate._replay import Swing, Treated, replay
from meshkit.preflight.estimate._step_trace import StepTrace, trace_step
from meshkit.preflight.estimate._template import Item, Template, Unlike, chunk_of, template
from meshkit.preflight.estimate._timeline import Timeline, device_bytes
from meshkit.preflight.estimate._tracker import GROUPS, HOST
from meshkit.preflight.estimate._units import UnitBytes, unit_bytes
from meshkit.preflight.estimate._walk import Crossing, Rank, Walk
from meshkit.preflight.explain import LocalParam
from meshkit.resolve import Resolved
from meshkit.step import Loss, next_token_loss
from meshkit.strategy import OptimizerPolicy

PARAMETERS, MOMENTS = GROUPS.index("parameters"), GROUPS.index("optimizer state")


@dataclass(eq=False)
class _Traced:
    """A template, its kinds of blocks, what each block was like, and what was replayed of it already."""

    template: Template
    kinds: Mapping[str, str]
    parts: Parts
    alike: Mapping[str, Hashable]
    swings: dict[tuple[int, Treated, frozenset[int]], tuple[Swing, Swing | None]] = field(default_factory=dict)

    @cached_property
    def inside(self) -> frozenset[int]:
        """Chunks of blocks."""
        rows = (*self.template.blocks.values(), *self.template.blocks_backward.values())
        return frozenset(item.index for items in rows for item in items)

    @cached_property
    def moved(self) -> dict[str, Moved]:
        return moved_of(self.template)

    def replayed(self, item: Item, treated: Treated, stays: frozenset[int] = frozenset()) -> tuple[Swing, Swing | None]:
        key = item.index, treated, stays
        if key not in self.swings:
            if item.index in self.inside:
                stays |= self.template.shared
            self.swings[key] = replay(self.template.trace, chunk_of(self.template, item), treated, stays)
        return self.swings[key]


class MemoryProfiles:
    """What was traced of models already, for many calls of `compose` about the same ones. The models may not change.

    Strategies that differ in dp, zero, pp, the schedule or the number of microbatches of equal size trace nothing again.
    """

    def __init__(self) -> None:
        self._traced: dict[Hashable, _Traced | MeshkitError] = {}
        self._kinds: dict[Hashable, Mapping[str, str]] = {}
        self._crossing: dict[Hashable, dict[int, Crossing]] = {}
        self._kept: list[object] = []  # whose ids are in keys

    def __len__(self) -> int:
        return len(self._traced)

    def kinds(self, resolved: Resolved) -> Mapping[str, str]:
        key = id(resolved.program.model), tuple(resolved.treatments.items())
        if key not in self._kinds:
            self._kinds[key] = kinds_of_blocks(resolved.program.model, resolved.blocks, resolved.treatments)
            self._kept.append(resolved.program)
        return self._kinds[key]

    def of(
        self,
        resolved: Resolved,
        *,
        rows: int,
        seq_len: int,
        mask: Mask | Sequence[Mask] | None,
        loss: Loss,
        kernels: Kernels,
    ) -> _Traced:
        """Of one microbatch. Raises: Unlike for a model whose blocks do not run in a row."""
        strategy, kinds, alike = resolved.strategy, self.kinds(resolved), alike_blocks(resolved)
        memory = replace(
            strategy.memory, recompute="none", offload=traced_offload(resolved), optimizer=OptimizerPolicy()
        )
        key: Hashable = (
            id(resolved.program.model),
            inner_mesh(resolved.spec),
            frozenset(alike.values()),
            repr((strategy.plan, strategy.context, strategy.experts, memory)),
            (resolved.sequence, resolved.compute, rows, seq_len, id(mask), loss, kernels),
            () if resolved.cut is None else resolved.cut.tied,
        )
        exact = key, tuple(resolved.treatments.items())
        if key not in self._traced and exact not in self._traced:
            self._kept.append((resolved.program, mask))
            try:
                traced = _trace(resolved, kinds, rows, seq_len, mask, loss, kernels)
                # Blocks that are known by their numbers are each of a kind of their own.
                self._traced[key if traced.kinds == kinds else exact] = traced
            except Unlike as error:
                self._traced[key] = error
        found = self._traced.get(exact) or self._traced[key]
        if isinstance(found, MeshkitError):
            raise found
        if exact in self._traced or found.kinds == kinds:
            return found
        # Other blocks of the same kinds are treated so.
        of_kinds = {found.alike[name]: kind for name, kind in found.kinds.items()}
        return replace(found, kinds={name: of_kinds[kind] for name, kind in alike.items()})

    def crossing(self, resolved: Resolved, cut: Cut, *, rows: int, tokens: int, granule: int) -> dict[int, Crossing]:
        """By the stage that receives."""
        key = id(resolved.program.model), cut.stages, cut.width, rows, tokens, resolved.compute, granule
        if key not in self._crossing:
            sizes = cut.message_bytes(resolved.program.model, rows, tokens, resolved.compute)
            self._crossing[key] = {
                stage: Crossing(
                    sum(_rounded(size, granule) for size, _ in each),
                    sum(_rounded(size, granule) for size, goes_back in each if goes_back),
                )
                for stage, each in enumerate(sizes, start=1)
            }
        return self._crossing[key]


def _rounded(size: int, granule: int) -> int:
    return -(-size // granule) * granule


def _trace(
    resolved: Resolved,
    kinds: Mapping[str, str],
    rows: int,
    seq_len: int,
    mask: Mask | Sequence[Mask] | None,
    loss: Loss,
    kernels: Kernels,
) -> _Traced:
    # Stages of a pipeline use tied parameters each in a backward of its own, as if they were two.
    tied = () if resolved.cut is None else resolved.cut.tied

    def traced(kinds: Mapping[str, str]) -> StepTrace:
        return trace_step(resolved, kinds, tied=tied, rows=rows, seq_len=seq_len, mask=mask, loss=loss, kernels=kernels)

    try:
        trace = traced(kinds)
    except (MeshkitError, LookupError, RuntimeError):
        # A model that knows its blocks by their numbers, or a plan that does, needs all of them.
        kinds = {name: name for name in kinds}
        trace = traced(kinds)
    return _Traced(template(trace, set(kinds.values())), kinds, parts_of(resolved, kinds), alike_blocks(resolved))


def compose(
    resolved: Resolved,
    *,
    rows: int,
    seq_len: int,
    microbatches: int | None = None,
    profiles: MemoryProfiles | None = None,
    mask: Mask | Sequence[Mask] | None = None,
    loss: Loss = next_token_loss,
    kernels: Kernels = "cuda",
) -> Composed:
    """Peak bytes of every rank of pp in an optimizer step of `parallelize(model, mesh, strategy)` with `adamw`.

    resolved: the strategy on its mesh, by `resolve`. rows, seq_len: a rank's [rows, seq_len] part of the step's batch, of the
    rank that has most, before cp splits it. microbatches: default the strategy's, or 1. profiles: kept between calls, which
    then take milliseconds. mask, loss, kernels: as `estimate` and `forecast` take them.
    Law: within 0.5 % of the peak of `estimate`; within 1.5 % for a split backward on tp, and 3 % for experts on ranks of
    their own under a row of `DataPolicy`, and 10 % on torch before 2.15; `Composed.within` says which.
    An optimizer other than AdamW in fp32, fp8, quantized wires, a tied parameter of two stages of one
    rank with a split backward, and models whose blocks do not run in a row are traced whole, for seconds, and the result
    says why.
    Raises: as `estimate` does.
    """
    count = microbatches or resolved.strategy.microbatches or 1
    kept = MemoryProfiles() if profiles is None else profiles
    resolved.refuse_tokens(seq_len)
    why = not_composed(resolved)
    if not why:
        try:
            traced = kept.of(
                resolved, rows=max(1, -(-rows // count)), seq_len=seq_len, mask=mask, loss=loss, kernels=kernels
            )
            return _compose(resolved, kept, traced, rows, seq_len, count, kernels)
        except Unlike as error:
            why = str(error)
    return _by_estimate(resolved, rows, seq_len, count, loss, kernels, why=why)


def kept_of_blocks(
    resolved: Resolved,
    *,
    rows: int,
    seq_len: int,
    profiles: MemoryProfiles,
    loss: Loss = next_token_loss,
    kernels: Kernels = "cuda",
) -> dict[str, tuple[int, int, int]] | None:
    """For each block (bytes that a microbatch of [rows, seq_len] keeps from its forward to its backward, those that a split
    backward leaves until W, the most that backward, or I, holds at a time beside them), without gradients that were there
    before; for "" the most that the head and the loss hold at a time, and nothing. None for what is not composed.
    Raises: as `compose`.
    """
    resolved.refuse_tokens(seq_len)
    if not_composed(resolved):
        return None
    traced = profiles.of(resolved, rows=rows, seq_len=seq_len, mask=None, loss=loss, kernels=kernels)
    template = traced.template
    whole = Treated(kept="reduced", experts_kept="reduced", experts=(), widened=1)
    split = replace(whole, split=_splittable(resolved, traced.parts))

    def net_and_top(items: Sequence[Item], treated: Treated) -> tuple[int, int]:
        """Bytes that are left after the items, and the most that there were meanwhile."""
        now = top = 0
        for item in items:
            swing, _ = traced.replayed(item, treated)
            now, top = now + swing.net, max(top, now + swing.rise)
        return now, top

    sizes = {}
    for kind in template.blocks:
        kept, _ = net_and_top(template.blocks[kind], whole)
        backward = template.blocks_backward.get(kind, ())
        left, _ = net_and_top(backward, split)
        added = (replace(each, kept="added", experts_kept="added") for each in (whole, split))
        rise = min(net_and_top(backward, each)[1] for each in added)
        waits = kept + left if split.split else 0
        sizes[kind] = kept, min(max(waits, 0), kept), rise
    _, top = net_and_top(
        (*template.after, *template.after_backward), replace(whole, kept="added", experts_kept="added")
    )
    return {name: sizes[kind] for name, kind in traced.kinds.items()} | {"": (top, 0, 0)}


def _compose(
    resolved: Resolved,
    profiles: MemoryProfiles,
    traced: _Traced,
    rows: int,
    seq_len: int,
    microbatches: int,
    kernels: Kernels,
) -> Composed:
    spec, cut = resolved.spec, resolved.cut
    granule = CUDA_GRANULE if kernels == "cuda" else 1
    checked = None if cut is None else cut.checked(spec.pp, microbatches)
    if checked is not None and 0 in checked.schedule.passing:
        raise Unlike("a stage that no microbatch passes has no gradients, and so no state of the optimizer")
    crossing: dict[int, Crossing] = {}
    if cut is not None:
        tokens = -(-seq_len // spec.cp) // (spec.tp if resolved.sequence else 1)
        crossing = profiles.crossing(
            resolved, cut, rows=max(1, -(-rows // microbatches)), tokens=tokens, granule=granule
        )
    ranks = []
    for pp_rank in range(spec.pp):
        walk = _walk(resolved, traced, pp_rank, granule, late=kernels == "cuda")
        live = 1
        if checked is None:
            walk.microbatches(microbatches)
        else:
            walk.pipeline(checked.schedule, pp_rank, crossing)
            live = checked.peak_live[pp_rank]
        totals, where, owner = walk.timeline.peak()
        kind = traced.kinds.get(owner, owner)
        stored = {
            stage: sum(each.stored_bytes for _, kind in blocks if (each := traced.moved.get(kind)) is not None)
            for stage, blocks in walk.rank.stages.items()
        }
        away = most_stored(None if checked is None else checked.schedule, pp_rank, stored)
        ranks.append(
            ComposedRank(
                pp_rank=pp_rank,
                peak_bytes=device_bytes(totals),
                where=where.replace(kind, owner) if kind else where,
                at_peak=dict(zip(GROUPS, totals, strict=True)) | {GROUPS[HOST]: away},
                live=live,
                offloaded_bytes=away,
                host_bytes=in_memory(resolved, away),
            )
        )
    return Composed(spec=spec, ranks=tuple(ranks), source="composed", within=within(resolved))


def _walk(resolved: Resolved, traced: _Traced, pp_rank: int, granule: int, *, late: bool) -> Walk:
    spec, cut, parts, kinds = resolved.spec, resolved.cut, traced.parts, traced.kinds
    precision, row = resolved.memory.precision, resolved.shardings
    sharded = spec.dp_replicate * spec.dp_shard * spec.cp > 1 or precision is not None
    in_view = in_expert_view(spec) and bool(resolved.experts_of(pp_rank))
    experts_sharded = in_view and (spec.dp_replicate * spec.edp > 1 or precision is not None)
    if experts_sharded:  # FSDP's root is there, so it takes the rest as well
        sharded = True
    of_stages = {0: list(kinds)} if cut is None else {s: list(cut.stages.blocks[s]) for s in cut.stages_of(pp_rank)}
    # Those that do not run are held, and get neither gradients nor moments.
    idle = {name for name, kind in kinds.items() if not traced.template.blocks[kind]}
    blocks = [name for stage in of_stages.values() for name in stage]
    last = None if cut is None else cut.stages.count - 1
    if any(idle.issuperset(names) for stage, names in of_stages.items() if stage != last or not stage):
        raise Unlike("compose: no block of a stage before the last runs.")

    policy = resolved.strategy.data

    def bytes_of(params: Sequence[LocalParam], is_sharded: bool, *, experts: bool = False) -> UnitBytes:
        nodes = hierarchical_ranks(row, spec, experts=experts) if policy.is_hierarchical else None
        return unit_bytes(
            params,
            shards=ranks_between(spec, "none", row.states, experts=experts),
            gathers=hops_between(spec, row.parameters, row.states, experts=experts),
            reduces=hops_between(spec, row.gradients, row.states, experts=experts),
            sharded=is_sharded,
            precision=precision,
            granule=granule,
            nodes=None if nodes is None else (*nodes, policy.chunk_bytes),
        )

    around = [each for each in parts.around if cut is None or cut.runs(each[0], pp_rank)]
    units: dict[str, UnitBytes] = {}
    plain: list[UnitBytes] = []
    experts_of: dict[str, list[str]] = {}
    root_params: list[LocalParam] = []
    by_kind = {}
    buffers = sum(
        _rounded(size, granule) for name, size in parts.around_buffers if cut is None or cut.runs(name, pp_rank)
    )
    for name in blocks:
        kind = kinds[name]
        part = parts.blocks[kind]
        if kind not in by_kind:
            by_kind[kind] = (
                bytes_of(part.own, sharded and part.is_unit),
                {
                    key.removeprefix(f"{kind}."): bytes_of(params, experts_sharded, experts=True)
                    for key, params in part.experts.items()
                },
                sum(_rounded(size, granule) for size in part.buffer_bytes),
            )
        own, experts, buffer_bytes = by_kind[kind]
        buffers += buffer_bytes
        if name in idle:
            own, experts = replace(own, moments=0), {key: replace(each, moments=0) for key, each in experts.items()}
        if own.sharded:
            units[name] = own
        elif sharded:
            root_params += part.own
        else:
            plain.append(own)
        for key, found in experts.items():
            if found.sharded:
                units[f"{name}.{key}"] = found
                experts_of.setdefault(name, []).append(f"{name}.{key}")
            else:
                plain.append(found)
    for name, params in units_around(around, resolved.units_of(pp_rank)).items():
        found = bytes_of([*params, *(root_params if not name else [])], sharded)
        if found.sharded:
            units[name] = found
        else:
            plain.append(found)
    totals = [0] * len(GROUPS)
    totals[PARAMETERS] = buffers + sum(each.params for each in (*units.values(), *plain))
    totals[MOMENTS] = sum(each.moments for each in (*units.values(), *plain))
    timeline, split = Timeline(tuple(totals)), _split(resolved, parts)
    kept = kept_units(blocks, [name for name in resolved.units_of(pp_rank) if name in units], resolved.head)
    kept |= {inner for name in kept for inner in experts_of.get(name, ())}
    ahead: dict[str, list[str]] = {}
    behind: dict[str, list[str]] = {}
    if experts_of and cut is None:
        every = [[each for each in (name, *experts_of.get(name, ())) if each in units] for name in blocks]
        for before, after in pairwise(every):
            if before and after:
                ahead[before[0]], behind[after[0]] = after, before
    return Walk(
        rank=Rank(
            stages={
                stage: [(name, kinds[name]) for name in names if name not in idle] for stage, names in of_stages.items()
            },
            count=1 if cut is None else cut.stages.count,
            shardings=row,
            sharded=sharded,
            experts_sharded=experts_sharded,
            experts=tuple(f"{name}." for name in resolved.experts) if in_view else (),
            experts_of=experts_of,
            only_hidden=cut is None or cut.width is not None,
            widened=_widened(resolved),
            second=frozenset() if cut is None or cut.copied else frozenset(name for name, _ in cut.tied),
            split=split,
        ),
        template=traced.template,
        replayed=traced.replayed,
        timeline=timeline,
        buffers=Buffers(
            timeline=timeline,
            units=units,
            frees=row.frees_parameters,
            kept=frozenset(kept),
            replicas=spec.dp_replicate * spec.dp_shard * spec.cp > ranks_between(spec, "none", row.states),
            ahead=ahead,
            behind=behind,
            idle=not idle.isdisjoint(units),
        ),
        moving=Moving(
            timeline=timeline,
            moved=traced.moved,
            waiting=waiting_of(traced.template, traced.moved, split),
            ahead=1 if resolved.memory.offload is None else resolved.memory.offload.ahead,
            late=late,
        ),
    )


def _split(resolved: Resolved, parts: Parts) -> frozenset[str]:
    """Weights whose gradients wait for W: not that of a chunked head, nor those of compiled blocks."""
    return _splittable(resolved, parts) if resolved.splits_backward else frozenset()


def _splittable(resolved: Resolved, parts: Parts) -> frozenset[str]:
    if resolved.strategy.compile:
        return frozenset()
    return parts.linears - ({f"{resolved.head}.weight"} if resolved.memory.loss is not None else set())


def _widened(resolved: Resolved) -> int:
    """Bytes of an accumulated gradient for each byte of a fresh one."""
    precision = resolved.memory.precision
    return 1 if precision is None else max(1, precision.reduce.itemsize // precision.compute.itemsize)


def _by_estimate(
    resolved: Resolved, rows: int, seq_len: int, microbatches: int, loss: Loss, kernels: Kernels, *, why: str
) -> Composed:
    model: nn.Module = resolved.program.model
    ranks = []
    for pp_rank in range(resolved.spec.pp):
        found = estimate(
            model,
            resolved.spec,
            resolved.strategy,
            rows=rows,
            seq_len=seq_len,
            microbatches=microbatches,
            coordinate={"pp": pp_rank},
            kernels=kernels,
            loss=loss,
        )
        ranks.append(
            ComposedRank(
                pp_rank=pp_rank,
                peak_bytes=found.peak_bytes,
                where=found.where,
                at_peak=found.at_peak,
                offloaded_bytes=found.offloaded_bytes,
                host_bytes=found.host_bytes - found.offloaded_bytes + in_memory(resolved, found.offloaded_bytes),
            )
        )
    return Composed(spec=resolved.spec, ranks=tuple(ranks), source="traced", why=why, within=0.0)
