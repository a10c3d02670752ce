"""Parameters of before the split that a loss or a forward still holds: a gradient that comes to one of them is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from weakref import ref

from torch import Tensor, nn


class OldParameters:
    """Those that the model had, has no more, and that something else still holds.

    before: by name; see `meshkit.core.optimizer_step.parameters_before`.
    """

    def __init__(self, model: nn.Module, before: Mapping[str, ref[nn.Parameter]]) -> None:
        kept = {id(param) for param in model.parameters()}
        self._refs = {
            name: old for name, old in before.items() if (param := old()) is not None and id(param) not in kept
        }
        self._grads: dict[str, tuple[Tensor | None, int]] = {}

    def begin_step(self) -> None:
        self._grads = {name: _state(param) for name, param in self._alive()}

    def refusal(self) -> str:
        """Why the step is not one device's, if a backward since `begin_step` gave one of them a gradient; else empty."""
        for name, param in self._alive():
            (grad, version), (before, version_before) = _state(param), self._grads.get(name, (None, 0))
            if grad is not before or version != version_before:
                return (
                    f"parameter {name!r} is read as it was before parallelize, where a shard is in its place: the loss, or a "
                    "forward, holds the old tensor, and its gradient is lost. Read it from the model in each call, in the "
                    "forward of the module that has it."
                )
        return ""

    def _alive(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, param) for name, old in self._refs.items() if (param := old()) is not None)


def _state(param: nn.Parameter) -> tuple[Tensor | None, int]:
    return param.grad, 0 if param.grad is None else param.grad._version
