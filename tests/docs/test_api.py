"""The page of all public names."""

from __future__ import annotations

import inspect

import pytest

from tests.docs.api import MODULES, PAGE, page, public


def test_the_page_lists_every_public_name_as_it_is() -> None:
    assert PAGE.read_text() == page(), "stale: python -m tests.docs.api"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_function_and_class_says_what_it_does(module: object) -> None:
    silent = [
        name
        for name, value in public(module).items()  # type: ignore[arg-type]
        if (inspect.isclass(value) or inspect.isfunction(value)) and not inspect.getdoc(value)
    ]
    assert not silent, f"no docstring: {silent}"
