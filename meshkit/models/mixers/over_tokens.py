"""What a mixer does over the tokens of a document: linear attention with decay, and a short convolution.

The counterparts of `meshkit.models.layers.attention`: they take the mask that it takes, whose documents begin with a state of
zeros. Dims: B batch, T tokens, G heads of q and k, H heads, K and V sizes of a head, C channels, W width.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from einops import rearrange
from torch import Tensor

from meshkit.core import linear_attention as scan
from meshkit.core import short_convolution as convolution
from meshkit.core.document_chunks import one_document
from meshkit.core.noting import being_read
from meshkit.errors import PlanError
from meshkit.models.layers import KernelMask, MaskedRows


@runtime_checkable
class SplitTokens(Protocol):
    """A mask that mixes tokens itself, because not all of them are on this rank (context parallelism)."""

    def linear_attention(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, /
    ) -> Tensor: ...

    def short_convolution(self, x: Tensor, weight: Tensor, /) -> Tensor: ...


def linear_attention(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, log_decay_BTH: Tensor, beta_BTH: Tensor | None, mask: KernelMask
) -> Tensor:
    """The chunked scan S = a S + k v' with a = exp(log_decay), with beta S = a (I - beta k k') S + beta k v'; S' q.

    Returns [B, T, H, V]; head h reads q and k of head h // (H/G), and numbers of heads are those of the arguments. log_decay
    is finite and at most 0. The state is in fp32 (fp64 for fp64).
    Raises: PlanError for a mask that is no more than packed causal documents.
    """
    if isinstance(mask, SplitTokens):
        return mask.linear_attention(q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, beta_BTH)
    if being_read() and q_BTGK.shape[2] != v_BTHV.shape[2]:
        # As attention is read: with a key for each head, of which a rank has whole ones.
        repeat = v_BTHV.shape[2] // q_BTGK.shape[2]
        q_BTGK, k_BTGK = (x.repeat_interleave(repeat, 2) for x in (q_BTGK, k_BTGK))
    table, joined = _documents(mask)
    inputs = (q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, beta_BTH)
    if joined:
        inputs = tuple(None if x is None else rearrange(x, "b t ... -> 1 (b t) ...") for x in inputs)  # type: ignore[assignment]
    out: Tensor = scan.linear_attention(*inputs, table)
    return rearrange(out, "1 (b t) h v -> b t h v", b=len(q_BTGK)) if joined else out


def short_convolution(x_BTC: Tensor, weight_CW: Tensor, mask: KernelMask) -> Tensor:
    """Causal depthwise convolution: a token reads itself (weight[:, -1]) and W - 1 tokens of its document before it.

    Returns [B, T, C]. Raises: PlanError, as `linear_attention`.
    """
    if isinstance(mask, SplitTokens):
        return mask.short_convolution(x_BTC, weight_CW)
    table, joined = _documents(mask)
    x = rearrange(x_BTC, "b t c -> 1 (b t) c") if joined else x_BTC
    out: Tensor = convolution.short_convolution(x, weight_CW, table)
    return rearrange(out, "1 (b t) c -> b t c", b=len(x_BTC)) if joined else out


def _documents(mask: KernelMask) -> tuple[Tensor, bool]:
    """(the table of the documents, whether it is of all rows end to end)."""
    if isinstance(mask, MaskedRows):
        return mask.table, mask.joined
    if mask is None or being_read():  # where documents begin is a matter of values
        return one_document(), False
    raise PlanError(
        f"a recurrent mixer follows packed causal documents, but was given a {type(mask).__name__}. Generation with a cache "
        "and dense masks are not there for it; give the model position_ids or a meshkit.Mask."
    )
