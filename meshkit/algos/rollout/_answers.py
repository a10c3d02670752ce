"""Answers in progress: what is held of each between two tokens, the next token of each, and rollouts of those that ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.algos.rollout._engine import Reason, Sampling, Stopping
from meshkit.algos.rollout._fingerprints import CHUNK_ENTRIES, GrowingFingerprint
from meshkit.algos.rollout._rollout import Prompt, Rollout
from meshkit.algos.rollout._sampler import Noise, choose
from meshkit.loss.vocab_parallel import wide_dtype
from meshkit.step import Run


@dataclass(eq=False)
class Answer:
    """All that an answer needs to go on: what is in a cache can be computed again from it.

    number: its place in the order of all answers. stream: of its random numbers. ids, log_probs, versions: of its tokens so
    far, as is fingerprint, if one is asked for. reason: why it has ended, if it has. routing: see `Rollout`, once it has
    ended.
    """

    number: int
    prompt: Prompt
    sample: int
    stream: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: Reason | None = None
    routing: np.ndarray | None = None
    fingerprint: GrowingFingerprint | None = None

    def forget(self) -> None:
        """As before its first token."""
        self.ids, self.log_probs, self.versions, self.reason = [], [], [], None


@dataclass(eq=False)
class Group:
    """Answers that have the same tokens so far, which are computed once for all of them; then each has its own.

    growing: how many have not ended yet.
    """

    tokens: np.ndarray
    answers: list[Answer]
    growing: int = field(init=False)

    def __post_init__(self) -> None:
        self.growing = len(self.answers)

    def parts(self, together: int) -> list[Group]:
        """Groups of so many answers at most."""
        firsts = range(0, len(self.answers), together)
        return [Group(self.tokens, self.answers[first : first + together]) for first in firsts]


def groups_of(answers: Sequence[Answer]) -> list[Group]:
    """Samples of a prompt that have no token yet are together, any other answer is alone; in the order of the first ones."""
    groups: list[Group] = []
    fresh: dict[int, Group] = {}
    for answer in sorted(answers, key=lambda answer: answer.number):
        tokens = answer.prompt.ids
        if answer.ids:
            groups.append(Group(np.concatenate([tokens, np.array(answer.ids, np.int64)]), [answer]))
        elif (group := fresh.get(id(answer.prompt))) is not None:
            group.answers.append(answer)
            group.growing += 1
        else:
            groups.append(fresh.setdefault(id(answer.prompt), Group(tokens, [answer])))
    return groups


def noise_of(answers: Sequence[Answer], device: torch.device) -> Noise:
    """Of their next tokens."""
    return Noise(
        torch.tensor([answer.stream for answer in answers], dtype=torch.int64, device=device),
        torch.tensor([len(answer.ids) for answer in answers], dtype=torch.int64, device=device),
    )


def draw_tokens(
    run: Run,
    logits: Tensor | None,
    rows: Tensor | None,
    answers: Sequence[Answer],
    noise: Noise,
    sampling: Sampling,
    *,
    version: int,
    held: Tensor | None = None,
) -> Tensor:
    """Append a token to each answer, the same one on all ranks of a data rank; returns their ids [N] on the device.

    logits: [rows, V], of the ranks of tp each with its part; None on stages of pp but the last. rows: [N], the row that each
    answer reads, None for each its own. noise: of these answers, at their next tokens. version: of the weights. held: [rows]
    bool, where ranks of cp have logits of some rows each; None: each has all.
    Wire: what `choose` sends, and two numbers per answer over tp, cp and pp.
    """
    mesh = run.mesh
    if logits is not None:
        ids, log_probs = choose(logits, rows, noise, sampling)
        drawn = torch.stack((ids.double(), log_probs.double()))
    else:
        drawn = torch.zeros(2, len(answers), dtype=torch.float64, device=mesh.device)
    # One rank decides for all: the last bits of logits may differ between ranks, and another token would be drawn.
    for axis, decider in deciders(run):
        if axis == "cp" and held is not None:
            mine = held if rows is None else held[rows]
            dist.all_reduce(drawn.masked_fill_(~mine, 0.0), group=mesh[axis].get_group())
        else:
            dist.broadcast(drawn, group=mesh[axis].get_group(), group_src=decider)
    for answer, id, log_prob in zip(answers, *drawn.tolist(), strict=True):
        answer.ids.append(int(id))
        answer.log_probs.append(log_prob)
        answer.versions.append(version)
    return drawn[0].long()


def add_entries(
    run: Run, codes_BK: Tensor | None, rows: Tensor | None, answers: Sequence[Answer], *, features: int
) -> None:
    """Append the token just drawn to each answer's fingerprint, the same on all ranks of a data rank.

    codes_BK: `top_entries` of the hidden states that gave the logits; None on stages of pp but the last. rows: [N], the one
    that each answer read, None for each its own. Wire: 8 bytes for each of K codes of a draw over tp, cp and pp.
    """
    mesh = run.mesh
    codes = torch.zeros(len(answers), min(CHUNK_ENTRIES, features), dtype=torch.int64, device=mesh.device)
    if codes_BK is not None:
        codes.copy_(codes_BK if rows is None else codes_BK[rows])
    for axis, decider in deciders(run):
        dist.broadcast(codes, group=mesh[axis].get_group(), group_src=decider)
    for answer, of_token in zip(answers, codes.cpu().numpy(), strict=True):
        answer.fingerprint = answer.fingerprint or GrowingFingerprint()
        answer.fingerprint.add(of_token, answer.versions[-1])


def deciders(run: Run) -> list[tuple[str, int]]:
    """Axes of more than one rank whose ranks have the same answers, and the rank of each that decides for all."""
    last_stage = 0 if run.pipeline is None else run.pipeline.cut.ends[1]
    spec = run.mesh.spec
    axes = (("tp", spec.tp, 0), ("cp", spec.cp, 0), ("pp", spec.pp, last_stage))
    return [(axis, decider) for axis, size, decider in axes if size > 1]


def rollouts_of(run: Run, ended: Sequence[Answer], stopping: Stopping) -> list[Rollout]:
    """In the order of (prompt, sample)."""
    precision = run.resolved.memory.precision
    dtype = next(run.model.parameters()).dtype if precision is None else precision.compute
    # As wide as `choose` computed them, which rounds nothing that the trainer will compare with.
    wide = np.float64 if wide_dtype(dtype) == torch.float64 else np.float32
    return [
        Rollout(
            prompt_ids=answer.prompt.ids,
            ids=np.array(answer.ids, np.int64),
            log_probs=np.array(answer.log_probs, wide),
            versions=np.array(answer.versions, np.int64),
            fingerprint=None if answer.fingerprint is None else answer.fingerprint.data,
            text=stopping.text(answer.ids),
            key=answer.prompt.key,
            fields=answer.prompt.fields,
            truncated=answer.reason == "length",
            routing=answer.routing,
        )
        for answer in sorted(ended, key=lambda answer: answer.number)
    ]
