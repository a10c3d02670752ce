"""Pricing strategies of one model, batch and cluster: each is resolved, composed and forecast once."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cached_property
from math import ceil
from typing import Any, TypeVar

from torch import nn

from meshkit.cluster import Cluster
from meshkit.errors import MeshkitError, PlanError
from meshkit.memory import Treatment
from meshkit.mesh import MeshSpec
from meshkit.parallel.pipeline import Cut
from meshkit.preflight._inner import inner_mesh
from meshkit.preflight._thin import thin_program
from meshkit.preflight.estimate import Composed, MemoryProfiles, compose, kept_of_blocks
from meshkit.preflight.explain import explain_step
from meshkit.preflight.forecast import (
    Batch,
    Call,
    Forecast,
    ModelProfile,
    Part,
    Prices,
    Profile,
    Profiles,
    StepProfile,
    profile_step,
)
from meshkit.preflight.placement import Placed, best_placed
from meshkit.preflight.search._ahead import Ahead, Task
from meshkit.preflight.search._bounds import Gathers, Microbatch, Seconds, Stages
from meshkit.preflight.search._goal import Goal, cost
from meshkit.preflight.search._held import Alive, Elements, Kept, Shares, alive_of
from meshkit.preflight.search._host import fits_host
from meshkit.preflight.search._result import Tried
from meshkit.program import Program, ReadingError, example_of
from meshkit.resolve import Resolved, resolve_alike
from meshkit.step import Loss
from meshkit.strategy import BlockOverride, DataPolicy, PipelinePolicy, Strategy

Made = TypeVar("Made")
Treatments = tuple[tuple[str, Treatment], ...]
NOTHING = Profile(ops=(), launches={})
KEPT = 64  # resolved strategies and profiles; of thousands they would not fit


class Pricing:
    """processes: how many trace, this one among them."""

    def __init__(
        self, model: nn.Module, cluster: Cluster, batch: Batch, loss: Loss, goal: Goal, processes: int = 1
    ) -> None:
        # Bounds are made of the best device and links there are; what is unlike is slower, and placed for each strategy.
        self.model, self.unlike, self.cluster = model, cluster, replace(cluster, unlike=None)
        self.batch, self.loss, self.goal = batch, loss, goal
        self.profiles, self.memory = Profiles(), MemoryProfiles()
        self.program = self.profiles.program_of(model)
        self._resolved: OrderedDict[str, Resolved] = OrderedDict()
        self._profiles: OrderedDict[str, StepProfile] = OrderedDict()
        self._placed: OrderedDict[str, Placed] = OrderedDict()
        self._peaks: dict[str, Composed] = {}
        self._tried: dict[str, Tried] = {}
        self._traced: dict[Hashable, tuple[Treatments, ModelProfile]] = {}
        self._microbatches: dict[Hashable, Microbatch | None] = {}
        self._cuts: dict[Hashable, Cut | MeshkitError | None] = {}
        self._stages: dict[Hashable, Stages | None] = {}
        self._elements: dict[Hashable, Elements | None] = {}
        self._kept: dict[Hashable, Kept | None] = {}
        self._gathers: dict[Hashable, Gathers] = {}
        self._alive: dict[Hashable, Alive | None] = {}
        self.ahead = Ahead(self._serve, processes - 1)

    # ------------------------------------------------------------------------------------------------- exactly

    def resolved(self, strategy: Strategy) -> Resolved:
        def made() -> Resolved:
            kernels = self.cluster.device.kernels
            return resolve_alike(self._program(strategy), strategy, strategy.mesh_for(), device_type=kernels)

        return _kept(self._resolved, repr(strategy), made)

    def profile(self, strategy: Strategy) -> StepProfile:
        def made() -> StepProfile:
            return self._profiled(self.resolved(strategy), self.batch, strategy)

        return _kept(self._profiles, repr(strategy), made)

    def forecast(self, strategy: Strategy) -> Forecast:
        return self.placed(strategy).forecast

    def placed(self, strategy: Strategy) -> Placed:
        """On the best order of ranks; of alike ones it is theirs."""
        return _kept(self._placed, repr(strategy), lambda: best_placed(strategy, self.unlike, self.profile, self.peak))

    def tried(self, strategy: Strategy) -> Tried:
        key = repr(strategy)
        if key not in self._tried:
            placed = self.placed(strategy)
            self._tried[key] = Tried(
                strategy=placed.strategy,
                forecast=placed.forecast,
                memory=self.peak(placed.strategy),
                cost=cost(self.goal, placed.forecast),
            )
        return self._tried[key]

    def peak(self, strategy: Strategy) -> Composed:
        key = repr(strategy)
        if key not in self._peaks:
            resolved = self.resolved(strategy)
            _refuse_skips(resolved)
            self._peaks[key] = compose(
                resolved,
                rows=self.batch.rows(resolved.spec),
                seq_len=self.batch.seq_len,
                microbatches=strategy.microbatches,
                profiles=self.memory,
                loss=self.loss,
                kernels=self.cluster.device.kernels,
            )
        return self._peaks[key]

    def fits(self, strategy: Strategy, device_bytes: int | None) -> bool:
        """On the device, and on the hosts of nodes."""
        peak = self.peak(strategy)
        return (device_bytes is None or peak.peak_bytes <= device_bytes) and fits_host(peak, self.cluster)

    def _program(self, strategy: Strategy) -> Program:
        """With cp the model is read with the positions of each rank's tokens, else for all sizes of tp once."""
        return self.program if strategy.mesh_for().cp > 1 else self._read_once

    @cached_property
    def _read_once(self) -> Program:
        example = self.program.example or example_of(self.model, multiple=4 * self.cluster.tiers[0].ranks)
        if example is None:
            return self.program
        program = Program(self.model, example)
        try:
            program.read(example, {})
        except (ReadingError, MeshkitError):
            return self.program  # it takes something else, or fewer tokens
        return program

    def _profiled(self, resolved: Resolved, batch: Batch, strategy: Strategy) -> StepProfile:
        rows = ceil(batch.rows(resolved.spec) / (strategy.microbatches or 1))
        key, treatments = (self.family(strategy), rows), tuple(resolved.treatments.items())
        if not self._is_known("traced", key) or self._traced[key][0] != treatments:
            self._traced[key] = self._trace(resolved, rows)
        return profile_step(
            resolved,
            batch,
            microbatches=strategy.microbatches or 1,
            loss=self.loss,
            kernels=self.cluster.device.kernels,
            profiles=self.profiles,
            computed=self._traced[key][1],
        )

    # ------------------------------------------------------------------------------------------ by other processes

    @property
    def _shared(self) -> dict[str, dict[Hashable, Any]]:
        """What was traced, as far as one process may tell another."""
        return {"traced": self._traced, "microbatch": self._microbatches, "kept": self._kept}

    def _serve(self, task: Task) -> dict[Hashable, Any]:
        """In another process: what it learns of a task."""
        self.ahead = Ahead(self._serve, 0)
        before = {name: set(known) for name, known in self._shared.items()}
        getattr(self, task.method)(*task.arguments)
        return {(name, key): known[key] for name, known in self._shared.items() for key in known.keys() - before[name]}

    def _is_known(self, name: str, key: Hashable) -> bool:
        """Here, or by a process that was asked for it."""
        known = self._shared[name]
        if key not in known and self.ahead.take((name, key)):
            known[key] = self.ahead.found.pop((name, key))
        return key in known

    def task_of_whole(self, strategy: Strategy, rows: int, ep: int) -> Task:
        """The bytes of a rank that splits nothing."""
        return Task(("kept", self._key_of_whole(strategy, rows, ep)), "kept_whole", (strategy, rows, ep))

    def tasks_of(self, strategy: Strategy, rows: int, *, kept: bool) -> list[Task]:
        """Seconds of its microbatch of so many rows, and with `kept` its bytes, as far as they are not known."""
        key = self.family(strategy), rows
        names = ("microbatch", "kept") if kept else ("microbatch",)
        return [Task((name, key), name, (strategy, rows)) for name in names if key not in self._shared[name]]

    # -------------------------------------------------------------------------------------- what bounds are made of

    def rows(self, strategy: Strategy) -> int:
        """Of a microbatch of the rank that has most."""
        return ceil(self.batch.rows(strategy.mesh_for()) / (strategy.microbatches or 1))

    def family(self, strategy: Strategy) -> Hashable:
        """What an operator of one microbatch depends on beside its rows."""
        spec = strategy.mesh_for()
        inner = spec.cp, spec.tp, spec.ep, spec.etp
        return inner, strategy.sequence, recompute_of(strategy), strategy.memory.offload, strategy.context.scheme

    def is_traced(self, strategy: Strategy) -> bool:
        """Seconds and bytes of its microbatch, so that its price takes milliseconds."""
        key = self.family(strategy), self.rows(strategy)
        return self._is_known("microbatch", key) and self._is_known("kept", key)

    def _alone(self, strategy: Strategy) -> Strategy:
        """One stage and one replica of it, without the rest of the mesh."""
        return replace(
            strategy,
            mesh=inner_mesh(strategy.mesh_for()),
            zero=None,
            data=DataPolicy(),
            microbatches=1,
            pipeline=PipelinePolicy(),
        )

    def _whole(self, strategy: Strategy, ep: int) -> Strategy:
        """Of one rank that splits no operator; experts apart, of which each then has the most tokens."""
        return replace(self._alone(strategy), mesh=inner_mesh(MeshSpec(ep=ep)), sequence=False)

    def whole(self, strategy: Strategy, rows: int, ep: int) -> Microbatch | None:
        """Seconds of kernels of one microbatch on a rank that splits none: where tp and cp do, each takes its share at least.

        ep: the largest of the space. None where that is refused.
        """
        key = "whole", recompute_of(strategy), rows, ep
        if not self._is_known("microbatch", key):
            self._microbatches[key] = None
            try:
                found = self._computed(strategy, rows, ep)
            except MeshkitError:
                return None
            prices = Prices(self.cluster, MeshSpec())
            blocks, around = (
                {name: Seconds.of(prices.part(Part(name=name, profile=profile))) for name, profile in each.items()}
                for each in (found.blocks, found.around)
            )
            self._microbatches[key] = Microbatch(blocks, around)
        return self._microbatches[key]

    def _computed(self, strategy: Strategy, rows: int, ep: int) -> ModelProfile:
        key = "whole", recompute_of(strategy), rows, ep
        if not self._is_known("traced", key):
            self._traced[key] = self._trace(self.resolved(self._whole(_resident(strategy), ep)), rows)
        return self._traced[key][1]

    def _trace(self, resolved: Resolved, rows: int) -> tuple[Treatments, ModelProfile]:
        traced = self.profiles.of(
            resolved, rows=rows, seq_len=self.batch.seq_len, loss=self.loss, kernels=self.cluster.device.kernels
        )
        return tuple(resolved.treatments.items()), traced

    def sent(self, strategy: Strategy, rows: int, ep: int) -> Microbatch | None:
        """The same with the messages that block kernels, which the strategy's own resolution says; nothing is traced."""
        key = "sent", self.family(strategy), rows, ep
        if key not in self._microbatches:
            try:
                self._microbatches[key] = self._sent(strategy, rows, ep)
            except MeshkitError:
                self._microbatches[key] = None
        return self._microbatches[key]

    def _sent(self, strategy: Strategy, rows: int, ep: int) -> Microbatch | None:
        """On a copy with one block of each kind: what a block sends depends on no other."""
        whole = self.whole(strategy, rows, ep)
        if whole is None:
            return None
        alone = self._alone(strategy)
        spec, kinds, resolved = alone.mesh_for(), *self._thin(alone, ep)
        computed = self._computed(strategy, rows, ep)
        profile = profile_step(
            resolved,
            Batch(sequences=rows * spec.dp_shard, seq_len=self.batch.seq_len),
            microbatches=1,
            loss=self.loss,
            profiles=self.profiles,
            computed=replace(computed, blocks={name: computed.blocks[name] for name in resolved.blocks}),
        )
        prices, share = Prices(self.cluster, spec), 1 / (spec.cp * spec.tp)
        known = {**whole.blocks, **whole.around}
        seconds = {}
        for part in profile.stages[0]:
            calls = tuple(call for call in part.calls if not call.is_beside)
            messages = Seconds.of(prices.part(Part(name=part.name, profile=NOTHING, calls=calls)))
            seconds[part.name] = Seconds.sum([known.get(part.name, Seconds()).part(share), messages])
        return Microbatch(
            blocks={name: seconds[kinds[name]] for name in whole.blocks},
            around={name: each for name, each in seconds.items() if name not in whole.blocks},
        )

    def _thin(self, strategy: Strategy, ep: int) -> tuple[Mapping[str, str], Resolved]:
        """(block -> the first that is like it, the strategy for a model of those). Each is treated as in the whole."""
        strategy = _resident(strategy)
        one = self.resolved(self._whole(strategy, ep))
        kinds = self.memory.kinds(one)
        program = thin_program(one, kinds, "sent", lambda model: None)
        overrides = {name: BlockOverride(recompute=one.treatments[name].recompute) for name in kinds.values()}
        thin = replace(strategy, memory=replace(strategy.memory, recompute="none"), overrides=overrides)
        return kinds, resolve_alike(program, thin, thin.mesh_for(), device_type=self.cluster.device.kernels)

    def gathers(self, strategy: Strategy, ep: int) -> Gathers:
        """What FSDP sends in a step without pp, but what it gathers again in backward for modules around the blocks."""
        key = strategy.mesh_for(), strategy.zero, strategy.data
        if key not in self._gathers:
            # Neither how activations lie nor what is recomputed changes them, and all microbatches send the same.
            plain = replace(strategy, sequence=False, microbatches=2, memory=replace(strategy.memory, recompute="none"))
            try:
                self._gathers[key] = self._gathered(plain, ep)
            except MeshkitError:
                self._gathers[key] = Gathers()
        return self._gathers[key]

    def _gathered(self, strategy: Strategy, ep: int) -> Gathers:
        kinds, resolved = self._thin(strategy, ep)
        blocks, alike = list(kinds), Counter(kinds.values())
        again = resolved.shardings.frees_parameters and len(self.program.trained) >= len(self.program.parameters)
        prices = Prices(self.cluster, strategy.mesh_for())
        each: defaultdict[str, float] = defaultdict(float)
        once: defaultdict[str, float] = defaultdict(float)
        for sent in explain_step(resolved, microbatches=2)[0]:
            kind = next((name for name in alike if f"{sent.module}.".startswith(f"{name}.")), "")
            if sent.phase == "step":
                continue
            call = Call(sent.message.axis, sent.message.op, sent.message.size, sent.phase, 1)
            seconds = prices.call_s(call) * (alike[kind] if kind else 1)
            of = each if sent.count == 2 else once
            if (call.op, call.phase) != ("all_gather", "backward"):
                of[call.phase] += seconds
            if again and kind and of is each and (call.op, call.phase) == ("all_gather", "forward"):
                # All blocks are gathered again but the last, which the thin model has in another place.
                of["backward"] += seconds - (prices.call_s(call) if kinds[blocks[-1]] == kind else 0.0)
        return Gathers(each["forward"], each["backward"], once["forward"], once["backward"])

    def microbatch(self, strategy: Strategy, rows: int) -> Microbatch | None:
        """Seconds of the parts of one microbatch of so many rows; None where it is refused without the rest of its mesh."""
        key = self.family(strategy), rows
        if not self._is_known("microbatch", key):
            try:
                self._microbatches[key] = self._microbatch(self._alone(strategy), rows)
            except MeshkitError:
                self._microbatches[key] = None
        return self._microbatches[key]

    def _microbatch(self, alone: Strategy, rows: int) -> Microbatch:
        spec = alone.mesh_for()
        batch = Batch(sequences=rows * spec.dp_shard, seq_len=self.batch.seq_len)
        resolved = self.resolved(alone)
        profile = self._profiled(resolved, batch, alone)
        prices = Prices(self.cluster, spec)
        parts = {part.name: Seconds.of(prices.part(part)) for part in profile.stages[0]}
        blocks = set(resolved.blocks)
        return Microbatch(
            blocks={name: seconds for name, seconds in parts.items() if name in blocks},
            around={name: seconds for name, seconds in parts.items() if name not in blocks},
        )

    def cut(self, strategy: Strategy) -> Cut | None:
        """The stages of any strategy with that many ranks of pp and that schedule; None without pp, and where refused."""
        cut = self._cut_or_refusal(strategy)
        return None if isinstance(cut, MeshkitError) else cut

    def stages(self, strategy: Strategy) -> Stages | None:
        """The strategy's own, where it says how many blocks each has."""
        key = strategy.mesh_for().pp, strategy.pipeline.schedule, strategy.pipeline.stages
        if key not in self._stages:
            cut = self.cut(strategy)
            self._stages[key] = None if cut is None else Stages.of(cut, strategy.pipeline.stages)
        return self._stages[key]

    def refusal(self, strategy: Strategy) -> MeshkitError | None:
        """Of every strategy with that many ranks of pp and that schedule: one that has nothing else is refused."""
        cut = self._cut_or_refusal(strategy)
        return cut if isinstance(cut, MeshkitError) else None

    def _cut_or_refusal(self, strategy: Strategy) -> Cut | MeshkitError | None:
        spec = strategy.mesh_for()
        key = spec.pp, strategy.pipeline.schedule
        if key not in self._cuts:
            plain = replace(
                strategy,
                mesh=MeshSpec(pp=spec.pp),
                zero=None,
                data=DataPolicy(),
                microbatches=None,
                sequence=False,
                pipeline=replace(strategy.pipeline, stages=None),
                memory=replace(strategy.memory, recompute="none"),
            )
            try:
                self._cuts[key] = None if spec.pp == 1 else self.resolved(_resident(plain)).cut
            except MeshkitError as error:
                self._cuts[key] = error.with_traceback(None)
        return self._cuts[key]

    def alive(self, strategy: Strategy, microbatches: int) -> Alive | None:
        """Of the strategy's table with so many microbatches; None without pp, and where there is none."""
        ranks = strategy.mesh_for().pp
        key = ranks, strategy.pipeline.schedule, microbatches
        if key not in self._alive:
            cut = self.cut(strategy)
            self._alive[key] = None if cut is None else alive_of(cut, ranks, microbatches)
        return self._alive[key]

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an element of the first parameter."""
        return next(iter(self.program.parameters.values())).element_size()

    def padding_bytes(self, strategy: Strategy) -> int:
        """At most what all parameters are padded by, so that as many ranks share them evenly: once gathered, once reduced; in
        two hops, each of these three times.
        """
        shards = Shares.of(strategy, strategy.mesh_for()).states
        return (
            (6 if strategy.data.shards else 2)
            * self.itemsize
            * sum(-rows % shards * width for rows, width in self._sizes)
        )

    @cached_property
    def _sizes(self) -> list[tuple[int, int]]:
        """(rows, elements of a row) of all parameters."""
        return [
            (len(each), each.numel() // len(each))
            for each in self.program.parameters.values()
            if each.ndim * each.numel()
        ]

    def elements(self, strategy: Strategy) -> Elements | None:
        """Of the parameters that train, as tp and experts split them at most; None where one rank alone is refused."""
        spec = strategy.mesh_for()
        key = spec.tp, spec.ep, spec.etp
        if key not in self._elements:
            try:
                one = replace(self._alone(_resident(strategy)), mesh=MeshSpec(), sequence=False)
                self._elements[key] = Elements.of(self.resolved(one), spec)
            except MeshkitError:
                self._elements[key] = None
        return self._elements[key]

    def kept_whole(self, strategy: Strategy, rows: int, ep: int) -> Kept | None:
        """What `kept` returns, on a rank that splits nothing."""
        return self._kept_of(self._key_of_whole(strategy, rows, ep), lambda: self._whole(strategy, ep), rows)

    def _key_of_whole(self, strategy: Strategy, rows: int, ep: int) -> Hashable:
        return "whole", recompute_of(strategy), strategy.memory.offload, rows, ep

    def kept(self, strategy: Strategy, rows: int) -> Kept | None:
        """Of one microbatch of so many rows, for each block: bytes kept from its forward to its backward, those of them that
        wait on for W, and what backward holds beside. None where they are not composed.
        """
        return self._kept_of((self.family(strategy), rows), lambda: self._alone(strategy), rows)

    def _kept_of(self, key: Hashable, alone: Callable[[], Strategy], rows: int) -> Kept | None:
        if not self._is_known("kept", key):
            try:
                sizes = kept_of_blocks(
                    self.resolved(alone()),
                    rows=rows,
                    seq_len=self.batch.seq_len,
                    profiles=self.memory,
                    loss=self.loss,
                    kernels=self.cluster.device.kernels,
                )
                self._kept[key] = None if sizes is None else Kept.of(sizes)
            except MeshkitError:
                self._kept[key] = None
        return self._kept[key]


def _resident(strategy: Strategy) -> Strategy:
    """With activations on the device: what they are computed and sent in is the same, and no block refuses it."""
    if strategy.memory.offload is None:
        return strategy
    overrides = {
        name: replace(each, offload=None) for name, each in strategy.overrides.items() if each.recompute is not None
    }
    return replace(strategy, memory=replace(strategy.memory, offload=None), overrides=overrides)


def recompute_of(strategy: Strategy) -> str:
    recompute = strategy.memory.recompute
    return recompute if isinstance(recompute, str) else repr(recompute)


def _kept(made: OrderedDict[str, Made], key: str, make: Callable[[], Made]) -> Made:
    if key in made:
        made.move_to_end(key)
    else:
        made[key] = make()
        if len(made) > KEPT:
            made.popitem(last=False)
    return made[key]


def _refuse_skips(resolved: Resolved) -> None:
    cut, microbatches = resolved.cut, resolved.strategy.microbatches
    if cut is None or cut.named or microbatches is None:
        return
    table = cut.checked(resolved.spec.pp, microbatches).schedule
    if table.skips:
        raise PlanError(
            f"search: microbatches of the schedule {table.name!r} skip stages, so that it trains another model in its time "
            "than strategies that skip none. Search without it, and compare by `forecast` what skipping saves."
        )
