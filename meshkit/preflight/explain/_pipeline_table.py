"""The pipeline's table behind an explanation: made when it is drawn or printed, since counting messages needs none of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshkit.parallel.pipeline import Checked, Cut, Path, Schedule, simulate


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
    def paths(self) -> tuple[Path, ...]:
        """Of each microbatch. Schedules with a name pass all stages, so that none is made."""
        if self.cut.named:
            return (tuple(range(self.cut.stages.count)),) * self.microbatches
        return self.checked.schedule.paths

    @property
    def note(self) -> str:
        table, peak_live = self.checked.schedule, self.checked.peak_live
        blocks = " ".join(str(len(stage)) for stage in self.cut.stages.blocks)
        stages = ", ".join(map(str, self.cut.stages_of(self.rank)))
        return (
            f"pp={table.world}: {table.name}, stages of {blocks} blocks, this rank has {stages}; at equal times bubble rate "
            f"{simulate(table).bubble_rate:.3f}; at most {peak_live[self.rank]} microbatches live here (rank by rank "
            f"{' '.join(map(str, peak_live))})"
            f"{_skips_text(table)}"
        )


def _skips_text(table: Schedule) -> str:
    if not table.skips:
        return ""
    share = 1 - sum(table.passing) / (table.stages * table.microbatches)
    passing = " ".join(map(str, table.passing))
    return f"; microbatches skip {100 * share:.1f} % of the stages, which {passing} of {table.microbatches} pass"
