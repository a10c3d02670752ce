"""Unpaired preference losses: KTO, and APO and BCO without pairs; answers are desirable or not. Computed in fp64."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshkit.errors import DataError, PlanError

UNPAIRED_KINDS = ("kto", "apo_zero_unpaired", "bco_unpaired")


@dataclass(frozen=True, kw_only=True)
class UnpairedLoss:
    """An unpaired objective and its constants.

    desirable_weight, undesirable_weight: KTO's lambda_D and lambda_U. Choose them so that weight times number of answers is
    up to 4/3 as much for one side as for the other.
    Raises: PlanError for an unknown kind and for constants out of range.
    """

    kind: str = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in UNPAIRED_KINDS:
            near = difflib.get_close_matches(self.kind, UNPAIRED_KINDS, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise PlanError(
                f"UnpairedLoss: kind={self.kind!r} is not known. {hint}Choose from {', '.join(UNPAIRED_KINDS)}."
            )
        if self.beta <= 0:
            raise PlanError(f"UnpairedLoss: beta={self.beta} removes or turns round the judgement. Use more than 0.")
        for name in ("desirable_weight", "undesirable_weight"):
            if getattr(self, name) < 0:
                raise PlanError(
                    f"UnpairedLoss: {name}={getattr(self, name)} trains the wrong way round. Use at least 0."
                )


@dataclass(frozen=True)
class UnpairedValues:
    """losses: [N] fp64, with the gradient; their sum is to be divided by the answers of the step.

    rewards: [N], beta times the log-ratio, without a gradient; take separate means over desirable and undesirable answers.
    """

    losses: Tensor
    rewards: Tensor


def unpaired_loss(
    logps_N: Tensor,
    ref_logps_N: Tensor,
    desirable_N: Tensor,
    loss: UnpairedLoss,
    *,
    reference_point: float | Tensor | None = None,
) -> UnpairedValues:
    """Loss and reward of each answer. With r = log pi - log pi_ref; of each kind, desirable above, undesirable below:

    | kind              | loss over weight      | reference_point, of the whole step, a constant |
    |-------------------|-----------------------|------------------------------------------------|
    | kto               | sigma(beta (z - r))   | z from `kto_kl`                                |
    |                   | sigma(beta (r - z))   |                                                |
    | apo_zero_unpaired | sigma(-beta r)        | none                                           |
    |                   | sigma(beta r)         |                                                |
    | bco_unpaired      | -log sigma(beta r - z)| z is the reward shift, `RunningMean.mean`      |
    |                   | -log sigma(z - beta r)|                                                |

    logps, ref_logps: [N], summed over the tokens of whole answers. desirable: [N] bool. The reference has no gradient.
    Raises: DataError for other shapes, and for a reference point that is missing or not used.
    Source: KTO Ethayarajh et al. 2024 (2402.01306), equation 7, less a constant; APO D'Oosterlinck et
    al. 2024 (2408.06266), equation 7; BCO Jung et al. 2024 (2404.04656).
    """
    shapes = {
        "logps": tuple(logps_N.shape),
        "ref_logps": tuple(ref_logps_N.shape),
        "desirable": tuple(desirable_N.shape),
    }
    if len(set(shapes.values())) > 1 or logps_N.ndim != 1:
        raise DataError(f"unpaired_loss: shapes {shapes}. Each is [N], one number for each answer.")
    if (reference_point is None) != (loss.kind == "apo_zero_unpaired"):
        wanted = {"kto": "Give kto_kl(...)", "bco_unpaired": "Give RunningMean(...).mean"}.get(
            loss.kind, "Leave it out"
        )
        raise DataError(f"unpaired_loss: kind={loss.kind!r} with reference_point={reference_point}. {wanted}.")
    # No gradient through z, which the KTO paper found to make training more stable.
    point = torch.as_tensor(0.0 if reference_point is None else reference_point, dtype=torch.float64).detach()
    rewards_N = loss.beta * (logps_N.double() - ref_logps_N.detach().double())
    # z is a log-ratio in KTO and a reward in BCO.
    centred_N = rewards_N - (point if loss.kind == "bco_unpaired" else loss.beta * point).to(rewards_N.device)
    # One formula for both sides: undesirable answers have the sign of the argument turned.
    good_N = desirable_N.bool()
    signed_N = torch.where(good_N, centred_N, -centred_N)
    values_N = -F.logsigmoid(signed_N) if loss.kind == "bco_unpaired" else (-signed_N).sigmoid()
    weighted_N = torch.where(good_N, loss.desirable_weight * values_N, loss.undesirable_weight * values_N)
    return UnpairedValues(weighted_N, rewards_N.detach())
