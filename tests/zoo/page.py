"""models.md: which models run on which axes, of the rows of a sweep. `python -m tests.zoo --write-docs` writes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers

from tests.zoo import all as zoo
from tests.zoo.case import COLUMNS
from tests.zoo.causal import SKIPPED
from tests.zoo.sweep import OUTCOMES, WELL_SPLIT, Row, table

SHOWN = {"equal": "yes", "refused": "no"}  # whatever else there is is a fault, and is shown as what it is


def page(rows: Sequence[Row]) -> str:
    """The page, as markdown."""
    lines = [
        "# Models",
        "",
        "<!-- Written by `python -m tests.zoo --write-docs`; do not edit. -->",
        "",
        f"Every causal language model of transformers {transformers.__version__} and modules that are odd on purpose, tiny, "
        f"in fp64, with torch {torch.__version__.partition('+')[0]} on CPU, by `auto_plan` and the defaults. **yes**: loss, "
        "every gradient and two optimizer steps equal one device; with the share of parameters that tp, ep or etp split. "
        "no: refused before the first optimizer step, with the reason. – has not been tried, or has no experts.",
        "",
        f"| mesh | {' | '.join(OUTCOMES)} | at least {WELL_SPLIT:.0%} split |",
        "|---|" + "--:|" * (len(OUTCOMES) + 1),
        *(f"| {' | '.join(line)} |" for line in table(rows)),
    ]
    lines += _models("transformers' decoders", [row for row in rows if "." not in row.model])
    lines += _models("Others of transformers", [row for row in rows if row.model.startswith("foreign.")])
    lines += _models("Odd modules", [row for row in rows if row.model.startswith("odd.")])
    lines += ["", "## Not in the sweep", "", "| model | why |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in sorted(SKIPPED.items())]
    return "\n".join(lines) + "\n"


def _models(title: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    cells = {(row.model, row.column): row for row in rows}
    columns = [column for column in COLUMNS if any(row.column == column for row in rows)]
    lines = ["", f"## {title}", "", "| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    order = {name: index for index, name in enumerate(zoo.names())}
    for model in sorted({row.model for row in rows}, key=lambda name: order.get(name, len(order))):
        lines.append(f"| {model} | " + " | ".join(_word(cells.get((model, column))) for column in columns) + " |")
    return lines


def _word(row: Row | None) -> str:
    if row is None:
        return "–"
    share = f" {row.split:.0%}" if row.outcome == "equal" and row.split else ""
    return SHOWN.get(row.outcome, f"**{row.outcome}**") + share
