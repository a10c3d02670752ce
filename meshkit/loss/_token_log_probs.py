"""What post-training asks of a model: the log-probability of each label; of each prediction the entropy, and how sharp it is.

Dims: N tokens, C features, V the vocabulary of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshkit.errors import PlanError
from meshkit.loss._cross_entropy import refuse_other_labels, vocabulary_part
from meshkit.loss.chunked import Gradients, chunks_of, slices_of
from meshkit.loss.linear_logits import LinearLogits, whole_weight
from meshkit.loss.vocab_parallel import Labels, find_labels, subtract_peak_, sum_over, wide_dtype
from meshkit.strategy import ChunkedLoss

WEIGHTLESS = -1e4  # its exp is 0, in fp64 too: where a logit is -inf, so that 0 times it is 0


class TokenLogProbs(NamedTuple):
    """log_probs: of each label; entropy: of each prediction, in nats. Both [...] in fp32 at least."""

    log_probs: Tensor
    entropy: Tensor


def token_log_probs(logits: Tensor | LinearLogits, labels: Tensor, *, temperature: float = 1.0) -> TokenLogProbs:
    """The log-probability of every label and the entropy of every prediction, differentiable both; 0 where the label is -100.

    logits: [..., V] in each of the forms that `cross_entropy` takes, divided by `temperature`. labels: [...] int64.
    Logits of a chunked loss are made chunk by chunk, in forward and again in backward, on a CPU without those of ignored
    labels; whole ones are read chunk by chunk.
    Wire, sharded logits only: forward, all-reduces of one maximum and three sums per label, in fp32. Backward: nothing.
    Raises: PlanError as `cross_entropy` does, and for a temperature that is not positive.
    """
    refuse_other_labels("token_log_probs", logits, labels)
    if not temperature > 0:
        raise PlanError(
            f"token_log_probs(temperature={temperature}): it divides the logits, so give a positive number."
        )
    hidden, weight, bias, choices = _taken_apart("token_log_probs", logits, temperature)
    log_probs, entropy = _TokenLogProbs.apply(hidden.flatten(0, -2), weight, bias, labels.flatten(), choices)
    return TokenLogProbs(log_probs.view(labels.shape), entropy.view(labels.shape))


@torch.no_grad()
def log_sum_squares(logits: Tensor | LinearLogits) -> Tensor:
    """log sum_v pi(v)^2 of every prediction, without a gradient; [...] in fp32 at least.

    What WPO compares a token's log-probability with. logits: [..., V] in each of the forms that `cross_entropy` takes.
    Wire, sharded logits only: all-reduces of one maximum and two sums per prediction, in fp32.
    Source: Zhou et al. 2024 (2406.11827), section 3.2, weights by sampled alignment.
    """
    hidden, weight, bias, choices = _taken_apart("log_sum_squares", logits, 1.0)
    hidden = hidden.flatten(0, -2)
    found = hidden.new_zeros(len(hidden), dtype=wide_dtype(hidden.dtype))
    for tokens in slices_of(len(hidden), choices.size):
        wide = _logits(hidden[tokens], weight, bias, choices)
        subtract_peak_(wide, choices.axis)
        weights = wide.exp_()
        total, squares = sum_over(choices.axis, weights.sum(-1), weights.square().sum(-1))
        found[tokens] = squares.log() - 2 * total.log()
        del wide, weights
    return found.view(logits.shape[:-1])


def _taken_apart(
    caller: str, logits: Tensor | LinearLogits, temperature: float
) -> tuple[Tensor, Tensor | None, Tensor | None, _Choices]:
    """(hidden, weight, bias, choices); without a weight the first is the logits of this rank."""
    vocabulary = logits.shape[-1]
    if isinstance(logits, LinearLogits):
        head = logits.head
        choices = _Choices(head.first, vocabulary, head.axis, head.loss.tokens, temperature)
        return logits.hidden, head.weight, head.bias, choices
    first, axis = 0, None
    if isinstance(logits, DTensor):
        logits, first, axis = vocabulary_part(caller, logits)
    return logits, None, None, _Choices(first, vocabulary, axis, ChunkedLoss().tokens, temperature)


class _Choices(NamedTuple):
    first: int
    vocabulary: int
    axis: DeviceMesh | None
    size: int
    temperature: float

    def find(self, labels: Tensor, wide: Tensor) -> Labels:
        return find_labels(labels, self.first, wide.shape[-1], self.vocabulary)


class _TokenLogProbs(torch.autograd.Function):
    """hidden: [N, C] with a weight, or the logits [N, V] without one."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, labels: Tensor, choices: _Choices
    ) -> tuple[Tensor, Tensor]:
        # Zeros, since tokens whose label is ignored may be in no chunk.
        log_probs, entropy, normaliser = hidden.new_zeros((3, len(labels)), dtype=wide_dtype(hidden.dtype))
        for tokens in chunks_of(labels, choices.size, choices.axis):
            wide = _logits(hidden[tokens], weight, bias, choices)
            found = choices.find(labels[tokens], wide)
            peak = subtract_peak_(wide, choices.axis)
            label_logit = found.of(wide)
            weights = wide.exp()
            mean = wide.clamp_(min=WEIGHTLESS).mul_(weights).sum(-1)
            total, mean, label_logit = sum_over(choices.axis, weights.sum(-1), mean, label_logit)
            log_probs[tokens] = (label_logit - total.log()).masked_fill_(~found.valid, 0)
            entropy[tokens] = (total.log() - mean / total).masked_fill_(~found.valid, 0)
            normaliser[tokens] = peak + total.log()
            del wide, weights
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser, entropy)
        ctx.choices = choices
        return log_probs, entropy

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_log_probs: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normaliser, entropy = ctx.saved_tensors
        choices = ctx.choices
        of_logits = torch.zeros_like(hidden) if weight is None else None
        grads = None if weight is None else Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for tokens in chunks_of(labels, choices.size, choices.axis):
            wide = _logits(hidden[tokens], weight, bias, choices)
            found = choices.find(labels[tokens], wide)
            # With p the probabilities: d log p(label) = [label] - p, d entropy = -p (log p + entropy).
            own_log_prob = d_log_probs[tokens].masked_fill(~found.valid, 0)
            own_entropy = d_entropy[tokens].masked_fill(~found.valid, 0)
            wide.sub_(normaliser[tokens].unsqueeze(-1))
            weights = wide.exp()
            wide.clamp_(min=WEIGHTLESS).add_(entropy[tokens].unsqueeze(-1))
            wide.mul_(own_entropy.unsqueeze(-1)).add_(own_log_prob.unsqueeze(-1)).mul_(weights).neg_()
            del weights
            found.add_to_(wide, own_log_prob)
            wide.div_(choices.temperature)
            if of_logits is not None:
                of_logits[tokens] = wide
            elif grads is not None:
                grads.add(tokens, wide.to(hidden.dtype))
            del wide
        return (of_logits, None, None, None, None) if grads is None else (*grads.finish(), None, None)


def _logits(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, choices: _Choices) -> Tensor:
    """A chunk's logits over the temperature, to be written over."""
    dtype = wide_dtype(hidden.dtype)
    if weight is None:
        return hidden.to(dtype, copy=True).div_(choices.temperature)
    return F.linear(hidden, whole_weight(weight), bias).to(dtype).div_(choices.temperature)
