"""What a teacher tells: the log-probabilities of its most probable tokens, or of all, also of vocabulary-parallel logits.

Dims: N tokens, V the vocabulary of this rank, K tokens that are told of.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from meshkit.core.collectives import all_gather
from meshkit.errors import PlanError
from meshkit.loss._divergence import Teacher
from meshkit.loss._token_log_probs import Settings, head_of, logits_of_chunk
from meshkit.loss._told_tokens import split_told
from meshkit.loss.chunked import slices_of
from meshkit.loss.linear_logits import LinearLogits
from meshkit.loss.vocab_parallel import subtract_peak_, sum_over


@torch.no_grad()
def top_log_probs(logits: Tensor | LinearLogits, top: int | None = None, *, temperature: float = 1.0) -> Teacher:
    """The `top` most probable tokens of every prediction with their log-probabilities and that of all others together, or
    the whole vocabulary, on every rank of tp.

    logits: [..., V], in any form that `mk.cross_entropy` takes; they are divided by `temperature`.
    Wire, sharded logits only: all-reduces of a maximum and a sum per prediction, and an all-gather of `top` log-probabilities
    and ids of every rank and what `Teacher.rest` needs, or of the vocabulary.
    Raises: PlanError for fewer than one token, and for a temperature that is not positive.
    """
    if (top is not None and top < 1) or not temperature > 0:
        raise PlanError(f"top_log_probs(top={top}, temperature={temperature}): give positive numbers.")
    hidden, weight, bias, settings = head_of("top_log_probs", logits, temperature)
    hidden = rearrange(hidden, "... c -> (...) c")
    parts = [
        _top(logits_of_chunk(hidden[tokens], weight, bias, settings), top, settings)
        for tokens in slices_of(len(hidden), settings.chunk)
    ] or [_nothing(hidden, top, settings)]
    log_probs, *more = (torch.cat(each) for each in zip(*parts, strict=True))
    log_probs = log_probs.view(*logits.shape[:-1], log_probs.shape[-1])
    if not more:
        return Teacher(log_probs)
    ids, rest = more
    return Teacher(log_probs, ids.view(log_probs.shape), rest.view(log_probs.shape[:-1]))


def _nothing(hidden: Tensor, top: int | None, settings: Settings) -> tuple[Tensor, ...]:
    """`_top` of no predictions."""
    if top is None:
        return (hidden.new_zeros(0, settings.vocabulary),)
    kept = min(top, settings.vocabulary)
    return hidden.new_zeros(0, kept), hidden.new_zeros(0, kept, dtype=torch.int64), hidden.new_zeros(0)


def _top(wide_NV: Tensor, top: int | None, settings: Settings) -> tuple[Tensor, ...]:
    """Log-probabilities of all tokens; or of the most probable, their ids, and the log-probability of all others."""
    subtract_peak_(wide_NV, settings.axis)
    (total,) = sum_over(settings.axis, wide_NV.exp().sum(-1))
    log_probs = wide_NV.sub_(total.log().unsqueeze(-1))
    ranks = 1 if settings.axis is None else settings.axis.size()
    longest = -(-settings.vocabulary // ranks)  # of all ranks; those with less come last
    if top is None:
        if settings.axis is None:
            return (log_probs,)
        padded = F.pad(log_probs, (0, longest - log_probs.shape[-1]))
        return (all_gather(padded, -1, settings.axis)[:, : settings.vocabulary],)
    count = min(top, log_probs.shape[-1])
    values, ids = log_probs.topk(count, dim=-1)
    ids = ids + settings.first
    if settings.axis is not None:
        missing = min(top, longest) - count
        values = all_gather(F.pad(values, (0, missing), value=-torch.inf), -1, settings.axis)
        ids = all_gather(F.pad(ids, (0, missing), value=-1), -1, settings.axis)
        # Behind tokens of -inf, which are tokens: a padded place is none, and its id another's.
        order = values.clamp(min=torch.finfo(values.dtype).min).masked_fill(ids < 0, -torch.inf)
        places = order.topk(min(top, values.shape[-1], settings.vocabulary), dim=-1).indices
        values, ids = values.gather(-1, places), ids.gather(-1, places)
    _, rest = split_told(log_probs, ids, settings)
    return values, ids, rest
