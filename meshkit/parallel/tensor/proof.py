"""Proving a tensor-parallel layout: the program of every rank beside the model's own, both read without values or ranks."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

from torch import nn
from torch.distributed.tensor import Shard

from meshkit.core.sharding import chunk
from meshkit.parallel.tensor.apply import shard_without_ranks
from meshkit.parallel.tensor.layout import TensorLayout
from meshkit.program import (
    EXPERTS_OF_PARTS,
    Example,
    Fold,
    Held,
    Program,
    ReadingError,
    Trace,
    Uneven,
    Unproved,
    fold,
    mode_of,
    prove,
    trace,
    without_values,
)


def prove_layout(program: Program, layout: TensorLayout, example: Example, *, blocks: Sequence[str] = ()) -> None:
    """blocks: those of the model; of blocks that are alike one is read on each rank.

    Raises: Unproved where a rank's program is not the model's on its part of the tensors; see `program.prove`.
    """
    if program.is_proved:
        return
    # A layout follows from these and the model. A style that prints as an address may be another one later.
    styles = repr(sorted(layout.styles.items()))
    key = "layout", mode_of(program.model), example.key, layout.size, layout.sequence, styles, tuple(blocks)
    if " at 0x" in styles or key not in program.shown:
        _prove_layout(program, layout, example, blocks)
        program.shown[key] = example.objects


def _prove_layout(program: Program, layout: TensorLayout, example: Example, blocks: Sequence[str]) -> None:
    closed = closed_of(layout)
    full = program.read(example, closed)
    alone = {call.module for call in layout.calls}  # a block that communicates by itself does so wherever it stands
    foldable = [block for block in blocks if block not in alone]
    folded = fold(full, program.modules, foldable, lambda block: _styles_in(layout, block))
    if folded.counted:  # one that knows its number may run something else of a part than the others
        on_rank = _on_rank(program.model, layout, example, closed, rank=0)
        folded = fold(full, program.modules, foldable, lambda block: _styles_in(layout, block), on_rank)
    if folded.left_out:
        try:
            _prove(program, layout, example, closed, folded)
            return
        except (Uneven, ReadingError):
            pass  # a model that cannot be told from one of fewer blocks is proved block by block
    _prove(program, layout, example, closed, Fold())


def _prove(program: Program, layout: TensorLayout, example: Example, closed: Mapping[str, str], folded: Fold) -> None:
    full, whole = program.read(example, closed), program.model
    if folded.left_out:
        whole = without_values(program.model, emptied=folded.left_out)
        present = dict(whole.named_modules())
        closed = {name: operation for name, operation in closed.items() if name in present}
        full = trace(whole, example.args, example.kwargs, closed=closed, fold=folded)
    ranks = [_on_rank(whole, layout, example, closed, rank=rank, folded=folded) for rank in range(layout.size)]
    # Of blocks that are left out nothing is read: their indices would take longer than the proof.
    params = program.parameters.keys() & dict(whole.named_parameters(remove_duplicate=False))
    held = [_held(program, layout, params, rank) for rank in range(layout.size)]
    prove(full, ranks, held, sums_counts=layout.sequence)


def _on_rank(
    whole: nn.Module,
    layout: TensorLayout,
    example: Example,
    closed: Mapping[str, str],
    *,
    rank: int,
    folded: Fold | None = None,
) -> Trace:
    model = without_values(whole)
    shard_without_ranks(model, "", layout, rank=rank)
    try:
        return trace(model, example.args, example.kwargs, closed=closed, fold=folded)
    except ReadingError as error:
        raise Unproved(f"on a rank of tp={layout.size}, {error}", error.module) from error


def _styles_in(layout: TensorLayout, block: str) -> Hashable:
    """How a block is split."""
    inside = {name: style for name, style in layout.styles.items() if name == block or name.startswith(f"{block}.")}
    return tuple((name[len(block) :], style) for name, style in inside.items())


def closed_of(layout: TensorLayout) -> dict[str, str]:
    """The modules that are read as one operation, with its name: experts, which are proved apart."""
    experts = EXPERTS_OF_PARTS if layout.sequence else "experts"
    return {name: experts for name, style in layout.styles.items() if style.kind == "experts"}


def _held(program: Program, layout: TensorLayout, params: Collection[str], rank: int) -> Mapping[str, Held]:
    held: dict[str, Held] = {}
    for name in params:
        placement = layout.params[name].placement if name in layout.params else None
        if isinstance(placement, Shard):
            part = chunk(program.parameters[name].shape[placement.dim], layout.size, rank)
            held[f"parameter {name}"] = Held("varying", placement.dim, tuple(range(part.start, part.stop)))
    return held
