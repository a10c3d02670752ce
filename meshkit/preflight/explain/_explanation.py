"""Explanation: the result of `explain`, and its printed form."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from meshkit.mesh import MeshSpec
from meshkit.optim.outer import PeriodTraffic
from meshkit.parallel.pipeline import Schedule
from meshkit.preflight._format import table_lines
from meshkit.preflight.explain._pipeline_table import PipelineTable

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


@dataclass(frozen=True, kw_only=True)
class Hierarchical:
    """A hierarchical collective: axis, op and size of the flat one, the axes of its hops, the bytes of a chunk of a part."""

    axis: str
    op: str
    size: int
    inside: str
    across: str
    chunk_bytes: int


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Messages in their place: what one module sends in one phase of each of some microbatches.

    phase: one of PHASES. module: that sends it, a block or a module inside of one, an FSDP unit; "" is the root. what: it is
    for. microbatches: in which it is sent; none where that depends on no single one, as of what is gathered once a step.
    count: calls in each of those microbatches, or in the step. hierarchical: of which it is chunks of one hop, and how often
    that is called.
    """

    message: Message
    phase: str
    module: str
    what: str
    microbatches: tuple[int, ...]
    count: int
    hierarchical: tuple[Hierarchical, int] | None = None

    @property
    def calls(self) -> int:
        """In the step."""
        return self.count * max(1, len(self.microbatches))


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
    """`str()` is the printed form. sent: every collective of one optimizer step on one rank, in the order of the modules.
    choices: what was chosen, and why. pipeline: with pp, the table of all its ranks, which is made when it is asked for.
    period: with an outer optimizer, what a period sends on dp_replicate; all else is of the replica.
    """

    spec: MeshSpec
    params: list[ParamRow]
    sent: tuple[Sent, ...]
    choices: tuple[str, ...] = ()
    pipeline: PipelineTable | None = None
    period: PeriodTraffic | None = None

    @cached_property
    def messages(self) -> Counter[Message]:
        """Calls of each kind of message in the step."""
        messages: Counter[Message] = Counter()
        for sent in self.sent:
            messages[sent.message] += sent.calls
        return messages

    @cached_property
    def reasons(self) -> dict[tuple[str, str], Counter[str]]:
        """(axis, op) -> what it is for, in bytes: `what, phase`, without the phase where it is the step."""
        reasons: dict[tuple[str, str], Counter[str]] = {}
        for sent in self.sent:
            why = sent.what if sent.phase == "step" else f"{sent.what}, {sent.phase}"
            message = sent.message
            reasons.setdefault((message.axis, message.op), Counter())[why] += message.size * sent.calls
        return reasons

    @property
    def schedule(self) -> Schedule | None:
        return None if self.pipeline is None else self.pipeline.checked.schedule

    @cached_property
    def notes(self) -> list[str]:
        """What was chosen, and why; of the pipeline last."""
        return [*self.choices, *([] if self.pipeline is None else [self.pipeline.note])]

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
        period = [] if self.period is None else ["", str(self.period)]
        return "\n".join([*_parameter_lines(self), "", *_message_lines(self), *self.notes, *period])


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
    """Collectives counted so far, and what they are for. microbatches: those in which what is added is sent."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.microbatches: tuple[int, ...] = ()

    def add(
        self,
        axis: str,
        op: str,
        size: int,
        why: str,
        times: int = 1,
        *,
        module: str = "",
        hierarchical: tuple[Hierarchical, int] | None = None,
    ) -> None:
        """why: what it is for and its phase, as "parameters, forward"; without a phase it is once a step."""
        if times and size:
            what, _, phase = why.partition(", ")
            self.sent.append(
                Sent(
                    message=Message(axis, op, size),
                    phase=phase or "step",
                    module=module,
                    what=what,
                    microbatches=self.microbatches,
                    count=times,
                    hierarchical=hierarchical,
                )
            )
