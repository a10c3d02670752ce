"""Documents packed into a row, tried on values: whether a model that gets `position_ids` which restart keeps them apart.

A copy of the model with random parameters runs on two rows of three documents, whose ends are not at the same tokens, then
with other tokens in the first of each, then in the second: what it returns of the others must be the same. So must it of one
row alone. Of a model that is large the copy has a few of its ids and layers, and its experts are alike.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.moe.aux_loss import collect_nothing
from meshkit.parallel.rows_tried import NoMessages, Undropped, random_values
from meshkit.program import copied, without_values

Call = Callable[[nn.Module, dict[str, Tensor]], Any]
Mixing = Literal["no", "earlier", "later"]
"""whether a token sees other documents of its row: none, those before its own, or also those after it"""

Lengths = tuple[tuple[int, ...], ...]
"""of the documents of each row"""
_LENGTHS: tuple[Lengths, ...] = (
    ((14, 16, 18), (18, 14, 16)),
    ((5, 6, 5), (6, 5, 5)),  # where the first are too long
)
_IDS, _FEWER = 64, (16, 4)
_SMALL, _SHORT, _MOST = (
    1 << 24,
    1 << 27,
    1 << 30,
)  # elements: of a model that is whole, with all its layers, and at most
_LAYERS = (2, 1)  # of a kind that are left of one that is cut: fewer where that is still large
_TOLERANCE = (
    1e-4  # some models compute in fp32 whatever they are given; one that mixes documents differs in its first digits
)


def mixes_documents(model: nn.Module, call: Call) -> Mixing | None:
    """Whether what the model returns of a token depends on other documents of its row. Runs nothing of the model itself, and
    reads no parameters, so all ranks are told the same.

    call(model, batch): how it is given `input_ids` and `position_ids`, both [B, T]. None where that is not shown: of a model
    that is large even when cut, one whose forward raises on random values, is another in each call, or returns nothing for
    each token.
    """
    whole = sum(param.numel() for param in model.parameters()) <= _SMALL
    cut = model if whole else _cut(model)
    if cut is None:
        return None
    dtypes = (torch.float64, torch.float32) if whole else (torch.float32,)
    for lengths, ids, dtype in product(_LENGTHS if whole else _LENGTHS[1:], _ids_of(cut), dtypes):
        with (
            _torch.without_modes(),
            torch.device("cpu"),
            _untouched_random(),
        ):  # an estimate's mode would give no values
            try:
                found = _tried(cut, call, lengths, ids, dtype)
            except Exception:  # of random values where it wants others, of more tokens than it takes, or of a dtype
                continue
        if found is not None:
            return found
    return None


def _tried(model: nn.Module, call: Call, lengths: Lengths, kinds: int, dtype: torch.dtype) -> Mixing | None:
    generator = torch.Generator().manual_seed(0)
    valued = random_values(model, dtype, generator, alike=True)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    number = (positions == 0).cumsum(1)  # of the document that a token is in, from 1
    ids = torch.randint(kinds, positions.shape, generator=generator)

    def run(given: Tensor) -> list[Tensor]:
        tensors: dict[int, Any] = {id(each): each for each in valued.parameters()}
        tensors |= {id(each): each.clone() for each in valued.buffers()}  # its own, for a forward may keep state
        copy = copied(valued, tensors, {})
        for module in copy.modules():
            _detach(module)
        with torch.no_grad(), collect_nothing(), Undropped(), NoMessages():
            torch.default_generator.manual_seed(0)
            batch = {"input_ids": given.clone(), "position_ids": positions[: len(given)].clone()}
            output = call(copy, batch)
        leaves = _torch.tree_leaves(getattr(output, "logits", output))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.shape[:2] == given.shape]

    all_rows = run(ids)
    if not all_rows or not all(map(torch.equal, all_rows, run(ids))):
        return None
    found = set[Mixing]()
    for rows, before, changed in ((2, all_rows, 1), (2, all_rows, 2), (1, run(ids[:1]), 2)):
        of = number[:rows]
        after = run(torch.where(of == changed, (ids[:rows] + 1) % kinds, ids[:rows]))
        if not all(map(_is_finite, (*before, *after))) or _are_close(before, after, of == changed):
            return None  # it looks at none of this
        found |= {"later"} if not _are_close(before, after, of < changed) else set()
        found |= {"earlier"} if not _are_close(before, after, of > changed) else set()
    return "later" if "later" in found else "earlier" if found else "no"


def _ids_of(model: nn.Module) -> list[int]:
    """How many ids are drawn from, in the order in which that is tried: the largest table is mostly that of words, but where
    there are few; and a model may have a table that is no nn.Embedding."""
    sizes = {min(_IDS, table.weight.shape[0]) for table in _tables(model)}
    return sorted({size for size in sizes if size > 1} | {_IDS, *_FEWER}, reverse=True)


def _tables(model: nn.Module) -> Iterator[nn.Embedding]:
    return (module for module in model.modules() if isinstance(module, nn.Embedding))


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _are_close(every: list[Tensor], others: list[Tensor], tokens: Tensor) -> bool:
    """tokens: bool [B, T], of those that are compared."""
    return not tokens.any() or all(
        float((one - other)[tokens].abs().max()) <= _TOLERANCE * max(1.0, float(one.abs().max()))
        for one, other in zip(every, others, strict=True)
    )


def _detach(module: nn.Module) -> None:
    """What a copy shares with the user's module: hooks, which may note what they see, and tensors that are no buffers."""
    for name, value in list(vars(module).items()):
        if name.endswith("_hooks") and isinstance(value, dict):
            vars(module)[name] = OrderedDict()
        elif isinstance(value, Tensor):
            vars(module)[name] = value.detach().clone()


@contextmanager
def _untouched_random() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


# [Note: a model that is cut]
# Whether documents are kept apart is in the code and settings of a model, and shows in a few of its layers. The first ids
# are left of the largest table, and of what has as many rows (a head); of each list of layers the first of each kind, where
# all of them are too many. Experts in one tensor are as many views of one. What is cut in a way that the forward does not
# bear raises, and nothing is shown. Not seen is a large model whose layers have the same modules, and differ in a number
# alone.


def _cut(model: nn.Module) -> nn.Module | None:
    """None where a layer alone is too large."""
    every = max((len(layers) for layers in _outer_lists(model)), default=0)
    for most, limit in ((every, _SHORT), *((each, _MOST) for each in _LAYERS)):
        cut = _with_layers(model, most)
        if sum(map(_held, cut.parameters())) <= limit:
            return cut
    return None


def _with_layers(model: nn.Module, most: int) -> nn.Module:
    cut = without_values(model)
    rows = max((table.num_embeddings for table in _tables(cut)), default=0)
    for module in cut.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
        for param in module._parameters.values():
            if type(param) is nn.Parameter and param.ndim and param.shape[0] == rows > _IDS:
                param.data = param.data[:_IDS]  # in place: tied ones stay tied
    for layers in _outer_lists(cut):
        seen, left = Counter[Any](), list[nn.Module]()
        for layer in layers:
            kind = tuple((name, type(each)) for name, each in layer.named_modules())
            seen[kind] += 1
            left += [layer] if seen[kind] <= most else []
        layers._modules = {str(index): layer for index, layer in enumerate(left)}
    return cut


def _outer_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Not those inside of others: a layer's experts are all asked for."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outer_lists(child)


def _held(param: Tensor) -> int:
    """Elements of one that is made, where experts are alike."""
    return param.numel() // (param.shape[0] if param.ndim > 2 else 1)
