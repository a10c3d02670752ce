"""A loss, tried on values: whether that of a row's tokens is the sum of those of their parts, as ranks of cp have them.

The model does not run: that it treats a rank's tokens as one device does is proved elsewhere. In its place random numbers of
the shapes that it returns go into the loss, once of all tokens and once of each half of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core.noting import AnyMask
from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError
from meshkit.loss import IGNORED
from meshkit.parallel.rows_tried import OfParts, Replaced, held_by
from meshkit.program import TensorRef, trace, without_values

_ROWS, _TOKENS, _FEWEST = 2, 16, 4
_DRAWS = 2  # of outputs
_TOLERANCE = 1e-4  # losses compute in fp32; one that mixes tokens differs in its first digits
_GIVEN = ("mask", "position_ids")  # by `split_batch`, to a loss on cp


def loss_of_tokens(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Mapping[str, Tensor]
) -> OfParts | None:
    """What the loss of a batch is of those of its tokens' parts: their sum, or between them, as a mean is, or neither. loss:
    is called some times, on what stands for the model.

    batch: input_ids [B, T], and tensors [B, T, ...]. None where it is not shown: of a loss that may change something, sends
    messages, or reads more of the model than it returns.
    """
    held, ids = held_by(loss), batch.get("input_ids")
    if held is None or ids is None or ids.ndim != 2 or not len(ids) or ids.shape[1] < _FEWEST:
        return None
    rows, tokens = ids.shape
    columns = _columns(batch.get("labels"), tokens)
    part = {name: _cut(x, rows, tokens, columns) for name, x in batch.items()}
    part.setdefault("position_ids", torch.arange(len(columns)).expand(len(part["input_ids"]), -1))
    with _torch.without_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]), Replaced(held, torch.float32):
        verdicts = [_tried(model, loss, part, seed, given="position_ids" in batch) for seed in range(_DRAWS)]
    return next((verdict for verdict in ("sum", "between", "neither") if verdict in verdicts), None)


def _columns(labels: Tensor | None, tokens: int) -> Tensor:
    """Some tokens, of which the first row has labels: of what is ignored every loss is a sum."""
    if labels is not None and labels.ndim == 2 and labels.shape[1] == tokens:
        valid = (labels[0].detach().cpu() != IGNORED).nonzero()[:_TOKENS, 0]
        if len(valid) >= _FEWEST:
            return valid
    return torch.arange(min(tokens, _TOKENS))


def _cut(x: Tensor, rows: int, tokens: int, columns: Tensor) -> Tensor:
    x = x.detach()[:_ROWS] if x.ndim and len(x) == rows else x.detach()
    if x.ndim > 1 and x.shape[1] == tokens:
        x = x.index_select(1, columns.to(x.device))
    x = x.cpu()
    return x.float() if x.is_floating_point() else x


def _tried(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], part: dict[str, Tensor], seed: int, *, given: bool
) -> OfParts | None:
    rows, tokens = part["input_ids"].shape
    outputs = _Outputs(model, torch.Generator().manual_seed(seed), given=given)
    found = []
    every = torch.arange(tokens)
    for own in (every, every, every[::2], every[1::2]):
        outputs.begin(rows, tokens, own)
        torch.default_generator.manual_seed(seed)
        of_own = {name: _of_tokens(x, rows, tokens, own) for name, x in part.items()}
        try:
            with _NoMessages():
                value = loss(outputs.stand_in, {**of_own, "mask": AnyMask()})
        except Exception:  # of numbers where it wants others, or what is not there
            return None
        if not isinstance(value, Tensor) or value.numel() != 1 or value.is_meta or _torch.is_fake(value):
            return None
        found.append(float(value))
    whole, again, one, other = found
    if whole != again or not isfinite(whole + one + other):
        return None
    allowed = _TOLERANCE * max(1.0, abs(whole), abs(one), abs(other))
    if abs(one + other - whole) <= allowed:
        return "sum"
    # Not the loss of one of the halves, which that of the last token is.
    inside = min(one, other) + allowed < whole < max(one, other) - allowed
    return "between" if inside or abs(one - other) <= allowed else "neither"


def _of_tokens(x: Tensor, rows: int, tokens: int, own: Tensor) -> Tensor:
    return x.index_select(1, own) if x.ndim > 1 and tuple(x.shape[:2]) == (rows, tokens) else x


class _Outputs:
    """What stands for the model returns random numbers for all tokens, and in later calls those of some of them."""

    def __init__(self, model: nn.Module, generator: torch.Generator, *, given: bool) -> None:
        self.model, self.generator, self.given = without_values(model), generator, given
        self.made: list[Any] = []
        self.calls, self.rows, self.tokens, self.own = 0, 0, 0, torch.empty(0, dtype=torch.int64)
        self.stand_in = without_values(model)
        patch_class(self.stand_in, forward=lambda _, *args, **kwargs: self.output(args, kwargs))

    def begin(self, rows: int, tokens: int, own: Tensor) -> None:
        self.calls, self.rows, self.tokens, self.own = 0, rows, tokens, own

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.calls == len(self.made):
            self.made.append(self._random(args, kwargs))
        self.calls += 1

        def own(leaf: Any) -> Any:
            return _of_tokens(leaf, self.rows, self.tokens, self.own).clone() if isinstance(leaf, Tensor) else leaf

        return _torch.tree_map(own, self.made[self.calls - 1])

    def _random(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        alone = {name: x for name, x in kwargs.items() if name not in _GIVEN or (self.given and name != "mask")}
        read = trace(self.model, args, alone)

        def values(leaf: Any) -> Any:
            if not isinstance(leaf, TensorRef):
                return leaf
            if not leaf.dtype.is_floating_point:
                raise PlanError("a trial knows no whole numbers that a model may return")
            return torch.randn(leaf.shape, generator=self.generator)

        return _torch.tree_map(values, read.calls[0].output)


class _NoMessages(_torch.TorchDispatchMode):
    """Inside, a message between ranks raises: of a trial it would be about other numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("a trial sends nothing")
        return func(*args, **(kwargs or {}))
