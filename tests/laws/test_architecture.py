"""Architecture as tests: where files lie, who imports whom, which names are public, how long a recipe is.

import-linter holds the directions of imports (`pyproject.toml`); here is what it cannot say.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.api import INDEX, MODULES, public
from tests.laws.terms import TERMS

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "meshkit"
CODE = ("meshkit", "tests", "examples", "benchmarks")
RECIPES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TORCH = "meshkit/core/_torch/"  # the one folder that may use PyTorch's private names
# Tests and benchmarks ask the compiler what it did; nothing public counts graphs or shows the kernels.
COMPILER = ("torch._dynamo.", "torch._inductor.")


def hold(law: str, offences: list[str]) -> None:
    assert not offences, "\n".join([f"{law}: {len(offences)}", *offences[:60]])


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _files() -> list[Path]:
    return sorted(LIBRARY.rglob("*.py"))


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.AST, module: str, *, is_package: bool = False) -> Iterator[tuple[str, str | None, int]]:
    """(module, name or None, line) of each import; relative ones are made whole."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield from ((source, alias.name, node.lineno) for alias in node.names)


def _is_module(dotted: str) -> bool:
    path = ROOT / dotted.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


# Where files lie


def test_the_root_of_the_package_has_at_most_9_files() -> None:
    loose = [path.name for path in sorted(LIBRARY.glob("*.py"))]
    hold("files at the root", loose[9:])


def test_algos_has_at_most_one_loose_file() -> None:
    loose = [path.name for path in sorted((LIBRARY / "algos").glob("*.py")) if path.name != "__init__.py"]
    hold("loose files in algos", loose[1:])


def test_every_module_says_in_its_first_line_what_it_is() -> None:
    hold("modules without a docstring", [str(path.relative_to(ROOT)) for path in _files() if not _first_line(path)])


def _first_line(path: Path) -> str:
    lines = (ast.get_docstring(_tree(path)) or "").splitlines()
    return lines[0] if lines else ""


# Who imports whom


def test_a_private_module_is_imported_only_from_its_own_folder_and_below() -> None:
    hold("private imports across rooms", sorted(_across_rooms()))


def _across_rooms() -> set[str]:
    """'importer: what it imports'. The folder of PyTorch's private names is meant for all rooms."""
    found = set[str]()
    for path in _files():
        module = _module(path)
        for source, name, _ in _imports(_tree(path), module, is_package=path.name == "__init__.py"):
            if source.partition(".")[0] != "meshkit":
                continue
            parts = [*source.split("."), *([name] if name else [])]
            at = next((i for i, part in enumerate(parts) if _is_private(part)), None)
            if at is None or parts[: at + 1] == ["meshkit", "core", "_torch"]:
                continue
            holder = ".".join(parts[:at])
            if not _is_module(f"{holder}.{parts[at]}") or not f"{module}.".startswith(f"{holder}."):
                found.add(f"{module}: {'.'.join(parts[: at + 1])}")
    return found


def test_private_names_of_torch_stand_in_one_folder() -> None:
    hold("files with private names of torch", [f"{file}: {', '.join(sorted(names))}" for file, names in _torch_names()])


def _torch_names() -> list[tuple[str, set[str]]]:
    """Of the library, its tests, recipes and benchmarks."""
    found = []
    for path in sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        names = set[str]()
        for source, name, _ in _imports(_tree(path), _module(path)):
            parts = [*source.split("."), *([name] if name else [])]
            if parts[0] == "torch" and any(map(_is_private, parts)):
                names.add(".".join(parts))
        names |= {chain for chain in _chains(_tree(path), {"torch"}) if any(map(_is_private, chain.split(".")))}
        names = {name for name in names if not name.startswith("torch.ops.aten.")}  # operators have such names
        if file.startswith(("tests/", "benchmarks/")):
            names = {name for name in names if not name.startswith(COMPILER)}
        if names and not file.startswith(TORCH):
            found.append((file, names))
    return found


