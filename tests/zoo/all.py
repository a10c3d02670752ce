"""Every model of the zoo by its name: transformers' types as they are, others as `odd.Name` and `foreign.Name`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import nn

from tests.zoo import (
    blocks,
    by_hand,
    calls,
    causal,
    counted,
    decoders,
    kinds,
    masked,
    nasty,
    nasty_backward,
    nasty_losses,
    odd,
    paths,
    swapped,
)
from tests.zoo.case import Case, Cell, tokens
from tests.zoo.mutated import MUTATED

NO_MODELS = (odd.Layers, odd.Residual)


@cache
def odd_modules() -> dict[str, type[nn.Module]]:
    """Hand-written models by the name they have in their file."""
    found: dict[str, type[nn.Module]] = {}
    files = (decoders, by_hand, blocks, paths, masked, nasty, nasty_backward, nasty_losses, counted, swapped, kinds)
    on_plain = dict.fromkeys(files, decoders.Plain)
    for file, base in {**on_plain, odd: nn.Module, calls: nn.Module}.items():
        for name, each in vars(file).items():
            if isinstance(each, type) and issubclass(each, base) and each not in NO_MODELS:
                found[name] = each
    return found


def names() -> list[str]:
    from tests.zoo.foreign import FOREIGN

    return [
        *causal.names(),
        *(f"odd.{name}" for name in odd_modules()),
        *(f"foreign.{name}" for name in FOREIGN),
        *mutated(),
    ]


def mutated() -> list[str]:
    return [f"mutated.{name}" for name in MUTATED]


@cache
def moes() -> set[str]:
    return {name for name in causal.names() if causal.has_experts(name)} | {"odd.ExpertList", "odd.ExpertStack"}


def padded() -> set[str]:
    """Models that take an `attention_mask`."""
    return set(causal.names())


def case_of(cell: Cell) -> Case:
    kind, _, name = cell.model.partition(".")
    if kind == "odd":
        return _odd(odd_modules()[name])
    if kind == "foreign":
        from tests.zoo import foreign

        of = foreign.FOREIGN[name]
        return Case(
            build=of.build,
            batch=foreign.batch,
            loss=foreign.loss_of(name),
            count=partial(foreign.rows_or_labels, of),
            example=of.example,
        )
    if kind == "mutated":
        return Case(build=partial(_filled, MUTATED[name]), batch=tokens)
    return Case(build=partial(causal.build, cell.model), batch=partial(tokens, padded=cell.padded))


def _filled(made: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return causal.fill(made()).train()


def _odd(made: type[nn.Module]) -> Case:
    def build() -> nn.Module:
        torch.manual_seed(3)
        model = made()
        if not any(isinstance(param, nn.UninitializedParameter) for param in model.parameters()):
            causal.fill(model)
        return model.train()

    if issubclass(made, decoders.Plain):
        return Case(build=build, batch=tokens, loss=getattr(made, "loss", None))
    return Case(build=build, batch=odd.features, loss=getattr(made, "loss", odd.squares), count=odd.row_count)
