"""Divergences of distillation (forward and reverse KL, generalised JSD) from a teacher's log-probabilities, per token.

Dims: N tokens, C features, V the vocabulary of this rank, K tokens that the teacher tells of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from meshkit.core.collectives import all_reduce
from meshkit.core.double_backward import once_differentiable
from meshkit.errors import DataError, PlanError
from meshkit.loss._cross_entropy import IGNORED, refuse_other_labels
from meshkit.loss._token_log_probs import WEIGHTLESS, Settings, head_of, logits_of_chunk
from meshkit.loss.chunked import Gradients, chunks_of
from meshkit.loss.linear_logits import LinearLogits
from meshkit.loss.vocab_parallel import subtract_peak_, sum_over, wide_dtype

REST = 1e-12  # the least share that the tokens together have which the teacher does not tell of: fp32 sums to 1 within 1e-7

Kind = Literal["forward", "reverse", "jsd"]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """How far the student's distribution q is from the teacher's p, of each token.

    kind: "forward" is KL(p || q), which covers all that the teacher says; "reverse" KL(q || p), which keeps to what it says
    most; "jsd" is beta KL(p || m) + (1 - beta) KL(q || m), with m = beta p + (1 - beta) q.
    temperature: divides the logits of both; a loss times its square has gradients of one size (Hinton et al. 2015).
    Raises: PlanError for other values.
    Source: Agarwal et al. 2023 (2306.13649), generalised knowledge distillation.
    """

    kind: Kind = "forward"
    beta: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("forward", "reverse", "jsd"):
            raise PlanError(f"Divergence: kind={self.kind!r} is not known. Choose from forward, reverse, jsd.")
        if not 0 < self.beta < 1:
            raise PlanError(f"Divergence: beta={self.beta} weighs two distributions. Use a number between 0 and 1.")
        if not self.temperature > 0:
            raise PlanError(f"Divergence: temperature={self.temperature} divides the logits. Give a positive number.")


class Teacher(NamedTuple):
    """What a teacher says of each prediction: log-probabilities at the temperature of the `Divergence`.

    log_probs: [..., K] of the tokens `ids` [..., K] int64, each once; all others are one outcome together. Or [..., whole
    vocabulary] in its order, with ids None.
    """

    log_probs: Tensor
    ids: Tensor | None = None


def token_divergences(
    logits: Tensor | LinearLogits, labels: Tensor, teacher: Teacher, divergence: Divergence
) -> Tensor:
    """The divergence of every prediction, differentiable in the logits; 0 where the label is -100. [...] in fp32 at least.

    logits: [..., V], in any form that `mk.cross_entropy` takes: vocabulary-parallel, or of a chunked loss. labels: [...]
    int64, which say no more than where nothing is learnt.
    Wire, sharded logits only: forward, all-reduces of a maximum, and of one sum and K numbers per token; with the whole
    vocabulary, of three sums. Backward: nothing.
    Raises: PlanError for logits sharded otherwise; DataError for a teacher of another shape.
    """
    refuse_other_labels("token_divergences", logits, labels)
    hidden, weight, bias, settings = head_of("token_divergences", logits, divergence.temperature)
    log_probs, ids = teacher
    wanted = logits.shape[-1] if ids is None else ids.shape[-1]
    if log_probs.shape != (*labels.shape, wanted) or (ids is not None and ids.shape != log_probs.shape):
        raise DataError(
            f"token_divergences: the teacher's log_probs are {tuple(log_probs.shape)}, and the student's logits "
            f"{tuple(logits.shape)}. Give ids [..., K] with log_probs of the same shape, or the whole vocabulary."
        )
    hidden = rearrange(hidden, "... c -> (...) c")
    said = rearrange(log_probs, "... k -> (...) k")
    told = None if ids is None else rearrange(ids, "... k -> (...) k")
    losses: Tensor = _Divergences.apply(hidden, weight, bias, labels.flatten(), said, told, settings, divergence)
    return losses.view(labels.shape)


class _Divergences(torch.autograd.Function):
    """hidden: [N, C] with a weight, or the logits [N, V] without one."""

    # [Note: gradient of a function of probabilities]
    # With q = softmax(z) and a loss D(q), g = dD/dq: dD/dz_v = q_v (g_v - sum_u q_u g_u). Tokens of which the teacher does
    # not tell are one outcome, and share one g. Their q_v are computed again in backward, so forward keeps no logits: of
    # each prediction it keeps the sum, and for tokens told of the correction of q g. A constant added to all g changes
    # nothing.

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        labels: Tensor,
        said: Tensor,
        told: Tensor | None,
        settings: Settings,
        divergence: Divergence,
    ) -> Tensor:
        wide_type = wide_dtype(hidden.dtype)
        losses, normaliser, shared = hidden.new_zeros((3, len(labels)), dtype=wide_type)
        corrections = None if told is None else hidden.new_zeros(said.shape, dtype=wide_type)
        for tokens in chunks_of(labels, settings.chunk, settings.axis):
            wide = logits_of_chunk(hidden[tokens], weight, bias, settings)
            peak = subtract_peak_(wide, settings.axis)
            total = wide.exp().sum(-1)
            valid = labels[tokens] != IGNORED
            if told is None or corrections is None:
                (total,) = sum_over(settings.axis, total)
                log_q = wide.sub_(total.log().unsqueeze(-1))
                log_p = _own_part(said[tokens], log_q, settings)
                terms, weighted, _ = _outcomes(divergence, log_p, log_q)
                loss, mean = sum_over(settings.axis, terms.sum(-1), weighted.sum(-1))
                shared[tokens] = mean
            else:
                entries = _entries(wide, told[tokens], settings)
                sums = torch.cat([total.unsqueeze(-1), entries], dim=-1)
                if settings.axis is not None:
                    sums = all_reduce(sums, settings.axis)
                total = sums[:, 0]
                log_p, log_q = said[tokens].to(wide_type), sums[:, 1:] - total.log().unsqueeze(-1)
                is_whole = told.shape[-1] == settings.vocabulary
                if not is_whole:  # one more outcome: all other tokens
                    log_p, log_q = (torch.cat([each, _rest(each)], dim=-1) for each in (log_p, log_q))
                terms, weighted, gradient = _outcomes(divergence, log_p, log_q)
                loss, mean = terms.sum(-1), weighted.sum(-1)
                of_rest = gradient[:, -1] if not is_whole else torch.zeros_like(mean)
                kept = slice(None, told.shape[-1])
                shared[tokens] = mean - of_rest
                corrections[tokens] = weighted[:, kept] - log_q[:, kept].exp() * of_rest.unsqueeze(-1)
            losses[tokens] = loss.masked_fill(~valid, 0)
            normaliser[tokens] = peak + total.log()
            del wide, terms, weighted  # before the next chunk's are allocated
        ctx.save_for_backward(hidden, weight, bias, labels, said, told, normaliser, shared, corrections)
        ctx.settings, ctx.divergence = settings, divergence
        out: Tensor = losses
        return out

    @staticmethod
    @once_differentiable(
        "the divergences of distillation are computed again in backward, chunk by chunk.",
        "Compute the loss of logits by F.kl_div",
    )
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, said, told, normaliser, shared, corrections = ctx.saved_tensors
        settings: Settings = ctx.settings
        d_logits = torch.zeros_like(hidden) if weight is None else None
        grads = None if weight is None else Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for tokens in chunks_of(labels, settings.chunk, settings.axis):
            log_q = logits_of_chunk(hidden[tokens], weight, bias, settings)
            log_q.sub_(normaliser[tokens].unsqueeze(-1))
            mean = shared[tokens].unsqueeze(-1)
            # See [Note: gradient of a function of probabilities].
            if told is None:
                log_p = _own_part(said[tokens], log_q, settings)
                _, weighted, _ = _outcomes(ctx.divergence, log_p, log_q)
                wide = weighted.sub_(log_q.exp_().mul_(mean))
            else:
                wide = log_q.exp_().mul_(-mean)
                _add_entries_(wide, told[tokens], corrections[tokens], settings)
            scale = d_losses[tokens].masked_fill(labels[tokens] == IGNORED, 0) / settings.temperature
            # A product with 0 is NaN where the teacher says nothing that is a number, as of padding.
            wide.mul_(scale.unsqueeze(-1)).masked_fill_((scale == 0).unsqueeze(-1), 0)
            if d_logits is not None:
                d_logits[tokens] = wide.to(d_logits.dtype)
            elif grads is not None:
                grads.add(tokens, wide.to(hidden.dtype))
            del wide, log_q
        nothing = (None,) * 5
        return (d_logits, None, None, *nothing) if grads is None else (*grads.finish(), *nothing)


def _outcomes(divergence: Divergence, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each outcome: (its part of the divergence, q g, g), with g the derivative by q up to a constant."""
    log_p, log_q = log_p.clamp(min=WEIGHTLESS), log_q.clamp(min=WEIGHTLESS)
    if divergence.kind == "forward":
        p = log_p.exp()
        return p * (log_p - log_q), -p, -(log_p - log_q).exp()
    q = log_q.exp()
    if divergence.kind == "reverse":
        gradient = log_q - log_p
        return q * gradient, q * gradient, gradient
    beta = divergence.beta
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    gradient = (1 - beta) * (log_q - log_m)
    return beta * log_p.exp() * (log_p - log_m) + q * gradient, q * gradient, gradient


