"""Attention of models that know no `mask`: transformers' registry, and calls of F.scaled_dot_product_attention."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshkit.errors import PlanError
from meshkit.parallel.context._pattern import CAUSAL, FULL, Pattern

TRANSFORMERS_NAME = "meshkit"


class Attending(Protocol):
    """A mask whose tokens are split, or one that stands for it while a program is read."""

    def following(self, pattern: Pattern, who: str) -> Attending: ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor: ...


# The mask of the forward that is running, for modules that are not handed one. A context variable and not an attribute:
# recompute copies the context of the forward, so attention that runs again in backward finds the mask of its own microbatch.
_running: ContextVar[Attending | None] = ContextVar("split mask", default=None)


# Whether that forward has masks made by transformers' own functions: a rank's rows of them, for attention by hand.
_makes_masks: ContextVar[bool] = ContextVar("masks of own rows", default=False)


@contextmanager
def following(mask: Attending, *, makes_masks: bool = False) -> Iterator[None]:
    """Inside, it is the mask of the forward."""
    tokens = _running.set(mask), _makes_masks.set(makes_masks)
    try:
        yield
    finally:
        _running.reset(tokens[0])
        _makes_masks.reset(tokens[1])


def mask_to_make() -> Attending | None:
    """The mask of the forward, where masks of its own rows are made."""
    return _running.get() if _makes_masks.get() else None


def mask_of_forward() -> Attending:
    mask = _running.get()
    if mask is None:
        raise PlanError(
            "context parallelism: attention ran outside of the model's forward, so there is no split to follow. Call the "
            "module that went through context_parallel; and where the model recomputes by a checkpoint of its own, use "
            "MemoryPolicy(recompute=) in its place."
        )
    return mask


# ------------------------------------------------------------------------------------------------ transformers


def is_transformers(module: nn.Module) -> bool:
    """Whether its class, or one that it derives from, is of transformers."""
    return any(base.__module__.startswith("transformers.") for base in type(module).__mro__)


def use_registry(module: nn.Module, name: str = TRANSFORMERS_NAME, attention: Callable[..., Any] | None = None) -> None:
    """Select our attention function by the module's config. The config is copied: other models may share the object.

    For a name that no mask function is registered for, transformers makes no masks.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention or _transformers_attention)
    copies: dict[int, Any] = {}
    for child in module.modules():
        config = child.__dict__.get("config")
        if config is not None:
            # One copy for each shared config, so that modules which share one still do. With those inside of it, which the
            # name is set on too.
            if id(config) not in copies:
                copies[id(config)] = copy.deepcopy(config)
            config_copy = copies[id(config)]
            config_copy._attn_implementation = name
            child.config = config_copy  # type: ignore[assignment]  # stubs: a Tensor or Module


def use_masks(masks: Callable[..., Any]) -> None:
    """Let `masks` make the tensors of transformers' masks, from their own function and that function's arguments.

    For all models of the process: a name of ours in the config would change what models run that ask for theirs. So `masks`
    must do as before outside of a forward that is split.
    """
    from transformers import AttentionMaskInterface

    for name in ("eager", "sdpa"):
        own = AttentionMaskInterface()[name]
        if getattr(own, "func", None) is not masks:
            AttentionMaskInterface.register(name, functools.partial(masks, own))


def follow_patterns(module: nn.Module, patterns: Mapping[str, Pattern]) -> None:
    """Note on modules what their attention sees, by name."""
    for name, pattern in patterns.items():
        module.get_submodule(name).__dict__["_attention_pattern"] = pattern


# Arguments of transformers' attention functions that change what is computed.
_UNKNOWN = ("dropout", "position_bias", "head_mask", "indices", "block_indices", "cache")


def refuse_unknown(who: str, kwargs: Mapping[str, Any]) -> None:
    """Raises: PlanError for arguments of an attention function that nothing here computes."""
    for name in _UNKNOWN:
        argument = kwargs.get(name)
        # dropout=0.0 and the like ask for nothing.
        if argument is not None and (isinstance(argument, Tensor) or argument != 0):
            raise PlanError(f"context parallelism: {who} asks for {name}, which no scheme here computes.")


