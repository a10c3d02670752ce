"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, all modules are in evaluation mode; afterwards each is in the mode that it had: a frozen part stays frozen."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(before[model])  # a model may do more in it than to set the modes
        for module, training in before.items():
            module.training = training
