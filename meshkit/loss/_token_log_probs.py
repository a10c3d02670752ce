"""Token log-probabilities for post-training: of each label the log-probability, of each prediction entropy and sharpness.

Dims: N tokens, C features, V the vocabulary of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshkit.core.double_backward import once_differentiable
from meshkit.errors import PlanError
from meshkit.loss._cross_entropy import refuse_other_labels, vocabulary_part
from meshkit.loss.chunked import Gradients, chunks_of, slices_of
from meshkit.loss.linear_logits import LinearLogits, gathered_weight
from meshkit.loss.vocab_parallel import Labels, find_labels, subtract_peak_, sum_over, wide_dtype
from meshkit.strategy import ChunkedLoss

WEIGHTLESS = -1e4  # stands for a logit of -inf: its exp is 0 in fp64 too, and 0 times it is 0, not NaN


class TokenLogProbs(NamedTuple):
    """log_probs: of each label; entropy: of each prediction, in nats. Both [...] in fp32 at least."""

    log_probs: Tensor
    entropy: Tensor


def token_log_probs(logits: Tensor | LinearLogits, labels: Tensor, *, temperature: float = 1.0) -> TokenLogProbs:
    """The log-probability of every label and the entropy of every prediction, both differentiable; 0 where the label is -100.

    logits: [..., V], in any form that `cross_entropy` takes; they are divided by `temperature`. labels: [...] int64.
    Logits of a chunked loss are computed chunk by chunk, in forward and again in backward, on a CPU without those of ignored
    labels; others are read chunk by chunk.
    Wire, sharded logits only: forward, all-reduces of one maximum and three sums per label, in fp32. Backward: nothing.
    Raises: PlanError as `cross_entropy` does, and for a temperature that is not positive.
    """
    refuse_other_labels("token_log_probs", logits, labels)
    if not temperature > 0:
        raise PlanError(
            f"token_log_probs(temperature={temperature}): it divides the logits, so give a positive number."
        )
    hidden, weight, bias, settings = head_of("token_log_probs", logits, temperature)
    hidden = rearrange(hidden, "... c -> (...) c")
    log_probs, entropy = _TokenLogProbs.apply(hidden, weight, bias, labels.flatten(), settings)
    return TokenLogProbs(log_probs.view(labels.shape), entropy.view(labels.shape))


@torch.no_grad()
def log_sum_squares(logits: Tensor | LinearLogits) -> Tensor:
    """log sum_v pi(v)^2 of every prediction, without a gradient; [...] in fp32 at least.

    WPO compares a token's log-probability with it. logits: [..., V], in any form that `cross_entropy` takes.
    Wire, sharded logits only: all-reduces of one maximum and two sums per prediction, in fp32.
    Source: Zhou et al. 2024 (2406.11827), section 3.2, weights by sampled alignment.
    """
    hidden, weight, bias, settings = head_of("log_sum_squares", logits, 1.0)
    hidden = rearrange(hidden, "... c -> (...) c")
    sharpness = hidden.new_zeros(len(hidden), dtype=wide_dtype(hidden.dtype))
    for tokens in slices_of(len(hidden), settings.chunk):
        wide = logits_of_chunk(hidden[tokens], weight, bias, settings)
        subtract_peak_(wide, settings.axis)
        weights = wide.exp_()
        total, squares = sum_over(settings.axis, weights.sum(-1), weights.square().sum(-1))
        sharpness[tokens] = squares.log() - 2 * total.log()
        del wide, weights  # before the next chunk's are allocated
    return sharpness.view(logits.shape[:-1])


def head_of(
    caller: str, logits: Tensor | LinearLogits, temperature: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Settings]:
    """(hidden, weight, bias, settings). Logits that exist already have no weight: then `hidden` is this rank's logits."""
    vocabulary = logits.shape[-1]
    if isinstance(logits, LinearLogits):
        head = logits.head
        settings = Settings(head.first, vocabulary, head.axis, head.loss.tokens, temperature)
        return logits.hidden, head.weight, head.bias, settings
    first, axis = 0, None
    if isinstance(logits, DTensor):
        logits, first, axis = vocabulary_part(caller, logits)
    return logits, None, None, Settings(first, vocabulary, axis, ChunkedLoss().tokens, temperature)


