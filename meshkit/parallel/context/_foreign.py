"""Attention of models that know no `mask`: transformers' registry, and calls of F.scaled_dot_product_attention."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshkit.errors import PlanError
from meshkit.parallel.context._split import SplitMask

TRANSFORMERS_NAME = "meshkit"

# ------------------------------------------------------------------------------------------------ transformers


def is_transformers(module: nn.Module) -> bool:
    return any(base.__module__.startswith("transformers.") for base in type(module).__mro__)


def use_registry(module: nn.Module) -> None:
    """Select our attention function by the module's config. The config is copied: other models may share the object."""
    from transformers import AttentionInterface

    AttentionInterface.register(TRANSFORMERS_NAME, _transformers_attention)
    copies: dict[int, Any] = {}
    for child in module.modules():
        config = child.__dict__.get("config")
        if config is not None:
            # One copy for each shared config, so that modules which share one still do.
            config_copy = copies.setdefault(id(config), copy.copy(config))
            config_copy._attn_implementation = TRANSFORMERS_NAME
            child.config = config_copy  # type: ignore[assignment]  # stubs: a Tensor or Module


# Arguments of transformers' attention functions that change what is computed.
_UNKNOWN = (
    "softcap",
    "dropout",
    "attention_mask",
    "position_bias",
    "s_aux",
    "sinks",
    "head_mask",
    "indices",
    "block_indices",
)


def _transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    mask: SplitMask,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q, k, v [B, heads, T, D] in, [B, T, heads, D] out."""
    for name in _UNKNOWN:
        argument = attention_mask if name == "attention_mask" else kwargs.get(name)
        # dropout=0.0 and the like ask for nothing.
        if argument is not None and (isinstance(argument, Tensor) or argument != 0):
            raise PlanError(
                f"context parallelism: {type(module).__name__} asks for {name}, which no scheme here computes."
            )
    # As transformers' own functions decide it: an argument goes before the module's attribute, and causal is the default.
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse_other_direction(causal, mask, type(module).__name__)
    if sliding_window is not None and not causal:
        raise PlanError(
            f"context parallelism: {type(module).__name__} has a sliding window to both sides, which sliding_window does not "
            "say here. Describe it with bands: mk.Mask.intervals(tokens, [mk.mask.Band(0, tokens, 0, tokens, -w, w)])."
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return mask.windowed(sliding_window).attend(q, k, v, scale=scaling), None


# ----------------------------------------------------------------------- modules that call scaled_dot_product_attention

# The mask of the forward that is running, for modules that cannot be handed one. A context variable and not an attribute:
# recompute copies the context of the forward, so attention that runs again in backward finds the mask of its own microbatch.
_running: ContextVar[SplitMask | None] = ContextVar("split mask", default=None)


def with_mask_set(forward: Callable[..., Any]) -> Callable[..., Any]:
    # `split_batch` puts the mask among the model's inputs; a model that knows none must not be given it.
    takes_mask = "mask" in inspect.signature(forward).parameters

    def forward_with_mask(self: nn.Module, *args: Any, mask: SplitMask, **kwargs: Any) -> Any:
        token = _running.set(mask)
        try:
            return forward(self, *args, **kwargs, **({"mask": mask} if takes_mask else {}))
        finally:
            _running.reset(token)

    return forward_with_mask


def with_attention_intercepted(forward: Callable[..., Any]) -> Callable[..., Any]:
    def attend_over_ranks(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Interception(_running.get()) as interception:
            out = forward(self, *args, **kwargs)
        if not interception.calls:
            raise PlanError(
                f"context parallelism: {type(self).__name__} is named in `attention`, but never called "
                "F.scaled_dot_product_attention where that could be seen; nn.MultiheadAttention for one hides it. Call it in "
                "the module's own forward, or take a `mask` and call mask.attend(q, k, v)."
            )
        return out

    return attend_over_ranks


def _refuse_other_direction(is_causal: bool, mask: SplitMask, who: str) -> None:
    if (
        len(mask.layout.mask.components) == mask.layout.mask.tokens
    ):  # every token sees itself alone: an empty microbatch
        return
    causal = not mask.layout.mask.sees_ahead
    if causal != is_causal:
        raise PlanError(
            f"context parallelism: {who} attends with is_causal={is_causal}, but the batch was split for a mask that is "
            f"{'causal' if causal else 'not causal'}. Give split_batch the mask that the module means, for example "
            "mask=Mask.full(tokens)."
        )


class _Interception(TorchFunctionMode):
    """Inside, F.scaled_dot_product_attention attends over all ranks, and refuses arguments that it cannot honour.

    A mode and not a patch of torch.nn.functional: it holds for this thread and this forward only.
    """

    def __init__(self, mask: SplitMask | None) -> None:
        super().__init__()
        self.mask, self.calls = mask, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return _dot_product_attention(self.mask, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _dot_product_attention(
    mask: SplitMask | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The signature of F.scaled_dot_product_attention: q [B, H, T, D]."""
    if mask is None:
        raise PlanError(
            "context parallelism: attention ran outside of the model's forward, so there is no split to follow. Call the "
            "module that went through context_parallel."
        )
    if attn_mask is not None or dropout_p:
        what = "attn_mask" if attn_mask is not None else f"dropout_p={dropout_p}"
        raise PlanError(
            f"context parallelism: the module calls scaled_dot_product_attention with {what}, which is about this rank's "
            "tokens only. Describe the mask as a meshkit.Mask to split_batch, and use no dropout in attention."
        )
    _refuse_other_direction(is_causal, mask, "the module")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return mask.attend(q, k, v, scale=scale).transpose(1, 2)
