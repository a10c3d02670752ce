"""Sampler (temperature, top-k, top-p, min-p): draws the next token of each sequence, also from vocabulary-parallel logits.

Random numbers depend on the seed, the prompt's key, the sample, and the position and id of the token, so that an answer
depends neither on the rest of the batch nor on the mesh. The token drawn is that with the largest quotient of probability and
exponential noise. This is the Gumbel-max trick without its logarithms; the last bits of logits matter only where two
quotients are equal up to them (Gumbel 1954; Maddison 2014).
Dims: N draws, V the vocabulary of this rank.
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshkit.algos.rollout._engine import Sampling
from meshkit.core.collectives import all_gather
from meshkit.core.rng import random_bits
from meshkit.loss import vocabulary_part
from meshkit.loss.vocab_parallel import subtract_peak_, sum_over, wide_dtype


class Noise:
    """Exponential noise of the next tokens of N answers. base_N: their streams of random numbers; positions_N: of the tokens.

    It depends on no logits. So it is made for more and more steps at a time while the answers stay the same: where few draw,
    the time is that of launches and not of numbers.
    """

    MOST = 1 << 16  # numbers that are made at a time for steps ahead

    def __init__(self, base_N: Tensor, positions_N: Tensor) -> None:
        self._base_N, self._positions_N = base_N, positions_N
        self._steps, self._ahead = 1, list[Tensor]()

    def of_next(self, first: int, tokens: int) -> Tensor:
        """[N, V] in fp32 for this rank's tokens, at the next position."""
        if not self._ahead:
            steps = min(self._steps, max(1, self.MOST // max(1, len(self._base_N) * tokens)))
            positions_PN = self._positions_N + torch.arange(steps, device=self._positions_N.device).unsqueeze(1)
            noise_PNV = _exponential(random_bits(positions_PN, self._base_N, 63), first, tokens)
            self._ahead = list(noise_PNV.unbind())[::-1]
            self._positions_N, self._steps = self._positions_N + steps, 2 * self._steps
        return self._ahead.pop()


def choose(logits: Tensor, rows_N: Tensor | None, noise: Noise, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(ids [N] int64, their log-probabilities [N] in fp32 at least), the same on every rank of tp.

    logits: [rows, V], plain or a DTensor sharded on its vocabulary. rows_N: the row of logits that each draw reads, None for
    each its own. noise: unused when greedy.
    Wire, sharded logits only: all-reduces of a maximum and a sum per row and an all-gather of three numbers per draw; with
    top_k an all-gather of top_k log-probabilities per row and rank, with top_p alone one of the whole logits.
    """
    axis: DeviceMesh | None = None
    first = 0
    if isinstance(logits, DTensor):
        logits, first, axis = vocabulary_part("generate", logits)
    # One copy in the wide dtype, on which all that follows works in place: logits of a step are [rows, V].
    wide = logits.to(wide_dtype(logits.dtype), copy=True)
    if sampling.temperature not in (0, 1):
        wide.div_(sampling.temperature)
    subtract_peak_(wide, axis)
    # After the peak is taken off: exp of raw logits overflows.
    odds = wide.exp()
    (total,) = sum_over(axis, odds.sum(-1))
    log_total = total.log()
    if rows_N is not None and len(rows_N) > len(wide):  # several samples of one prompt; else each has its own, in order
        wide, odds, log_total = wide[rows_N], odds[rows_N], log_total[rows_N]
    scores = wide
    if sampling.temperature:
        scores = odds.div_(noise.of_next(first, odds.shape[-1]))
    if sampling.temperature and sampling.filters:
        log_probs = wide - log_total.unsqueeze(-1)
        scores = scores.masked_fill(log_probs < _threshold(log_probs, axis, sampling).unsqueeze(-1), -torch.inf)
    ids_N, chosen_N = _largest(scores, wide, first, axis)
    return ids_N, chosen_N - log_total


def _exponential(streams: Tensor, first: int, tokens: int) -> Tensor:
    """Exponential noise [..., V] in fp32 of streams [...] for this rank's tokens: -log(1 - u), u uniform."""
    # Small noise decides, and comes from small u, which fp32 holds to full relative precision: so log1p(-u) of u itself, not
    # log of 1 - u. The clamps keep u from 0, where a quotient would be infinite, and from 1, where the noise would be.
    token_V = torch.arange(first, first + tokens, device=streams.device)
    uniform = random_bits(token_V, streams.unsqueeze(-1), 53).float().mul_(2.0**-53)
    return uniform.clamp_(2.0**-54, 1 - 2.0**-24).neg_().log1p_().neg_()


def _threshold(log_probs: Tensor, axis: DeviceMesh | None, sampling: Sampling) -> Tensor:
    """The smallest log-probability [N] that passes top_k, top_p and min_p."""
    candidates = log_probs
    if sampling.top_k is not None:
        candidates = _top(candidates, sampling.top_k)
    if axis is not None and (sampling.top_k is not None or sampling.top_p < 1):
        candidates = _gathered(candidates, axis)
    if sampling.top_k is not None:
        candidates = _top(candidates, sampling.top_k)
    peak = _peak(candidates, axis)
    threshold = candidates.amin(-1) if sampling.top_k is not None else torch.full_like(peak, -torch.inf)
    if sampling.top_p < 1:
        ordered = candidates.sort(-1, descending=True).values
        # A token is kept if the more probable ones add up to less than top_p; so the first always is.
        before = ordered.softmax(-1).cumsum(-1).roll(1, dims=-1)
        before[:, 0] = 0  # roll brought the total of all tokens here
        threshold = ordered.masked_fill(before >= sampling.top_p, torch.inf).amin(-1)
    if sampling.min_p > 0:
        threshold = torch.maximum(threshold, peak + torch.tensor(sampling.min_p, dtype=torch.float64).log().to(peak))
    return threshold


def _top(log_probs: Tensor, count: int) -> Tensor:
    return log_probs.topk(min(count, log_probs.shape[-1]), dim=-1).values


def _gathered(log_probs: Tensor, axis: DeviceMesh) -> Tensor:
    """[N, all of the axis]; -inf pads what ranks have fewer of. Wire: an all-reduce of a size and an all-gather."""
    longest = torch.tensor(log_probs.shape[-1], device=log_probs.device)
    all_reduce(longest, ReduceOp.MAX, group=axis.get_group())
    missing = int(longest) - log_probs.shape[-1]
    return all_gather(torch.nn.functional.pad(log_probs, (0, missing), value=-torch.inf), -1, axis)


def _peak(log_probs: Tensor, axis: DeviceMesh | None) -> Tensor:
    peak = log_probs.amax(-1) if log_probs.shape[-1] else log_probs.new_full(log_probs.shape[:1], -torch.inf)
    if axis is not None:
        all_reduce(peak, ReduceOp.MAX, group=axis.get_group())
    return peak


def _largest(scores: Tensor, wide: Tensor, first: int, axis: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """The token [N] with the largest score, and its entry [N] of `wide`; of equal scores the first token."""
    if axis is None:
        best = scores.argmax(-1, keepdim=True)
        return best.squeeze(-1), wide.gather(-1, best).squeeze(-1)
    if scores.shape[-1]:
        best = scores.argmax(-1, keepdim=True)
        best_3N = torch.stack(
            [scores.gather(-1, best).double(), (best + first).double(), wide.gather(-1, best).double()]
        ).squeeze(-1)
    else:
        best_3N = scores.new_full((3, len(scores)), -torch.inf, dtype=torch.float64)
    # Scores, ids and entries in one message of fp64, which holds ids exactly. argmax takes the first of equal scores, and
    # ranks are in the order of the vocabulary, so the choice does not depend on tp.
    best_R3N = all_gather(rearrange(best_3N, "three n -> 1 three n"), 0, axis)
    rank_N = best_R3N[:, 0].argmax(0)
    _, ids_N, wide_N = best_R3N.gather(0, repeat(rank_N, "n -> 1 three n", three=3))[0]
    return ids_N.long(), wide_N.to(wide.dtype)
