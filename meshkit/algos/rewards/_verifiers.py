"""Verifiers (rule-based, verifiable rewards; unit tests): 1 for a right answer, 0 for a wrong one, by its fields."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from meshkit.algos.rollout import Rollout
from meshkit.sandbox import SandboxLimits, run_sandboxed

LONGEST_EXPRESSION = 200
"""characters; ast.parse of much longer ones can exhaust the stack"""
# A sign belongs to it, and commas inside of it; so "1,000." at the end of a sentence is 1000.
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)")
_FENCED = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
_IMPORT = re.compile(r"(import|from)\s[^(\\#]+$")  # of a prelude: at the margin, whole on its line
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def exact_match(answer: Rollout) -> float:
    """Whether the text is `completion`, white space around it aside. A truncated answer is wrong: it never ended."""
    return float(not answer.truncated and answer.text.strip() == str(answer.fields["completion"]).strip())


def arithmetic(answer: Rollout) -> float:
    """Whether the last number of the text equals the last number of `completion`, as exact decimals: 1,000 is 1000.0.

    Raises: ValueError for a completion without a number.
    """
    wanted = _last_number(str(answer.fields["completion"]))
    if wanted is None:
        raise ValueError(
            f"the completion {answer.fields['completion']!r} has no number. Give rows whose completion has."
        )
    return float(not answer.truncated and _last_number(answer.text) == wanted)


def countdown(answer: Rollout) -> float:
    """Whether the text is an expression that gives `target`, of `numbers`, each used at most as often as it is there.

    + - * / ( ) and whole numbers, evaluated exactly; what stands after a last `=` is not read. Source: the rules of the
    countdown game as TinyZero has them, except that numbers may be left over.
    """
    used: Counter[int] = Counter()
    try:
        value = calculate(answer.text.split("=")[0], used)
    except ValueError:
        return 0.0
    if answer.truncated:
        return 0.0
    return float(value == answer.fields["target"] and used <= Counter(answer.fields["numbers"]))


def calculate(expression: str, used: Counter[int] | None = None) -> Fraction:
    """The exact value of an expression of whole numbers, + - * / and ( ).

    used: how often each number is there is added to it. Raises: ValueError for any other text, and for one without a value.
    """
    # Length before ast.parse, which may exhaust the stack: RecursionError is caught below, a crash cannot be.
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"an expression of {len(expression)} characters, of {LONGEST_EXPRESSION} at most")
    try:
        return _evaluate(ast.parse(expression.strip(), mode="eval").body, Counter() if used is None else used)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} has no value: {error}") from None


@dataclass(frozen=True, kw_only=True)
class UnitTests:
    """1 if the answer's program runs to its end and the field `tests` holds of it, else 0.

    The program is the text's last fenced block, or all of the text without one. The field `prelude`, if there is one, comes
    before it: a signature to be continued; its imports are the tests' too. `tests` are plain Python with asserts, which run
    in an interpreter of their own, as `run_sandboxed` says. A program beyond the limits is wrong.
    Raises: RewardError where there is no sandbox; KeyError for a row without tests. Neither makes the answer wrong.
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)

    def __call__(self, answer: Rollout) -> float:
        # The last one: models write a draft, and then the program.
        blocks = _FENCED.findall(answer.text)
        prelude = str(answer.fields.get("prelude", ""))
        # On one line, so that a failed test is named by its own line or the next.
        imports = "; ".join(line.strip() for line in prelude.splitlines() if _IMPORT.match(line))
        verdict = run_sandboxed(
            prelude + (blocks[-1] if blocks else answer.text),
            tests=f"{imports}\n{answer.fields['tests']}",
            limits=self.limits,
        )
        return float(verdict.end == "passed")


def _last_number(text: str) -> Fraction | None:
    numbers = _NUMBER.findall(text)
    return Fraction(numbers[-1].replace(",", "").rstrip(".")) if numbers else None


def _evaluate(node: ast.expr, used: Counter[int]) -> Fraction:
    """The value of a tree of whole numbers and the four operators. Never `eval`: a `**` could ask for all memory there is."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left, used), _evaluate(node.right, used))
    # type() is int: True is an int to isinstance.
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    raise ValueError("not an expression of numbers and + - * /")
