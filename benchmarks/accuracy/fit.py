"""Errors of forecasts of the published rows, beside a naive predictor of equal freedom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, fsum, log

from benchmarks.accuracy.rows import PEAKS, Row, cluster_of
from meshkit.cluster import Cluster
from meshkit.preflight.forecast import StepProfile, price


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row with its profile."""

    row: Row
    profile: StepProfile


Predict = Callable[[Case], float]


def forecast_s(case: Case, change: Callable[[Cluster], Cluster]) -> float:
    """Seconds from the datasheet, with what the row's software changes of it."""
    return price(in_its_dtype(case), change(cluster_of(case.row))).seconds


def in_its_dtype(case: Case) -> StepProfile:
    """Rows in fp8 multiply the linear layers of blocks in it: the profile was traced in bf16."""
    if not case.row.fp8:
        return case.profile
    known: dict[int, object] = {}

    def in_fp8(part):  # type: ignore[no-untyped-def]
        if not part.name.startswith("layers."):
            return part
        if id(part.profile) not in known:
            ops = tuple(
                (replace(op, dtype="float8") if op.kind == "matmul" and op.batch == 1 else op, count)
                for op, count in part.profile.ops
            )
            known[id(part.profile)] = replace(part.profile, ops=ops)
        return replace(part, profile=known[id(part.profile)])

    stages: dict[int, tuple] = {}
    for parts in case.profile.stages:
        if id(parts) not in stages:
            stages[id(parts)] = tuple(map(in_fp8, parts))
    return replace(case.profile, stages=tuple(stages[id(parts)] for parts in case.profile.stages))


def naive_s(case: Case) -> float:
    """All FLOPs of the step at the peak: what one number per GPU is usually multiplied with."""
    peak = PEAKS[case.row.gpu] * (2 if case.row.fp8 else 1)
    return case.profile.flops / peak / case.profile.spec.world_size


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Of a set of rows. mean: of |forecast / measured - 1|. signed: of the same without the bars. spearman: of ranks."""

    rows: int
    mean: float
    signed: float
    spearman: float


def errors(cases: Sequence[Case], predicted: Sequence[float]) -> Errors:
    ratios = [said / case.row.measured_s for case, said in zip(cases, predicted, strict=True)]
    return Errors(
        rows=len(ratios),
        mean=fsum(abs(ratio - 1) for ratio in ratios) / len(ratios),
        signed=fsum(ratio - 1 for ratio in ratios) / len(ratios),
        spearman=spearman(predicted, [case.row.measured_s for case in cases]),
    )


def scaled(cases: Sequence[Case], predicted: Sequence[float], key: Callable[[Case], object]) -> list[float]:
    """The predictions with one number for each key: the geometric mean of what they lack."""
    factor = _factors(cases, predicted, key)
    return [said * factor[key(case)] for case, said in zip(cases, predicted, strict=True)]


def held_out(cases: Sequence[Case], predicted: Sequence[float], key: Callable[[Case], object]) -> list[float]:
    """The same with numbers from other sources than the row's own; without one where no other source has the key."""
    sources = {case.row.source for case in cases}
    rest = {source: [index for index, case in enumerate(cases) if case.row.source != source] for source in sources}
    factors = {
        source: _factors([cases[index] for index in chosen], [predicted[index] for index in chosen], key)
        for source, chosen in rest.items()
    }
    return [said * factors[case.row.source].get(key(case), 1.0) for case, said in zip(cases, predicted, strict=True)]


def _factors(cases: Sequence[Case], predicted: Sequence[float], key: Callable[[Case], object]) -> dict[object, float]:
    lacking: dict[object, list[float]] = {}
    for case, said in zip(cases, predicted, strict=True):
        lacking.setdefault(key(case), []).append(log(case.row.measured_s / said))
    return {name: exp(fsum(logs) / len(logs)) for name, logs in lacking.items()}


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    if len(one) < 2:
        return float("nan")
    a, b = _ranks(one), _ranks(other)
    mean = (len(a) - 1) / 2
    covariance = fsum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = (fsum((x - mean) ** 2 for x in a) * fsum((y - mean) ** 2 for y in b)) ** 0.5
    return covariance / spread if spread else float("nan")


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end + 1 < len(order) and values[order[end + 1]] == values[order[at]]:
            end += 1
        for index in range(at, end + 1):
            ranks[order[index]] = (at + end) / 2
        at = end + 1
    return ranks


def regret(cases: Sequence[Case], predicted: Sequence[float], key: Callable[[Case], object]) -> tuple[int, float]:
    """(sets, mean of how much slower the best by forecast is than the best): sets of rows that train the same."""
    sets: dict[object, list[tuple[float, float]]] = {}
    for case, said in zip(cases, predicted, strict=True):
        sets.setdefault(key(case), []).append((said, case.row.measured_s))
    lost = [min(each)[1] / min(measured for _, measured in each) - 1 for each in sets.values() if len(each) > 1]
    return len(lost), fsum(lost) / len(lost) if lost else 0.0
