"""Presets: published algorithms (PPO, GRPO, DAPO, ...) as `PolicyLoss`es; change one with `dataclasses.replace`.

Where a paper leaves a number open, it is that of the reference implementation that docs/policy.md names beside it.
"""

from __future__ import annotations

import math

from meshkit.algos.policy._advantages import GroupAdvantage
from meshkit.algos.policy._clips import Cispo, Clip, Reinforce, Sapo, Vespo
from meshkit.algos.policy._corrections import AnyCorrection, Correction, DivergenceMask, OffPolicyMask
from meshkit.algos.policy._loss import PolicyLoss
from meshkit.algos.policy._returns import GAE, RewardToGo
from meshkit.algos.policy._sampling import RolloutRules
from meshkit.algos.policy._terms import KL

_NORMALISED = GroupAdvantage(baseline="group", scale="group")

REINFORCE = PolicyLoss(advantage=GroupAdvantage(baseline="none"), clip=Reinforce(), aggregation="sequence_sum")
"""Williams 1992."""
RLOO = PolicyLoss(advantage=GroupAdvantage(baseline="leave_one_out"), ratio="trajectory", aggregation="sequence_mean")
"""Ahmadian et al. 2024 (2402.14740), with the clipped ratio of whole answers that TRL has."""
REMAX = PolicyLoss(advantage=GroupAdvantage(baseline="greedy"), clip=Reinforce(), aggregation="sequence_sum")
"""Li et al. 2023 (2310.10505): the baseline is the reward of the greedy answer."""
OPO = PolicyLoss(advantage=GroupAdvantage(baseline="length_weighted"), clip=Reinforce())
"""Hao et al. 2025 (2505.23585): exactly on policy, without KL."""

PPO = PolicyLoss(advantage=GAE(), clip=Clip(low=0.2, high=0.2), kl=KL(estimator="k1", coefficient=0.05, place="reward"))
"""Schulman et al. 2017 (1707.06347), with KL in the reward (Ziegler et al. 2019); 0.05 is TRL's."""
DECOUPLED_PPO = PolicyLoss(
    advantage=GAE(),
    clip=Clip(low=0.2, high=0.2),
    kl=KL(estimator="k1", coefficient=0.05, place="reward"),
    corrections=(Correction(level="token", kind="truncate", high=5.0),),
)
"""Hilton et al. 2021 (2110.00641): pi / pi_old is clipped, pi_old / pi_rollout weighs; the bound of 5 is AReaL's."""
REINFORCE_PP = PolicyLoss(
    advantage=RewardToGo(), clip=Clip(low=0.2, high=0.2), kl=KL(estimator="k1", coefficient=0.01, place="reward")
)
"""Hu 2025 (2501.03262): rewards to go, whitened over the step."""
REINFORCE_PP_BASELINE = PolicyLoss(
    advantage=GroupAdvantage(baseline="group", whiten=True),
    clip=Clip(low=0.2, high=0.2),
    kl=KL(estimator="k2", coefficient=0.01),
)
"""The same, for groups: reward minus the mean of the group, then whitened over the step."""

