"""Rows of tokens that grow together, of a model without a `mask`: over the model's own cache, or computed whole each time.

Dims: N rows, P tokens of the longest prompt, T of a whole row, V vocabulary of this rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshkit.algos.rollout._token_values import model_logits
from meshkit.core import _torch
from meshkit.loss import vocabulary_part
from meshkit.loss.linear_logits import LinearLogits, sharded_logits
from meshkit.parallel.tensor.guard import tried_by_values
from meshkit.step import Run

Ids = Sequence[Tensor]
Way = Literal["padded", "plain", "positions"]

# What a forward takes and returns a cache as; most of transformers' models have the first, those of state spaces the second.
CACHES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
READ = "read_token"  # of a whole row: 0, or the place of the token's logits among those that are read, from 1 on
PADDED_TO = 16  # where a length is dear: on tp, cp and pp a call with a new one is read before it runs


class Rows(Protocol):
    """`begin` and `grow` return (logits [n, V], held): of the last token of each row, and see `draw_tokens`."""

    mixed: bool
    """whether prompts of several lengths may begin together"""

    def begin(self, prompts: Ids, samples: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
        """Compute the prompts, one row of logits each; each has so many rows from here on."""

    def grow(self, ids_N: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """One more token of each row."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows, in this order; one may come twice."""

    def idle(self) -> None:
        """A forward for nothing, of a rank that has no rows while others wait for it."""


