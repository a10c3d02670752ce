"""Start a recipe so that every failure ends every rank, with one message that says who, where and why."""

from ._main import run_main as run_main