def _rest(log_probs: Tensor) -> Tensor:
    """The log-probability [N, 1] of all outcomes that are not there."""
    return (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=REST).log()


def _own_part(said: Tensor, like: Tensor, settings: Settings) -> Tensor:
    """This rank's vocabulary of a teacher's whole one."""
    return said[:, settings.first : settings.first + like.shape[-1]].to(like.dtype)


def _entries(wide_NV: Tensor, ids_NK: Tensor, settings: Settings) -> Tensor:
    """The logits [N, K] of these tokens: 0 where another rank has them, NaN outside of the vocabulary."""
    local, position = _local(wide_NV, ids_NK, settings)
    entries = wide_NV.gather(-1, position) if wide_NV.shape[-1] else wide_NV.new_zeros(ids_NK.shape)
    unknown = (ids_NK < 0) | (ids_NK >= settings.vocabulary)
    return entries.masked_fill_(~local, 0).masked_fill_(unknown, torch.nan)


def _add_entries_(wide_NV: Tensor, ids_NK: Tensor, summands_NK: Tensor, settings: Settings) -> None:
    local, position = _local(wide_NV, ids_NK, settings)
    if wide_NV.shape[-1]:
        wide_NV.scatter_add_(-1, position, summands_NK.masked_fill(~local, 0).to(wide_NV.dtype))


def _local(wide_NV: Tensor, ids_NK: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """(whether this rank has the token, its place there, 0 where it has not)."""
    local = (ids_NK >= settings.first) & (ids_NK < settings.first + wide_NV.shape[-1])
    return local, (ids_NK - settings.first).masked_fill(~local, 0)
