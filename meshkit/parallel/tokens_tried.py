"""A loss, tried on values: whether that of a row's tokens is the sum of those of their parts, as ranks of cp have them.

The model does not run: that it treats a rank's tokens as one device does is proved elsewhere. In its place random numbers of
the shapes that it returns go into the loss, once of all tokens and once of each half of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core.noting import AnyMask
from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError
from meshkit.loss import IGNORED
from meshkit.parallel.rows_tried import ROWS, Laid, OfParts, OfTrial, Trial, more_rows, of_parts
from meshkit.program import TensorRef, trace, without_values

_ROWS, _TOKENS, _FEWEST, _FILLING = 2, 16, 4, 2
_DRAWS = 2  # of outputs
_TOLERANCE = 1e-4  # losses compute in fp32; one that mixes tokens differs in its first digits
_GIVEN = ("mask", "position_ids")  # by `split_batch`, to a loss on cp


def loss_of_tokens(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Mapping[str, Tensor], trial: Trial | None = None
) -> OfParts | None:
    """What the loss of a batch is of those of its tokens' parts: their sum, or between them, as a mean is, or neither. loss:
    is called some times, on what stands for the model, and what it has changed is put back.

    batch: input_ids [B, T], and tensors [B, T, ...]. None where it is not shown: of a loss that may change what cannot be put
    back, sends messages, or reads more of the model than it returns for each token.
    """
    trial, ids = trial or Trial(loss), batch.get("input_ids")
    if trial.reach.obstacle or ids is None or ids.ndim != 2 or not len(ids) or ids.shape[1] < _FEWEST:
        return None
    return _of_outputs(model, trial, _few(batch, ids), dim=1, given="position_ids" in batch)


def misread_by(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Mapping[str, Tensor],
    layouts: Sequence[Laid],
    trial: Trial | None = None,
) -> Laid | None:
    """The first of the layouts in which a loss that is a sum over tokens is not that of the tokens: it reads how many rows
    there are, which are laid end to end, or adds something for what fills a rank up. Takes what `loss_of_tokens` takes.

    None also where it is not shown, and for a loss that raises of rows that are one: it would in the step.
    """
    trial, ids = trial or Trial(loss), batch["input_ids"]
    two = {n: more_rows(x, (_ROWS, *x.shape[1:])) if x.ndim and len(x) == len(ids) else x for n, x in batch.items()}
    with _torch.without_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        part = _few(two, two["input_ids"])
        outputs = _outputs_of(model, part, seed=0, dim=1, given="position_ids" in batch)
        values = [_value(trial, outputs, part, seed=0, laid=laid) for laid in (None, None, *layouts)]
    whole, again, *others = values
    if whole is None or again is None or not torch.equal(whole, again):
        return None
    allowed = _TOLERANCE * whole.abs().clamp(min=1.0)
    for laid, other in zip(layouts, others, strict=True):
        if other is not None and (other.shape != whole.shape or bool(((other - whole).abs() > allowed).any())):
            return laid
    return None


def loss_of_rows_alone(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Mapping[str, Tensor], trial: Trial | None = None
) -> OfParts | None:
    """As `loss_of_rows`, with random outputs in place of a model that is large, or computes with a mask of its own.

    None as in `loss_of_tokens`, and for what the model returns that is not of each row.
    """
    trial = trial or Trial(loss)
    rows = next((len(x) for x in batch.values() if isinstance(x, Tensor) and x.ndim), 0)
    if trial.reach.obstacle or not rows:
        return None
    ids, part = batch.get("input_ids"), dict(batch)
    if ids is not None and ids.ndim == 2 and ids.shape[1] >= _FEWEST:
        part, rows = _few(batch, ids), min(rows, _ROWS)
    for name, x in part.items():
        x = x.detach().cpu()
        x = more_rows(x, (ROWS, *x.shape[1:])) if x.ndim and len(x) == rows else x
        part[name] = x.float() if x.is_floating_point() else x
    return _of_outputs(model, trial, part, dim=0, given="position_ids" in batch)


def _few(batch: Mapping[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    rows, tokens = ids.shape
    columns = _columns(batch.get("labels"), tokens)
    part = {name: _cut(x, rows, tokens, columns) for name, x in batch.items()}
    part.setdefault("position_ids", torch.arange(len(columns)).expand(len(part["input_ids"]), -1))
    return part


def _of_outputs(model: nn.Module, trial: Trial, part: dict[str, Tensor], *, dim: int, given: bool) -> OfParts | None:
    with _torch.without_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        verdicts = [_tried(model, trial, part, seed, dim=dim, given=given) for seed in range(_DRAWS)]
    order = ("sum", "between", "neither") if dim else ("neither", "between", "sum")
    return next((verdict for verdict in order if verdict in verdicts), None)


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
    model: nn.Module, trial: Trial, part: dict[str, Tensor], seed: int, *, dim: int, given: bool
) -> OfParts | None:
    outputs = _outputs_of(model, part, seed=seed, dim=dim, given=given)
    found = []
    every = torch.arange(outputs.sizes[dim])
    halves = (every[::2], every[1::2]) if dim else every.tensor_split(2)
    for own in (every, every, *halves):
        if (value := _value(trial, outputs, part, seed=seed, own=own)) is None:
            return None
        found.append(value)
    return of_parts(*found, tolerance=_TOLERANCE, inside=bool(dim))


def _outputs_of(model: nn.Module, part: dict[str, Tensor], *, seed: int, dim: int, given: bool) -> _Outputs:
    sizes = next(x for x in (part.get("input_ids"), *part.values()) if x is not None and x.ndim).shape[: dim + 1]
    return _Outputs(model, OfTrial().manual_seed(seed), given=given, sizes=sizes)


def _value(
    trial: Trial,
    outputs: _Outputs,
    part: dict[str, Tensor],
    *,
    seed: int,
    own: Tensor | None = None,
    laid: Laid | None = None,
) -> Tensor | None:
    """Of the loss of these rows or tokens, by default all; None where there is none."""
    outputs.begin(torch.arange(outputs.sizes[-1]) if own is None else own, laid)
    torch.default_generator.manual_seed(seed)
    of_own = {name: outputs.cut(x, IGNORED if name.startswith("labels") else 0) for name, x in part.items()}
    try:
        value = trial.call(outputs.stand_in, {**of_own, "mask": AnyMask()}, torch.float32)
    except Exception as error:  # of numbers where it wants others, or what is not there
        if laid is None:
            trial.has_raised(error)
        return None
    return None if not isinstance(value, Tensor) or value.is_meta or _torch.is_fake(value) else value


class _Outputs:
    """What stands for the model returns random numbers for all rows or tokens, and in later calls those of some of them.

    sizes: of the rows, or of rows and tokens. What is not of each of them is no number.
    """

    def __init__(self, model: nn.Module, generator: torch.Generator, *, given: bool, sizes: torch.Size) -> None:
        self.model, self.generator, self.given, self.sizes = without_values(model), generator, given, sizes
        self.made: list[Any] = []
        self.calls, self.own = 0, torch.empty(0, dtype=torch.int64)
        self.laid: Laid | None = None
        self.stand_in = without_values(model)

        @functools.wraps(type(model).forward)  # a loss may ask what it takes
        def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.output(args, kwargs)

        patch_class(self.stand_in, forward=forward, restart=lambda _: self.begin(self.own, self.laid))

    def begin(self, own: Tensor, laid: Laid | None = None) -> None:
        self.calls, self.own, self.laid = 0, own, laid

    def cut(self, x: Any, filling: float | None = None) -> Any:
        """Of the tokens, or the rows, that there are now. filling: what a token that is none has; None is anything."""
        dim = len(self.sizes) - 1
        if not isinstance(x, Tensor) or x.shape[: dim + 1] != self.sizes:
            return x
        x = x.index_select(dim, self.own)
        if self.laid == "end to end":
            return x.flatten(0, 1)[None]
        if self.laid == "filled up":
            first = x[:, :_FILLING]
            return torch.cat((x, first if filling is None else torch.full_like(first, filling)), dim=1)
        return x

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.calls == len(self.made):
            self.made.append(self._random(args, kwargs))
        self.calls += 1

        def own(leaf: Any) -> Any:
            return self.cut(leaf).clone() if isinstance(leaf, Tensor) else leaf

        return _torch.tree_map(own, self.made[self.calls - 1])

    def _random(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        alone = {name: x for name, x in kwargs.items() if name not in _GIVEN or (self.given and name != "mask")}
        read = trace(self.model, args, alone)

        def values(leaf: Any) -> Any:
            if not isinstance(leaf, TensorRef):
                return leaf
            if not leaf.dtype.is_floating_point:
                raise PlanError("a trial knows no whole numbers that a model may return")
            if leaf.shape[: len(self.sizes)] != self.sizes:
                return torch.full(leaf.shape, torch.nan)
            return torch.randn(leaf.shape, generator=self.generator)

        return _torch.tree_map(values, read.calls[0].output)
