"""How is the library built: files, lines of rooms, arrows between rooms, public names, recipes, comments, long functions?

    python benchmarks/structure.py             # a table
    python benchmarks/structure.py --record    # adds a row to results/structure.jsonl

A room is a package or a loose file right under meshkit/. An arrow says that a file of the one imports one of the other, also
for types alone. Flags are the fields of classes in recipes, distinct by name. Names are those of docs/names.md.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rows import environment

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results/structure.jsonl"


def room(path: Path) -> str:
    return path.relative_to(ROOT / "meshkit").parts[0].removesuffix(".py")


def arrows(files: list[Path]) -> set[tuple[str, str]]:
    """(room, room that it imports); the package's own table of contents and command line are no room."""
    rooms = {room(path) for path in files} - {"__init__", "__main__"}
    pairs = set[tuple[str, str]]()
    for path in files:
        module = ["meshkit", *path.relative_to(ROOT / "meshkit").with_suffix("").parts]
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(module[: -node.level]) if node.level else ""
                source = ".".join(part for part in (base, node.module) if part)
                names = [f"{source}.{alias.name}" for alias in node.names]
            for name in names:
                parts = name.split(".")
                if parts[0] == "meshkit" and len(parts) > 1 and parts[1] in rooms and room(path) in rooms - {parts[1]}:
                    pairs.add((room(path), parts[1]))
    return pairs


def comment_share(files: list[Path]) -> float:
    """Comments for each line of code. Lines of docstrings and empty ones are not code; `type:` and `noqa` are no comments."""
    comments, code = 0, 0
    for path in files:
        text = path.read_text()
        docstrings = set[int]()
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = set[int]()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comments += not re.match(r"#\s*(type:|noqa|!)", token.string)
            elif token.string.strip():
                lines |= set(range(token.start[0], token.end[0] + 1))
        code += len(lines - docstrings)
    return comments / code


def functions(files: list[Path]) -> list[tuple[int, str]]:
    """(lines, name) of each function, decorators left out."""
    return [
        ((node.end_lineno or 0) - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.name}")
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def flags(files: list[Path]) -> list[str]:
    names = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names += [
                    each.target.id
                    for each in node.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                ]
    return names


def lines_of(paths: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def measure() -> dict[str, Any]:
    files = sorted((ROOT / "meshkit").rglob("*.py"))
    recipes = sorted((ROOT / "examples").glob("*.py"))
    shared = sorted((ROOT / "meshkit/recipes").rglob("*.py"))
    sizes = [path.read_text().count("\n") for path in files]
    by_room = Counter[str]()
    for path, size in zip(files, sizes, strict=True):
        by_room[room(path)] += size
    longest, longest_name = max(functions(files))
    lengths = sorted(length for length, _ in functions(files))
    flag_names = flags(recipes)
    index = ROOT / "docs/names.md"
    names = re.search(r"^(\d+) names", index.read_text(), re.MULTILINE) if index.exists() else None
    top = ast.parse((ROOT / "meshkit/__init__.py").read_text())
    return {
        "files": len(files),
        "lines": sum(sizes),
        "median_file": statistics.median(sizes),
        "largest_file": max(sizes),
        "files_below_60_lines": sum(size < 60 for size in sizes),
        "rooms": len(by_room) - 2,
        "lines_of_rooms": dict(sorted(by_room.items())),
        "arrows": len(arrows(files)),
        "names_of_mk": sum(len(node.names) for node in top.body if isinstance(node, ast.ImportFrom | ast.Import)),
        "public_names": int(names[1]) if names else None,
        "recipe_lines": {path.name: lines_of([path]) for path in recipes} | {"all": lines_of(recipes)},
        "shared_recipe_lines": lines_of(shared),
        "recipe_flags": len(flag_names),
        "recipe_flags_distinct": len(set(flag_names)),
        "comments_per_code_line": round(comment_share(files), 4),
        "longest_function": longest,
        "longest_function_is": longest_name,
        "functions": len(lengths),
        "functions_up_to_40_lines": round(sum(length <= 40 for length in lengths) / len(lengths), 4),
        "function_p95": lengths[int(0.95 * len(lengths))],
        "lines_of_tests": lines_of(sorted((ROOT / "tests").rglob("*.py"))),
        "lines_of_benchmarks": lines_of(sorted((ROOT / "benchmarks").rglob("*.py"))),
        "lines_of_docs": lines_of(sorted((ROOT / "docs").rglob("*.md"))),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="add a row of results")
    options = parser.parse_args()
    measured = measure()
    table = Table("measure", "value")
    for name, value in measured.items():
        table.add_row(
            name, ", ".join(f"{each} {size}" for each, size in value.items()) if isinstance(value, dict) else str(value)
        )
    Console(width=140).print(table)
    if options.record:
        with RESULTS.open("a") as file:
            file.write(json.dumps({**environment(), **measured}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
