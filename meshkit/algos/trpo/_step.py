"""A step of TRPO: along the natural gradient as far as a KL limit allows to second order, then back until it holds."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meshkit.algos.policy import PolicyLoss, TrustRegionStep, policy_count, policy_objective, step_within
from meshkit.algos.trpo._natural_gradient import natural_gradient
from meshkit.core.sharding import local_tensor
from meshkit.errors import PlanError
from meshkit.step import Batch, Run


class TrpoStep(NamedTuple):
    """loss: before the step. taken: by the line search. residual, products: of the conjugate gradients."""

    loss: float
    taken: TrustRegionStep
    residual: float
    products: int


def trpo_step(
    run: Run,
    batch: Batch,
    loss: PolicyLoss,
    *,
    limit: float = 0.01,
    damping: float = 0.1,
    products: int = 10,
    top: int | None = None,
    temperature: float = 1.0,
    microbatches: int = 1,
) -> TrpoStep:
    """Maximise the surrogate on this batch with KL(pi_old || pi) <= limit, nats per token; no optimizer is needed.

    batch: with `old_log_probs` and advantages, as for `policy_objective`. loss: usually without a clip, whose place the limit
    takes. The step is sqrt(2 limit / x F x) x, with x of `natural_gradient`, and then that of `step_within`.
    Every rank must call it. Wire: a step's forward and backward passes, `natural_gradient` and `step_within`.
    Raises: PlanError as those do, and for a gradient of zeros no step is taken.
    Source: Schulman et al. 2015 (1502.05477).
    """
    if limit <= 0:
        raise PlanError(f"trpo_step(limit={limit}): a KL in nats per token. Give a positive number.")
    objective = policy_objective(run.mesh, batch, loss, temperature=temperature)
    value = run.forward_backward(batch, loss=objective, count=policy_count(loss), microbatches=microbatches).item()
    found = natural_gradient(
        run,
        batch,
        damping=damping,
        products=products,
        top=top,
        temperature=temperature,
        microbatches=microbatches,
    )
    size = (2 * limit / found.curvature) ** 0.5 if found.curvature > 0 else 0.0

    @torch.no_grad()
    def step() -> None:
        trained = [parameter for parameter in run.parameters() if parameter.requires_grad]
        for parameter, shard in zip(trained, found.shards, strict=True):
            local_tensor(parameter).sub_(shard, alpha=size)

    taken = step_within(run, batch, loss, step, limit=limit, temperature=temperature)
    return TrpoStep(value, taken, found.residual, found.products)
