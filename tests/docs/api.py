"""Pages made of the code: docs/names.md, which is committed, and build/docs/, which is not. `make docs` writes both."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import warnings
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build/docs"
INDEX = ROOT / "docs/names.md"
# Public rooms that `import meshkit` does not load, or that meshkit/__init__.py does not name.
ALSO = (
    "meshkit.data",
    "meshkit.metrics",
    "meshkit.sandbox",
    "meshkit.algos.rollout",
    "meshkit.algos.rewards",
    "meshkit.algos.environments",
    "meshkit.algos.policy",
    "meshkit.algos.preference",
    "meshkit.algos.sft",
    "meshkit.algos.reallocate",
    "meshkit.algos.shardcast",
    "meshkit.algos.workers",
    "meshkit.algos.distill",
    "meshkit.algos.trpo",
    "meshkit.algos.dataflow",
    "meshkit.algos.plan_rl",
    "meshkit.recipes",
    "meshkit.resolve",
)


def _exported_modules(module: ModuleType) -> list[ModuleType]:
    """Modules that a table of contents names: `from meshkit import models as models`."""
    if not hasattr(module, "__path__"):
        return []
    tree = ast.parse(Path(str(module.__file__)).read_text())
    names = [alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    values = [getattr(module, name) for name in names if name]
    return [value for value in values if inspect.ismodule(value)]


def public_modules() -> list[ModuleType]:
    """meshkit, the rooms that its table of contents names, those that theirs name, and ALSO."""
    waiting = [importlib.import_module(name) for name in ("meshkit", *ALSO)]
    modules: list[ModuleType] = []
    while waiting:
        module = waiting.pop(0)
        if module not in modules:
            modules.append(module)
            waiting += _exported_modules(module)
    return modules


def public(module: ModuleType) -> dict[str, Any]:
    """What a package's table of contents names, or what a module of one file defines; rooms inside of it are not values."""
    names = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    if not hasattr(module, "__path__"):
        names = {name: value for name, value in names.items() if getattr(value, "__module__", "") == module.__name__}
    return {
        name: value
        for name, value in sorted(names.items())
        if not inspect.ismodule(value)
        and name != "annotations"
        and (hasattr(module, "__path__") or getattr(value, "__module__", None) == module.__name__)
    }


MODULES = public_modules()


def page() -> str:
    lines = ["# Every public name", "", "<!-- Written by `make docs`; do not edit. -->"]
    listed: list[Any] = []  # members are where a class comes first
    for module in MODULES:
        lines += ["", f"## {module.__name__}"]
        if module.__doc__:
            lines += ["", module.__doc__.strip()]
        for name, value in public(module).items():
            lines += ["", f"### {name}", "", *_entry(name, value)]
            if inspect.isclass(value) and not any(value is other for other in listed):
                listed.append(value)
                lines += _members(value)
    return "\n".join(lines) + "\n"


KINDS = {"functions": inspect.isfunction, "classes": inspect.isclass}


def index() -> str:
    """Every public name once, where it is shortest to reach: a line for each room's functions, classes and values.

    So its length grows with the rooms and not with the names.
    """
    lines = [
        "# Every public name, with the first line of its docstring",
        "",
        "<!-- Written by `make docs`; do not edit. -->",
        "",
        f"{sum(len(public(module)) for module in MODULES)} names, by room. Signatures and whole docstrings are in "
        "`build/docs/api.md`, which `make docs` builds.",
        "",
    ]
    listed: list[Any] = []
    for module in MODULES:
        names = {name: value for name, value in public(module).items() if not any(value is other for other in listed)}
        listed += [value for value in names.values() if inspect.isclass(value) or inspect.isfunction(value)]
        room = module.__name__.replace("meshkit", "mk", 1)
        for kind, is_kind in KINDS.items():
            said = [f"`{name}`: {first_line(name, value)}" for name, value in names.items() if is_kind(value)]
            lines += [f"- **{room}** {kind}: {' '.join(said)}"] if said else []
        values = [f"`{name}`" for name, value in names.items() if not any(is_(value) for is_ in KINDS.values())]
        lines += [f"- **{room}** values: {', '.join(values)}."] if values else []
    return "\n".join(lines) + "\n"


def first_line(name: str, value: Any) -> str:
    """As one sentence; of a constant, nothing."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return ""
    said = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    if said.startswith(f"{name}("):  # a dataclass without words of its own
        return "a record."
    sentence = re.split(r"(?<=[.:]) (?=[A-Z])", said)[0].rstrip(":")
    return sentence if sentence.endswith((".", "?")) else sentence + "."


def _entry(name: str, value: Any) -> list[str]:
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return [f"A value: a `{type(value).__name__}`."]
    said = inspect.getdoc(value) or ""
    if said.startswith(f"{name}("):  # a dataclass without words of its own
        said = ""
    return ["```text", *_call(name, value), "```", *(["", "```text", said, "```"] if said else [])]


def _members(value: type) -> list[str]:
    """Public methods and properties that a class of meshkit's defines itself."""
    lines = []
    for name, member in vars(value).items():
        function = next(
            (each for attribute in ("__func__", "fget", "func") if (each := getattr(member, attribute, None))), member
        )
        if name.startswith("_") or not inspect.isfunction(function) or not value.__module__.startswith("meshkit."):
            continue
        title = f"{value.__name__}.{name}"
        returned = _type(inspect.signature(function).return_annotation)
        is_value = isinstance(member, property | cached_property)
        call = [f"{title}: {returned}"] if is_value else _call(title, function)
        said = inspect.getdoc(function)
        lines += ["", f"#### {title}", "", "```text", *call, *(["", said] if said else []), "```"]
    return lines


def _call(name: str, value: Any) -> list[str]:
    """How it is called: one parameter a line where the whole is long."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            signature = inspect.signature(value)
    except ValueError:
        return [name]
    parameters = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    shown = [_parameter(each) for each in parameters]
    first_keyword = next((i for i, each in enumerate(parameters) if each.kind is each.KEYWORD_ONLY), None)
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
