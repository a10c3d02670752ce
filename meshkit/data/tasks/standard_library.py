"""Tasks from Python's standard library: instruction and preference data that every machine has. No download.

A function with a docstring is a task: its head, signature and docstring, asks for its body. A docstring answers what the
function does. A preference sets the real body against one that is wrong.
"""

from __future__ import annotations

import ast
import random
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from meshkit.data.records import Record
from meshkit.data.text.corpus import Corpus, standard_library
from meshkit.data.text.preparation import is_held_out
from meshkit.errors import DataError

WrongBody = Literal["mismatched", "scrambled", "reversed", "repeated"]


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function of the library that has a docstring and something after it."""

    name: str
    """qualified, like json.decoder.JSONDecoder.decode"""
    head: str
    """signature and docstring, dedented, ending in a newline"""
    body: str
    """what follows, dedented with the head"""
    summary: str
    """the first paragraph of the docstring, in one line"""
    file: str
    line: int


@dataclass(frozen=True, kw_only=True)
class TaskSplits:
    """What is learnt from and what is only evaluated on; no file is in both."""

    train: list[Record]
    held_out: list[Record]


def function_tasks(*, held_out: float = 0.1, limit_bytes: int = 1200, corpus: Corpus | None = None) -> TaskSplits:
    """Rows of plain text: prompt (signature and docstring) and completion (the body).

    held_out: part of the files set aside, by a hash of their names. limit_bytes: longer functions are left out.
    """
    return _split(
        ((each, {"prompt": each.head, "completion": each.body}) for each in library_functions(limit_bytes, corpus)),
        held_out,
    )


def question_tasks(*, held_out: float = 0.1, limit_bytes: int = 1200, corpus: Corpus | None = None) -> TaskSplits:
    """Rows with `messages`: a question about a function, and its docstring as the answer; every third has a second turn,
    which asks for the body.
    """

    def rows() -> Iterator[tuple[Function, dict[str, Any]]]:
        for number, each in enumerate(library_functions(limit_bytes, corpus)):
            messages = [
                {"role": "user", "content": f"What does {each.name} do?"},
                {"role": "assistant", "content": each.summary},
            ]
            if number % 3 == 0:
                messages += [
                    {"role": "user", "content": "How is it written?"},
                    {"role": "assistant", "content": each.body.strip("\n")},
                ]
            yield each, {"messages": messages}

    return _split(rows(), held_out)


def preference_tasks(
    *,
    kinds: Sequence[WrongBody] = ("mismatched", "scrambled", "reversed", "repeated"),
    every: bool = False,
    held_out: float = 0.1,
    limit_bytes: int = 1200,
    seed: int = 0,
    corpus: Corpus | None = None,
) -> TaskSplits:
    """Rows of plain text with prompt, chosen (the real body) and rejected, and `kind`, how that was made.

    kinds: "mismatched" is the body of another function of the same half, "scrambled" has the words of each line in another
    order, "reversed" has the lines from last to first, "repeated" has the first line in place of every other. Of those that
    differ from the real body one is drawn per function, by seed and name; or with `every` each makes a row.
    Raises: DataError for an unknown kind.
    """
    unknown = sorted(set(kinds) - _CORRUPTIONS.keys() - {"mismatched"})
    if unknown or not kinds:
        raise DataError(f"kinds={list(kinds)}: unknown or none. Give some of mismatched, {', '.join(_CORRUPTIONS)}.")
    functions = library_functions(limit_bytes, corpus)

    def rows(half: list[Function]) -> Iterator[tuple[Function, dict[str, Any]]]:
        for each in half:
            # `random` hashes a text by SHA-512, the same in every process. One generator for each function: another
            # function that comes or goes with a version of Python changes no draw of the others.
            draw = random.Random(f"{seed} {each.name} {each.file}:{each.line}")
            wrong: dict[str, str] = {
                kind: _CORRUPTIONS[kind](each.body, draw) for kind in kinds if kind != "mismatched"
            }
            if "mismatched" in kinds:
                wrong["mismatched"] = draw.choice(half).body
            usable = [kind for kind in kinds if wrong[kind].strip() and wrong[kind] != each.body]
            for kind in usable if every or not usable else [draw.choice(usable)]:
                yield each, {"prompt": each.head, "chosen": each.body, "rejected": wrong[kind], "kind": kind}

    # Halves first: a mismatched body is one of the same half, or training would show bodies that are held out.
    halves = [[each for each in functions if is_held_out(each.file, held_out) is out] for out in (False, True)]
    return _split((row for half in halves for row in rows(half)), held_out)


def library_functions(limit_bytes: int = 1200, corpus: Corpus | None = None) -> tuple[Function, ...]:
    """The functions with docstring and body of at most `limit_bytes` in all, each text once, in file order."""
    return _functions(corpus, limit_bytes)


# All kinds of tasks read the same functions, and parsing the library takes seconds.
@lru_cache(maxsize=4)
def _functions(corpus: Corpus | None, limit_bytes: int) -> tuple[Function, ...]:
    functions: dict[str, Function] = {}
    for name, path in (standard_library() if corpus is None else corpus).files:
        for function in _functions_of(name, path):
            if len((function.head + function.body).encode()) <= limit_bytes:
                # A function that is in several modules would be learnt from one and held out in another.
                functions.setdefault(function.head + function.body, function)
    return tuple(functions.values())


def _functions_of(name: str, path: Path) -> Iterator[Function]:
    text = path.read_text(encoding="utf-8")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old files
            tree = ast.parse(text)
    except SyntaxError:
        return  # a template or a file for another version
    lines = _lines(text)
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    yield from _walk(tree, module, name, lines)


def _walk(node: ast.AST, prefix: str, file: str, lines: list[str]) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _walk(child, f"{prefix}.{child.name}", file, lines)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            summary = " ".join((ast.get_docstring(child) or "").split("\n\n")[0].split())
            first = child.body[0]
            if summary and len(child.body) > 1 and first.end_lineno is not None and child.end_lineno is not None:
                cut = first.end_lineno  # the docstring's last line ends the head
                source = textwrap.dedent("".join(lines[child.lineno - 1 : child.end_lineno]))
                parts = _lines(source)
                head, body = parts[: cut - child.lineno + 1], parts[cut - child.lineno + 1 :]
                if "".join(body).strip():
                    yield Function(
                        name=f"{prefix}.{child.name}",
                        head="".join(head),
                        body="".join(body).rstrip() + "\n",
                        summary=summary,
                        file=file,
                        line=child.lineno,
                    )


def _lines(text: str) -> list[str]:
    """The lines that ast counts, each with its end."""
    # Not splitlines, which also cuts at form feeds and U+2028: every later function of the file would be cut elsewhere.
    return [f"{line}\n" for line in text.removesuffix("\n").split("\n")]


def _split(rows: Iterator[tuple[Function, dict[str, Any]]], held_out: float) -> TaskSplits:
    if not 0 < held_out < 1:
        raise DataError(f"held_out={held_out}: not a part of the files. Give a number between 0 and 1.")
    halves: tuple[list[Record], list[Record]] = ([], [])
    for function, fields in rows:
        half = halves[is_held_out(function.file, held_out)]
        half.append(Record(fields=fields, source=f"{function.file}:{function.line}"))
    return TaskSplits(train=halves[0], held_out=halves[1])


def _scrambled(body: str, draw: random.Random) -> str:
    lines = []
    for line in body.splitlines():
        words = line.split()
        draw.shuffle(words)
        lines.append(line[: len(line) - len(line.lstrip())] + " ".join(words))
    return "\n".join(lines) + "\n"


def _reversed(body: str, draw: random.Random) -> str:
    return "\n".join(body.splitlines()[::-1]) + "\n"


def _repeated(body: str, draw: random.Random) -> str:
    lines = body.splitlines()
    return "\n".join([lines[0]] * len(lines)) + "\n"


_CORRUPTIONS: dict[str, Callable[[str, random.Random], str]] = {
    "scrambled": _scrambled,
    "reversed": _reversed,
    "repeated": _repeated,
}


# Splits: training rows and held-out rows.


def split_records(records: Iterable[Record], *, held_out: float) -> TaskSplits:
    """Set aside part of the rows, by a hash of their sources: a row stays on its side whatever others come or go.

    Raises: DataError if one of the two halves would be empty.
    """
    rows = list(records)
    train, aside = _halves(rows, held_out)
    if not train or not aside:
        shares = (each / 1000 for each in range(1, 1000))
        least = next((share for share in shares if all(_halves(rows, share))), None)  # tens of rows: of many 0.001 does
        instead = "" if least is None else f", as {least}"
        raise DataError(
            f"held_out={held_out} leaves {len(train)} rows to learn from and {len(aside)} to evaluate on, and both "
            f"need one. Use more rows or another held_out{instead}."
        )
    return TaskSplits(train=train, held_out=aside)


def _halves(rows: Iterable[Record], held_out: float) -> tuple[list[Record], list[Record]]:
    halves: tuple[list[Record], list[Record]] = ([], [])
    for row in rows:
        halves[is_held_out(row.source, held_out)].append(row)
    return halves
