"""Which rollouts a step learns from (dynamic and rejection sampling), and what their length costs (overlong penalty)."""

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
    """What an algorithm does to the rollouts of a step before its loss sees them.

    dynamic: dynamic sampling, see `keep_informative`. overlong: soft overlong punishment, see `overlong_penalty`, over the
    last tokens of an answer, which are allowed beyond the expected `max_new_tokens`: so many parts of it.
    """

    dynamic: bool = False
    overlong: float = 0.0

    def limit(self, max_new_tokens: int) -> int:
        """The most tokens of an answer, those included that cost reward: what to sample with."""
        return max_new_tokens + math.ceil(self.overlong * max_new_tokens)


class Kept(NamedTuple):
    """mask: [A] bool, the answers to learn from. groups: how many groups they are. missing: how many more are wanted."""

    mask: Tensor
    groups: int
    missing: int


@torch.no_grad()
def keep_informative(rewards_A: Tensor, groups_A: Tensor, *, wanted: int) -> Kept:
    """DAPO's dynamic sampling: drop groups whose answers all have the same score, and those beyond the first `wanted` groups.

    Of all answers of the step; NaN is no score. While `missing` is not 0, generate for more prompts and call it again with
    all that there is. Groups count in the order of their first answer.
    Source: Yu et al. 2025 (2503.14476), section 3.2.
    """
    uniform_A = group_advantages(rewards_A, groups_A, GroupAdvantage()).uniform
    found = list(dict.fromkeys(groups_A[~uniform_A].tolist()))[:wanted]
    mask_A = torch.isin(groups_A, groups_A.new_tensor(found)) & ~uniform_A
    return Kept(mask_A, len(found), wanted - len(found))


def overlong_penalty(lengths_A: Tensor, *, limit: int, buffer: int) -> Tensor:
    """DAPO's soft penalty, to be added to rewards; [A] fp64, in [-1, 0].

    0 up to limit - buffer tokens, then down a straight line to -1 at `limit`, -1 beyond.
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
    order = rewards_A.double().nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
    taken: dict[int, int] = {}
    mask_A = torch.zeros_like(rewards_A, dtype=torch.bool)
    for at in order.tolist():
        group = int(groups_A[at])
        if taken.get(group, 0) < best and not rewards_A[at].isnan():
            taken[group] = taken.get(group, 0) + 1
            mask_A[at] = True
    return mask_A


@torch.no_grad()
def select_above(rewards_A: Tensor, threshold: float) -> Tensor:
    """Rejection sampling: answers with at least this reward; [A] bool, False without a score.

    Source: STaR, Zelikman et al. 2022 (2203.14465); ReST-EM, Singh et al. 2023 (2312.06585).
    """
    return rewards_A >= threshold
