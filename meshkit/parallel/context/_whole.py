"""Modules that mix tokens otherwise than by attention, left whole: every rank of cp gathers the tokens, runs the module on
all of them as one device does, and keeps its own. `Strategy(unproved="replicate")`.

What is computed so is computed on each rank, attention in it too, and so are its activations: it is for modules that are few
or cheap, such as short convolutions. The gradient of what was gathered is summed back to its ranks, for each rank reads its
own outputs only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core.collectives import gather_dim
from meshkit.core.noting import noted
from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError
from meshkit.parallel.context._foreign import following, mask_of_forward
from meshkit.parallel.context._read_attention import ReadMask
from meshkit.parallel.context._split_mask import AllTokens, SplitMask
from meshkit.program import ModuleCall, ReadingError, TensorRef, Trace, Unproved, model_line

GATHER_TOKENS = "gather_tokens"
Path = tuple[int | str, int]  # (place or name of an argument, number of the tensor in it)
Dims = Mapping[Path, int]
Trees = dict[int | str, Any]


@dataclass(frozen=True)
class Whole:
    """A module that runs on all tokens. inputs, outputs: the dim of tokens of each tensor that has one. elements: of a token
    of each of the inputs, with its dtype and whether it has a gradient. calls: how often a forward calls it. why: what was
    not proved of it."""

    name: str
    inputs: Dims
    outputs: Dims
    elements: tuple[tuple[int, torch.dtype, bool], ...]
    calls: int
    why: str

    def open(self, model: nn.Module) -> None:
        """Let the module of a model that is split by tokens run on all of them."""
        module = model.get_submodule(self.name)
        patch_class(module, forward=_on_all_tokens(type(module).forward, self))

    def sent(self, rows: int, tokens: int, compute: torch.dtype) -> list[tuple[int, bool]]:
        """(bytes of the gathered tensor, whether its gradient is scattered) of each message of one forward.

        tokens: of the longest rank, times the ranks.
        """
        return [
            (rows * tokens * count * (compute if dtype.is_floating_point else dtype).itemsize, trains)
            for count, dtype, trains in self.elements
        ] * self.calls


def notes_of(whole: Mapping[str, Whole], ranks: int) -> list[str]:
    """Which modules run on all tokens, and why: a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, each in whole.items():
        by_reason.setdefault(each.why, []).append(name)
    return [
        f"cp={ranks}: every rank runs {names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)} on all tokens: {why}"
        for why, names in by_reason.items()
    ]


def whole_around(
    error: Unproved | ReadingError,
    full: Trace,
    wider: Trace,
    *,
    apart: Collection[str],
    known: Collection[str],
    blocks: Collection[str],
) -> dict[str, Whole]:
    """The innermost module around what was not proved that can run on all tokens, and the modules of the same place in other
    layers; empty where there is none.

    full, wider: the single-device model's program, on two numbers of tokens. apart: modules that are computed apart, as
    experts. known: modules that run on all tokens already. blocks: of the model; what has several of them in it is no such
    module, for then nothing would be split.
    """
    for at in (error.module, getattr(error, "before", "")):
        name = at
        while name:
            several = sum(_within(block, name) for block in blocks) > 1
            if not several and not any(_within(name, other) for other in known):
                found = {
                    other: region
                    for other in dict.fromkeys(call.name for call in full.calls)
                    if _place(other) == _place(name) and (region := _whole(other, full, wider, apart, str(error)))
                }
                if name in found:
                    return found
            name = name.rpartition(".")[0]
    return {}


