"""Some of what a model wrote, on the screen and in TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence

from meshkit.metrics._logger import Logger


def show_samples(
    step: int, names: Sequence[str], rows: Sequence[Sequence[str]], logger: Logger, *, most: int = 8
) -> None:
    """A table of at most so many of the rows, evenly chosen. Call it on the rank that speaks."""
    from rich.console import Console  # here, so that importing the package stays light
    from rich.table import Table
    from rich.text import Text

    some = rows[:: max(1, len(rows) // most)][:most]
    table = Table(*names, title=f"step {step}", title_justify="left")
    for row in some:
        table.add_row(*map(Text, row))
    Console().print(table)
    lines = [names, ["---"] * len(names), *([f"`{cell}`" for cell in row] for row in some)]
    logger.text(step, "samples", "\n".join("|".join(("", *line, "")) for line in lines))
