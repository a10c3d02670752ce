"""Context parallelism on a module: `context_parallel` makes it attend over ranks, `split_batch` cuts its batches."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from meshkit.core.arguments import require
from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError
from meshkit.mask import Mask
from meshkit.parallel.context._split import Context, SplitMask
from meshkit.parallel.context._traffic import Shape
from meshkit.plan import match_names
from meshkit.plan.match import listed
from meshkit.strategy import ContextPolicy

TRANSFORMERS_NAME = "meshkit"


def context_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    policy: ContextPolicy | None = None,
    attention: Iterable[str] = (),
    heads: tuple[int, int, int] | None = None,
    window: int | None = None,
    multiple: int = 1,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Let the module's attention reach over the tokens of all ranks of one mesh axis, in place.

    The module is then run on what `split_batch(module, batch)` returns: this rank's tokens with their positions, labels
    and a `mask`. Three kinds of modules understand it:
    - a module whose forward takes `mask` and calls `mask.attend(q, k, v)` with it, as `meshkit.models` do;
    - a transformers model, through its registry of attention functions;
    - any other, if `attention` names the modules (patterns as in a plan) that call F.scaled_dot_product_attention.
    Its forward must take `position_ids` where it uses positions: a rank's tokens are not 0, 1, 2, ...

    policy: the scheme (ring, Ulysses, ...) and the order of tokens over ranks. heads: (query heads, key/value heads,
    head_dim) of one rank, from which "auto" computes what each scheme sends; default: the module's config. window: the
    module's own sliding window; default: its config's. multiple: pad every rank's tokens to a multiple of it. dtype: of
    activations.
    Wire: each attention sends the scheme's messages; `explain` prints them.
    Raises: PlanError for a module that takes no mask, and for attention dropout, which would depend on the split.
    """
    require("context_parallel", "module", module, nn.Module)
    require("context_parallel", "mesh", mesh, DeviceMesh)
    require("context_parallel", "policy", policy, ContextPolicy, NoneType)
    attention = listed(attention, where="context_parallel", argument="attention")
    if mesh.ndim != 1:
        raise PlanError(f"context_parallel needs one mesh axis, but got {mesh.mesh_dim_names}. Pass mesh['cp'].")
    if context_of(module) is not None:
        raise PlanError(
            f"context_parallel: this {type(module).__name__} went through it already, and would split what is split. Call it "
            "once for each module."
        )
    policy = policy or ContextPolicy()
    named = plan_context(module, policy, size=mesh.size(), attention=attention)
    config = getattr(module, "config", None)
    shape = attention_shape(config, heads, dtype or next((p.dtype for p in module.parameters()), torch.float32))
    window = window if window is not None else model_window(config)
    # Named modules never read positions, so position_ids cannot mark documents for them: causal over the whole row.
    module.__dict__["_context"] = Context(mesh, policy, shape, window, multiple, documents=not named)
    if mesh.size() == 1:
        return module
    if named:
        modules = dict(module.named_modules())
        for name in named:
            patch_class(modules[name], forward=_with_attention_intercepted(type(modules[name]).forward))
        patch_class(module, forward=_with_mask_set(type(module).forward))
    elif _is_transformers(module):
        _use_registry(module)
    # A forward without the mask would not fail: it would attend to this rank's tokens and train a wrong model.
    module.register_forward_pre_hook(_refuse_unsplit, with_kwargs=True)
    return module


def plan_context(module: nn.Module, policy: ContextPolicy, *, size: int, attention: Iterable[str]) -> list[str]:
    """Names of the modules that `attention` matches. Changes nothing. Raises: PlanError as `context_parallel` does."""
    policy.refuse_misfit(size)
    named = match_names(attention, dict(module.named_modules()), what="module")
    if size == 1:
        return named
    _refuse_dropout(module)
    if named:
        return named
    if _is_transformers(module):
        if not getattr(module, "_supports_attention_backend", False):
            raise PlanError(
                f"context parallelism: {type(module).__name__} computes attention by itself and not through transformers' "
                "registry, so it would see this rank's tokens only. Use a model with `_supports_attention_backend`, or name "
                'the modules that call F.scaled_dot_product_attention: attention=["layers.*.attn"].'
            )
    elif "mask" not in inspect.signature(module.forward).parameters:
        raise PlanError(
            f"context_parallel: {type(module).__name__}.forward takes no `mask`, so its attention would see this rank's "
            "tokens only. Take a `mask` and call mask.attend(q, k, v), or name the modules that call "
            'F.scaled_dot_product_attention: attention=["layers.*.attn"].'
        )
    return named