def _within(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")


def _place(name: str) -> str:
    """The same for all layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _whole(name: str, full: Trace, wider: Trace, apart: Collection[str], why: str) -> Whole | None:
    if not name or any(_within(other, name) for other in apart) or len(full.calls) != len(wider.calls):
        return None
    calls = [(a, b) for a, b in zip(full.calls, wider.calls, strict=True) if a.name == name]
    dims = [_dims_of(a, b) for a, b in calls]
    if any(each != dims[0] for each in dims) or dims[0] is None:
        return None
    inputs, outputs = dims[0]
    leaves = _refs(_arguments(calls[0][0].args, calls[0][0].kwargs))
    elements = []
    for path, dim in inputs.items():
        ref = leaves[path]
        count = torch.Size(ref.shape).numel() // ref.shape[dim]
        elements.append((count, ref.dtype, ref.requires_grad))
    return Whole(name, inputs, outputs, tuple(elements), len(calls), why)


def _dims_of(call: ModuleCall, wider: ModuleCall) -> tuple[dict[Path, int], dict[Path, int]] | None:
    """The dims of tokens of a call's inputs and outputs; None where a tensor has them in no dim of its own."""
    found: list[dict[Path, int]] = []
    tokens: set[int] = set()
    pairs: set[tuple[int, Path]] = set()
    both: list[tuple[Trees, Trees]] = [
        (_arguments(call.args, call.kwargs), _arguments(wider.args, wider.kwargs)),
        ({0: call.output}, {0: wider.output}),
    ]
    for each, other in both:
        refs, others = _refs(each), _refs(other)
        if refs.keys() != others.keys() or any(len(refs[path].shape) != len(others[path].shape) for path in refs):
            return None
        dims: dict[Path, int] = {}
        for path, ref in refs.items():
            grown = [dim for dim, (a, b) in enumerate(zip(ref.shape, others[path].shape, strict=True)) if a != b]
            if len(grown) > 1:
                # A mask of all pairs of tokens is handed on: it must be one of all tokens already, which the proof sees. So
                # are probabilities that are returned: what reads them has them of all tokens.
                pairs.add((len(found), path))
            elif grown:
                dims[path] = grown[0]
                tokens.add(ref.shape[grown[0]])
        found.append(dims)
    inputs, outputs = found
    # What it returns of all tokens alike, such as a loss, each rank would count.
    complete = all(path in outputs or (1, path) in pairs for path in _refs({0: call.output}))
    return (inputs, outputs) if inputs and outputs and complete and len(tokens) == 1 else None


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Trees:
    return dict(enumerate(args)) | dict(kwargs)  # type: ignore[operator]


def _refs(trees: Trees) -> dict[Path, TensorRef]:
    return {
        (key, number): leaf
        for key, tree in trees.items()
        for number, leaf in enumerate(_torch.tree_leaves(tree))
        if isinstance(leaf, TensorRef)
    }


# --------------------------------------------------------------------------------------------------------- running


def is_split(mask: object) -> TypeGuard[SplitMask | ReadMask]:
    """Whether the rank has a part of the tokens. In generation, and inside of a module that is whole, it has all."""
    return isinstance(mask, SplitMask) or (isinstance(mask, ReadMask) and mask.ranks > 1)


def _on_all_tokens(forward: Callable[..., Any], whole: Whole) -> Callable[..., Any]:
    @functools.wraps(forward)
    def on_all_tokens(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mask = mask_of_forward()
        if not is_split(mask):
            return forward(self, *args, **kwargs)
        inside = AllTokens(mask) if isinstance(mask, SplitMask) else mask.of_all_tokens()

        def gathered(path: Path, leaf: Any) -> Any:
            if isinstance(leaf, SplitMask):
                return AllTokens(leaf)
            return gather_tokens(leaf, whole.inputs[path], mask) if path in whole.inputs else leaf

        def own(path: Path, leaf: Any) -> Any:
            return own_tokens(leaf, whole.outputs[path], mask) if path in whole.outputs else leaf

        given = [_mapped(key, tree, gathered) for key, tree in enumerate(args)]
        named = {key: _mapped(key, tree, gathered) for key, tree in kwargs.items()}
        with following(inside):
            out = forward(self, *given, **named)
        return _mapped(0, out, own)

    return on_all_tokens


def _mapped(key: int | str, tree: Any, change: Callable[[Path, Any], Any]) -> Any:
    leaves, shape = _torch.tree_flatten(tree)
    return _torch.tree_unflatten([change((key, number), leaf) for number, leaf in enumerate(leaves)], shape)


def _read_all(tensor: Tensor, dim: int, mask: ReadMask) -> Tensor:
    return torch.cat([tensor] * mask.ranks, dim)


def _read_own(tensor: Tensor, dim: int, mask: ReadMask) -> Tensor:
    return tensor.narrow(dim, 0, tensor.shape[dim] // mask.ranks).clone()


@noted(reading=_read_all)
def gather_tokens(tensor: Tensor, dim: int, mask: Any) -> Tensor:
    """This rank's tokens in, those of all ranks in their order out, row by row. dim: 0 of a tensor that is of one row.

    Wire: all-gather, backward reduce-scatter. Raises: PlanError for a tensor of one row where rows are laid end to end.
    """
    if dim == 0:
        refuse_end_to_end("reads some tokens of a row for others", mask)
    rows = tensor.movedim(dim, 1) if dim else tensor[None]
    gathered: Tensor = mask.in_order(gather_dim(mask.padded(rows), 1, mask.axis))
    return gathered.movedim(1, dim) if dim else gathered[0]


@noted(reading=_read_own)
def own_tokens(tensor: Tensor, dim: int, mask: Any) -> Tensor:
    """All tokens in, this rank's out. dim: as of `gather_tokens`. No communication."""
    if dim == 0:
        refuse_end_to_end("reads some tokens of a row for others", mask)
    own: Tensor = mask.own(tensor.movedim(dim, 1) if dim else tensor[None])
    return own.movedim(1, dim) if dim else own[0]


def refuse_end_to_end(what: str, mask: Any) -> None:
    """Raises: PlanError for rows with masks of their own, of which a rank has parts."""
    if getattr(mask, "rows", 0) > 1:
        raise PlanError(
            f"context parallelism: {model_line()} {what}, but rows with masks of their own are laid end to end. Give batches "
            "without padding or documents, whose rows have one mask, or use cp=1."
        )
