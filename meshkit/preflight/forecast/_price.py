"""The step model (performance model): seconds of a step out of its profile and a cluster, and a ledger of where they go.

A pure function of both. Streams: kernels of a rank run one after the other; messages of tensor, context and expert
parallelism block them, except a ring's, which go on beside attention; FSDP gathers one unit ahead and reduces one unit
behind. What runs at the same time slows each other down: contention, no free overlap. Pipelines are simulated from the
schedule's own table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, log, sqrt

from meshkit.cluster import Cluster, Op, collective_s, hierarchical_s, kernel_s, place_of, speed_of, stage_hop_s
from meshkit.mesh import MeshSpec
from meshkit.parallel.pipeline import Schedule, Simulation, Times, simulate
from meshkit.preflight.explain import Hierarchical
from meshkit.preflight.forecast._copies import coming_exposed_s, copy_bytes_per_s, leaving_exposed_s
from meshkit.preflight.forecast._profile import Call, Part, StepProfile
from meshkit.preflight.forecast._update import Update
from meshkit.strategy import ActivationOffload

FORWARD, BACKWARD, WEIGHT = "forward", "backward", "weight"
ALIKE = 3  # where host and device take as long, a step takes 2 ** (1 / 3) times that: fitted to published runs
Ledger = dict[str, float]
KERNELS = ("matmul", "attention", "other kernels", "recompute", "optimizer")  # lines of a ledger that compute


class Prices:
    """Seconds of kernels and messages on one cluster and mesh, each asked for once.

    stage: a rank of pp, of whose ranks and groups the slowest counts where they are unlike; None, of all.
    """

    def __init__(self, cluster: Cluster, spec: MeshSpec, stage: int | None = None) -> None:
        self.cluster, self.spec, self.stage = cluster.slowed(speed_of(cluster, spec, stage)), spec, stage
        self._kernels: dict[Op, float] = {}
        self._calls: dict[tuple[str, str, int, Hierarchical | None], float] = {}
        self._parts: dict[tuple[int, int], tuple[PartSeconds, Part]] = {}

    def kernel_s(self, op: Op) -> float:
        if op not in self._kernels:
            self._kernels[op] = kernel_s(self.cluster.device, op)
        return self._kernels[op]

    def call_s(self, call: Call) -> float:
        key = call.axis, call.op, call.size, call.hierarchical
        if key not in self._calls:
            place = place_of(self.cluster, self.spec, call.axis, stage=self.stage)
            if (hops := call.hierarchical) is None:
                self._calls[key] = collective_s(self.cluster, call.op, call.size, place)
            else:
                inside = place_of(self.cluster, self.spec, hops.inside, stage=self.stage)
                self._calls[key] = hierarchical_s(
                    self.cluster, call.op, call.size, inside=inside, across=place, chunk_bytes=hops.chunk_bytes
                )
        return self._calls[key] * call.count

    def part(self, part: Part) -> PartSeconds:
        """Parts of one profile and the same messages are priced once."""
        key = id(part.profile), id(part.calls)
        if key not in self._parts:
            self._parts[key] = _part_seconds(part, self), part  # whose ids stay its own
        return self._parts[key][0]


@dataclass(frozen=True)
class PartSeconds:
    """Of one microbatch, for each of forward, backward and weight: a ledger of seconds, and the kernels launched.

    What is recomputed is under its own name in backward's ledger.
    """

    ledgers: Mapping[str, Ledger]
    launches: Mapping[str, int]

    def seconds(self, phase: str) -> float:
        return fsum(self.ledgers[phase].values())


def _part_seconds(part: Part, prices: Prices) -> PartSeconds:
    ledgers: dict[str, defaultdict[str, float]] = {name: defaultdict(float) for name in (FORWARD, BACKWARD, WEIGHT)}
    attention: defaultdict[str, float] = defaultdict(float)
    for op, count in part.profile.ops:
        seconds = prices.kernel_s(op) * count
        kind = "recompute" if op.phase == "recompute" else "other kernels" if op.kind == "memory" else op.kind
        ledgers[BACKWARD if op.phase == "recompute" else op.phase][kind] += seconds
        if op.kind == "attention":
            attention[op.phase] += seconds
    slower = prices.cluster.overlap
    for phase in dict.fromkeys(call.phase for call in part.calls):
        ledger = ledgers[FORWARD if phase == FORWARD else BACKWARD]
        of_phase = [call for call in part.calls if call.phase == phase]
        for axis in dict.fromkeys(call.axis for call in of_phase):
            beside = fsum(prices.call_s(call) for call in of_phase if call.axis == axis and call.is_beside)
            alone = fsum(prices.call_s(call) for call in of_phase if call.axis == axis and not call.is_beside)
            shown = exposed_s(attention[phase], beside, slower.compute_slower, slower.collective_slower)
            ledger[axis] += alone + shown
    launches = dict.fromkeys((FORWARD, BACKWARD, WEIGHT), 0)
    for phase, count in part.profile.launches.items():
        launches[BACKWARD if phase == "recompute" else phase] += count
    for call in part.calls:  # the host launches messages too
        launches[FORWARD if call.phase == FORWARD else BACKWARD] += call.count
    return PartSeconds({name: dict(ledger) for name, ledger in ledgers.items()}, launches)


def exposed_s(compute_s: float, message_s: float, compute_slower: float, message_slower: float) -> float:
    """By how much longer computing takes with a message beside it: both are slowed down until the first of them ends."""
    if not compute_s or not message_s:
        return message_s
    if message_s * message_slower <= compute_s * compute_slower:
        # The message ends first; meanwhile less was computed.
        together = message_s * message_slower
        return together * (1 - 1 / compute_slower)
    together = compute_s * compute_slower
    return together + message_s - together / message_slower - compute_s


# A stage of the pipeline, or the whole model without one


@dataclass(frozen=True)
class StageSeconds:
    """Of one microbatch: ledgers of forward, backward (of inputs, with recompute) and weight. once: of the step."""

    ledgers: Mapping[str, Ledger]
    once: Ledger

    def seconds(self, phase: str) -> float:
        return fsum(self.ledgers[phase].values())


def stage_seconds(
    parts: Sequence[Part],
    microbatches: int,
    prices: Prices,
    update: Update,
    offload: ActivationOffload | None = None,
    *,
    splits: bool = False,
) -> StageSeconds:
    """Gathers and reductions of every microbatch are in its ledgers, those of once a step, and the optimizer, in `once`.

    microbatches: that pass the stage; where none does, it does nothing. splits: whether weights' gradients have rows of their
    own, beside which nothing comes back.
    """
    cluster = prices.cluster
    priced = [prices.part(part) for part in parts]
    ledgers = {phase: _sum(each.ledgers[phase] for each in priced) for phase in (FORWARD, BACKWARD, WEIGHT)}
    for phase, ledger in ledgers.items():
        launches = sum(each.launches[phase] for each in priced)
        ledger["launch"] = launch_s(cluster, launches, fsum(ledger.values()))
    once: defaultdict[str, float] = defaultdict(float)
    forward = [each.seconds(FORWARD) for each in priced]
    backward = [each.seconds(BACKWARD) + each.seconds(WEIGHT) for each in priced]
    for phase, computed in ((FORWARD, forward), (BACKWARD, backward)):
        for times, exposed in data_exposed(parts, phase, computed, microbatches, prices):
            for axis, seconds in exposed.items():
                if times == microbatches > 1:
                    ledgers[phase][axis] = ledgers[phase].get(axis, 0.0) + seconds
                else:
                    once[axis] += seconds
    if offload is not None:
        of_inputs = [each.seconds(BACKWARD) for each in priced]
        for phase, seconds in _copies(parts, forward, of_inputs if splits else backward, offload, prices).items():
            ledgers[phase]["offload"] = seconds
    rate = cluster.device.memory_bytes_per_s * cluster.device.efficiency.memory
    copied = fsum(part.copied_bytes for part in parts)
    added = fsum(3 * part.grad_bytes for part in parts) * (microbatches - 1)
    once["other kernels"] += (copied + added) / rate
    once["optimizer"] += update.seconds(
        sum(part.trained for part in parts),
        cluster,
        backward_s=fsum(backward),
        step_s=microbatches * fsum([*forward, *backward]),
    )
    return StageSeconds(ledgers, dict(once) if microbatches else {})


def _copies(
    parts: Sequence[Part],
    forward: Sequence[float],
    backward: Sequence[float],
    offload: ActivationOffload,
    prices: Prices,
) -> Ledger:
    """Seconds by phase that a microbatch waits for its activations to leave, and to come back."""
    rate = copy_bytes_per_s(offload, prices.cluster, prices.spec)
    blocks = [at for at, part in enumerate(parts) if part.is_block]
    copies = [parts[at].profile.moved_bytes / rate for at in blocks]
    if prices.cluster.device.kernels == "cpu":  # the host that computes also copies
        return {FORWARD: fsum(copies), BACKWARD: fsum(copies)}
    return {
        FORWARD: leaving_exposed_s([forward[at] for at in blocks], copies),
        BACKWARD: coming_exposed_s([backward[at] for at in blocks], copies, offload.ahead),
    }


def launch_s(cluster: Cluster, launches: int, busy_s: float) -> float:
    """What is seen of launches: all where the host computes itself or waits, else what the device waits for the host."""
    host_s = launches * cluster.device.launch_s
    if cluster.device.kernels == "cpu" or cluster.device.blocking or not host_s:
        return host_s
    # The slower of the two, and where they are alike more than either: the host is not ahead of each kernel.
    return float((host_s**ALIKE + busy_s**ALIKE) ** (1 / ALIKE)) - busy_s


def data_exposed(
    parts: Sequence[Part], phase: str, computed: Sequence[float], microbatches: int, prices: Prices
) -> Iterable[tuple[int, Ledger]]:
    """(how often in the step, exposed seconds by axis) of an FSDP stage's gathers and reductions.

    In forward unit i is gathered while unit i - 1 computes; in backward, which runs them in reverse, it is gathered while
    i + 1 computes, and its gradients are reduced while i - 1 does. The first gather and the last reduction are alone. What is
    sent once comes on top of what every microbatch sends beside the same kernels: nothing hides behind them twice.
    """
    counts = sorted({call.count for part in parts for call in part.data if call.phase == phase}, reverse=True)
    earlier = [0.0] * (len(parts) + 1)
    order = range(len(parts)) if phase == FORWARD else range(len(parts) - 1, -1, -1)
    slower = prices.cluster.overlap
    for times in counts:
        waiting: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(len(parts) + 1)]
        for place, index in enumerate(order):
            for call in parts[index].data:
                if call.phase != phase or call.count != times:
                    continue
                seconds = prices.call_s(call) / times
                # `place` counts what has computed: beside which of them it runs; the last entry is after all.
                beside = place - 1 if call.op == "all_gather" else place + 1
                waiting[beside if 0 <= beside < len(parts) else -1][call.axis] += seconds
        exposed: defaultdict[str, float] = defaultdict(float)
        for place, messages in enumerate(waiting):
            compute_s = computed[order[place]] if place < len(parts) else 0.0
            total, often_s = fsum(messages.values()), earlier[place]
            shown = exposed_s(compute_s, often_s + total, slower.compute_slower, slower.collective_slower)
            shown -= exposed_s(compute_s, often_s, slower.compute_slower, slower.collective_slower)
            earlier[place] += total
            for axis, seconds in messages.items():
                exposed[axis] += shown * seconds / total
        yield times, dict(exposed)


# The step


@dataclass(frozen=True)
class Priced:
    """Seconds of a step and their ledger, which sums to them. simulation: of the pipeline; None without one.

    busy_s: for which a rank computes, the mean of all.
    """

    seconds: float
    ledger: Ledger
    simulation: Simulation | None = None
    busy_s: float = 0.0


def price(profile: StepProfile, cluster: Cluster) -> Priced:
    """Seconds of one optimizer step on the cluster. Pure: the same profile has a price on every cluster."""
    prices = Prices(cluster, profile.spec)
    of_stage = _prices_of_stages(profile, cluster, prices)
    offload, splits = profile.offload, profile.schedule is not None and profile.schedule.splits_backward
    known: dict[tuple[int, int, int], StageSeconds] = {}  # stages that are alike are one object
    stages: list[StageSeconds] = []
    for parts, passing, its in zip(profile.stages, profile.passing, of_stage, strict=True):
        key = id(parts), passing, id(its)
        if key not in known:
            known[key] = stage_seconds(parts, passing, its, profile.update, offload, splits=splits)
        stages.append(known[key])
    tail = _sum([_by_axis(profile.once, prices)])
    if profile.schedule is None:
        computed = [_times(ledger, profile.microbatches) for ledger in stages[0].ledgers.values()]
        ledger, simulation = _sum([*computed, stages[0].once, tail]), None
        busy_s = _computed_s(ledger)
    else:
        ledger, simulation, busy_s = _pipelined(profile.schedule, stages, profile, prices)
        ledger = _sum([ledger, tail])
    if cluster.host.step_s:
        ledger["host"] = cluster.host.step_s
    ranks = profile.spec.world_size
    if cluster.faults.jitter and ranks > 1:
        # The expected slowest of n ranks, for large n: Gumbel 1958.
        ledger["jitter"] = fsum(ledger.values()) * cluster.faults.jitter * sqrt(2 * log(ranks))
    ledger = {name: seconds for name, seconds in ledger.items() if seconds}
    return Priced(fsum(ledger.values()), ledger, simulation, busy_s)


def _prices_of_stages(profile: StepProfile, cluster: Cluster, prices: Prices) -> list[Prices]:
    """Those of each stage; `prices` of all where ranks are alike."""
    schedule = profile.schedule
    if cluster.unlike is None:
        return [prices] * len(profile.stages)
    of_rank = [Prices(cluster, profile.spec, rank) for rank in range(profile.spec.pp)]
    return [of_rank[0 if schedule is None else schedule.placement[stage]] for stage in range(len(profile.stages))]


def _pipelined(
    schedule: Schedule, stages: Sequence[StageSeconds], profile: StepProfile, prices: Prices
) -> tuple[Ledger, Simulation, float]:
    """The ledger of the rank that computes longest; what it waits for others is bubble, of which hops are pp's part.

    Also how long a rank computes, on average.

    Where ranks share the cores of a host, a rank computes faster while others wait, and all together as fast as the cores do.
    """
    hops, crowding = hops_between(schedule.ways, profile, prices.cluster), prices.cluster.crowding
    simulation = pipeline_seconds(schedule, stages, lambda one, other: hops[one, other], faster=crowding)
    of_rank = [
        _sum(
            _times(ledger, profile.passing[stage] / crowding)
            for stage in schedule.stages_of(rank)
            for ledger in stages[stage].ledgers.values()
        )
        for rank in range(schedule.world)
    ]
    longest = max(range(schedule.world), key=lambda rank: fsum(of_rank[rank].values()))
    ledger = dict(of_rank[longest])
    idle_s = simulation.makespan_s - fsum(ledger.values())
    most = max((hops[one, longest] for one in range(schedule.world) if (one, longest) in hops), default=0.0)
    ends = (0.0, *simulation.ends_s[longest])
    waits = [start_s - end_s for start_s, end_s in zip(simulation.starts_s[longest], ends, strict=False)]
    ledger["pp"] = ledger.get("pp", 0.0) + min(idle_s, fsum(min(most, wait) for wait in waits))
    ledger["bubble"] = idle_s - min(idle_s, fsum(min(most, wait) for wait in waits))
    if crowding > 1:
        busy_s = crowding * fsum(fsum(each.values()) for each in of_rank) / schedule.world
        ledger["shared cores"] = max(0.0, busy_s - simulation.makespan_s)
    # All ranks wait for the slowest before and after: the one whose gathers, reductions and optimizer take longest.
    once = [_sum(stages[stage].once for stage in schedule.stages_of(rank)) for rank in range(schedule.world)]
    busy_s = fsum(crowding * _computed_s(each) for each in of_rank) + fsum(_computed_s(each) for each in once)
    return _sum([ledger, max(once, key=lambda each: fsum(each.values()))]), simulation, busy_s / schedule.world


def pipeline_seconds(
    schedule: Schedule,
    stages: Sequence[StageSeconds],
    hop_s: float | Callable[[int, int], float],
    *,
    faster: float = 1.0,
) -> Simulation:
    """The schedule's own table, with the seconds of each stage, divided by `faster`. hop_s: of a message, or a function of
    (from, to).
    """
    seconds = {phase: tuple(stage.seconds(phase) / faster for stage in stages) for phase in (FORWARD, BACKWARD, WEIGHT)}
    return simulate(schedule, Times(f_s=seconds[FORWARD], i_s=seconds[BACKWARD], w_s=seconds[WEIGHT], hop_s=hop_s))


def hops_between(
    ways: Iterable[tuple[int, int]], profile: StepProfile, cluster: Cluster
) -> dict[tuple[int, int], float]:
    """Seconds of a message between two ranks of pp. ways: (from, to)."""
    size = max((max(each) for each in profile.crossing), default=0)
    return {(one, other): stage_hop_s(cluster, profile.spec, size, one, other) for one, other in ways}


def _by_axis(calls: Iterable[Call], prices: Prices) -> Ledger:
    ledger: defaultdict[str, float] = defaultdict(float)
    for call in calls:
        ledger["step" if call.phase == "step" else call.axis] += prices.call_s(call)
    return ledger


def _computed_s(ledger: Ledger) -> float:
    return fsum(ledger.get(name, 0.0) for name in KERNELS)


def _times(ledger: Ledger, count: float) -> Ledger:
    return {name: seconds * count for name, seconds in ledger.items()}


def _sum(ledgers: Iterable[Mapping[str, float]]) -> Ledger:
    total: defaultdict[str, float] = defaultdict(float)
    for ledger in ledgers:
        for name, seconds in ledger.items():
            total[name] += seconds
    return dict(total)
