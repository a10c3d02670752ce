"""Samples of what a model wrote, on the screen and wherever the logger's tables go."""

from __future__ import annotations

from collections.abc import Sequence

from meshkit.metrics._logger import Logger


def show_samples(
    step: int, names: Sequence[str], rows: Sequence[Sequence[str]], logger: Logger, *, most: int = 8
) -> None:
    """Print a table of at most `most` of the rows, evenly chosen, and log all of them. Call it on the main rank."""
    from rich.console import Console  # here, so that importing the package stays light
    from rich.table import Table
    from rich.text import Text

    shown = rows[:: max(1, len(rows) // most)][:most]
    table = Table(*names, title=f"step {step}", title_justify="left")
    for row in shown:
        table.add_row(*map(Text, row))
    Console().print(table)
    logger.table(step, "samples", names, rows)
