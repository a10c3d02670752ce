"""What does a new choice, scheme, schedule, objective, bound or family of models cost: lines to add, and in how many files?

    python benchmarks/cost_of_change.py             # a table, and each place as file:line
    python benchmarks/cost_of_change.py --record    # adds a row to results/cost_of_change.jsonl

Counted by an example of each kind: the lines of code that name it outside of its own definition (AXLearn's measure, Lee et
al. 2025: they must not grow with the number of models). Docstrings, comments and blank lines are not counted. Of a choice of
`parallelize` they are the lines that declare it, hand it on as it is, or put it into a dict; the number is the mean over the
choices. The definition itself is the work, not its price.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rows import environment

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results/cost_of_change.jsonl"
CHOICES = ("plan", "memory", "zero", "sequence", "context", "experts", "schedule", "stages")
# Rooms that take a run's choices as a whole; others take one because it is theirs.
WHOLE = (
    "parallelize",
    "step",
    "explain",
    "estimate",
    "check",
    "page",
    "resolve",
    "strategy",
    "preflight",
    "algos/reallocate",
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """names: a regular expression of what was added. defined: functions and classes that are the addition itself."""

    kind: str
    example: str
    names: str
    defined: tuple[str, ...] = ()
    within: tuple[str, ...] = ("",)


CHANGES = (
    Change(
        kind="a context scheme",
        example="group_cast",
        names=r"[\"']group_cast[\"']|_cast_(blocks|gradients)",
        defined=("cast_blocks", "cast_gradients"),
        within=("parallel/context", "strategy"),
    ),
    Change(kind="a schedule", example="v_half", names=r"\bv_half\b|[\"']v-half[\"']", defined=("v_half",)),
    Change(
        kind="a DPO kind",
        example="discopop",
        names=r"_discopop\b|[\"']discopop[\"']",
        defined=("_discopop",),
    ),
    Change(kind="a policy bound", example="Sapo", names=r"\bSapo\b", defined=("Sapo",)),
    Change(
        kind="a model family, llama-like",
        example="qwen3",
        names=r"[\"']qwen3[\"']|\bQwen3ForCausalLM\b|\bQWEN3_\d+_?\d?B\b",
    ),
    Change(
        kind="a model family, its own architecture",
        example="DeepseekV3",
        names=r"[Dd]eepseek|DEEPSEEK",
        defined=("DeepseekV3", "DeepseekV3Config"),
    ),
)


def code_lines(path: Path, without: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(number, line) outside of docstrings, comments and some definitions."""
    text = path.read_text()
    left_out = set[int]()
    for node in ast.walk(ast.parse(text)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in without):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(text.splitlines(), 1):
        if number not in left_out and line.strip() and not line.lstrip().startswith("#"):
            yield number, line.partition("  #")[0]


def places(names: str, within: tuple[str, ...], defined: tuple[str, ...] = ()) -> list[str]:
    """file:line of each line of code that names it."""
    hits = []
    for path in sorted((ROOT / "meshkit").rglob("*.py")):
        inside = str(path.relative_to(ROOT / "meshkit"))
        if any(not room or inside == f"{room}.py" or inside.startswith(f"{room}/") for room in within):
            lines = code_lines(path, defined)
            hits += [f"meshkit/{inside}:{number}" for number, line in lines if re.search(names, line)]
    return hits


def choice(name: str) -> list[str]:
    handed = rf"\b{name}=(\w+\.)?{name}\b"
    return places(rf"^\s+{name}: |[\"']{name}[\"']: |{handed}", WHOLE)


def count() -> dict[str, dict[str, list[str]]]:
    """By kind and example: places."""
    counts = {"a choice of parallelize": {name: choice(name) for name in CHOICES}}
    for change in CHANGES:
        counts[change.kind] = {change.example: places(change.names, change.within, change.defined)}
        if not counts[change.kind][change.example]:
            raise SystemExit(f"{change.kind}: nothing names {change.example}. Was it renamed? Edit CHANGES.")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="add a row of results")
    options, counted, console = parser.parse_args(), count(), Console(width=140)
    table = Table("to add", "as", "lines", "files")
    values: dict[str, dict[str, float]] = {}
    for kind, examples in counted.items():
        lines = statistics.mean(len(hits) for hits in examples.values())
        files = statistics.mean(len({hit.partition(":")[0] for hit in hits}) for hits in examples.values())
        values[kind] = {"lines": round(lines, 1), "files": round(files, 1)}
        table.add_row(kind, ", ".join(examples), f"{lines:.1f}", f"{files:.1f}")
    console.print(table)
    for examples in counted.values():
        for example, hits in examples.items():
            console.print(f"{example}: {' '.join(hits)}", markup=False)
    if options.record:
        row = {
            **environment(),
            **values,
            "places": {name: hits for each in counted.values() for name, hits in each.items()},
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
