"""docs/api.md: every public name with its docstring. `python -m tests.docs.api` writes it; a test says when it is stale."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import meshkit as mk
import meshkit.algos.dataflow
import meshkit.algos.policy
import meshkit.algos.preference
import meshkit.algos.reallocate
import meshkit.algos.rewards
import meshkit.algos.rollout
import meshkit.data
import meshkit.metrics
import meshkit.models
import meshkit.parallel.pipeline
import meshkit.recipes

PAGE = Path(__file__).parents[2] / "docs/api.md"
MODULES: list[ModuleType] = [
    mk,
    mk.models,
    meshkit.data,
    meshkit.metrics,
    meshkit.parallel.pipeline.schedules,
    meshkit.algos.preference,
    meshkit.algos.rollout,
    meshkit.algos.policy,
    meshkit.algos.rewards,
    meshkit.algos.reallocate,
    meshkit.algos.dataflow,
    meshkit.recipes,
]


def public(module: ModuleType) -> dict[str, Any]:
    """What the module's table of contents names."""
    names = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {
        name: value for name, value in sorted(names.items()) if not inspect.ismodule(value) and name != "annotations"
    }


def page() -> str:
    lines = ["# Every public name", "", "<!-- Written by `python -m tests.docs.api`; do not edit. -->"]
    for module in MODULES:
        lines += ["", f"## {module.__name__}"]
        if module.__doc__:
            lines += ["", module.__doc__.strip()]
        for name, value in public(module).items():
            lines += ["", f"### {name}", "", *_entry(name, value)]
    return "\n".join(lines) + "\n"


def _entry(name: str, value: Any) -> list[str]:
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return [f"A value: a `{type(value).__name__}`."]
    said = inspect.getdoc(value) or ""
    if said.startswith(f"{name}("):  # a dataclass without words of its own
        said = ""
    return ["```text", *_call(name, value), "```", *(["", "```text", said, "```"] if said else [])]


def _call(name: str, value: Any) -> list[str]:
    """How it is called: one parameter a line where the whole is long."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            signature = inspect.signature(value)
    except ValueError:
        return [name]
    shown = [_parameter(each) for each in signature.parameters.values()]
    first_keyword = next(
        (i for i, each in enumerate(signature.parameters.values()) if each.kind is each.KEYWORD_ONLY), None
    )
    if first_keyword is not None and not any(each.startswith("*") for each in shown):
        shown.insert(first_keyword, "*")
    returned = signature.return_annotation
    end = "" if inspect.isclass(value) or returned is signature.empty else f" -> {_type(returned)}"
    whole = f"{name}({', '.join(shown)}){end}"
    return [whole] if len(whole) < 110 else [f"{name}(", *(f"    {each}," for each in shown), f"){end}"]


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
    default = re.sub(r" at 0x[0-9a-f]+", "", repr(parameter.default))  # an address differs between runs
    return f"{stars}{parameter.name}{kind}" + ("" if parameter.default is parameter.empty else f" = {default}")


def _type(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    named = getattr(annotation, "__forward_arg__", None) or getattr(annotation, "__name__", None)
    return str(named or annotation)


if __name__ == "__main__":
    PAGE.write_text(page())
