"""Numbers of ranks in words."""

from __future__ import annotations

from collections.abc import Sequence


def ranges_in_words(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"{'ranks' if len(ranks) != 1 else 'rank'} {shown}"
