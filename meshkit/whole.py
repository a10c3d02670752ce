"""The single-device model of which this rank holds some stages: what the other ranks of `pp` hold, and under which names."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import ProcessGroup

_KEY = "_meshkit_whole"


@dataclass(frozen=True)
class Whole:
    """tensors: parameters and persistent buffers of all stages, on meta, by their single-device names, each once.

    owners: the rank of `group`, the axis pp, that counts and writes each. copies: parameters of this rank that are
    another's too, which counts them: name here -> single-device name.
    """

    tensors: dict[str, Tensor]
    owners: dict[str, int]
    copies: dict[str, str]
    group: ProcessGroup


def set_whole(module: nn.Module, whole: Whole) -> None:
    module.__dict__[_KEY] = whole


def whole_of(module: nn.Module) -> Whole | None:
    """None for a module that this rank holds whole, apart from shards."""
    whole: Whole | None = module.__dict__.get(_KEY)
    return whole


def copies_of(module: nn.Module) -> dict[str, str]:
    """See `Whole.copies`; empty without stages."""
    whole = whole_of(module)
    return whole.copies if whole is not None else {}
