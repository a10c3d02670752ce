"""Scores on ranks: each answer is scored once, every rank learns of every failure, and no rank waits for one that raised."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist

from meshkit.algos.rewards._score import Scorer, Scores
from meshkit.algos.rollout import Rollout
from meshkit.errors import RewardError
from meshkit.mesh import Mesh


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshScores:
    """Scores of this data rank's answers, and what all ranks are told of the rest."""

    own: Scores
    rollouts: list[Rollout]
    """this data rank's, with their rewards: each score, a vector's sum; NaN where there is none"""
    answers: int
    """of the whole step"""
    tokens: int
    """of them"""
    mean: float
    """score of the step's answers that have one; NaN if none has"""
    unscored: dict[str, int]
    """of the whole step, by kind"""
    first_unscored: str | None
    """of the lowest data rank that has one"""

    def scalars(self) -> dict[str, float]:
        """For a logger: reward, tokens of an answer, and of answers without a score how many, by kind."""
        unscored = {f"unscored/{kind}": count for kind, count in self.unscored.items()}
        return {"reward": self.mean, "answer_tokens": self.tokens / max(self.answers, 1), **unscored}

    @staticmethod
    def joined(parts: Sequence[MeshScores]) -> MeshScores:
        """Of several calls in one step, in order. No communication."""
        if len(parts) == 1:
            return parts[0]
        unscored = sum((Counter(part.unscored) for part in parts), Counter())
        scored = [part.answers - sum(part.unscored.values()) for part in parts]
        totals = [part.mean * count for part, count in zip(parts, scored, strict=True) if count]
        return MeshScores(
            own=Scores(values=tuple(value for part in parts for value in part.own.values)),
            rollouts=[rollout for part in parts for rollout in part.rollouts],
            answers=sum(part.answers for part in parts),
            tokens=sum(part.tokens for part in parts),
            mean=sum(totals) / sum(scored) if totals else math.nan,
            unscored=dict(unscored),
            first_unscored=next((part.first_unscored for part in parts if part.first_unscored), None),
        )


def score_on_mesh(mesh: Mesh, answers: Sequence[Rollout], scorer: Scorer, *, fail_fast: bool = False) -> MeshScores:
    """scorer(answers) of each data rank, on the first of its ranks; the others (tp, cp, pp) are told, so all agree.

    answers: of this data rank, the same on its ranks; may be none. scorer: `partial(score, reward=...)`, a pool's `score`, or
    a function that adds several up. If it raises, which `score` does not, the whole step raises.
    fail_fast: an answer without a score ends the step too. Give time limits: the others wait in a collective.
    Wire: one all-gather of the pickled scores over the mesh.
    Raises: RewardError, on every rank and with the same text.
    """
    scores, failure = None, None
    if all(mesh[axis].get_local_rank() == 0 for axis in ("pp", "cp", "tp")):
        try:
            scores = scorer(answers)
            if len(scores.values) != len(answers):
                failure = f"RewardError: {len(scores.values)} scores for {len(answers)} answers"
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    everyone: list[tuple[int, Scores | None, str | None, int]] = [(0, None, None, 0)] * mesh.spec.world_size
    dist.all_gather_object(
        everyone, (mesh.data_rank, scores, failure, sum(len(answer.ids) for answer in answers)), group=mesh.group
    )
    for rank, (_, _, text, _) in enumerate(everyone):
        if text is not None:
            raise RewardError(f"scoring failed on rank {rank}: {text}. Mend the scorer.")
    by_data_rank = dict(sorted((data_rank, found) for data_rank, found, _, _ in everyone if found is not None))
    unscored: Counter[str] = Counter()
    for found in by_data_rank.values():
        unscored.update(found.unscored)
    first = next(
        (f"data rank {at}, {found.first_unscored}" for at, found in by_data_rank.items() if found.first_unscored), None
    )
    totals = np.concatenate([found.totals for found in by_data_rank.values()])
    tokens = sum({data_rank: tokens for data_rank, _, _, tokens in everyone}.values())
    if fail_fast and first is not None:
        raise RewardError(
            f"{sum(unscored.values())} of {len(totals)} answers have no score; the first: {first}. "
            "Mend the reward, or pass fail_fast=False to leave such answers out."
        )
    scored = totals[~np.isnan(totals)]
    mean = float(scored.mean()) if len(scored) else math.nan
    own = by_data_rank[mesh.data_rank]
    return MeshScores(
        own=own,
        rollouts=[replace(each, reward=reward) for each, reward in zip(answers, own.totals.tolist(), strict=True)],
        answers=len(totals),
        tokens=tokens,
        mean=mean,
        unscored=dict(unscored),
        first_unscored=first,
    )
