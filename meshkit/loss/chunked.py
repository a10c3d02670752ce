"""Chunked cross-entropy (fused linear cross-entropy): head and loss over a few tokens at a time, gradients made with them.

Dims: N tokens, C features, V the vocabulary of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core.double_backward import once_differentiable
from meshkit.loss.linear_logits import Head, LinearLogits, gathered_weight
from meshkit.loss.vocab_parallel import IGNORED, find_labels, softmax_, wide_dtype


def chunked_cross_entropy(logits: LinearLogits, labels: Tensor) -> Tensor:
    """`cross_entropy` of logits that exist for at most `ChunkedLoss.tokens` tokens at a time.

    Forward also computes the gradients of hidden state, weight and bias; backward scales them by the loss's own gradient, in
    which they are linear. Their matrix products are those of full logits, summed over chunks in fp32 at least; on a CPU
    tokens whose label is ignored are left out.
    Keeps: the gradients, N·C + V·C numbers. Where no gradient is wanted only the loss is computed.
    Wire, vocabulary sharded over an axis: per chunk, what `cross_entropy` sends for its tokens. Nothing in backward.
    Source: the idea is https://github.com/mgmalek/efficient_cross_entropy; Hsu et al. 2024, Liger Kernel.
    """
    head = logits.head
    hidden_NC, labels_N = rearrange(logits.hidden, "... c -> (...) c"), labels.flatten()
    if head.loss.backend == "liger":
        return liger_cross_entropy(hidden_NC, head, labels_N)
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden_NC, head.weight, head.bias, labels_N, head)
    return loss


def liger_cross_entropy(hidden_NC: Tensor, head: Head, labels_N: Tensor) -> Tensor:
    """The same by liger-kernel, which chooses its own chunks. Its backward can run once only."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: Tensor = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)(
        gathered_weight(head.weight), hidden_NC, labels_N, head.bias
    )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head) -> Tensor:
        gathered_weight(weight)
        loss = hidden.new_zeros((), dtype=wide_dtype(hidden.dtype))
        grads = Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for tokens in chunks_of(labels, head.loss.tokens, head.axis):
            d_logits = _chunk_loss(loss, hidden[tokens], weight, bias, labels[tokens], head, bool(grads))
            if d_logits is not None:
                grads.add(tokens, d_logits)
        ctx.save_for_backward(*grads.finish())
        return loss

    @staticmethod
    @once_differentiable(
        "the chunked cross-entropy computes gradients in forward.", "Compute the loss of logits by F.cross_entropy"
    )
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: a graph that is retained may run this again.
        return (*(None if value is None else value * grad for value in ctx.saved_tensors), None, None)


def chunks_of(labels_N: Tensor, size: int, axis: DeviceMesh | None) -> list[slice] | list[Tensor]:
    """The chunks, each an index of at most `size` tokens.

    On a CPU tokens whose label is ignored are left out, so that prompts and padding cost nothing in the head.
    """
    # Elsewhere the host would have to wait for the device to know how many tokens are left. And where `axis` shards the
    # vocabulary every rank must send for the same tokens: with all of them that holds whatever the labels are.
    if labels_N.device.type == "cpu" and axis is None:
        valid = (labels_N != IGNORED).nonzero().squeeze(-1)
        if len(valid) < len(labels_N):
            return list(valid.split(size)) if len(valid) else []
    return slices_of(len(labels_N), size)


def slices_of(tokens: int, size: int) -> list[slice]:
    """All tokens, at most `size` at a time."""
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _chunk_loss(
    loss: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head, wanted: bool
) -> Tensor | None:
    """Add the chunk's loss to `loss`; returns the gradient of its logits [n, V], None where it is not wanted.

    The gradient is softmax - onehot(label), written over the logits, which are freed when this returns.
    """
    logits_NV = F.linear(hidden, weight, bias).to(loss.dtype)
    local_labels = find_labels(labels, head.first, logits_NV.shape[-1], head.vocabulary)
    losses = softmax_(logits_NV, local_labels, head.axis)
    loss += losses.masked_fill_(~local_labels.valid, 0).sum()
    if not wanted:
        return None
    logits_NV.masked_fill_(~local_labels.valid.unsqueeze(-1), 0)
    local_labels.add_to_(logits_NV, -1.0)
    return logits_NV.to(hidden.dtype)


class Gradients:
    """Gradients of hidden state, weight and bias, added up from those of the logits chunk by chunk.

    False in a condition where none of them is wanted.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        self.input, self.weight = hidden, weight
        wide = wide_dtype(hidden.dtype)
        self.d_hidden = torch.zeros_like(hidden) if needed[0] else None  # zero where no chunk has the token
        self.d_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        self.d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None

    def __bool__(self) -> bool:
        return any(grad is not None for grad in (self.d_hidden, self.d_weight, self.d_bias))

    def add(self, tokens: slice | Tensor, d_logits_NV: Tensor) -> None:
        if self.d_hidden is not None and isinstance(tokens, slice):
            torch.mm(d_logits_NV, self.weight, out=self.d_hidden[tokens])
        elif self.d_hidden is not None:
            self.d_hidden[tokens] = d_logits_NV @ self.weight
        if self.d_weight is not None:
            add_product_(self.d_weight, d_logits_NV.mT, self.input[tokens])
        if self.d_bias is not None:
            self.d_bias += d_logits_NV.sum(0, dtype=self.d_bias.dtype)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Each in the dtype of the tensor that it is the gradient of."""
        d_weight = None if self.d_weight is None else self.d_weight.to(self.weight.dtype)
        d_bias = None if self.d_bias is None else self.d_bias.to(self.weight.dtype)
        return self.d_hidden, d_weight, d_bias


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where `total` may have a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and total.dtype == torch.float32:  # the sum stays in fp32 inside of the kernel
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
