"""docs/zoo.md: which models run on which axes, and why not, of the rows of a sweep."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.zoo import all as zoo
from tests.zoo.case import COLUMNS
from tests.zoo.causal import SKIPPED
from tests.zoo.sweep import OUTCOMES, WELL_SPLIT, Row, table

SHOWN = {"equal": "yes", "refused": "no"}  # whatever else there is is a fault, and is shown as what it is
GROUPS = {
    "": "Causal language models of transformers",
    "foreign": "Encoders, and encoders with decoders",
    "odd": "Modules that are odd on purpose",
    "mutated": "Random edits of a small decoder's forward",
}


def page(rows: Sequence[Row]) -> str:
    """The page, as markdown."""
    groups = {_group(row) for row in rows}
    lines = [
        "# Which models run on which axes",
        "",
        "<!-- Written by `make zoo` from tests/zoo/results.jsonl; do not edit. -->",
        "",
        f"{'; '.join(title for group, title in GROUPS.items() if group in groups)}: all tiny, in fp64, on CPU, by "
        f"`auto_plan` and the defaults; {_of(rows)}. **yes**: loss, every gradient and two optimizer steps equal one device; "
        "with the share of parameters that tp, ep or etp split. no: refused before the first optimizer step; why stands "
        "below each table. – has not been tried, or has no experts. padded: rows of a batch begin later. replicate: with "
        '`Strategy(unproved="replicate")`.',
    ]
    order = {name: index for index, name in enumerate(zoo.names())}
    rows = sorted(rows, key=lambda row: order.get(row.model, len(order)))
    for group, title in GROUPS.items():
        of = [row for row in rows if _group(row) == group]
        if of:
            lines += ["", f"## {title}", *_counts(of)]
            lines += [*_models(of), *_reasons(of)] if group != "mutated" else []
    lines += ["", "## Not in the sweep", "", "| model | why |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in sorted(SKIPPED.items())]
    return "\n".join(lines) + "\n"


def _of(rows: Sequence[Row]) -> str:
    """What was tried, and how many cells of it."""
    trees = Counter(row.of for row in rows).most_common()
    return "; ".join(
        f"{count:,} cells with transformers {transformers}, torch {torch}, commit {commit}"
        for (commit, torch, transformers), count in trees
    )


def _group(row: Row) -> str:
    return row.model.partition(".")[0] if "." in row.model else ""


def _counts(rows: Sequence[Row]) -> list[str]:
    head = f"| mesh | {' | '.join(OUTCOMES)} | at least {WELL_SPLIT:.0%} split |"
    return ["", head, "|---|" + "--:|" * (len(OUTCOMES) + 1), *(f"| {' | '.join(line)} |" for line in table(rows))]


def _models(rows: Sequence[Row]) -> list[str]:
    cells = {(row.model, row.column): row for row in rows}
    columns = [column for column in COLUMNS if any(row.column == column for row in rows)]
    lines = ["", "| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for model in dict.fromkeys(row.model for row in rows):
        lines.append(f"| {model} | " + " | ".join(_word(cells.get((model, column))) for column in columns) + " |")
    return lines


def _word(row: Row | None) -> str:
    if row is None:
        return "–"
    share = f" {row.split:.0%}" if row.outcome == "equal" and row.split else ""
    return SHOWN.get(row.outcome, f"**{row.outcome}**") + share


def _reasons(rows: Sequence[Row]) -> list[str]:
    """What each refusal says, once for all meshes on which it says the same."""
    columns: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row.outcome == "refused":
            columns[row.model, row.text.replace("|", "\\|")].append(row.column)
    said = [f"| {model} | {'; '.join(where)} | {text} |" for (model, text), where in columns.items()]
    head = ["", "<details><summary>Why not</summary>", "", "| | mesh | |", "|---|---|---|"]
    return [*head, *said, "", "</details>"] if said else []
