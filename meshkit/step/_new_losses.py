"""Losses in their first call: tried, watched and judged, so that one that is no sum over its parts is refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from meshkit.core.code import code_of, is_ours
from meshkit.core.held_values import Held, Judged, held_values
from meshkit.loss import LossWatch
from meshkit.mask import Mask
from meshkit.mesh import Mesh
from meshkit.parallel.rows_tried import loss_of_rows
from meshkit.parallel.tokens_tried import loss_of_tokens
from meshkit.step._loss import Batch, Count, Loss


@dataclass(eq=False)
class NewLosses:
    """Of a run. model: without values, as one device has it. known: what losses held when they were judged; by the call, the
    code of a loss and its count, and whether there are microbatches and masks."""

    model: nn.Module
    mesh: Mesh
    known: defaultdict[tuple[Any, ...], Judged] = field(default_factory=lambda: defaultdict(Judged))
    _new: tuple[tuple[Any, ...], Held] | None = None  # that is being judged

    def watch(
        self, what: str, batch: Batch, microbatches: int, loss: Loss, count: Count, mask: Mask | Sequence[Mask] | None
    ) -> LossWatch | None:
        """In the first call of `what` with this loss; None in later ones."""
        key = (what, code_of(loss), code_of(count), microbatches > 1, mask is None)
        held = held_values(*(each for each in (loss, count) if not is_ours(each)))
        if not self.known[key].is_due(held):
            return None
        self._new = key, held
        rows = tokens = None
        if not is_ours(loss):
            if mask is None and microbatches * self.mesh.data_ranks > 1:
                rows = loss_of_rows(self.model, loss, batch)
            if self.mesh["cp"].size() > 1:
                tokens = loss_of_tokens(self.model, loss, batch)
            # A mean of equal parts may be counted as one; a sum of rows' means is neither of theirs nor of tokens'.
            if tokens == "between" and (rows or loss_of_rows(self.model, loss, batch)) == "sum":
                tokens = "neither"
        return LossWatch(loss, count, self.mesh.device, what=what, rows=rows, tokens=tokens)

    def settle(self, watch: LossWatch, means: Tensor, counted: Tensor, *, microbatches: int) -> None:
        """means: of all ranks. Raises: PlanError, on every rank."""
        ranks, data_ranks = self.mesh.tokens.size(), self.mesh.data_ranks
        watch.settle(means, counted, microbatches=microbatches, ranks=ranks, data_ranks=data_ranks)
        assert self._new is not None
        key, held = self._new
        self.known[key].add(held)