class CachedRows:
    """Rows over the model's own cache: what its forward returns with `use_cache`, it is given back at the next token.

    way: "padded" puts padding before shorter prompts, with an `attention_mask` and `position_ids`; the others have rows of
    one length and no mask, "positions" with `position_ids` for models that do not count what is in their cache.
    """

    def __init__(self, model: nn.Module, device: torch.device, way: Way) -> None:
        self.mixed = way == "padded"
        takes = takes_of(model)
        self._model, self._device = model, device
        self._mask = self.mixed
        self._positions = way != "plain" and "position_ids" in takes
        self._few = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._cache: tuple[str, Any] | None = None
        self._seen_NT = self._position_N = torch.empty(0, dtype=torch.int64)

    def begin(self, prompts: Ids, samples: Sequence[int]) -> tuple[Tensor, None]:
        lengths = torch.tensor([len(each) for each in prompts], device=self._device)
        longest = int(lengths.max())
        ids_NP = torch.stack([F.pad(each.to(self._device), (longest - len(each), 0)) for each in prompts])
        places_P = torch.arange(longest, device=self._device)
        before_N1 = longest - lengths.unsqueeze(1)
        self._cache = None
        self._seen_NT, self._position_N = (places_P >= before_N1).long(), lengths - 1
        logits = self._forward(ids_NP, (places_P - before_N1).clamp(min=0))
        if any(count != 1 for count in samples):
            repeats = torch.tensor(samples, device=self._device)
            self.keep(torch.arange(len(prompts), device=self._device).repeat_interleave(repeats))
        return logits, None

    def grow(self, ids_N: Tensor) -> tuple[Tensor, None]:
        self._position_N = self._position_N + 1
        self._seen_NT = F.pad(self._seen_NT, (0, 1), value=1)
        return self._forward(ids_N.unsqueeze(1), self._position_N.unsqueeze(1)), None

    def keep(self, rows: Tensor) -> None:
        self._seen_NT, self._position_N = self._seen_NT[rows], self._position_N[rows]
        assert self._cache is not None
        name, cache = self._cache
        if (select := _selection(cache)) is not None:
            select(rows)
        else:
            kept = _torch.tree_map(lambda leaf: leaf.index_select(0, rows) if isinstance(leaf, Tensor) else leaf, cache)
            self._cache = name, kept

    def idle(self) -> None:
        with tried_by_values():
            self._model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self._device))

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[N, V] of the last tokens."""
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True, **self._few}
        if self._cache is not None:
            inputs[self._cache[0]] = self._cache[1]
        if self._mask:
            inputs["attention_mask"] = self._seen_NT
        if self._positions:
            inputs["position_ids"] = positions
        # A trial, and two answers of each call, hold what these forwards give against training's.
        with tried_by_values():
            output = self._model(**inputs)
        caches = [(name, cache) for name in CACHES if (cache := getattr(output, name, None)) is not None]
        if not caches:
            raise LookupError("its forward returns no cache with use_cache=True")
        self._cache = caches[0]
        return _made(output.logits[:, -1])


class WholeRows:
    """Rows that are computed whole for each token, as a step of training does it: on any mesh, at a cost that grows with the
    square of the length."""

    mixed = True

    def __init__(self, run: Run) -> None:
        self._run, self._ids = run, list[Tensor]()
        spec = run.mesh.spec
        plain = run.pipeline is None and spec.cp == spec.tp == 1
        self.multiple = 1 if plain else PADDED_TO * spec.cp * spec.tp

    def begin(self, prompts: Ids, samples: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
        self._ids = list(prompts)
        logits = self._read()
        self._ids = [each for each, count in zip(prompts, samples, strict=True) for _ in range(count)]
        return logits

    def grow(self, ids_N: Tensor) -> tuple[Tensor | None, Tensor | None]:
        self._ids = [torch.cat([row, id.cpu().reshape(1)]) for row, id in zip(self._ids, ids_N, strict=True)]
        return self._read()

    def keep(self, rows: Tensor) -> None:
        self._ids = [self._ids[row] for row in rows.tolist()]

    def idle(self) -> None:
        empty = torch.zeros(0, self.multiple, dtype=torch.int64)
        ((part, _),) = self._run.parts({"input_ids": empty, READ: empty}, 1)
        self._run.infer(part, _read_tokens)

    def _read(self) -> tuple[Tensor | None, Tensor | None]:
        return whole_logits(self._run, self._ids, [[len(row) - 1] for row in self._ids], multiple=self.multiple)


def _selection(cache: Any) -> Callable[[Tensor], None] | None:
    """What keeps some rows of a cache, in place. Of two that transformers has, the one that the cache's class wrote itself:
    the other may leave out what only this class holds."""
    for kind in type(cache).__mro__:
        for name in ("reorder_cache", "batch_select_indices"):
            if name in vars(kind):
                select: Callable[[Tensor], None] = getattr(cache, name)
                return select
    return None


def whole_logits(
    run: Run, rows: Ids, places: Sequence[Sequence[int]], *, multiple: int = 1
) -> tuple[Tensor | None, Tensor | None]:
    """(logits [n, V] at these places of each row, held [n] bool with cp), by the forward of training."""
    longest = -(-max(map(len, rows)) // multiple) * multiple
    # After a row stands its last token again, which every model has an embedding for. A causal model does not see it.
    ids_NT = torch.stack([torch.cat([row, row[-1:].expand(longest - len(row))]) for row in rows])
    read_NT, count = torch.zeros_like(ids_NT), 0
    for row, of_row in enumerate(places):
        read_NT[row, list(of_row)] = torch.arange(count + 1, count + len(of_row) + 1)
        count += len(of_row)
    ((part, _),) = run.parts({"input_ids": ids_NT, READ: read_NT}, 1)
    chosen = run.infer(part, _read_tokens)
    if chosen is None:
        return None, None
    order = part[READ][part[READ] > 0] - 1
    logits, wrap = _local(chosen)
    all_rows = logits.new_zeros(count, logits.shape[-1]).index_copy_(0, order, logits)
    if run.mesh["cp"].size() == 1:
        return wrap(all_rows), None
    held = torch.zeros(count, dtype=torch.bool, device=logits.device).index_fill_(0, order, True)
    return wrap(all_rows), held


def _read_tokens(model: nn.Module, part: dict[str, Any]) -> Tensor:
    """[n, V] of the tokens that `READ` marks, in the order in which they stand."""
    logits = model_logits(model, part)
    places = part[READ].flatten().nonzero().squeeze(1)
    if isinstance(logits, LinearLogits):
        return LinearLogits(logits.hidden.flatten(0, 1)[places], logits.head).to_logits()
    local, wrap = _local(logits)
    return wrap(local.flatten(0, 1)[places])


def _local(logits: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """This rank's vocabulary, and what makes logits of it again."""
    if not isinstance(logits, DTensor):
        return logits, _same
    vocabulary = logits.shape[-1]
    local, _, axis = vocabulary_part("generate", logits)
    return local, lambda local: sharded_logits(local, axis, vocabulary)


def _same(logits: Tensor) -> Tensor:
    return logits


def _made(logits: Any) -> Tensor:
    made: Tensor = logits.to_logits() if isinstance(logits, LinearLogits) else logits
    return made


def takes_of(model: nn.Module) -> set[str]:
    """Names of what its forward takes."""
    return set(inspect.signature(model.forward).parameters)


def takes_any(model: nn.Module) -> bool:
    """Does its forward take keywords that it does not name?"""
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(model.forward).parameters.values())
