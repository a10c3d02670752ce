"""A trust region (TRPO's line search): a step that may not move the policy further than a given KL."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from meshkit.algos.policy._loss import PolicyLoss
from meshkit.algos.policy._objective import policy_count, policy_metrics, policy_objective, policy_sums
from meshkit.core.sharding import local_tensor
from meshkit.errors import PlanError
from meshkit.step import Batch, Run


class TrustRegionStep(NamedTuple):
    """fraction: of the optimizer's step that was taken, 0 if none was fit. kl: of the policy after it, nats a token.

    improvement: by how much the loss fell. tries: how many fractions were measured.
    """

    fraction: float
    kl: float
    improvement: float
    tries: int


@torch.no_grad()
def step_within(
    run: Run,
    batch: Batch,
    loss: PolicyLoss,
    step: Callable[[], object],
    *,
    limit: float = 0.01,
    shrink: float = 0.5,
    tries: int = 10,
    temperature: float = 1.0,
) -> TrustRegionStep:
    """Take `step()`, and go back along it until KL(pi_old || pi) <= limit on this batch and the loss is below what it was.

    TRPO's constraint by its line search: the direction is the optimizer's, and not the natural gradient. KL is measured (k3
    of the batch's learnt tokens against `old_log_probs`), fraction 1, shrink, shrink^2, ...; after `tries` of them nothing
    moves. step: `optimizer.step` after `forward_backward`. Moments of the optimizer stay those of the whole step. Parameters
    must be what the optimizer updates: not with masters elsewhere.
    Every rank must call it. Memory: two copies of this rank's parameters. Wire: a forward pass for each try, and one before.
    Source: Schulman et al. 2015 (1502.05477), appendix C, for the line search.
    Raises: PlanError for limits out of range, and for a batch without old_log_probs.
    """
    if limit <= 0 or not 0 < shrink < 1 or tries < 1:
        raise PlanError(
            f"step_within: limit={limit}, shrink={shrink}, tries={tries}. Use limit > 0, 0 < shrink < 1 and tries >= 1."
        )
    if "old_log_probs" not in batch:
        raise PlanError(
            "step_within: the batch has no old_log_probs, so there is no KL to measure. Add token_values of it."
        )
    metrics = policy_sums(run.mesh)
    objective = policy_objective(run.mesh, batch, loss, temperature=temperature, metrics=metrics)

    def measure() -> tuple[float, float]:
        total, counted = run.evaluate(batch, loss=objective, count=policy_count(loss))
        return policy_metrics(metrics)["old_k3"], float(total / counted.clamp(min=1))

    _, start = measure()
    own = [local_tensor(parameter) for parameter in run.parameters()]
    before = [parameter.clone() for parameter in own]
    step()
    after = [parameter.clone() for parameter in own]
    for attempt in range(tries):
        fraction = shrink**attempt
        for parameter, old, new in zip(own, before, after, strict=True):
            parameter.copy_(new if attempt == 0 else torch.lerp(old, new, fraction))
        kl, value = measure()
        if kl <= limit and value < start:
            return TrustRegionStep(fraction, kl, start - value, attempt + 1)
    for parameter, old in zip(own, before, strict=True):
        parameter.copy_(old)
    return TrustRegionStep(0.0, measure()[0], 0.0, tries)
