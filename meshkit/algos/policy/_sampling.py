"""Dynamic sampling, rejection sampling and the overlong penalty: which rollouts a step learns from, and what length costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshkit.algos.policy._advantages import GroupAdvantage, group_advantages
from meshkit.errors import DataError


@dataclass(frozen=True, kw_only=True)
class RolloutRules:
    """What an algorithm does to the rollouts of a step before its loss.

    dynamic: dynamic sampling, see `keep_informative`. overlong: soft overlong punishment, see `overlong_penalty`: an answer
    may be longer than `max_new_tokens` by this share of it, and the tokens beyond cost reward.
    """

    dynamic: bool = False
    overlong: float = 0.0

    def limit(self, max_new_tokens: int) -> int:
        """The most tokens an answer may have, including those that cost reward: what to sample with."""
        return max_new_tokens + math.ceil(self.overlong * max_new_tokens)


class Kept(NamedTuple):
    """mask: [A] bool, the answers to learn from. groups: the number of their groups. missing: how many more are wanted."""

    mask: Tensor
    groups: int
    missing: int


@torch.no_grad()
def keep_informative(rewards_A: Tensor, groups_A: Tensor, *, wanted: int) -> Kept:
    """DAPO's dynamic sampling: drop groups whose answers all have the same score, and those beyond the first `wanted` groups.

    rewards, groups: of all answers of the step; NaN is no score. While `missing` is not 0, generate answers to more prompts
    and call it again with all answers so far. Groups are ordered by their first answer.
    Source: Yu et al. 2025 (2503.14476), section 3.2.
    """
    # The same test as the advantage makes: what is dropped is what would have had an advantage of 0.
    uniform_A = group_advantages(rewards_A, groups_A, GroupAdvantage()).uniform
    groups = list(dict.fromkeys(groups_A[~uniform_A].tolist()))[:wanted]
    mask_A = torch.isin(groups_A, groups_A.new_tensor(groups)) & ~uniform_A
    return Kept(mask_A, len(groups), wanted - len(groups))


def overlong_penalty(lengths_A: Tensor, *, limit: int, buffer: int) -> Tensor:
    """DAPO's soft penalty, added to rewards; [A] fp64, in [-1, 0].

    It is 0 up to limit - buffer tokens, falls in a straight line to -1 at `limit`, and stays -1 beyond.
    Source: Yu et al. 2025 (2503.14476), equation 13.
    """
    if not 0 < buffer <= limit:
        raise DataError(
            f"overlong_penalty: buffer={buffer} is the last part of limit={limit}. Use 0 < buffer <= limit."
        )
    return ((limit - buffer - lengths_A.double()) / buffer).clamp(-1, 0)


@torch.no_grad()
def select_best(rewards_A: Tensor, groups_A: Tensor, *, best: int = 1) -> Tensor:
    """Rejection sampling: the `best` answers of each group by reward, earlier ones first among equals; [A] bool.

    An answer without a score (NaN) is never selected. Train on them with `sft_losses`.
    Source: Touvron et al. 2023 (2307.09288), section 3.2.
    """
    # Stable: equal rewards keep the order of samples, so the choice is the same on every mesh.
    order = rewards_A.double().nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
    taken: dict[int, int] = {}
    mask_A = torch.zeros_like(rewards_A, dtype=torch.bool)
    for answer in order.tolist():
        group = int(groups_A[answer])
        if taken.get(group, 0) < best and not rewards_A[answer].isnan():
            taken[group] = taken.get(group, 0) + 1
            mask_A[answer] = True
    return mask_A


@torch.no_grad()
def select_above(rewards_A: Tensor, threshold: float) -> Tensor:
    """Rejection sampling: answers with at least this reward; [A] bool, False without a score.

    Source: STaR, Zelikman et al. 2022 (2203.14465); ReST-EM, Singh et al. 2023 (2312.06585).
    """
    return rewards_A >= threshold
