"""Attention that adds a mask of its own to its scores, through the cache that transformers' models decode with: what a
decoding step reads as the keys and values of the past, a rank reads as those of all ranks.

A model hands its new keys and values to `cache.update` and attends to what comes back, so this is where they are gathered,
with few heads and before anything is computed with pairs of tokens. The model's code for pairs is its own: it takes the
memory of own tokens × all tokens, and is not balanced over the ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from meshkit.errors import PlanError
from meshkit.parallel.context._by_hand import gather_keys
from meshkit.parallel.context._foreign import is_transformers, mask_of_forward
from meshkit.parallel.context._whole import is_split


def takes_cache(model: nn.Module) -> bool:
    """Whether the model attends to what a cache of transformers gives back."""
    return is_transformers(model) and bool(_name_of_cache(model))


def with_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model whose tokens are split, which is given the cache, and returns none; not in generation."""

    @functools.wraps(forward)
    def forward_with_cache(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_split(mask_of_forward()):
            return forward(self, *args, **kwargs)
        return forward(self, *args, **{**kwargs, **not_kept(self), _name_of_cache(self): _cache_of_ranks()()})

    return forward_with_cache


def _name_of_cache(model: nn.Module) -> str:
    """Of the argument of its forward; it is another one from transformers 5.24 on. Empty where it takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache") if name in parameters), "")


def not_kept(model: nn.Module) -> dict[str, bool]:
    """The argument by which a model returns no cache, where it takes one."""
    parameters = inspect.signature(model.forward).parameters
    takes = "use_cache" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {"use_cache": False} if takes else {}


def notes_of_cache(names: Sequence[str], ranks: int) -> list[str]:
    """names: of modules that attend to what a cache gives back."""
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"cp={ranks}: {names[0]}{more} attend by a mask of the model's own, to keys and values that are gathered: scores of "
        "a rank's own tokens with all, not balanced"
    ]


@functools.cache
def _cache_of_ranks() -> type[Any]:
    """Of a function: `import meshkit` needs no transformers."""
    from transformers import Cache

    class CacheOfRanks(Cache):
        """Wire: all-gather of keys and of values, backward reduce-scatter."""

        keeps_nothing = True  # so a forward that runs again in backward may have it

        def __init__(self) -> None:
            super().__init__(layers=[])

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return _of_all_tokens(key_states, 2), _of_all_tokens(value_states, 2)

        def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
            return _of_all_tokens(indexer_key_states, 1)

        def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
            return None

        get_recurrent_state = get_conv_state

        def is_recording_past(self, *args: Any, **kwargs: Any) -> bool:
            return False

        def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return conv_states  # as a cache of no tokens before gives it

        def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
            raise PlanError("it keeps a state of the tokens before, which is on another rank.")

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return 0

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            mask = mask_of_forward()
            return (mask.row_tokens if is_split(mask) else query_length), 0

        def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
            return False

    return CacheOfRanks


def _of_all_tokens(x: Tensor, dim: int) -> Tensor:
    mask = mask_of_forward()
    # As a cache gives it.
    return gather_keys(x, dim, mask).contiguous() if is_split(mask) else x
