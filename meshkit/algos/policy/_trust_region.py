"""Trust region (TRPO's line search): an optimizer step that moves the policy no further than a given KL."""

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
    """fraction: the part of the optimizer's step that was taken, 0 if no part was accepted.

    kl: of the policy after it, nats per token. improvement: by how much the loss fell. tries: fractions measured.
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
    """Take `step()`, and go back along it until KL(pi_old || pi) <= limit on this batch and the loss has fallen.

    This is TRPO's constraint with its line search; the direction is the optimizer's, not the natural gradient. The fractions
    1, shrink, shrink^2, ... of the step are tried; KL is measured as k3 of the batch's learnt tokens against
    `old_log_probs`. If all `tries` fail, the parameters are restored. step: `optimizer.step` after `forward_backward`. The
    optimizer's moments keep the update of the full step. Parameters must be the tensors that the optimizer updates, so there
    may be no masters elsewhere.
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
    # Local tensors, since going back and forth then needs no collective; copies, since `step` writes in place.
    shards = [local_tensor(parameter) for parameter in run.parameters()]
    before = [shard.clone() for shard in shards]
    # The line runs through the parameters, not through gradients: whatever the optimizer does is the direction.
    step()
    after = [shard.clone() for shard in shards]
    # Copies are of this rank's shards only, and every rank measures the same KL: so all ranks take the same fraction.
    for attempt in range(tries):
        fraction = shrink**attempt
        for shard, old, new in zip(shards, before, after, strict=True):
            shard.copy_(new if attempt == 0 else torch.lerp(old, new, fraction))
        kl, value = measure()
        if kl <= limit and value < start:
            return TrustRegionStep(fraction, kl, start - value, attempt + 1)
    for shard, old in zip(shards, before, strict=True):
        shard.copy_(old)
    return TrustRegionStep(0.0, measure()[0], 0.0, tries)
