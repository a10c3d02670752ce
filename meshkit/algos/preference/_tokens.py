"""From token-level to sequence-level log-probabilities: masked sums over the tokens of answers, packed or split over cp.

Dims: N sequences, T tokens, V vocabulary. A log-probability at t is that of the label at t. Masks are True, or 1, on tokens
of the answer; masked values may be anything, even NaN, and get no gradient. All sums over T are linear: with cp each rank
has a partial sum, and `whole_sequences` adds them up.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core.collectives import copy_to_axis, reduce_from_axis
from meshkit.errors import DataError, PlanError


def sequence_logps(logps_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """log pi(y|x): the sum over unmasked tokens; [N]."""
    return masked_logps(logps_NT, mask_NT).sum(1)


def packed_logps(logps_NT: Tensor, mask_NT: Tensor, sequence_NT: Tensor, sequences: int) -> Tensor:
    """log pi(y|x) of sequences that are packed into rows or split over cp; [sequences].

    sequence: for each token the number of its sequence, 0 to sequences - 1; where masked it may be anything.
    """
    # index_add: one segment sum for packed rows and for rows split over cp, whose parts add up.
    summed = logps_NT.new_zeros(sequences, dtype=_wide(logps_NT).dtype)
    index_NT = sequence_NT.masked_fill(~mask_NT.bool(), 0)
    return summed.index_add(0, index_NT.flatten(), masked_logps(logps_NT, mask_NT).flatten())


def whole_sequences(parts_N: Tensor, axis: DeviceMesh) -> Tensor:
    """Add partial sums over tokens up over all ranks of `axis` (cp); [N], the same on each rank.

    Every rank of the axis then computes the same losses: divide them by axis.size(), so that they count once. The gradient
    reaches the tokens of every rank.
    Wire: forward and backward, one all-reduce of [N] each.
    """
    # [Note: sums over cp, forward and backward]
    # Forward, `reduce_from_axis` adds the partial sums up. Backward it hands the gradient to each rank unchanged, which is
    # right for its own tokens. But every rank of cp computes the loss of the same sums, divided by the size of cp, and has
    # only its share of the gradient; `copy_to_axis` adds the shares up on the way back. Without it gradients would be too
    # small by the size of cp, while the loss was right.
    return copy_to_axis(reduce_from_axis(parts_N, axis), axis)


def answer_positions(mask_NT: Tensor) -> Tensor:
    """1 for the first token of each answer, 2 for the next, 0 where masked; [N, T] int64.

    Of whole sequences: with cp compute it before the batch is split.
    """
    chosen_NT = mask_NT.bool()
    return chosen_NT.cumsum(1) * chosen_NT


def desensitised_logps(logps_NT: Tensor, positions_NT: Tensor, shared_N: Tensor, *, alpha: float) -> Tensor:
    """LD-DPO's log-probability: tokens up to the length both answers share count 1, those beyond it alpha; [N].

    positions: from `answer_positions`. shared: the shorter length of each sequence's pair, the same for both its sequences.
    alpha in [0, 1]: 1 is the usual sum. Use it for the policy and for the reference.
    Source: Liu et al. 2024 (2409.06411).
    """
    if not 0 <= alpha <= 1:
        raise PlanError(f"desensitised_logps: alpha={alpha} is the share of what the longer answer adds. Use 0 to 1.")
    logps_NT = masked_logps(logps_NT, positions_NT > 0)
    return torch.where(positions_NT > shared_N.unsqueeze(1), alpha * logps_NT, logps_NT).sum(1)


def aligned_logps(logps_NT: Tensor, log_sum_squares_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Sum over unmasked tokens of log pi(y_t) - log sum_v pi(v)^2, without a gradient; [N]. See `wpo_weights`."""
    return masked_logps((logps_NT - log_sum_squares_NT).detach(), mask_NT).sum(1)


def wpo_weights(
    aligned_chosen_N: Tensor, chosen_tokens_N: Tensor, aligned_rejected_N: Tensor, rejected_tokens_N: Tensor
) -> Tensor:
    """How likely the policy is to write each pair: exp of the mean aligned log-probability, chosen times rejected; [N].

    aligned: from `aligned_logps`, of whole sequences. tokens: of the answers. It is what `Pairs.weights` takes.
    Source: Zhou et al. 2024 (2406.11827), equation 2, with weights by sampled alignment.
    """
    # Means of logs first: products of probabilities of long answers underflow.
    chosen_N = aligned_chosen_N.double() / chosen_tokens_N.clamp(min=1)
    rejected_N = aligned_rejected_N.double() / rejected_tokens_N.clamp(min=1)
    return (chosen_N + rejected_N).exp()


def masked_logps(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """In fp32 at least, 0 where masked; [N, T]."""
    if values_NT.shape != mask_NT.shape:
        raise DataError(
            f"log-probabilities {tuple(values_NT.shape)} and mask {tuple(mask_NT.shape)} differ. Both are [N, T]."
        )
    # where, not times: a masked NaN would stay NaN, in the value and in the gradient.
    return torch.where(mask_NT.bool(), _wide(values_NT), 0.0)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
