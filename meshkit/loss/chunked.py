"""Head and cross-entropy over a few tokens at a time, forward and backward in one pass.

Dims: N tokens, C features, V the vocabulary of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from meshkit.loss.linear_logits import Head, LinearLogits, whole_weight
from meshkit.loss.vocab_parallel import IGNORED, find_labels, softmax_, wide_dtype


def chunked_cross_entropy(logits: LinearLogits, labels: Tensor) -> Tensor:
    """`cross_entropy` of logits that are never made whole: at most `ChunkedLoss.tokens` tokens' at a time.

    The gradients of hidden state, weight and bias are made with the loss, since that is linear in what comes from above: they
    are scaled in backward. Their matrix products are those of whole logits, summed over chunks in fp32 at least, on a CPU
    without tokens whose label is ignored.
    Keeps: the gradients, N·C + V·C numbers. Without gradients wanted only the loss is computed.
    Wire, vocabulary shared over an axis: per chunk, what `cross_entropy` sends for its tokens. Nothing in backward.
    Source: the idea is https://github.com/mgmalek/efficient_cross_entropy; Hsu et al. 2024, Liger Kernel.
    """
    head = logits.head
    hidden_NC, labels_N = logits.hidden.flatten(0, -2), labels.flatten()
    if head.loss.backend == "liger":
        return liger_cross_entropy(hidden_NC, head, labels_N)
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden_NC, head.weight, head.bias, labels_N, head)
    return loss


def liger_cross_entropy(hidden_NC: Tensor, head: Head, labels_N: Tensor) -> Tensor:
    """The same by liger-kernel, which chooses its own chunks. Its backward can run once only."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: Tensor = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)(
        whole_weight(head.weight), hidden_NC, labels_N, head.bias
    )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head) -> Tensor:
        whole_weight(weight)
        loss = hidden.new_zeros((), dtype=wide_dtype(hidden.dtype))
        grads = Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for tokens in chunks_of(labels, head.loss.tokens, head.axis):
            d_logits = _chunk_loss(loss, hidden[tokens], weight, bias, labels[tokens], head, bool(grads))
            if d_logits is not None:
                grads.add(tokens, d_logits)
        ctx.save_for_backward(*grads.finish())
        return loss

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: a graph that is retained may come here again.
        return (*(None if value is None else value * grad for value in ctx.saved_tensors), None, None)


def chunks_of(labels_N: Tensor, size: int, axis: DeviceMesh | None) -> list[slice] | list[Tensor]:
    """Which tokens make a chunk: an index of at most `size` tokens for each.

    On a CPU none whose label is ignored, so that prompts and padding cost nothing in the head; elsewhere the host would
    have to wait to be told how many are left. Where ranks of `axis` share the vocabulary, all of them: what is sent for a
    token is then known before the labels are.
    """
    if labels_N.device.type == "cpu" and axis is None:
        places = (labels_N != IGNORED).nonzero().squeeze(-1)
        if len(places) < len(labels_N):
            return list(places.split(size)) if len(places) else []
    return slices_of(len(labels_N), size)


def slices_of(tokens: int, size: int) -> list[slice]:
    """All tokens, at most `size` at a time."""
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _chunk_loss(
    loss: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head, wanted: bool
) -> Tensor | None:
    """Add the chunk's loss; returns the gradient of its logits [n, V]. The logits end with this function."""
    wide = F.linear(hidden, weight, bias).to(loss.dtype)
    found = find_labels(labels, head.first, wide.shape[-1], head.vocabulary)
    losses = softmax_(wide, found, head.axis)
    loss += losses.masked_fill_(~found.valid, 0).sum()
    if not wanted:
        return None
    wide.masked_fill_(~found.valid.unsqueeze(-1), 0)
    found.add_to_(wide, -1.0)
    return wide.to(hidden.dtype)


class Gradients:
    """Of hidden state, weight and bias, out of those of the logits, chunk by chunk. False where none is wanted."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        self.given, self.weight = hidden, weight
        wide = wide_dtype(hidden.dtype)
        self.hidden = torch.zeros_like(hidden) if needed[0] else None  # zero where no chunk has the token
        self.of_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None

    def __bool__(self) -> bool:
        return any(grad is not None for grad in (self.hidden, self.of_weight, self.bias))

    def add(self, tokens: slice | Tensor, d_logits_NV: Tensor) -> None:
        if self.hidden is not None and isinstance(tokens, slice):
            torch.mm(d_logits_NV, self.weight, out=self.hidden[tokens])
        elif self.hidden is not None:
            self.hidden[tokens] = d_logits_NV @ self.weight
        if self.of_weight is not None:
            add_product_(self.of_weight, d_logits_NV.mT, self.given[tokens])
        if self.bias is not None:
            self.bias += d_logits_NV.sum(0, dtype=self.bias.dtype)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the dtypes of what they are gradients of."""
        of_weight = None if self.of_weight is None else self.of_weight.to(self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return self.hidden, of_weight, bias


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where total may be wider."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and total.dtype == torch.float32:  # the sum stays in fp32 inside of the kernel
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