def is_causal_by(module: nn.Module, is_causal: bool | None) -> bool:
    """As transformers' own functions decide it: an argument goes before the module's attribute, and causal is the default."""
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    mask: Attending | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q, k, v [B, heads, T, D] in, [B, T, heads, D] out."""
    who = type(module).__name__
    refuse_unknown(who, kwargs)
    if attention_mask is not None:
        raise PlanError(
            f"context parallelism: {who} makes an attention mask of its own, which is about this rank's tokens only."
        )
    causal = is_causal_by(module, is_causal)
    if sliding_window is not None and not causal:
        raise PlanError(
            f"context parallelism: {who} has a sliding window to both sides, which sliding_window does not "
            "say here. Describe it with bands: mk.Mask.intervals(tokens, [mk.mask.Band(0, tokens, 0, tokens, -w, w)])."
        )
    # Where the program was read, it tells what the layer sees; else its arguments must.
    pattern = module.__dict__.get("_attention_pattern") or Pattern(causal, sliding_window)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    split = (mask_of_forward() if mask is None else mask).following(pattern, who)
    return split.attend(q, k, v, scale=scaling, softcap=softcap, sinks=s_aux if sinks is None else sinks), None


# ----------------------------------------------------------------------- modules that call scaled_dot_product_attention


def with_mask_set(
    forward: Callable[..., Any], *, hand_on: bool = False, positions: bool = True, makes_masks: bool = False
) -> Callable[..., Any]:
    """The forward, and what it calls can ask for the mask. hand_on: to a forward that takes it among others. positions:
    whether a forward that takes position_ids is given them. makes_masks: of its own rows."""
    # `split_batch` puts the mask among the model's inputs; a model that knows none must not be given it. Nor positions.
    parameters = inspect.signature(forward).parameters
    takes_mask = hand_on or "mask" in parameters
    takes_positions = positions and (
        "position_ids" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    )

    @functools.wraps(forward)
    def forward_with_mask(self: nn.Module, *args: Any, mask: Attending, **kwargs: Any) -> Any:
        if not takes_positions:
            kwargs.pop("position_ids", None)
        with following(mask, makes_masks=makes_masks):
            return forward(self, *args, **kwargs, **({"mask": mask} if takes_mask else {}))

    return forward_with_mask


def with_attention_intercepted(forward: Callable[..., Any]) -> Callable[..., Any]:
    def attend_over_ranks(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        interception = Interception(_attend_dot_products)
        with interception:
            out = forward(self, *args, **kwargs)
        if not interception.calls:
            raise PlanError(
                f"context parallelism: {type(self).__name__} is named in `attention`, but never called "
                "F.scaled_dot_product_attention where that could be seen; nn.MultiheadAttention for one hides it. Call it in "
                "the module's own forward, or take a `mask` and call mask.attend(q, k, v)."
            )
        return out

    return attend_over_ranks


class Interception(TorchFunctionMode):
    """Inside, `attend` runs for F.scaled_dot_product_attention.

    A mode and not a patch of torch.nn.functional: it holds for this thread and this forward only.
    """

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend, self.calls = attend, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return self.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend_dot_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The signature of F.scaled_dot_product_attention: q [B, H, T, D]. Refuses arguments that it cannot honour."""
    mask = mask_of_forward()
    if attn_mask is not None or dropout_p:
        what = "attn_mask" if attn_mask is not None else f"dropout_p={dropout_p}"
        raise PlanError(
            f"context parallelism: the module calls scaled_dot_product_attention with {what}, which is about this rank's "
            "tokens only. Describe the mask as a meshkit.Mask to split_batch, and use no dropout in attention."
        )
    if query.ndim != 4:
        raise PlanError(
            f"context parallelism: scaled_dot_product_attention of queries {tuple(query.shape)}, but a split one takes "
            "[rows, heads, tokens, head_dim]. Give it those dims."
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    split = mask.following(CAUSAL if is_causal else FULL, "the module")
    return split.attend(q, k, v, scale=scale, softcap=None, sinks=None).transpose(1, 2)
