"""docs/zoo.md: which models run on which axes, and why not, of the rows of a sweep."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.zoo import all as zoo
from tests.zoo.case import COLUMNS, Cell
from tests.zoo.causal import SKIPPED
from tests.zoo.generated import AS_THEIRS, PATHS
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
    rows, generates = _apart(rows)
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
    lines += ["", "## Generation", *generation(generates)] if generates else []
    lines += ["", "## Not in the sweep", "", "| model | why |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in sorted(SKIPPED.items())]
    return "\n".join(lines) + "\n"


def generation(rows: Sequence[Row]) -> list[str]:
    """Which models generate over their cache, by mesh, and why others do not."""
    alone = [row for row in rows if row.column == "dp_shard=1, generate" and row.outcome == "equal"]
    same = sum(row.text.endswith(AS_THEIRS) for row in alone)
    lines = [
        "",
        f"Greedy answers of `generate` to prompts of several lengths, two samples each; {_of(rows)}. Equal is: their tokens "
        "are those that the model's forward of whole rows gives on one device without a cache, and so are their "
        "log-probabilities, to 1e-9. By the path that was taken: over the model's own cache, with prompts of several lengths "
        "together or of one; or whole rows for each token. Refused are those that the mesh refuses too, and models that are "
        f"not causal. On one device the tokens of {same} of {len(alone)} are those of transformers' own `generate` too.",
        "",
        f"| mesh | {' | '.join(PATHS)} | refused | wrong, crash or hang |",
        "|---|" + "--:|" * (len(PATHS) + 2),
    ]
    for column in (column for column in COLUMNS if any(row.column == column for row in rows)):
        of = [row for row in rows if row.column == column]
        paths = Counter(_path(row) for row in of if row.outcome == "equal")
        counts = [*(paths[path] for path in PATHS), sum(row.outcome == "refused" for row in of)]
        lines.append(f"| {_mesh(column)} | {' | '.join(map(str, counts))} | {len(of) - sum(counts)} |")
    columns: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in filter(_told, rows):
        said = row.text if row.outcome == "equal" else f"{row.outcome}: {row.text}"
        columns[row.model, said.replace("|", "\\|")].append(_mesh(row.column))
    said = [f"| {model} | {'; '.join(where)} | {text} |" for (model, text), where in columns.items()]
    head = [
        "",
        "<details><summary>Not over a cache, or unlike transformers</summary>",
        "",
        "| | mesh | |",
        "|---|---|---|",
    ]
    return [*lines, *head, *said, "", "</details>"]


def _path(row: Row) -> str:
    return row.text.partition(";")[0].partition(":")[0]


def _mesh(column: str) -> str:
    return column.replace(", generate", "").replace("dp_shard=1", "one device")


def _told(row: Row) -> bool:
    """Whether the row has a reason of its own, and not that of its mesh."""
    if row.outcome != "equal":
        return row.outcome != "refused" or "generate: " in row.text
    cached = _path(row) != PATHS[2] and (row.text in PATHS or row.text.endswith(AS_THEIRS))
    return not cached and "is used on dp, tp and ep alone" not in row.text


def _apart(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Those that train, and those that generate."""
    generates = [row for row in rows if Cell.of(row.model, row.column).generate]
    return [row for row in rows if row not in generates], generates


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
