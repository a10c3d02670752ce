"""Versions of the software that a run's numbers depend on."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("meshkit", "torch", "transformers", "numpy", "torchao")


def versions() -> dict[str, str]:
    """Of Python, and of those packages that are imported."""
    found = {"Python": platform.python_version()}
    for package in _PACKAGES:
        if package in sys.modules:
            try:
                found[package] = version(package)
            except PackageNotFoundError:  # its folder alone is on the path
                continue
    return found
