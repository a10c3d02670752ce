"""The microbatches of a step: rows by turns, or the documents of all rows shared out anew; this rank's tokens of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core.to_device import to_device
from meshkit.mask import Mask
from meshkit.parallel.context import context_of, split_batch
from meshkit.parallel.lengths import Pace
from meshkit.step._loss import Batch
from meshkit.step._rows import refuse_microbatches, refuse_odd_rows, spare_row, split_rows

# [Note: microbatches without rows]
# A rank with fewer rows than microbatches must still take part in every collective of the others' forwards and backwards,
# and many models cannot run on no rows. So it runs a row whose loss has the weight 0: gradients are zeros. All of it is 0, so
# that what a loss counts beside sees nothing. But in a batch without `input_ids` floats are those of the rank's first row, or
# random on a rank that has none: of zeros features a model may make NaN (x / x.norm()), and NaN times 0 is.

Part = tuple[dict[str, Any], float]
"""A microbatch with this rank's tokens on its device, and the weight of its loss: 0 for one without rows."""


def split(
    model: nn.Module, batch: Batch, microbatches: int, mask: Mask | Sequence[Mask] | None, *, device: torch.device
) -> Iterator[Part]:
    """As many microbatches, of rows that lie one after the other."""
    refuse_odd_rows(batch, mask)
    first = 0
    for part in split_rows(batch, microbatches):
        rows = min((tensor.shape[0] for tensor in part.values()), default=0)
        masks, first = mask if isinstance(mask, Mask | None) else mask[first : first + rows], first + rows
        if not rows:
            part = {name: spare_row(name, tensor, batch) for name, tensor in batch.items()}
            if not isinstance(mask, Mask | None):
                ids = part.get("input_ids")  # a user's loss may read other tensors instead
                # No token sees another, as position_ids of zeros say too.
                masks = mask[:1] if ids is None else [Mask.documents([1] * ids.shape[1])]
        yield _moved(split_batch(model, part, mask=_joined(masks)), device), float(rows > 0)


def split_step(
    model: nn.Module,
    batch: Batch,
    microbatches: int,
    mask: Mask | Sequence[Mask] | None,
    *,
    device: torch.device,
    pace: Pace,
) -> Iterator[Part]:
    """As `split`; with dynamic groups of context parallelism the documents of the whole step are shared out anew."""
    context = context_of(model)
    if context is None or context.costs is None or "input_ids" not in batch:
        yield from split(model, batch, microbatches, mask, device=device)
        return
    refuse_odd_rows(batch, mask)
    refuse_microbatches(microbatches)
    parts: Iterator[dict[str, Any] | None] = context.split_step(batch, microbatches, _joined(mask), pace=pace)
    for part in parts:
        # A rank without documents runs a token of padding, which routers would count and balance.
        weight = float(part is not None and not part["mask"].only_padding)
        if part is None:
            tokens = min(context.axis.size(), batch["input_ids"].shape[1])  # one for each rank
            spare = {name: spare_row(name, tensor, batch)[:, :tokens] for name, tensor in batch.items()}
            part = split_batch(model, spare, mask=Mask.documents([1] * tokens))
        yield _moved(part, device), weight


def _joined(mask: Mask | Sequence[Mask] | None) -> Mask | None:
    if isinstance(mask, Mask | None):
        return mask
    return Mask.joined(mask) if mask else None


def _moved(part: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """On the device. Split before, so that of a batch on the host only this rank's tokens are copied."""
    moved = {name: to_device(value, device) if isinstance(value, Tensor) else value for name, value in part.items()}
    return type(part)(moved)
