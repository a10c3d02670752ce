"""The pages made of the code: the index of names, which is committed, and the reference, which `make docs` builds."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

from tests.docs.api import INDEX, MODULES, ROOT, index, page, public

pytestmark = pytest.mark.turns(1)


def test_the_index_lists_every_public_name_as_it_is() -> None:
    assert INDEX.read_text() == index(), "stale: make docs"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_function_and_class_says_what_it_does(module: object) -> None:
    silent = [
        name
        for name, value in public(module).items()  # type: ignore[arg-type]
        if (inspect.isclass(value) or inspect.isfunction(value)) and not inspect.getdoc(value)
    ]
    assert not silent, f"no docstring: {silent}"


def test_the_reference_has_an_entry_for_every_public_name() -> None:
    entries = re.findall(r"^### (\w+)$", page(), re.MULTILINE)
    assert entries == [name for module in MODULES for name in public(module)]


def test_the_reference_has_what_users_call_of_a_run_and_a_mesh() -> None:
    members = set(re.findall(r"^#### ([\w.]+)$", page(), re.MULTILINE))
    called = {"forward_backward", "evaluate", "parameters", "named_parameters", "export", "move"}
    assert {f"Run.{name}" for name in called} | {"Mesh.data_rank", "Mesh.data_ranks", "Strategy.mesh_for"} <= members


def test_another_process_writes_the_same_reference() -> None:
    """No address, no order of a set."""
    command = [sys.executable, "-c", "from tests.docs.api import page; print(page(), end='')"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == page()
