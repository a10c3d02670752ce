"""Documents packed into a row, tried on values: whether a model that gets `position_ids` which restart keeps them apart.

A copy of the model with random parameters runs on rows of two documents, then with other tokens in the first: what it returns
of the second must be the same. Of a model that is large the copy has a few of its ids and layers, and its experts are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.moe.aux_loss import collect_nothing
from meshkit.parallel.rows_tried import NoMessages, Undropped, random_values
from meshkit.program import copied, without_values

Call = Callable[[nn.Module, dict[str, Tensor]], Any]

_LENGTHS = (5, 7)
_ROWS, _IDS = 2, 64
_SMALL, _MOST = 1 << 24, 1 << 30  # elements of parameters: of a model that is not cut, and of one that is, 4 GiB
_LAYERS = (2, 1)  # of a kind that are left of one that is cut: fewer where that is still large
_TOLERANCE = (
    1e-4  # some models compute in fp32 whatever they are given; one that mixes documents differs in its first digits
)


def mixes_documents(model: nn.Module, call: Call) -> bool | None:
    """Whether what the model returns of a token depends on other documents of its row. Runs nothing of the model itself, and
    reads no parameters, so all ranks are told the same.

    call(model, batch): how it is given `input_ids` and `position_ids`, both [B, T]. None where that is not shown: of a model
    that is large even when cut, one whose forward raises on random values, is another in each call, or returns nothing for
    each token.
    """
    small = sum(param.numel() for param in model.parameters()) <= _SMALL
    tries = (model,) if small else (_cut(model, layers) for layers in _LAYERS)
    cut = next((each for each in tries if sum(map(_held, each.parameters())) <= _MOST), None)
    if cut is None:
        return None
    with _torch.without_modes():  # an estimate's would let tensors have no values
        for dtype in (torch.float64, torch.float32) if small else (torch.float32,):
            try:
                found = _tried(cut, call, dtype)
            except Exception:  # of random values where it wants others, or of a dtype
                continue
            if found is not None:
                return found
    return None


def _tried(model: nn.Module, call: Call, dtype: torch.dtype) -> bool | None:
    generator, (first, last) = torch.Generator().manual_seed(0), _LENGTHS
    valued = random_values(model, dtype, generator, alike=True)
    ids = torch.randint(_ids_of(model), (_ROWS, first + last), generator=generator)
    other = ids.clone()
    other[:, :first] = (ids[:, :first] + 1) % _ids_of(model)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS]).expand(_ROWS, -1)

    def run(given: Tensor) -> list[Tensor]:
        tensors: dict[int, Any] = {id(each): each for each in valued.parameters()}
        tensors |= {id(each): each.clone() for each in valued.buffers()}  # its own, for a forward may keep state
        copy = copied(valued, tensors, {})
        with torch.no_grad(), torch.random.fork_rng(devices=[]), collect_nothing(), Undropped(), NoMessages():
            torch.default_generator.manual_seed(0)
            output = call(copy, {"input_ids": given.clone(), "position_ids": positions.clone()})
        leaves = _torch.tree_leaves(getattr(output, "logits", output))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.shape[:2] == given.shape]

    both, again, changed = map(run, (ids, ids, other))
    if not both or not all(map(torch.equal, both, again)) or not all(map(_is_finite, (*both, *changed))):
        return None
    if all(_are_close(one[:, :first], another[:, :first]) for one, another in zip(both, changed, strict=True)):
        return None  # it looks at none of this
    return not all(_are_close(one[:, first:], another[:, first:]) for one, another in zip(both, changed, strict=True))


def _ids_of(model: nn.Module) -> int:
    """How many ids are drawn from. The largest table is that of the words: others may have a row or two."""
    return min(_IDS, max((each.weight.shape[0] for each in _tables(model)), default=_IDS))


def _tables(model: nn.Module) -> Iterator[nn.Embedding]:
    return (module for module in model.modules() if isinstance(module, nn.Embedding))


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _are_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and float((one - other).abs().max()) <= _TOLERANCE * max(
        1.0, float(one.abs().max())
    )


# [Note: a model that is cut]
# Whether documents are kept apart is in the code and settings of a model, and shows in a few of its layers. Of each list of
# layers the first of each kind are left, of the largest tables the first ids, as of what has as many rows (heads). Experts in
# one tensor are as many views of one. What is cut in a way that the forward does not bear raises, and nothing is shown.


def _cut(model: nn.Module, most: int) -> nn.Module:
    cut = without_values(model)
    rows = {table.num_embeddings for table in _tables(cut) if table.num_embeddings > _IDS}
    for module in cut.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
        for param in module._parameters.values():
            if type(param) is nn.Parameter and param.ndim and param.shape[0] in rows:
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
