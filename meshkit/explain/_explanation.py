"""What `explain` found, and its printed form."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from meshkit.mesh import MeshSpec


@dataclass(frozen=True, order=True)
class Message:
    """One kind of message: `size` is the whole tensor in bytes (an all-gather's result, a reduce-scatter's input), and for
    a send or an all-to-all what leaves the rank.
    """

    axis: str
    op: str  # all_gather, reduce_scatter, all_reduce, all_to_all or send
    size: int


@dataclass(frozen=True)
class ParamRow:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: dict[str, str]  # axis -> Shard(dim) or Replicate
    rank_bytes: int


@dataclass(frozen=True)
class Explanation:
    """`str()` is the printed form; `messages` counts every collective of one optimizer step on one rank."""

    spec: MeshSpec
    params: list[ParamRow]
    messages: Counter[Message]
    reasons: dict[tuple[str, str], Counter[str]]  # (axis, op) -> what it is for, in bytes
    notes: list[str] = field(default_factory=list)  # what was chosen, and why

    @property
    def parameter_bytes(self) -> int:
        return sum(row.rank_bytes for row in self.params)

    def __str__(self) -> str:
        return "\n".join([*_parameter_lines(self), "", *_message_lines(self), *self.notes])


def _parameter_lines(explanation: Explanation) -> list[str]:
    """One line for parameters that differ only in their layer."""
    groups: Counter[tuple[str, ...]] = Counter()
    for row in explanation.params:
        general = re.sub(r"\.\d+(?=\.)", ".*", row.name)
        where = "  ".join(f"{axis}:{placement}" for axis, placement in row.placements.items()) or "whole"
        shape, dtype = "×".join(map(str, row.shape)), str(row.dtype).removeprefix("torch.")
        groups[general, shape, dtype, where, f"{row.rank_bytes:,}"] += 1
    header = ("parameter", "shape", "dtype", "placement", "bytes/rank", "×")
    table = [(*cells, str(count)) for cells, count in groups.items()]
    total = f"parameters: {explanation.parameter_bytes:,} bytes on this rank; AdamW holds 2x more, gradients 1x"
    return [*_table([header, *table]), total]


def _message_lines(explanation: Explanation) -> list[str]:
    header = ("axis", "collective", "calls/step", "bytes/step", "for")
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for message, count in explanation.messages.items():
        calls[message.axis, message.op] += count
        sizes[message.axis, message.op] += count * message.size
    table = [
        (axis, op, str(calls[axis, op]), f"{sizes[axis, op]:,}", _said(explanation.reasons[axis, op]))
        for axis, op in sorted(calls)
    ]
    if not table:
        return ["one rank: nothing is sent"]
    return _table([header, *table])


def _said(reasons: Iterable[str]) -> str:
    """`activations, forward` and `activations, backward` as `activations (forward, backward)`."""
    phases: dict[str, list[str]] = {}
    for reason in reasons:
        what, _, phase = reason.partition(", ")
        phases.setdefault(what, []).extend([phase] if phase else [])
    return ", ".join(f"{what} ({', '.join(when)})" if when else what for what, when in phases.items())


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
