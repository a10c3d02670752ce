"""Recipes are read top to bottom: they stay short, import little, and say their flags once."""

from __future__ import annotations

import ast
import importlib
from dataclasses import fields
from pathlib import Path

import pytest

import meshkit.recipes.flags
from tests.recipes.launch import ROOT

RECIPES = sorted((ROOT / "examples").glob("*.py"))
LINES, LINES_ON_AVERAGE, NAMES, MODULES = 220, 190, 20, 6
OWN = {"global_batch"}  # what it counts is the recipe's: sequences, rows, pairs, answers


def imports_of_meshkit(path: Path) -> list[tuple[str, str]]:
    """(module, name); what is imported as a whole has itself as a name."""
    imports = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshkit"):
            imports += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            imports += [(alias.name, alias.name) for alias in node.names if alias.name.startswith("meshkit")]
    return imports


def documented_fields(source: str) -> dict[str, list[str]]:
    """The fields of each class that a text follows."""
    documented = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            documented[node.name] = [
                field.target.id
                for field, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            ]
    return documented


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_imports_little(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LINES
    imports = imports_of_meshkit(path)
    assert len(imports) <= NAMES, imports
    assert len({module for module, _ in imports}) <= MODULES, imports


def test_all_recipes_together_are_short() -> None:
    assert sum(len(path.read_text().splitlines()) for path in RECIPES) <= LINES_ON_AVERAGE * len(RECIPES)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shared_flag_is_documented_in_one_place(path: Path) -> None:
    config = importlib.import_module(f"examples.{path.stem}").Config
    inherited = {field.name for base in config.__mro__[1:-1] for field in fields(base)}
    assert not set(documented_fields(path.read_text())["Config"]) & inherited - OWN


def test_flags_document_a_field_once() -> None:
    """A class may say another default, and then has the text of the one that it inherits from."""
    files = sorted(Path(meshkit.recipes.flags.__file__).parent.glob("_*.py"))
    documented = documented_fields("\n".join(path.read_text() for path in files))
    bases = {name: each for name, each in vars(meshkit.recipes.flags).items() if name in documented}
    assert len(bases) > 10
    for name, names in documented.items():
        inherited = {field.name for base in bases[name].__mro__[1:-1] for field in fields(base)}
        # Whether a small model is trained first, which steps have rows, what a number of microbatches rounds: other texts.
        again = set(names) & inherited - {"pretrained", "seq_len", "microbatches"}
        assert not again, (name, again)