def split_batch(module: nn.Module, batch: dict[str, Tensor], *, mask: Mask | None = None) -> dict[str, Any]:
    """This rank's part of a batch, for a module that went through `context_parallel`.

    batch: input_ids [B, T], and any other tensors [B, T, ...]: labels (already shifted), position_ids, weights. All ranks
    of the axis give the same batch. mask: of T tokens for every row, or of B*T tokens, rows end to end; default: causal
    inside each document, and documents start where position_ids restart. Returns the same names with this rank's tokens,
    [B, L, ...], or [1, L, ...] where rows were laid end to end, plus position_ids and `mask`, a `SplitMask` to hand to the
    model; its `join` undoes the split. Padding has label -100 and is zero elsewhere. With an axis of one rank the batch
    comes back as it is.
    Raises: DataError for tensors that are not per token, and for batches that differ between the ranks.
    """
    context = context_of(module)
    if context is None:
        raise PlanError(f"split_batch: {type(module).__name__} did not go through context_parallel. Call that first.")
    if context.axis.size() == 1:
        if mask is None:
            return dict(batch)
        if "mask" not in inspect.signature(module.forward).parameters:
            raise PlanError(
                f"split_batch: {type(module).__name__}.forward takes no `mask`, so on one rank of cp it would not be "
                "followed. Give the model the mask in its own way, or leave it away."
            )
        return {**batch, "mask": mask}
    return context.split(batch, mask)


def context_of(module: nn.Module) -> Context | None:
    """The module's `Context`, if it went through `context_parallel`; None for another."""
    return module.__dict__.get("_context")


def attention_shape(config: Any, heads: tuple[int, int, int] | None, dtype: torch.dtype) -> Shape:
    """The shape of one rank's attention layer: from `heads`, else from the config; one head where both are silent."""
    if heads is None:
        query = getattr(config, "num_attention_heads", 1)
        per_head = getattr(config, "head_dim", None) or getattr(config, "hidden_size", query) // query
        heads = (query, getattr(config, "num_key_value_heads", None) or query, per_head)
    return Shape(
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=heads[2],
        itemsize=dtype.itemsize,
        sum_itemsize=torch.promote_types(dtype, torch.float32).itemsize,
    )


def model_window(config: Any) -> int | None:
    """The sliding window if all layers share one, so that the balance of work can count it; None otherwise."""
    windows = layer_windows(config, 1)
    return windows[0] if len(set(windows)) == 1 else None


def layer_windows(config: Any, layers: int) -> list[int | None]:
    """The sliding window of every attention layer, as the config says."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _refuse_unsplit(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("attention_mask") is not None:
        raise PlanError(
            f"context parallelism: {type(module).__name__} was given an attention_mask, which is about this rank's tokens "
            "only. Describe it as a meshkit.Mask to split_batch; padding needs none if it comes last and its labels are -100."
        )
    if not hasattr(kwargs.get("mask"), "attend"):  # of a split batch, or of generation, whose ranks see all tokens
        raise PlanError(
            f"context parallelism: {type(module).__name__} was called without `mask=` of a split batch, and would attend to "
            "this rank's tokens only. Call batch = mk.split_batch(model, batch), and hand on its mask."
        )


def _refuse_dropout(module: nn.Module) -> None:
    rate = getattr(getattr(module, "config", None), "attention_dropout", 0.0) or 0.0
    if rate:
        raise PlanError(
            f"context parallelism: attention_dropout={rate}, but no kernel draws dropout by the place in the sequence, so it "
            "would depend on the split. Set attention_dropout=0."
        )


# ------------------------------------------------------------------------------------------------ transformers


def _is_transformers(module: nn.Module) -> bool:
    return any(base.__module__.startswith("transformers.") for base in type(module).__mro__)


def _use_registry(module: nn.Module) -> None:
    """Select our attention function by the module's config. The config is copied: other models may share the object."""
    from transformers import AttentionInterface

    AttentionInterface.register(TRANSFORMERS_NAME, _transformers_attention)
    copies: dict[int, Any] = {}
    for child in module.modules():
        config = child.__dict__.get("config")
        if config is not None:
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
        if argument is not None and (isinstance(argument, Tensor) or argument != 0):
            raise PlanError(
                f"context parallelism: {type(module).__name__} asks for {name}, which no scheme here computes."
            )
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


def _with_mask_set(forward: Callable[..., Any]) -> Callable[..., Any]:
    takes_mask = "mask" in inspect.signature(forward).parameters

    def forward_with_mask(self: nn.Module, *args: Any, mask: SplitMask, **kwargs: Any) -> Any:
        token = _running.set(mask)
        try:
            return forward(self, *args, **kwargs, **({"mask": mask} if takes_mask else {}))
        finally:
            _running.reset(token)

    return forward_with_mask


def _with_attention_intercepted(forward: Callable[..., Any]) -> Callable[..., Any]:
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
