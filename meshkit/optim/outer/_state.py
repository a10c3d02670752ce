"""The state of an outer optimizer by parameter, as a checkpoint takes it from an optimizer: beside that of the inner one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshkit.core.sharding import local_tensor

PREFIX = "outer_"


@dataclass(kw_only=True)
class Entry:
    """One parameter. Tensors are laid out as it, in the dtype of the outer parameters; None: the policy has none.

    parameter: the outer one, alike on all replicas. momentum: of the outer optimizer. error: what rounding took. average: the
    mean of a fragment that has come, and is due in some steps.
    """

    name: str
    param: Tensor
    fragment: int
    parameter: Tensor | None = None
    momentum: Tensor | None = None
    error: Tensor | None = None
    average: Tensor | None = None

    def like(self, dtype: torch.dtype) -> Tensor:
        """Zeros in the layout of the parameter; its shard is contiguous, so that it has flat views."""
        return torch.zeros_like(self.param.detach(), dtype=dtype, memory_format=torch.contiguous_format)

    @property
    def tensors(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in ("parameter", "momentum", "error", "average")}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def flat(tensor: Tensor | None) -> Tensor:
    """This rank's shard as [size], sharing its memory."""
    assert tensor is not None
    return local_tensor(tensor).view(-1)


class JoinedState(MutableMapping[Tensor, dict[str, Any]]):
    """Parameter -> the inner optimizer's state and, under `outer_...`, the outer one's.

    numbers: of a fragment, what is no tensor of a parameter. restore: takes what was loaded of an entry.
    """

    def __init__(
        self,
        inner: Optimizer,
        entries: Mapping[Tensor, Entry],
        numbers: Callable[[int], dict[str, Any]],
        restore: Callable[[Entry, dict[str, Any]], None],
    ) -> None:
        self._inner, self._entries, self._numbers, self._restore = inner, entries, numbers, restore

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        entry = self._entries.get(param)
        if entry is None:
            return {**self._inner.state.get(param, {})}
        outer = {**entry.tensors, **self._numbers(entry.fragment)}
        inner = self._inner.state.get(param, {})
        return {**inner, **{f"{PREFIX}{key}": value for key, value in outer.items()}}

    def __setitem__(self, param: Tensor, values: dict[str, Any]) -> None:
        inner = {key: value for key, value in values.items() if not key.startswith(PREFIX)}
        self._inner.state.pop(param, None)
        if inner:
            self._inner.state[param] = inner
        if param in self._entries:
            outer = {key.removeprefix(PREFIX): value for key, value in values.items() if key.startswith(PREFIX)}
            self._restore(self._entries[param], outer)

    def __delitem__(self, param: Tensor) -> None:
        self[param] = {}

    def __iter__(self) -> Iterator[Tensor]:
        return iter([*self._entries, *(param for param in self._inner.state if param not in self._entries)])

    def __len__(self) -> int:
        return len(list(iter(self)))