GRPO = PolicyLoss(
    advantage=_NORMALISED,
    clip=Clip(low=0.2, high=0.2),
    aggregation="sequence_mean",
    kl=KL(estimator="k3", coefficient=0.04),
)
"""Shao et al. 2024 (2402.03300)."""
DR_GRPO = PolicyLoss(
    advantage=GroupAdvantage(baseline="group"), clip=Clip(low=0.2, high=0.2), aggregation="constant", max_tokens=1024
)
"""Liu et al. 2025 (2503.20783). Set max_tokens to the most an answer may have: it scales the loss."""
DAPO = PolicyLoss(advantage=_NORMALISED, clip=Clip(low=0.2, high=0.28), aggregation="token_mean")
"""Yu et al. 2025 (2503.14476); its other half is in ROLLOUT_RULES."""
LITE_PPO = PolicyLoss(
    advantage=GroupAdvantage(baseline="group", scale="batch"), clip=Clip(low=0.2, high=0.2), aggregation="token_mean"
)
"""Liu et al. 2025 (2508.08221): mean of the group, deviation of the batch."""
GSPO = PolicyLoss(advantage=_NORMALISED, ratio="sequence", clip=Clip(low=3e-4, high=4e-4), aggregation="sequence_mean")
"""Zheng et al. 2025 (2507.18071)."""
GSPO_TOKEN = PolicyLoss(
    advantage=_NORMALISED, ratio="sequence_token", clip=Clip(low=3e-4, high=4e-4), aggregation="sequence_mean"
)
"""The same with advantages of tokens; equal to GSPO where those of an answer are equal."""
GMPO = PolicyLoss(advantage=_NORMALISED, ratio="geometric", clip=Clip(low=0.4, high=0.4), aggregation="sequence_mean")
"""Zhao et al. 2025 (2507.20673)."""
CISPO = PolicyLoss(advantage=_NORMALISED, clip=Cispo(high=5.0), aggregation="token_mean")
"""MiniMax-M1 2025 (2506.13585)."""
SAPO = PolicyLoss(advantage=_NORMALISED, clip=Sapo(), aggregation="sequence_mean")
"""Gao et al. 2025 (2511.20347)."""
LUSPO = PolicyLoss(advantage=_NORMALISED, ratio="sequence", clip=Clip(low=3e-4, high=4e-4), aggregation="sequence_sum")
"""2026 (2602.05261): GSPO whose answers count by their length."""
VESPO = PolicyLoss(advantage=_NORMALISED, ratio="trajectory", clip=Vespo(), aggregation="token_mean")
"""2026 (2602.10693), as TRL 1.16 has it."""

_UNCLIPPED = Clip(low=math.inf, high=math.inf)
_WEIGHT = Correction(level="token", kind="truncate", high=20.0)  # with pi / pi_old, pi / pi_rollout
DPPO_TV = PolicyLoss(advantage=_NORMALISED, clip=_UNCLIPPED, corrections=(_WEIGHT, DivergenceMask()))
"""2026 (2602.04879): no clip; a token stops where its probability is 0.15 from the one it was written with."""
DPPO_KL = PolicyLoss(
    advantage=_NORMALISED, clip=_UNCLIPPED, corrections=(_WEIGHT, DivergenceMask(divergence="kl", limit=0.05))
)
"""The same by the binary KL."""

# By the name of the constant, so that a preset cannot be listed under another name; names with _ are parts of presets.
PRESETS = {
    name: value for name, value in dict(globals()).items() if isinstance(value, PolicyLoss) and not name.startswith("_")
}
"""name -> preset, for a flag of a recipe"""

ROLLOUT_RULES = {name: RolloutRules() for name in PRESETS} | {"DAPO": RolloutRules(dynamic=True, overlong=0.25)}
"""name -> rules for the rollouts of a step, which `step_rollouts` applies; DAPO's 0.25 is 4,096 of 16,384 tokens"""

CORRECTIONS: dict[str, tuple[AnyCorrection, ...]] = {
    "none": (),
    "tis": (Correction(level="token", kind="truncate", high=2.0),),
    "mis": (Correction(level="token", kind="mask", high=2.0),),
    "icepop": (Correction(level="token", kind="mask", low=0.5, high=5.0),),
    "sequence-tis": (Correction(level="sequence", kind="truncate", high=2.0),),
    "sequence-mis": (Correction(level="sequence", kind="mask", high=2.0),),
    "geometric": (Correction(level="geometric", kind="reject", low=0.999, high=1.001),),
    "off-policy": (OffPolicyMask(),),
    "dppo-tv": (DivergenceMask(),),
    "dppo-kl": (DivergenceMask(divergence="kl", limit=0.05),),
}
"""name -> corrections for older or otherwise computed tokens, for a flag of a recipe; of several the factors multiply"""
