"""Calls whose work goes on over many steps of training: rollouts that are written token by token, in a `StreamFlow`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from meshkit.algos.dataflow._call import Sample


class StreamWriter(Protocol):
    """What makes samples of first samples, bit by bit, on the ranks of a mesh. Every rank makes the same calls.

    busy: whether something is begun and not whole. room: how many more first samples this data rank would begin now. begin:
    gives it some, perhaps none. advance: a few tokens of all that is begun; returns the first samples that have become whole,
    each as what was made of it, with the field `source` kept. take_weights: the model has those after so many updates now.
    state_dict: {"parts": [...]}, one dict with `source` for each first sample that is not whole, of this data rank;
    load_state_dict gets those of any mesh that are this data rank's now.
    """

    @property
    def busy(self) -> bool: ...

    @property
    def room(self) -> int: ...

    def begin(self, samples: Sequence[Sample]) -> None: ...

    def advance(self) -> list[list[Sample]]: ...

    def take_weights(self, version: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StreamCall:
    """The call of a `StreamFlow` that writes. on, needs, gives: as of a `Call`. writer: None on ranks outside of the mesh."""

    name: str
    on: str
    writer: StreamWriter | None
    needs: Sequence[str] = ()
    gives: Sequence[str] = ()
