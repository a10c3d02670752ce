"""`Times` as what schedulers compute with: a value for each stage, and hops as a function."""

from __future__ import annotations

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._simulate import PerStage, Times

from ._greedy import Costs


def costs_of(times: Times, stages: int) -> Costs:
    """Raises: PlanError for times of another number of stages."""

    def per_stage(name: str, value: PerStage) -> tuple[float, ...]:
        values = tuple(value) if isinstance(value, tuple) else (value,) * stages
        if len(values) != stages:
            raise PlanError(
                f"{name} has {len(values)} values, but there are {stages} stages. Give one for each, or one for all."
            )
        return values

    i_s, w_s, hop_s = per_stage("i_s", times.i_s), per_stage("w_s", times.w_s), times.hop_s
    return Costs(
        f_s=per_stage("f_s", times.f_s),
        i_s=i_s,
        w_s=w_s,
        b_s=tuple(map(sum, zip(i_s, w_s, strict=True))) if times.b_s is None else per_stage("b_s", times.b_s),
        hop=hop_s if callable(hop_s) else lambda source, target: hop_s,
    )
