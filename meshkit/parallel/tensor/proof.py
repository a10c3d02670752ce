"""Proving a tensor-parallel layout: the program of every rank beside the model's own, both read without values or ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.tensor import Shard

from meshkit.core.sharding import chunk
from meshkit.parallel.tensor.apply import shard_without_ranks
from meshkit.parallel.tensor.layout import TensorLayout
from meshkit.program import Example, Held, Program, Trace, prove, trace, without_values


def prove_layout(program: Program, layout: TensorLayout, example: Example) -> None:
    """Raises: Unproved where a rank's program is not the model's on its part of the tensors; see `program.prove`."""
    closed = {name: "experts" for name, style in layout.styles.items() if style.kind == "experts"}
    full = trace(program.model, example.args, example.kwargs, closed=closed)
    ranks: list[Trace] = []
    for rank in range(layout.size):
        model = without_values(program.model)
        shard_without_ranks(model, "", layout, rank=rank)
        ranks.append(trace(model, example.args, example.kwargs, closed=closed))
    prove(full, ranks, [_held(program, layout, rank) for rank in range(layout.size)])


def _held(program: Program, layout: TensorLayout, rank: int) -> Mapping[str, Held]:
    held: dict[str, Held] = {}
    for name, param in program.parameters.items():
        placement = layout.params[name].placement if name in layout.params else None
        if isinstance(placement, Shard):
            part = chunk(param.shape[placement.dim], layout.size, rank)
            held[f"parameter {name}"] = Held("varying", placement.dim, tuple(range(part.start, part.stop)))
    return held
