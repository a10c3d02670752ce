"""Every model of the zoo by its name: transformers' types as they are, odd modules as `odd.Name`."""

from __future__ import annotations

from functools import cache, partial

from tests.zoo import causal
from tests.zoo.case import Case, Cell, tokens


def names() -> list[str]:
    return causal.names()


@cache
def moes() -> set[str]:
    return {name for name in causal.names() if causal.has_experts(name)}


def masked() -> set[str]:
    """Models that take an `attention_mask`."""
    return set(causal.names())


def case_of(cell: Cell) -> Case:
    return Case(
        build=partial(causal.build, cell.model),
        batch=partial(tokens, padded=cell.padded),
        moe=cell.model in moes(),
        takes_mask=True,
    )
