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

from meshkit.core.double_backward import once_differentiable
from meshkit.errors import DataError, PlanError
from meshkit.loss._cross_entropy import IGNORED, refuse_other_labels
from meshkit.loss._token_log_probs import WEIGHTLESS, Settings, head_of, logits_of_chunk
from meshkit.loss._told_tokens import add_told_, hide_told_, split_told
from meshkit.loss.chunked import Gradients, chunks_of
from meshkit.loss.linear_logits import LinearLogits
from meshkit.loss.vocab_parallel import subtract_peak_, sum_over, wide_dtype

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

    log_probs: [..., K] of the tokens `ids` [..., K] int64, each once; `rest` [...] of all others, which are one outcome
    together, -inf where there are none. Or [..., whole vocabulary] in its order, without ids and rest.
    """

    log_probs: Tensor
    ids: Tensor | None = None
    rest: Tensor | None = None


def token_divergences(
    logits: Tensor | LinearLogits, labels: Tensor, teacher: Teacher, divergence: Divergence
) -> Tensor:
    """The divergence of every prediction, differentiable in the logits; 0 where the label is -100. [...] in fp32 at least.

    logits: [..., V], in any form that `mk.cross_entropy` takes: vocabulary-parallel, or of a chunked loss. labels: [...]
    int64, which say no more than where nothing is learnt.
    Wire, sharded logits only: forward, all-reduces of a maximum and of K numbers, and an all-gather of one, per token; with
    the whole vocabulary, all-reduces of a maximum and three sums. Backward: nothing.
    Raises: PlanError for logits sharded otherwise; DataError for a teacher of another shape.
    """
    refuse_other_labels("token_divergences", logits, labels)
    hidden, weight, bias, settings = head_of("token_divergences", logits, divergence.temperature)
    log_probs, ids, rest = teacher
    wanted = logits.shape[-1] if ids is None else ids.shape[-1]
    if log_probs.shape != (*labels.shape, wanted) or (ids is not None and ids.shape != log_probs.shape):
        raise DataError(
            f"token_divergences: the teacher's log_probs are {tuple(log_probs.shape)}, and the student's logits "
            f"{tuple(logits.shape)}. Give ids [..., K] with log_probs of the same shape, or the whole vocabulary."
        )
    if (ids is None) != (rest is None) or (rest is not None and rest.shape != labels.shape):
        given = "none" if rest is None else tuple(rest.shape)
        raise DataError(
            f"token_divergences: the teacher's rest is {given}, and the labels {tuple(labels.shape)}. Give with ids, and "
            "with them alone, the log-probability of all other tokens together, which `top_log_probs` says."
        )
    hidden = rearrange(hidden, "... c -> (...) c")
    said = rearrange(log_probs, "... k -> (...) k")
    told = None
    if ids is not None and rest is not None:
        told = rearrange(ids, "... k -> (...) k")
        said = torch.cat([said, rest.reshape(-1, 1).to(said.dtype)], dim=-1)
    losses: Tensor = _Divergences.apply(hidden, weight, bias, labels.flatten(), said, told, settings, divergence)
    return losses.view(labels.shape)


class _Divergences(torch.autograd.Function):
    """hidden: [N, C] with a weight, or the logits [N, V] without one. said: [N, K + 1] with told tokens, the rest last."""

    # [Note: gradient of a function of probabilities]
    # With q = softmax(z) and a loss D(q), g = dD/dq: dD/dz_v = q_v (g_v - sum_u q_u g_u). Tokens of which the teacher does
    # not tell are one outcome r: theirs is the part q_v / q_r of that of r. So of each prediction forward keeps the gradient
    # of each outcome and the logarithm of what the others sum up to, and no logits: they are computed again in backward.
    # Nothing is a difference of large numbers: a q_r of 1e-30 has its own digits, and its g, of 1e30, never stands alone.

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
        # normaliser: of the whole vocabulary, and `shared` the sum of q g; or of all others, and their outcome's gradient.
        losses, normaliser, shared = hidden.new_zeros((3, len(labels)), dtype=wide_type)
        of_told = None if told is None else hidden.new_zeros(told.shape, dtype=wide_type)
        for tokens in chunks_of(labels, settings.chunk, settings.axis):
            wide = logits_of_chunk(hidden[tokens], weight, bias, settings)
            peak = subtract_peak_(wide, settings.axis)
            valid = labels[tokens] != IGNORED
            if told is None or of_told is None:
                (total,) = sum_over(settings.axis, wide.exp().sum(-1))
                log_q = wide.sub_(total.log().unsqueeze(-1))
                log_p = _own_part(said[tokens], log_q, settings)
                terms, weighted = _outcomes(divergence, log_p, log_q)
                loss, shared[tokens] = sum_over(settings.axis, terms.sum(-1), weighted.sum(-1))
                normaliser[tokens] = peak + total.log()
            else:
                entries, others = split_told(wide, told[tokens], settings)
                outcomes = torch.cat([entries, others.unsqueeze(-1)], dim=-1)
                log_q = outcomes - outcomes.logsumexp(-1, keepdim=True)
                terms, weighted = _outcomes(divergence, said[tokens].to(wide_type), log_q)
                loss = terms.sum(-1)
                of_outcomes = weighted - log_q.exp() * weighted.sum(-1, keepdim=True)
                of_told[tokens], shared[tokens] = of_outcomes[:, :-1], of_outcomes[:, -1]
                normaliser[tokens] = peak + others.masked_fill(others == -torch.inf, 0)  # nothing has to be summed up
            losses[tokens] = loss.masked_fill(~valid, 0)
            del wide, terms, weighted, log_q  # before the next chunk's are allocated
        ctx.save_for_backward(hidden, weight, bias, labels, said, told, normaliser, shared, of_told)
        ctx.settings, ctx.divergence = settings, divergence
        out: Tensor = losses
        return out

    @staticmethod
    @once_differentiable(
        "the divergences of distillation are computed again in backward, chunk by chunk.",
        "Compute the loss of logits by F.kl_div",
    )
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, said, told, normaliser, shared, of_told = ctx.saved_tensors
        settings: Settings = ctx.settings
        d_logits = torch.zeros_like(hidden) if weight is None else None
        grads = None if weight is None else Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for tokens in chunks_of(labels, settings.chunk, settings.axis):
            log_q = logits_of_chunk(hidden[tokens], weight, bias, settings)
            of_one = shared[tokens].unsqueeze(-1)
            # See [Note: gradient of a function of probabilities].
            if told is None:
                log_q.sub_(normaliser[tokens].unsqueeze(-1))
                log_p = _own_part(said[tokens], log_q, settings)
                _, weighted = _outcomes(ctx.divergence, log_p, log_q)
                wide = weighted.sub_(log_q.exp_().mul_(of_one))
            else:
                hide_told_(log_q, told[tokens], settings)
                wide = log_q.sub_(normaliser[tokens].unsqueeze(-1)).exp_().mul_(of_one)
                add_told_(wide, told[tokens], of_told[tokens], settings)
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


def _outcomes(divergence: Divergence, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Of each outcome: (its part of the divergence, q g), with g the derivative by q up to a constant."""
    # Of -inf alone: a finite one may be smaller than that, as at temperatures near 0.
    log_p, log_q = (each.masked_fill(each == -torch.inf, WEIGHTLESS) for each in (log_p, log_q))
    if divergence.kind == "forward":
        p = log_p.exp()
        return p * (log_p - log_q), -p
    q = log_q.exp()
    if divergence.kind == "reverse":
        weighted = q * (log_q - log_p)
        return weighted, weighted
    beta = divergence.beta
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    weighted = (1 - beta) * q * (log_q - log_m)
    return beta * log_p.exp() * (log_p - log_m) + weighted, weighted


def _own_part(said: Tensor, like: Tensor, settings: Settings) -> Tensor:
    """This rank's vocabulary of a teacher's whole one."""
    return said[:, settings.first : settings.first + like.shape[-1]].to(like.dtype)
