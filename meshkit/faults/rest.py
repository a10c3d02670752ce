"""Tensors at rest: sums of their words (checksums), by which a flipped bit of what nothing writes is seen on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import NamedTuple

import torch
from torch import Tensor

from meshkit.core.word_sum import word_sums

# [Note: what may be written]
# A tensor counts as at rest if it is the same object at the same address with the same counter of in-place writes. Writes
# through `.data` do not count: who makes them, as a load does, calls `forget`.


class Key(NamedTuple):
    """state: of the optimizer, "gradient", or "" for the parameter. region: of the full tensor, (start, stop) by dim."""

    parameter: str
    state: str
    region: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"{self.state} of {self.parameter}" if self.state else self.parameter


Stamp = tuple[int, ...]
Held = Iterator[tuple[Key, tuple[Tensor, Stamp]]]


def stamp(tensor: Tensor, local: Tensor) -> Stamp:
    """See [Note: what may be written]. local: this rank's shard."""
    return id(tensor), local.data_ptr(), tensor._version, local._version


class AtRest:
    """Says which tensors have changed while nothing wrote them: `begin`, then `look` or `end`, as often as wanted.

    held: what this rank holds now, with its stamps. The host does not wait for the device.
    """

    def __init__(self, held: Callable[[], Held], device: torch.device) -> None:
        self._held, self._device = held, device
        self._stamps: dict[Key, Stamp] | None = None
        self._before = torch.zeros(0, dtype=torch.int64, device=device)
        self._changed: dict[tuple[Key, ...], Tensor] = {}  # bool [tensors]

    @torch.no_grad()
    def begin(self, *, without: Set[Key] = frozenset()) -> None:
        """From now on nothing is written. without: not looked at."""
        resting = {key: each for key, each in self._held() if key not in without}
        self._stamps = {key: stamp for key, (_, stamp) in resting.items()}
        self._before = digests((local for local, _ in resting.values()), self._device)

    @torch.no_grad()
    def look(self) -> None:
        """Compare what was not written since `begin`."""
        if self._stamps is None:
            return
        unwritten = {key: local for key, (local, stamp) in self._held() if self._stamps.get(key) == stamp}
        before = self._before
        if len(unwritten) < len(self._stamps):
            before = before[torch.tensor([key in unwritten for key in self._stamps], device=before.device)]
        changed = digests(unwritten.values(), self._device) != before
        keys = (*unwritten,)
        self._changed[keys] = changed | self._changed[keys] if keys in self._changed else changed

    @torch.no_grad()
    def sums(self, tensors: Mapping[Key, tuple[Tensor, Stamp]]) -> Tensor:
        """int64 [tensors]: of those at rest as they were at `begin`, to which `look` and `end` hold them; of others now."""
        stamps = enumerate((self._stamps or {}).items())
        at_rest = {key: index for index, (key, stamp) in stamps if key in tensors and tensors[key][1] == stamp}
        own = digests((local for key, (local, _) in tensors.items() if key not in at_rest), self._device)
        turn = iter(range(len(self._before), len(self._before) + len(own)))
        places = [at_rest[key] if key in at_rest else next(turn) for key in tensors]
        return torch.cat([self._before, own])[torch.tensor(places, dtype=torch.int64, device=self._device)]

    def end(self) -> None:
        """Compare, and from now on it may be written."""
        self.look()
        self._stamps = None

    def count(self) -> Tensor:
        """How many have changed, int64 []."""
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        return sum((each.sum() for each in self._changed.values()), none)

    def changed(self) -> set[Key]:
        """Which have. The host waits for the device."""
        found = (zip(keys, each.tolist(), strict=True) for keys, each in self._changed.items())
        return {key for each in found for key, is_changed in each if is_changed}

    def found_right(self) -> None:
        """What was looked at was told, and begins anew."""
        self._changed.clear()

    def forget(self) -> None:
        self._stamps = None
        self._changed.clear()


def digests(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """int64 [tensors]"""
    sums = [each.to(device) for each in word_sums([*tensors])]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)