def _chains(tree: ast.AST, roots: set[str]) -> Iterator[str]:
    """Dotted names that begin with one of the roots, each to its end: torch.cuda.memory._dump_snapshot."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        parts: list[str] = []
        value: ast.AST = node
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if parts and id(node) not in inner and isinstance(value, ast.Name) and value.id in roots:
            yield ".".join([value.id, *reversed(parts)])


HEAVY = ("jinja2", "rich", "scipy", "tensorboard", "tokenizers", "transformers", "tyro")


def test_importing_meshkit_stays_light() -> None:
    """Half of these are extras, which a user of the blocks need not have; each costs a rank time when it starts."""
    code = "import sys; import meshkit; print(*(name for name in sys.argv[1:] if name in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code, *HEAVY], cwd=ROOT, capture_output=True, text=True, check=True)
    hold("heavy modules that `import meshkit` loads", loaded.stdout.split())


# Which names are public


def test_no_value_shadows_a_submodule() -> None:
    """Else `import meshkit.lora as x` gives a function."""
    found = []
    for init in sorted(LIBRARY.rglob("__init__.py")):
        package = importlib.import_module(_module(init))
        inside = {path.stem for path in init.parent.glob("*.py")} | {
            path.parent.name for path in init.parent.glob("*/__init__.py")
        }
        shadows = [name for name in sorted(inside) if not inspect.ismodule(vars(package).get(name, package))]
        found += [f"{package.__name__}.{name}" for name in shadows]
    hold("values that shadow a submodule", found)


def test_the_index_has_exactly_the_public_names() -> None:
    listed = set(re.findall(r"`(\w+)`(?=[:,.])", INDEX.read_text()))
    assert {name for module in MODULES for name in public(module)} <= listed
    assert INDEX.read_text().count("\n") <= 150


def test_parallelize_is_the_order_of_composition_and_no_more() -> None:
    assert (ROOT / "meshkit" / "_parallelize.py").read_text().count("\n") <= 150


def test_names_that_recipes_and_pages_use_are_public() -> None:
    used = {f"{path.relative_to(ROOT)}: {name}" for path, name in _used() if not _is_public(name)}
    hold("names in use that are not public", sorted(used))


FENCES = re.compile(r"^```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def _used() -> Iterator[tuple[Path, str]]:
    """(file, dotted name from meshkit on) of what recipes and pages name."""
    for path in [*RECIPES, *PAGES]:
        codes = (
            [path.read_text()]
            if path.suffix == ".py"
            else [found["code"] for found in FENCES.finditer(path.read_text())]
        )
        for code in codes:
            tree = ast.parse(code)
            for source, name, _ in _imports(tree, ""):
                if source.partition(".")[0] == "meshkit" and name:
                    yield path, f"{source}.{name}"
            yield from ((path, chain.replace("mk.", "meshkit.", 1)) for chain in _chains(tree, {"mk"}))
        if path.suffix == ".md":  # inline, in prose and tables
            for chain in re.findall(r"\bmk((?:\.[A-Za-z_]\w*)+)", path.read_text()):
                yield path, f"meshkit{chain}"


def _is_public(dotted: str) -> bool:
    """Whether public rooms lead to the name; what a public value has inside is its own matter."""
    module = importlib.import_module("meshkit")
    for part in dotted.split(".")[1:]:
        if module in MODULES and part in public(module):
            return True
        inside = f"{module.__name__}.{part}"
        exported = vars(module).get(part)
        if inspect.ismodule(exported):  # a room by another name: mk.schedules
            module = exported
        elif _is_module(inside):
            module = importlib.import_module(inside)
        else:
            return False
    return any(f"{each.__name__}.".startswith(f"{module.__name__}.") for each in MODULES)  # a room, or one of rooms


# Which words are found


@pytest.mark.parametrize("place", ["meshkit", "docs"])
def test_every_term_of_the_field_is_found(place: str) -> None:
    text = _text(place)
    missing = [
        term for term, spellings in TERMS.items() if not any(re.search(s, text, re.IGNORECASE) for s in spellings)
    ]
    hold(f"terms without a hit in {place}", missing)


def test_the_list_has_45_terms() -> None:
    assert len(TERMS) == 45


def _text(place: str) -> str:
    files = {*(ROOT / place).rglob("*.py"), *(ROOT / place).rglob("*.md")} - {INDEX}
    return " ".join(" ".join(path.read_text() for path in sorted(files)).split())  # a term may end a line


PATH = re.compile(r"\bPath\b")
WRITES = re.compile(r"Callable\[[^\]]*\][^|]*")  # a function that is given a Path


def test_a_public_function_takes_a_path_as_text_too() -> None:
    """Records hold a `Path`, and flags are made of either; who calls a function should not have to know which."""
    strict = [
        f"{module.__name__}.{name}({parameter.name}: {parameter.annotation})"
        for module in MODULES
        for name, value in _callables(module)
        for parameter in inspect.signature(value).parameters.values()
        if PATH.search(WRITES.sub("", str(parameter.annotation)))
    ]
    hold("public parameters that take no str", strict)


NO_PATHS_OF_CALLERS = {"Corpus", "Tokenizer", "Tokens", "Schedule"}  # made by functions; paths through stages


def test_a_record_that_callers_make_takes_a_path_as_text_too() -> None:
    """Whichever they give; flags have their own test."""
    strict = [
        f"{module.__name__}.{name}({each.name}: {each.type})"
        for module in MODULES
        if not module.__name__.startswith("meshkit.recipes")
        for name, value in public(module).items()
        if inspect.isclass(value) and dataclasses.is_dataclass(value) and name not in NO_PATHS_OF_CALLERS
        for each in dataclasses.fields(value)
        if each.init and PATH.search(WRITES.sub("", str(each.type))) and "str |" not in str(each.type)
    ]
    hold("fields that take no str", strict)


def _callables(module: ModuleType) -> Iterator[tuple[str, Callable[..., object]]]:
    """Functions, and methods of classes; not what a dataclass makes of its fields."""
    for name, value in public(module).items():
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value) and value.__module__.startswith("meshkit"):
            for method, each in vars(value).items():
                function = each.__func__ if isinstance(each, staticmethod | classmethod) else each
                generated = method == "__init__" and dataclasses.is_dataclass(value)
                if (
                    inspect.isfunction(function)
                    and (method == "__init__" or not method.startswith("_"))
                    and not generated
                ):
                    yield f"{name}.{method}", function


# How long a recipe is


def test_a_recipe_has_at_most_220_lines() -> None:
    sizes = {path.name: path.read_text().count("\n") for path in RECIPES}
    hold("recipes above 220 lines", [f"{name}: {lines}" for name, lines in sizes.items() if lines > 220])


def test_recipes_have_at_most_190_lines_on_average() -> None:
    total = sum(path.read_text().count("\n") for path in RECIPES)
    hold("lines of recipes above 190 each", ["a line"] * (total - 190 * len(RECIPES)))


def test_a_recipe_imports_at_most_20_names_of_meshkit() -> None:
    counts = {path.name: len(set(_names_of_meshkit(path))) for path in RECIPES}
    hold("recipes that import more than 20 names", [f"{name}: {count}" for name, count in counts.items() if count > 20])


def _names_of_meshkit(path: Path) -> Iterator[tuple[str, str | None]]:
    for source, name, _ in _imports(_tree(path), ""):
        if source.partition(".")[0] == "meshkit":
            yield source, name


# What pages point to


LINK = re.compile(r"\]\((?!https?:)(?P<target>[^)#\s]+)(?:#[^)]*)?\)")


def test_links_of_pages_lead_to_files() -> None:
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "DECISIONS.md", ROOT / "benchmarks/README.md"]
    dead = [
        f"{page.relative_to(ROOT)}: {link['target']}"
        for page in pages
        for link in LINK.finditer(page.read_text())
        if not (page.parent / link["target"]).exists()
    ]
    hold("dead links", dead)


FILE = re.compile(r"`([\w./*-]+(?:/|\.(?:py|md|toml|json|txt|sh)))(?:`|::)")


def test_contributing_names_files_that_exist() -> None:
    """In backticks, from the root of the repository, or the name alone of a file somewhere in it."""
    named = set(FILE.findall((ROOT / "CONTRIBUTING.md").read_text()))
    missing = [name for name in sorted(named) if not list(ROOT.glob(name)) and not list(_tracked_folders(name))]
    hold("files that CONTRIBUTING names and that are not there", missing)


def test_every_file_that_names_the_version_names_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"version: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()
    newest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert newest.split()[1] == project["version"]


def _tracked_folders(name: str) -> Iterator[Path]:
    if "/" not in name:
        for folder in ("meshkit", "tests", "examples", "benchmarks", "docs"):
            yield from (ROOT / folder).rglob(name)


def test_a_superseded_decision_names_a_later_one() -> None:
    lines = (ROOT / "DECISIONS.md").read_text().splitlines()
    titles = {line.removeprefix("## "): number for number, line in enumerate(lines) if line.startswith("## ")}
    marks = [
        (number, found[1])
        for number, line in enumerate(lines)
        if (found := re.match(r"Superseded.* by: \*(.+?)\*", line))
    ]
    assert marks and all(titles.get(title, -1) > number for number, title in marks), marks
