"""The pipeline's table behind an explanation: made when it is drawn or printed, since counting messages needs none of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshkit.parallel.pipeline import Checked, Cut, simulate


@dataclass(frozen=True, kw_only=True)
class PipelineTable:
    """rank: of pp, whose stages the note tells."""

    cut: Cut
    ranks: int
    microbatches: int
    rank: int

    @cached_property
    def checked(self) -> Checked:
        return self.cut.checked(self.ranks, self.microbatches)

    @property
    def note(self) -> str:
        table, peak_live = self.checked.schedule, self.checked.peak_live
        blocks = " ".join(str(len(stage)) for stage in self.cut.stages.blocks)
        stages = ", ".join(map(str, self.cut.stages_of(self.rank)))
        return (
            f"pp={table.world}: {table.name}, stages of {blocks} blocks, this rank has {stages}; at equal times bubble rate "
            f"{simulate(table).bubble_rate:.3f}; at most {peak_live[self.rank]} microbatches live here (rank by rank "
            f"{' '.join(map(str, peak_live))})"
        )
