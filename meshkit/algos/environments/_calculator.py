"""Calculator and Python, tools that a policy calls within its answer (tool use, function calling)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshkit.algos.environments._protocol import Action, Observation
from meshkit.algos.rewards import calculate
from meshkit.sandbox import SandboxLimits, run_sandboxed


def arithmetic_of(expression: str) -> str:
    """The value of an expression of + - * / ( ) and whole numbers; "" where it has none."""
    try:
        return str(calculate(expression))
    except ValueError:
        return ""


def run_python(program: str, *, limits: SandboxLimits | None = None) -> str:
    """What a program prints, or `error: ` and why it did not end, from a sandbox of its own (`run_sandboxed`)."""
    verdict = run_sandboxed(program, limits=limits)
    return verdict.printed if verdict.end == "ended" else f"error: {verdict.text}"


@dataclass(kw_only=True)
class Calculator:
    """A turn `=EXPRESSION` asks the tool, and reads `=VALUE>`; a turn without `=` is the answer, right if it is `completion`.

    tool: text to text, `run_python` for one that runs programs.
    """

    tool: Callable[[str], str] = arithmetic_of

    def reset(self, fields: Mapping[str, Any], seed: int) -> Observation:
        self.completion = str(fields["completion"])
        return Observation()

    def step(self, action: Action) -> Observation:
        if action.text.startswith("="):
            return Observation(text=f"={self.tool(action.text[1:])}>")
        right = not action.truncated and action.text.strip() == self.completion
        return Observation(reward=float(right), done=True)
