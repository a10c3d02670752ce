"""Rows of a batch (data parallelism, microbatches): a forward that mixes them is not one of each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshkit.core import _torch
from meshkit.errors import PlanError
from meshkit.parallel.writes import refuse_writes
from meshkit.program import (
    Example,
    Fold,
    Held,
    Program,
    Rewritten,
    Trace,
    Unproved,
    fold,
    live,
    prove,
    trace,
    without_values,
)

_PARTS = ((0, 1), (2, 3))  # not one row: a model may treat that apart


def refuse_mixed_rows(program: Program, example: Example, *, blocks: Sequence[str], closed: Mapping[str, str]) -> None:
    """Nothing is refused of a model that cannot be followed, as one that sorts tokens by its own experts.

    closed: modules whose inside is not read, as in `trace`.

    Raises: PlanError for a forward that is shown to mix rows or to write parameters, with the operation and its line.
    """
    try:
        read = program.read(_of(example, len(_PARTS[0])), closed)
    except Rewritten:
        raise
    except PlanError:
        return
    refuse_writes(read, program.model)
    try:
        if any("c10d" in operation.name for operation in read.operations):
            return  # it asks the other ranks by itself
        folded = fold(read, program.modules, blocks, lambda block: None)
        try:
            _prove(program, example, folded, closed)
        except Unproved:
            if not folded.left_out:
                raise
            _prove(program, example, Fold(), closed)  # a model may not be told from one of fewer blocks
    except Unproved as error:
        if not error.wrong:
            return
        raise PlanError(
            f"{type(program.model).__name__} mixes the rows of a batch, of which each data rank and each microbatch has a "
            f"part: {error} Compute it of each row, as the loss does of each token, or use a mesh without dp and pp."
        ) from error
    except PlanError:
        return


def _prove(program: Program, example: Example, folded: Fold, closed: Mapping[str, str]) -> None:
    def read(rows: int) -> Trace:
        given = _of(example, rows)
        model = without_values(program.model, emptied=folded.left_out)
        present = dict(model.named_modules())
        inside = {name: operation for name, operation in closed.items() if name in present}
        found = trace(model, given.args, given.kwargs, closed=inside, fold=folded)
        return live(found, found.result)

    full, of_rank = read(sum(map(len, _PARTS))), read(len(_PARTS[0]))
    params = {f"parameter {name}": Held("replicated") for name in program.parameters}
    inputs = {kept.source for kept in of_rank.storages if kept.source.startswith("input ") and kept.shape}
    held = [params | {source: Held("varying", 0, rows) for source in inputs} for rows in _PARTS]
    prove(full, [of_rank] * len(_PARTS), held, tokens=_PARTS)


def _of(example: Example, rows: int) -> Example:
    """The same of so many rows."""
    first = next((leaf for leaf in _torch.tree_leaves((example.args, dict(example.kwargs))) if _has_rows(leaf)), None)

    def resized(leaf: Any) -> Any:
        if first is None or not _has_rows(leaf) or leaf.shape[0] != first.shape[0]:
            return leaf
        return torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

    if first is None or first.shape[0] == rows:
        return example
    args, kwargs = _torch.tree_map(resized, (example.args, dict(example.kwargs)))
    return Example(args, kwargs)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0
