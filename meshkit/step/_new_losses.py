"""Losses in their first call: tried, watched and judged, so that one that is no sum over its parts is refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core.code import code_of, is_ours
from meshkit.core.held_values import Held, Judged, held_values
from meshkit.loss import LossWatch
from meshkit.mask import Mask
from meshkit.mesh import Mesh
from meshkit.parallel.rows_tried import Laid, OfParts, Trial, loss_of_rows
from meshkit.parallel.tokens_tried import loss_of_rows_alone, loss_of_tokens, misread_by
from meshkit.program import follow_mode, without_values
from meshkit.step._loss import Batch, Count, Loss, is_vouched


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a rank has seen a loss to be of parts of the rows and tokens that it is a loss of; see `LossWatch`."""

    rows: OfParts | None = None
    tokens: OfParts | None = None
    misread: Laid | None = None
    untried: str = ""
    error: Exception | None = None
    carries: bool = False


@dataclass(eq=False)
class NewLosses:
    """Of a run. model: without values, as one device has it. running: says what is in training. known: what losses held
    when they were judged; by the call, the code of a loss and its count, and whether there are microbatches and masks, and
    how rows are laid on cp. multiple: a rank's tokens are filled up to a multiple of it. by_length: documents leave their
    rows."""

    model: nn.Module
    running: nn.Module
    mesh: Mesh
    multiple: int = 1
    by_length: bool = False
    known: defaultdict[tuple[Any, ...], Judged] = field(default_factory=lambda: defaultdict(Judged))
    _new: tuple[tuple[Any, ...], Held] | None = None  # that is being judged

    def watch(
        self, what: str, batch: Batch, microbatches: int, loss: Loss, count: Count, mask: Mask | Sequence[Mask] | None
    ) -> LossWatch | None:
        """In the first call of `what` with this loss; None in later ones."""
        judged = self.judge(what, batch, microbatches, loss, count, mask)
        return None if judged is None else LossWatch(loss, count, self.mesh.device, what=what, **vars(judged))

    def judge(
        self, what: str, batch: Batch, microbatches: int, loss: Loss, count: Count, mask: Mask | Sequence[Mask] | None
    ) -> Judgement | None:
        """In the first call of `what` with this loss, until it is `settled`; None in later ones."""
        layouts = self._layouts(batch, mask)
        key = (what, code_of(loss), code_of(count), microbatches > 1, mask is None, layouts)
        held = held_values(*(each for each in (loss, count) if not is_ours(each)))
        if not self.known[key].is_due(held):
            return None
        self._new = key, held
        trial = Trial(loss)
        known = is_ours(loss) or is_vouched(loss)
        rows, tokens = (None, None) if known else self._tried(what, trial, batch, microbatches, mask)
        is_sum = tokens == "sum" and layouts
        misread = misread_by(without_values(self.model), loss, batch, layouts, trial) if is_sum else None
        # Of a loss that was tried with other numbers a trial that shows nothing, as of a factor that is nan now, is no news.
        untried = "" if held.kind in self.known[key].kinds else trial.why
        return Judgement(
            rows=rows,
            tokens=tokens,
            misread=misread,
            untried=untried,
            error=trial.error if untried else None,
            carries=trial.carries and microbatches > 1,
        )

    def _layouts(self, batch: Batch, mask: Mask | Sequence[Mask] | None) -> tuple[Laid, ...]:
        """In which a rank of cp may get this batch, beside tokens of each row."""
        ranks, ids = self.mesh["cp"].size(), batch.get("input_ids")
        if ranks == 1 or ids is None or ids.ndim != 2:
            return ()
        joined = self.by_length or mask is not None or not batch.keys().isdisjoint(("position_ids", "attention_mask"))
        layouts = {"end to end": joined, "filled up": self.multiple > 1 or ids.shape[1] < ranks}
        return tuple(laid for laid in get_args(Laid) if layouts[laid])

    def _tried(
        self, what: str, trial: Trial, batch: Batch, microbatches: int, mask: Mask | Sequence[Mask] | None
    ) -> tuple[OfParts | None, OfParts | None]:
        """What the loss is of parts of the rows and of the tokens. `trial.why`: it sees a part, and that is not known."""
        some_rows, some_tokens = microbatches * self.mesh.data_ranks > 1, self.mesh["cp"].size() > 1
        if not (some_rows or some_tokens) or trial.reach.obstacle:
            trial.why = trial.why if some_rows or some_tokens else ""
            return None, None
        loss, rows, tokens = trial.loss, None, None
        model = without_values(self.model)
        follow_mode(model, self.running)
        if what != "forward_backward":
            model.eval()
        if some_tokens:
            tokens = loss_of_tokens(model, loss, batch, trial)
        # A mean of equal parts may be counted as one; a sum of rows' means is neither of theirs nor of tokens'.
        if some_rows or tokens == "between":
            rows = None if mask is not None else loss_of_rows(model, loss, batch, trial)
            rows = rows or loss_of_rows_alone(model, loss, batch, trial)
        if tokens == "between" and rows == "sum":
            tokens = "neither"
        known = (rows is not None or not some_rows) and (tokens is not None or not some_tokens)
        if known or not _has_values(batch):
            trial.why = ""
        else:
            trial.why = trial.why or "on random values it returns no number, or another one when it is called again"
        return rows if some_rows else None, tokens

    def settle(self, watch: LossWatch, means: Tensor, counted: Tensor, *, microbatches: int) -> None:
        """means: of all ranks. Raises: PlanError, on every rank."""
        ranks, data_ranks = self.mesh.tokens.size(), self.mesh.data_ranks
        watch.settle(means, counted, microbatches=microbatches, ranks=ranks, data_ranks=data_ranks)
        self.settled()

    def settled(self) -> None:
        """What was judged last was not refused."""
        assert self._new is not None
        key, held = self._new
        self.known[key].add(held)


def _has_values(batch: Batch) -> bool:
    """Whether this rank has rows, and they are no stand-ins, as in an estimate."""
    tensors = [each for each in batch.values() if isinstance(each, Tensor)]
    return any(each.ndim and len(each) for each in tensors) and not any(
        each.is_meta or _torch.is_fake(each) for each in tensors
    )