class Settings(NamedTuple):
    first: int  # this rank's first token of the vocabulary
    vocabulary: int  # tokens of all ranks
    axis: DeviceMesh | None  # that shards the vocabulary
    chunk: int  # tokens of the batch at a time
    temperature: float

    def find(self, labels: Tensor, wide: Tensor) -> Labels:
        return find_labels(labels, self.first, wide.shape[-1], self.vocabulary)


class _TokenLogProbs(torch.autograd.Function):
    """hidden: [N, C] with a weight, or the logits [N, V] without one."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, labels: Tensor, settings: Settings
    ) -> tuple[Tensor, Tensor]:
        # Zeros, since tokens whose label is ignored may be in no chunk.
        log_probs, entropy, normaliser = hidden.new_zeros((3, len(labels)), dtype=wide_dtype(hidden.dtype))
        for tokens in chunks_of(labels, settings.chunk, settings.axis):
            wide = logits_of_chunk(hidden[tokens], weight, bias, settings)
            local_labels = settings.find(labels[tokens], wide)
            peak = subtract_peak_(wide, settings.axis)
            label_logit = local_labels.of(wide)
            weights = wide.exp()
            mean = wide.clamp_(min=WEIGHTLESS).mul_(weights).sum(-1)
            total, mean, label_logit = sum_over(settings.axis, weights.sum(-1), mean, label_logit)
            log_probs[tokens] = (label_logit - total.log()).masked_fill_(~local_labels.valid, 0)
            entropy[tokens] = (total.log() - mean / total).masked_fill_(~local_labels.valid, 0)
            normaliser[tokens] = peak + total.log()
            del wide, weights  # before the next chunk's are allocated
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser, entropy)
        ctx.settings = settings
        return log_probs, entropy

    @staticmethod
    @once_differentiable(
        "token log-probabilities are computed again in backward, chunk by chunk.",
        "Compute the loss of logits by F.cross_entropy",
    )
    def backward(ctx: Any, d_log_probs: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normaliser, entropy = ctx.saved_tensors
        settings = ctx.settings
        d_logits = torch.zeros_like(hidden) if weight is None else None
        grads = None if weight is None else Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for tokens in chunks_of(labels, settings.chunk, settings.axis):
            wide = logits_of_chunk(hidden[tokens], weight, bias, settings)
            local_labels = settings.find(labels[tokens], wide)
            # With p the probabilities: d log p(label) = [label] - p, d entropy = -p (log p + entropy).
            d_log_prob = d_log_probs[tokens].masked_fill(~local_labels.valid, 0)
            d_chunk_entropy = d_entropy[tokens].masked_fill(~local_labels.valid, 0)
            wide.sub_(normaliser[tokens].unsqueeze(-1))
            weights = wide.exp()
            wide.clamp_(min=WEIGHTLESS).add_(entropy[tokens].unsqueeze(-1))
            wide.mul_(d_chunk_entropy.unsqueeze(-1)).add_(d_log_prob.unsqueeze(-1)).mul_(weights).neg_()
            del weights
            local_labels.add_to_(wide, d_log_prob)
            wide.div_(settings.temperature)
            if d_logits is not None:
                # Rounded here: chunks are slices or, on a CPU with ignored labels, indices, which take no other dtype.
                d_logits[tokens] = wide.to(d_logits.dtype)
            elif grads is not None:
                grads.add(tokens, wide.to(hidden.dtype))
            del wide
        return (d_logits, None, None, None, None) if grads is None else (*grads.finish(), None, None)


def logits_of_chunk(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings) -> Tensor:
    """A chunk's logits over the temperature, in memory of their own: the caller writes over them."""
    dtype = wide_dtype(hidden.dtype)
    if weight is None:
        return hidden.to(dtype, copy=True).div_(settings.temperature)
    return F.linear(hidden, gathered_weight(weight), bias).to(dtype).div_(settings.temperature)
