"""compose: the peak of every pipeline rank in milliseconds, of blocks that were traced once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meshkit.mask import Mask
from meshkit.preflight.estimate._composed import Composed, ComposedRank
from meshkit.preflight.estimate._estimate import Kernels, estimate
from meshkit.resolve import Resolved
from meshkit.step import Loss, next_token_loss


class MemoryProfiles:
    """What was traced of models already, for many calls of `compose` about the same ones. The models may not change."""


def compose(
    resolved: Resolved,
    *,
    rows: int,
    seq_len: int,
    microbatches: int | None = None,
    profiles: MemoryProfiles | None = None,
    mask: Mask | Sequence[Mask] | None = None,
    loss: Loss = next_token_loss,
    kernels: Kernels = "cuda",
) -> Composed:
    """Peak bytes of every rank of pp in an optimizer step of `parallelize(model, mesh, strategy)` with `adamw`.

    resolved: the strategy on its mesh, by `resolve`. rows, seq_len: a rank's [rows, seq_len] part of the step's batch, of the
    rank that has most, before cp splits it. microbatches: default the strategy's, or 1. profiles: kept between calls, which
    then take milliseconds. mask, loss, kernels: as `estimate` and `forecast` take them.
    Law: within 0.5 % of the peak of `estimate`.
    Raises: as `estimate` does.
    """
    return _traced(resolved, rows, seq_len, microbatches, loss, kernels, why="nothing is composed yet")


def _traced(
    resolved: Resolved, rows: int, seq_len: int, microbatches: int | None, loss: Loss, kernels: Kernels, *, why: str
) -> Composed:
    model: nn.Module = resolved.program.model
    ranks = []
    for pp_rank in range(resolved.spec.pp):
        found = estimate(
            model,
            resolved.spec,
            resolved.strategy,
            rows=rows,
            seq_len=seq_len,
            microbatches=microbatches,
            coordinate={"pp": pp_rank},
            kernels=kernels,
            loss=loss,
        )
        ranks.append(
            ComposedRank(pp_rank=pp_rank, peak_bytes=found.peak_bytes, where=found.where, at_peak=found.at_peak)
        )
    return Composed(spec=resolved.spec, ranks=tuple(ranks), source="traced", why=why)
