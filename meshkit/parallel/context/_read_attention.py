"""Attention and mixers while a program is read: one operation of all its tokens, with the pattern of what it sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from meshkit.core import noting
from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError
from meshkit.parallel.context._foreign import Interception, is_causal_by, refuse_unknown, use_registry
from meshkit.parallel.context._pattern import CAUSAL, FULL, Pattern, pattern_of

ATTEND = "context_attend"
SCAN, CONVOLVE = "context_scan", "context_convolve"
_NAME = "meshkit_read"


class ReadMask:
    """Stands for a split mask while a program is read: its attention is one operation.

    tokens: of a rank. ranks: that have the tokens of a row together; 1 where all tokens are gathered.
    """

    def __init__(self, pattern: Pattern | None = None, *, tokens: int = 0, ranks: int = 2) -> None:
        self.pattern, self.tokens, self.ranks = pattern, tokens, ranks

    @property
    def row_tokens(self) -> int:
        return self.tokens * self.ranks

    def of_all_tokens(self) -> ReadMask:
        return ReadMask(self.pattern, tokens=self.row_tokens, ranks=1)

    def windowed(self, window: int | None) -> ReadMask:
        return self if window is None else self.following(Pattern(causal=False, window=window), "")

    def following(self, pattern: Pattern, who: str) -> ReadMask:
        return ReadMask(pattern, tokens=self.tokens, ranks=self.ranks)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        note = noting.reader.get()
        out = _like_attention(q, k, v, sinks)
        if note is None:  # inside of another operation
            return out
        choices = {"scale": scale or q.shape[3] ** -0.5, "softcap": softcap or 0.0, "pattern": self.pattern}
        noted: Tensor = note(ATTEND, _like_attention, (q, k, v, sinks), choices)
        return noted

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None) -> Tensor:
        return _noted(SCAN, _like_scan, q, k, v, log_decay, beta)

    def short_convolution(self, x: Tensor, weight: Tensor) -> Tensor:
        return _noted(CONVOLVE, _like_convolution, x, weight)


def _noted(name: str, function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    note = noting.reader.get()
    if note is None:  # inside of another operation
        return function(*inputs)
    noted: Tensor = note(name, function, inputs, {})
    return noted


def _like_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None) -> Tensor:
    """[B, T, H, V] in the dtype of v, with a gradient where the scan's result has one."""
    out = v * (q.sum() + k.sum()) * log_decay.unsqueeze(-1)
    return (out if beta is None else out * beta.unsqueeze(-1)).to(v.dtype)


def _like_convolution(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.sum()


def _like_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **choices: Any) -> Tensor:
    """[B, T, H, E], with a gradient where attention's result has one."""
    out = q[..., :1] * v.repeat_interleave(q.shape[2] // v.shape[2], 2) * k.sum()
    return out if sinks is None else out * sinks.sum()


# ------------------------------------------------------------------------------------------- the single-device model


def read_registry(model: nn.Module, *, packed: bool) -> None:
    """Let a transformers model's attention be read. packed: whether its batches have position_ids."""
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(_NAME, partial(_describe, packed=packed))
    use_registry(model, _NAME, _read_attention)


def read_calls(module: nn.Module, *, tokens: int, masked: bool) -> None:
    """Let calls of scaled_dot_product_attention inside of the module be read that are of so many tokens; those of something
    else are read as they are. masked: whether one with a mask of its own is too, since its module may run on all tokens; else
    it is refused."""
    patch_class(module, forward=_with_calls_read(type(module).forward, tokens, masked))


def _describe(
    mask_function: Callable[..., Any], attention_mask: Tensor | None = None, *, packed: bool, **kwargs: Any
) -> _Described:
    """In place of transformers' own, which make the mask's tensor."""
    return _Described(pattern_of(mask_function, padded=attention_mask is not None, packed=packed))


@dataclass(frozen=True)
class _Described:
    """Stands for an attention mask."""

    pattern: Pattern

    def to(self, *args: Any, **kwargs: Any) -> _Described:
        return self


def _read_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _Described | Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    refuse_unknown(type(module).__name__, kwargs)
    if attention_mask is None:
        pattern = CAUSAL if is_causal_by(module, is_causal) else FULL
    elif isinstance(attention_mask, _Described):
        pattern = attention_mask.pattern
    else:
        raise PlanError(f"{type(module).__name__} makes an attention mask of its own. Describe it as a meshkit.Mask.")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    sinks = s_aux if sinks is None else sinks
    return ReadMask(pattern).attend(q, k, v, scale=scaling, softcap=softcap, sinks=sinks), None


def _read_dot_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None or dropout_p or query.ndim != 4:
        what = "attn_mask" if attn_mask is not None else f"dropout_p={dropout_p}" if dropout_p else f"{query.ndim} dims"
        raise PlanError(
            f"scaled_dot_product_attention with {what} cannot be split. Use is_causal, no dropout, and "
            "[rows, heads, tokens, head_dim]; or take a `mask` and call mask.attend(q, k, v)."
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return ReadMask(CAUSAL if is_causal else FULL).attend(q, k, v, scale=scale).transpose(1, 2)


def _read_or_run(
    tokens: int, masked: bool, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **given: Any
) -> Tensor:
    of_tokens = tokens in (query.shape[-2], key.shape[-2])
    run = _read_dot_products if of_tokens and not (masked and attn_mask is not None) else F.scaled_dot_product_attention
    out: Tensor = run(query, key, value, attn_mask, **given)
    return out


def _with_calls_read(forward: Callable[..., Any], tokens: int, masked: bool) -> Callable[..., Any]:
    def read(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with Interception(partial(_read_or_run, tokens, masked)):
            return forward(self, *args, **kwargs)

    return read
