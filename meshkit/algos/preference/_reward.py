"""Reward model losses (Bradley-Terry and relatives): one loss for each of N pairs of scores, computed in fp64.

The score of an answer is read at its last token, found from its length, never at the first pad id, which may be eos.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshkit.errors import DataError, PlanError


@dataclass(frozen=True)
class RewardValues:
    """losses: [N] fp64, with the gradient; their sum is to be divided by the pairs of the step. margins: [N], without one."""

    losses: Tensor
    margins: Tensor

    @property
    def accuracies(self) -> Tensor:
        """1.0 where the chosen answer has the higher score; [N]. A tie is 0."""
        return (self.margins > 0).double()


def bradley_terry(
    chosen_N: Tensor,
    rejected_N: Tensor,
    *,
    margin_N: Tensor | None = None,
    preference_N: Tensor | None = None,
    center: float = 0.0,
) -> RewardValues:
    """-log sigma(r_w - r_l - margin) + center (r_w + r_l)^2.

    chosen, rejected: scores [N], any float dtype. margin: their least difference (Llama 2). preference: the probability p
    that the chosen answer is the better one, default 1; 0.5 is a tie, as `cross_prompt_pairs` makes them. The loss is then
    -p log sigma(d) - (1 - p) log sigma(-d). center: keeps the sum of both scores near 0, which ranking alone leaves free.
    Raises: DataError for other shapes, PlanError for center < 0.
    Source: Bradley and Terry 1952; margin Touvron et al. 2023, section 3.2.2; centring Eisenstein et al. 2023 (2312.09244).
    """
    if center < 0:
        raise PlanError(f"bradley_terry: center={center} rewards large scores. Use 0 for none, or about 0.01.")
    _same_shapes(chosen=chosen_N, rejected=rejected_N, margin=margin_N, preference=preference_N)
    chosen_N, rejected_N = chosen_N.double(), rejected_N.double()
    # The margin moves only the loss. Accuracy and margin that are shown are of the scores themselves.
    difference_N = chosen_N - rejected_N if margin_N is None else chosen_N - rejected_N - margin_N.double()
    losses_N = -F.logsigmoid(difference_N)
    if preference_N is not None:
        share_N = preference_N.double()
        losses_N = share_N * losses_N - (1 - share_N) * F.logsigmoid(-difference_N)
    # Only r_w - r_l is learnt from an order; the sum is free, and would drift.
    if center:
        losses_N = losses_N + center * (chosen_N + rejected_N).square()
    return RewardValues(losses_N, (chosen_N - rejected_N).detach())


def pcrm(
    chosen_N: Tensor,
    rejected_N: Tensor,
    similarity_N: Tensor,
    *,
    scale: float = 6.0,
    floor: float = 1e-3,
    offset: float = 0.0,
) -> RewardValues:
    """-log sigma(d) - log sigma(limit - d) with d = r_w - r_l and limit = scale / (similarity + floor) + offset.

    The more alike two answers are, the closer their scores must stay. similarity: [N] in [0, 1], from `length_ratio` or
    `angular_similarity`. The loss is smallest at d = limit / 2.
    Source: Zhou et al. 2024 (2404.00978), constants and form as in the authors' code, there on each token after the first
    difference, here on the final scores.
    """
    if scale <= 0 or floor <= 0:
        raise PlanError(f"pcrm: scale={scale}, floor={floor} give no finite upper limit. Use more than 0 for both.")
    _same_shapes(chosen=chosen_N, rejected=rejected_N, similarity=similarity_N)
    difference_N = chosen_N.double() - rejected_N.double()
    # floor: identical answers would otherwise have no limit at all.
    limit_N = scale / (similarity_N.detach().double() + floor) + offset
    losses_N = -F.logsigmoid(difference_N) - F.logsigmoid(limit_N - difference_N)
    return RewardValues(losses_N, difference_N.detach())


def length_ratio(chosen_tokens_N: Tensor, rejected_tokens_N: Tensor) -> Tensor:
    """The shorter length over the longer one; [N] fp64 in [0, 1]. 1 for two empty answers."""
    shorter_N = torch.minimum(chosen_tokens_N, rejected_tokens_N).double()
    longer_N = torch.maximum(chosen_tokens_N, rejected_tokens_N).double()
    return torch.where(longer_N > 0, shorter_N / longer_N.clamp(min=1), 1.0)


def angular_similarity(chosen_ND: Tensor, rejected_ND: Tensor) -> Tensor:
    """1 - angle / pi between embeddings of any encoder, a negative cosine counting as 0; [N] fp64 in [0.5, 1]."""
    # The embeddings weigh, they are not trained.
    cosine_N = F.cosine_similarity(chosen_ND.detach().double(), rejected_ND.detach().double(), dim=-1)
    return 1 - cosine_N.clamp(0, 1).acos() / math.pi


def haf(reward: RewardValues, policy_losses_N: Tensor, *, alpha: float) -> RewardValues:
    """HAF-RM: the reward loss plus alpha times a policy loss of the same pairs, from the language head that is kept.

    policy_losses: `preference_loss(...).losses`; the paper has the DPO loss (kind "sigmoid") with beta=0.1.
    Source: Liu et al. 2024 (2407.04185), the hybrid alignment loss.
    """
    if alpha < 0:
        raise PlanError(f"haf: alpha={alpha} would train the language head against the preferences. Use at least 0.")
    _same_shapes(reward=reward.losses, policy_losses=policy_losses_N)
    return RewardValues(reward.losses + alpha * policy_losses_N, reward.margins)


def _same_shapes(**tensors: Tensor | None) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise DataError(f"reward loss: shapes {shapes}. Each is [N], one number for each pair.")
