"""Proving a tensor-parallel layout: the program of every rank beside the model's own, both read without values or ranks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Shard

from meshkit.core import _torch
from meshkit.core.sharding import chunk
from meshkit.parallel.tensor.apply import shard_without_ranks
from meshkit.parallel.tensor.layout import TensorLayout
from meshkit.program import (
    EXPERTS_OF_PARTS,
    Example,
    Held,
    Program,
    ReadingError,
    Trace,
    Unproved,
    prove,
    trace,
    without_values,
)


def prove_layout(program: Program, layout: TensorLayout, example: Example) -> None:
    """Raises: Unproved where a rank's program is not the model's on its part of the tensors; see `program.prove`."""
    experts = EXPERTS_OF_PARTS if layout.sequence else "experts"
    closed = {name: experts for name, style in layout.styles.items() if style.kind == "experts"}
    full = program.read(example, closed)
    ranks: list[Trace] = []
    for rank in range(layout.size):
        model = without_values(program.model)
        shard_without_ranks(model, "", layout, rank=rank)
        try:
            ranks.append(trace(model, example.args, example.kwargs, closed=closed))
        except ReadingError as error:
            raise Unproved(f"on a rank of tp={layout.size}, {error}", error.module) from error
    prove(full, ranks, [_held(program, layout, rank) for rank in range(layout.size)])


def prove_at_first_call(model: nn.Module, program: Program, layout: TensorLayout, example: Example | None) -> None:
    """Let a split model prove its layout when its forward is first called with other arguments than the example's, by which
    it was proved, or in another mode (train, eval); before it runs.

    A `mask` is left away: attention follows it head by head.

    Wire: nothing; every rank proves for itself.
    """
    known = {_signature(model, example.args, example.kwargs)} if example is not None else set()

    def prove(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = {name: value for name, value in kwargs.items() if name != "mask"}
        signature = _signature(model, args, kwargs)
        if signature in known or any(map(_torch.is_fake, _torch.tree_leaves((args, kwargs)))):
            return
        known.add(signature)
        program.model.train(model.training)
        prove_layout(program, layout, Example(args, kwargs))

    model.register_forward_pre_hook(prove, with_kwargs=True)


def _signature(model: nn.Module, args: Any, kwargs: Any) -> Hashable:
    """What the program may depend on, but for sizes: names, numbers of dims, dtypes, and the mode."""
    leaves, tree = _torch.tree_flatten((args, dict(kwargs)))
    kinds = tuple(
        (leaf.ndim, leaf.dtype) if isinstance(leaf, Tensor) else leaf if isinstance(leaf, bool | str) else type(leaf)
        for leaf in leaves
    )
    return str(tree), kinds, model.training


def _held(program: Program, layout: TensorLayout, rank: int) -> Mapping[str, Held]:
    held: dict[str, Held] = {}
    for name, param in program.parameters.items():
        placement = layout.params[name].placement if name in layout.params else None
        if isinstance(placement, Shard):
            part = chunk(param.shape[placement.dim], layout.size, rank)
            held[f"parameter {name}"] = Held("varying", placement.dim, tuple(range(part.start, part.stop)))
    return held
