"""What a period of local updates sends on dp_replicate, for one rank of a model that is not built yet, or of a run."""

from __future__ import annotations

from collections.abc import Mapping

from meshkit.errors import PlanError
from meshkit.optim.outer import OuterOptimizer, PeriodTraffic, Policy, fragments_of_model, outer_dtype, period_traffic
from meshkit.preflight.explain._rank import RankModel
from meshkit.resolve import Resolved


def period_of_run(outer: Policy | OuterOptimizer) -> PeriodTraffic:
    """Raises: PlanError for a policy alone, which knows of no replicas."""
    if not isinstance(outer, OuterOptimizer):
        raise PlanError(
            f"explain(run, outer={outer}): a run is of one replica. Give its OuterOptimizer, or the model and a mesh."
        )
    return outer.period


def period_of_model(
    resolved: Resolved, coordinate: Mapping[str, int], outer: Policy | OuterOptimizer, *, replicas: int
) -> PeriodTraffic:
    """resolved: on the mesh of a replica. All parameters that train are taken to be the optimizer's."""
    policy = outer.policy if isinstance(outer, OuterOptimizer) else outer
    rank_model = RankModel(resolved=resolved, coordinate=dict(coordinate))
    trained = {name: param.dtype for name, param in rank_model.params.items() if param.trains}
    sizes = {name: rank_model.row(name).rank_bytes // dtype.itemsize for name, dtype in trained.items()}
    persistent = resolved.program.model.state_dict().keys()
    buffers = [
        buffer.numel()
        for name, buffer in resolved.program.model.named_buffers()
        if name in persistent and buffer.is_floating_point() and rank_model.runs(name)
    ]
    fragments, dtype = fragments_of_model(resolved, getattr(policy, "fragments", 1)), outer_dtype(trained.values())
    return period_traffic(policy, sizes, fragments, buffers=buffers, replicas=replicas, dtype=dtype)
