"""The site: it builds without a warning, every public class has its methods on a page, and the glossary has every term."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.api import MODULES, ROOT, public
from tests.laws.terms import TERMS

ENTRY = re.compile(r"^- \*\*(.+?)\*\*", re.MULTILINE)


def test_the_glossary_has_every_term_of_the_field() -> None:
    words = {entry.lower() for entry in ENTRY.findall((ROOT / "docs/glossary.md").read_text())}
    assert not [term for term in TERMS if term.lower() not in words]


@pytest.mark.timeout(900)
def test_the_site_is_built_without_a_warning_and_has_every_class_with_its_methods(tmp_path: Path) -> None:
    """--strict: no dead link, no lost anchor, no page outside of the navigation."""
    pytest.importorskip("mkdocs", reason="in the extra `docs`")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]  # with -q no warning counts
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert built.returncode == 0, built.stdout + built.stderr
    shown = set(re.findall(r'id="(meshkit[\w.]*)"', " ".join(page.read_text() for page in tmp_path.glob("api/*.html"))))
    assert not missing(shown)


def missing(shown: set[str]) -> list[str]:
    """Public names, and public methods of public classes, that no page has; by any path on which they are public."""
    lost = []
    by_name = {path.rpartition(".")[2] for path in shown}
    for module in MODULES:
        for name, value in public(module).items():
            if inspect.isfunction(value) and name not in by_name:
                lost.append(f"{module.__name__}.{name}")
            if not inspect.isclass(value) or not value.__module__.startswith("meshkit"):
                continue
            ends = {path.split(f".{name}.", 1)[1] for path in shown if f".{name}." in path}
            methods = [
                each for each, what in vars(value).items() if inspect.isfunction(what) and not each.startswith("_")
            ]
            lost += [f"{module.__name__}.{name}.{each}" for each in methods if each not in ends]
    return lost
