"""GAE and rewards to go: token-level advantages, from rewards of tokens and, with a critic, values; once a step.

Dims: B rows of T tokens, packed as `build_rows` lays them out: a token's numbers stand where it is the label. segments: [B,
T], 0 is padding. learn: [B, T] bool, the labels that the policy wrote. The recursions skip the tokens between them (a
prompt, the output of a tool). A reward at a token that is not learnt, such as a score at the end of an answer, counts for
the last learnt token before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from meshkit.algos.policy._terms import KL, kl_estimates
from meshkit.errors import PlanError

TURN_STARTS = "turn_starts"
"""the name under which a batch holds where turns begin"""
Level = Literal["token", "turn"]


def _refuse_level(what: str, level: str) -> None:
    if level not in ("token", "turn"):
        raise PlanError(f"{what}: level={level!r} is not known. Choose token or turn.")


@dataclass(frozen=True, kw_only=True)
class GAE:
    """Generalised advantage estimation: delta_t = r_t + discount V_{t+1} - V_t, A_t = delta_t + discount decay A_{t+1}.

    V after the end of an answer is 0. bootstrap: an answer that was cut off has no score, keeps what its tokens earned
    before its end, and goes on with the value of its last state (ReaL); False: it has its score, and ends (TRL, which takes a
    penalty from it).
    whiten: the advantages, not the returns; over all learnt tokens of the step.
    level: of a step t, a "token" or a "turn" of an episode: then one value, of the state before it, and one advantage for all
    its tokens; `discount` and `decay` count turns.
    Source: Schulman et al. 2015 (1506.02438), equations 11 and 12; turns: RLinf 2025 (2509.15965), VAGEN 2025 (2510.16907).
    """

    discount: float = 1.0
    decay: float = 0.95
    bootstrap: bool = True
    whiten: bool = True
    level: Level = "token"

    def __post_init__(self) -> None:
        _refuse_level("GAE", self.level)
        if not 0 <= self.discount <= 1 or not 0 <= self.decay <= 1:
            raise PlanError(f"GAE: discount={self.discount}, decay={self.decay} are shares. Use 0 to 1.")


@dataclass(frozen=True, kw_only=True)
class RewardToGo:
    """A_t = the discounted sum of the rewards from t on: REINFORCE++, Hu 2025 (2501.03262), whitened over the step.

    level: of t, as of `GAE`.
    """

    discount: float = 1.0
    whiten: bool = True
    level: Level = "token"

    def __post_init__(self) -> None:
        _refuse_level("RewardToGo", self.level)
        if not 0 <= self.discount <= 1:
            raise PlanError(f"RewardToGo: discount={self.discount} is a share. Use 0 to 1.")


class TokenAdvantages(NamedTuple):
    """advantages, returns: [B, T] fp64, 0 where not learnt."""

    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def token_rewards(
    rewards_BT: Tensor,
    learn_BT: Tensor,
    *,
    kl: KL | None = None,
    old_log_probs_BT: Tensor | None = None,
    reference_log_probs_BT: Tensor | None = None,
) -> Tensor:
    """Rewards minus beta times the KL of each learnt token; [B, T] fp64.

    kl: with place="reward"; of pi_old, which wrote the tokens, from the reference model. Source: Ziegler et al. 2019.
    """
    rewards_BT = rewards_BT.double()
    if kl is None or not kl.in_reward:
        return rewards_BT
    if old_log_probs_BT is None or reference_log_probs_BT is None:
        raise PlanError("token_rewards: KL(place='reward') needs old_log_probs and reference_log_probs. Give both.")
    penalty_BT = kl_estimates(old_log_probs_BT, reference_log_probs_BT, kl.estimator)
    # where, not times: an estimate at a prompt's token may be inf.
    return rewards_BT - torch.where(learn_BT.bool(), kl.coefficient * penalty_BT, 0.0)


@torch.no_grad()
def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    learn_BT: Tensor,
    segments_BT: Tensor,
    *,
    discount: float = 1.0,
    decay: float = 0.95,
    open_BT: Tensor | None = None,
) -> TokenAdvantages:
    """Advantages and returns A + V of each segment; [B, T] fp64.

    values: V of the state before each label, as `critic_values` returns them. open: True at the last token of a segment that
    was cut off, and is continued by the value there; the value after the end of other segments is 0.
    """
    # Time first, since the recursion runs over it: each step reads and writes one row of B numbers.
    by_time = "b t -> t b"
    rewards_TB, values_TB = rearrange(rewards_BT.double(), by_time), rearrange(values_BT.double(), by_time)
    learn_TB, segments_TB = rearrange(learn_BT.bool(), by_time), rearrange(segments_BT, by_time)
    open_TB = torch.zeros_like(learn_TB) if open_BT is None else rearrange(open_BT.bool(), by_time)
    advantages_TB = torch.zeros_like(rewards_TB)
    zeros_B = rewards_TB.new_zeros(rewards_TB.shape[1])
    ahead_B, value_B, pending_B, segment_B = zeros_B, zeros_B, zeros_B, torch.zeros_like(segments_TB[:1].sum(0))
    for t in reversed(range(len(rewards_TB))):
        # Backwards in time: at the last token of a segment all that came from the next one is dropped.
        entered_B = segments_TB[t] != segment_B
        segment_B = segments_TB[t]
        ahead_B, pending_B = ahead_B.masked_fill(entered_B, 0.0), pending_B.masked_fill(entered_B, 0.0)
        # Only the last token of a segment is open, so no later value is overwritten.
        value_B = torch.where(open_TB[t], values_TB[t], value_B.masked_fill(entered_B, 0.0))
        pending_B = pending_B + rewards_TB[t]  # rewards since the last learnt token, which gets them
        learnt_B = learn_TB[t]
        delta_B = pending_B + discount * value_B - values_TB[t]
        ahead_B = torch.where(learnt_B, delta_B + discount * decay * ahead_B, ahead_B)
        value_B = torch.where(learnt_B, values_TB[t], value_B)
        pending_B = pending_B.masked_fill(learnt_B, 0.0)
        advantages_TB[t] = torch.where(learnt_B, ahead_B, 0.0)
    advantages_BT = rearrange(advantages_TB, "t b -> b t").contiguous()
    # R = A + V is the lambda-return: the critic learns from it before whitening changes A.
    return TokenAdvantages(advantages_BT, torch.where(learn_BT.bool(), advantages_BT + values_BT.double(), 0.0))


@torch.no_grad()
def rewards_to_go(rewards_BT: Tensor, learn_BT: Tensor, segments_BT: Tensor, *, discount: float = 1.0) -> Tensor:
    """The discounted sum of rewards from each learnt token on; [B, T] fp64. It equals GAE with values 0 and decay 1."""
    zeros_BT = torch.zeros_like(rewards_BT)
    return gae(rewards_BT, zeros_BT, learn_BT, segments_BT, discount=discount, decay=1.0).advantages


@torch.no_grad()
def turn_starts(learn_BT: Tensor, segments_BT: Tensor) -> Tensor:
    """[B, T] bool: the first learnt token of each turn, a run of learnt tokens of one segment."""
    goes_on = torch.zeros_like(learn_BT.bool())
    goes_on[:, 1:] = learn_BT[:, :-1].bool() & (segments_BT[:, 1:] == segments_BT[:, :-1])
    return learn_BT.bool() & ~goes_on


@torch.no_grad()
def spread_over_turns(values_BT: Tensor, starts_BT: Tensor, learn_BT: Tensor) -> Tensor:
    """Give each learnt token what stands at the start of its turn; 0 elsewhere. [B, T]"""
    places_T = torch.arange(values_BT.shape[1], device=values_BT.device)
    # Between a learnt token and the last start before it are learnt tokens only.
    start_BT = torch.where(starts_BT, places_T, 0).cummax(dim=1).values if values_BT.numel() else starts_BT.long()
    return torch.where(learn_BT.bool(), values_BT.gather(1, start_BT), 0.0)
