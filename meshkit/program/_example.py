"""The example (sample inputs) by which a model's program is read: arguments of its forward, whose values do not matter."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core._torch import tree_flatten, tree_leaves

ROWS = 2
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_KNOWN = {"position_ids", "mask"}  # which context parallelism gives
_IDS = ("input_ids", "ids", "idx", "tokens", "token_ids")


@dataclass(frozen=True, eq=False)
class Example:
    """args, kwargs: of the model's forward; of tensors only shapes and dtypes are read."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def key(self) -> Hashable:
        """The same of examples by which the same is read; for as long as their `objects` live."""
        leaves, tree = tree_flatten((self.args, dict(self.kwargs)))
        return str(tree), tuple(_key(leaf) for leaf in leaves)

    @property
    def objects(self) -> list[object]:
        """What it is of beside tensors, of which shapes and dtypes are enough."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if not isinstance(leaf, Tensor)]


def with_positions(model: nn.Module, example: Example) -> Example:
    """With `position_ids`, where the model takes them and its first argument is [rows, tokens]."""
    ids = example.args[0] if example.args else example.kwargs.get("input_ids")
    takes = "position_ids" in inspect.signature(model.forward).parameters and "position_ids" not in example.kwargs
    if not takes or not isinstance(ids, Tensor) or ids.ndim != 2 or len(example.args) > 1:
        return example
    return Example(example.args, {**example.kwargs, "position_ids": torch.empty_like(ids, device="meta")})


def _key(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
    plain = isinstance(leaf, bool | int | float | complex | str | torch.dtype | None)
    return type(leaf), leaf if plain else id(leaf)


def example_of(model: nn.Module, *, multiple: int = 1) -> Example | None:
    """An example for a model of token ids: 2 rows of at least 8 tokens, a multiple of `multiple`. None for another model.

    It is one if its forward's first parameter is called `input_ids` or so, and it needs no other tensors.
    """
    tokens = multiple * -(-8 // multiple)
    ids = torch.empty(ROWS, tokens, dtype=torch.int64, device="meta")
    parameters = list(inspect.signature(model.forward).parameters.values())
    needed = {each.name for each in parameters[1:] if each.default is each.empty and each.kind not in _REST}
    if parameters and parameters[0].name in _IDS and not needed - _KNOWN:
        return Example((ids,))
    return None
