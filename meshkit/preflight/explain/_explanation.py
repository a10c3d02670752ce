"""Explanation: the result of `explain`, and its printed form."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from meshkit.mesh import MeshSpec
from meshkit.parallel.pipeline import Schedule
from meshkit.preflight._format import table_lines

PHASES = ("forward", "recompute", "backward", "step")
"""when something is sent; `step` is once per optimizer step: the loss, counts, the norm of the gradients"""


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


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Parameters that differ only in their layer: `row` has the name `layers.*.mlp.up_proj.weight`."""

    row: ParamRow
    count: int


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All messages of one kind on one axis, in one optimizer step of one rank. phases: bytes by PHASES."""

    axis: str
    op: str
    calls: int
    bytes: int
    phases: dict[str, int]
    purpose: str


@dataclass(frozen=True)
class Explanation:
    """`str()` is the printed form; `messages` counts every collective of one optimizer step on one rank."""

    spec: MeshSpec
    params: list[ParamRow]
    messages: Counter[Message]
    # (axis, op) -> what it is for, in bytes: `what, phase`, without the phase where it is the step.
    reasons: dict[tuple[str, str], Counter[str]]
    notes: list[str] = field(default_factory=list)  # what was chosen, and why
    schedule: Schedule | None = None  # with pp: the table of all its ranks

    @property
    def parameter_bytes(self) -> int:
        return sum(row.rank_bytes for row in self.params)

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The parameters as they are printed."""
        rows = [replace(row, name=general_name(row.name)) for row in self.params]
        first = {str(row): row for row in reversed(rows)}
        return [ParamGroup(row=first[key], count=count) for key, count in Counter(map(str, rows)).items()]

    @property
    def traffic(self) -> list[Traffic]:
        """The messages as they are printed: by axis and collective."""
        calls: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for message, count in self.messages.items():
            calls[message.axis, message.op] += count
            sizes[message.axis, message.op] += count * message.size
        return [
            Traffic(
                axis=axis,
                op=op,
                calls=calls[axis, op],
                bytes=sizes[axis, op],
                phases=_phases(self.reasons[axis, op]),
                purpose=_format_reasons(self.reasons[axis, op]),
            )
            for axis, op in sorted(calls)
        ]

    def __str__(self) -> str:
        return "\n".join([*_parameter_lines(self), "", *_message_lines(self), *self.notes])


def general_name(name: str) -> str:
    """`layers.3.mlp.up_proj.weight` as `layers.*.mlp.up_proj.weight`."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _phases(reasons: Mapping[str, int]) -> dict[str, int]:
    sizes = dict.fromkeys(PHASES, 0)
    for reason, size in reasons.items():
        sizes[reason.partition(", ")[2] or "step"] += size
    return sizes


def _parameter_lines(explanation: Explanation) -> list[str]:
    """One line for parameters that differ only in their layer."""
    header = ("parameter", "shape", "dtype", "placement", "bytes/rank", "×")
    table = []
    for group in explanation.param_groups:
        row = group.row
        where = "  ".join(f"{axis}:{placement}" for axis, placement in row.placements.items()) or "whole"
        shape, dtype = "×".join(map(str, row.shape)), str(row.dtype).removeprefix("torch.")
        table.append((row.name, shape, dtype, where, f"{row.rank_bytes:,}", str(group.count)))
    total = f"parameters: {explanation.parameter_bytes:,} bytes on this rank; AdamW holds 2x more, gradients 1x"
    return [*table_lines([header, *table]), total]


def _message_lines(explanation: Explanation) -> list[str]:
    header = ("axis", "collective", "calls/step", "bytes/step", "for")
    table = [(row.axis, row.op, str(row.calls), f"{row.bytes:,}", row.purpose) for row in explanation.traffic]
    if not table:
        return ["one rank: nothing is sent"]
    return table_lines([header, *table])


def _format_reasons(reasons: Iterable[str]) -> str:
    """`activations, forward` and `activations, backward` as `activations (forward, backward)`."""
    phases: dict[str, list[str]] = {}
    for reason in reasons:
        what, _, phase = reason.partition(", ")
        phases.setdefault(what, []).extend([phase] if phase else [])
    return ", ".join(f"{what} ({', '.join(when)})" if when else what for what, when in phases.items())


class TrafficLog:
    """Collectives counted so far, and what they are for."""

    def __init__(self) -> None:
        self.messages: Counter[Message] = Counter()
        self.reasons: dict[tuple[str, str], Counter[str]] = {}

    def add(self, axis: str, op: str, size: int, why: str, times: int = 1) -> None:
        if times and size:
            self.messages[Message(axis, op, size)] += times
            self.reasons.setdefault((axis, op), Counter())[why] += size * times
