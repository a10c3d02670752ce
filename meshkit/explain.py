"""Print what a run will be before it starts: where each parameter lies, and what one step sends on which axis.

Pure arithmetic over the same tables that `parallelize` executes: no process group, no ranks, a model on meta is enough.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import nn

from meshkit.errors import PlanError
from meshkit.mask import Mask
from meshkit.memory.policy import MemoryPolicy
from meshkit.mesh import MeshSpec
from meshkit.parallel.context import (
    ContextPolicy,
    Layout,
    attention_shape,
    choose_for_rows,
    layer_windows,
    model_window,
    traffic,
)
from meshkit.parallel.data import Zero, kept_units, reduction_dtype, shard_units
from meshkit.parallel.tensor_layout import Call, TensorLayout, attention_heads, tensor_layout, widest_heads
from meshkit.plan import Plan, match_names
from meshkit.sharding import chunk


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


def explain(
    model: nn.Module,
    spec: MeshSpec,
    *,
    plan: Plan,
    rows: int,
    seq_len: int,
    microbatches: int = 1,
    memory: MemoryPolicy | None = None,
    zero: int = 3,
    sequence: bool = False,
    context: ContextPolicy | None = None,
    mask: Mask | Sequence[Mask] | None = None,
    coordinate: dict[str, int] | None = None,
) -> Explanation:
    """What `parallelize(model, mesh, plan=..., ...)` will hold and send, for one optimizer step of one rank.

    rows, seq_len: this rank's [rows, seq_len] part of the step's batch; microbatches: how many parts it is run in.
    mask: who sees whom, one for all rows or one for each, on which depends what context parallelism sends; default: causal.
    coordinate: the rank's place on each axis (sizes differ between ranks where shards are uneven); default 0 everywhere.
    Counts the forward and backward of `Run.forward_backward` with the default loss, and `clip_grad_norm`.
    Raises: PlanError as `parallelize` does.
    """
    if spec.pp > 1:
        raise PlanError(
            f"explain: pp={spec.pp} is executed, but its stages and messages are not explained yet. Explain the mesh of one "
            "stage: the same axes with pp=1."
        )
    memory = memory or MemoryPolicy()
    place = coordinate or {}
    sequence = sequence and spec.tp > 1
    layout = tensor_layout(model, plan.tensor, size=spec.tp, sequence=sequence) if spec.tp > 1 else None
    names = dict(model.named_modules())
    blocks = match_names(plan.blocks, names, what="module")
    units = match_names(plan.units, names, what="module")
    params = _local_params(model, spec, layout, place.get("tp", 0))
    sharded = spec.dp_shard * spec.cp * spec.dp_replicate > 1
    ledger = _Ledger()
    notes: list[str] = []
    parts = [
        _Part(max(1, len(part)), seq_len, _part_masks(mask, part.tolist()))
        for part in torch.arange(rows).tensor_split(microbatches)
    ]
    if spec.cp > 1:
        parts = [_split_part(model, plan, spec, part, context, memory, sequence, place) for part in parts]
        for part in parts:
            _context_messages(ledger, model, plan, spec, part, memory, place)
        notes += list(dict.fromkeys(note for part in parts for note in part.notes))
    if sharded:
        _data_messages(
            ledger,
            spec,
            params,
            shard_units(model, [*blocks, *units]),
            kept_units(blocks, units),
            memory,
            Zero(zero),
            microbatches,
        )
    if layout is not None:
        for part in parts:
            _tensor_messages(ledger, layout, params, blocks, memory, part.rows * part.tokens, model, place.get("tp", 0))
    _scalar_messages(ledger, spec, params)
    table = [_row(name, param, spec, layout, sharded, place) for name, param in params.items()]
    return Explanation(spec=spec, params=table, messages=ledger.messages, reasons=ledger.reasons, notes=notes)


class _Ledger:
    def __init__(self) -> None:
        self.messages: Counter[Message] = Counter()
        self.reasons: dict[tuple[str, str], Counter[str]] = {}

    def add(self, axis: str, op: str, size: int, why: str, times: int = 1) -> None:
        if times and size:
            self.messages[Message(axis, op, size)] += times
            self.reasons.setdefault((axis, op), Counter())[why] += size * times


@dataclass(frozen=True)
class _Local:
    """A parameter as one tensor rank holds it, before fully_shard."""

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype
    trains: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)


def _local_params(model: nn.Module, spec: MeshSpec, layout: TensorLayout | None, tp_rank: int) -> dict[str, _Local]:
    params = {}
    for name, param in model.named_parameters():
        shape = list(param.shape)
        placement = layout.params[name].placement if layout is not None else None
        if placement is not None and placement.is_shard():
            part = chunk(shape[placement.dim], spec.tp, tp_rank)  # type: ignore[union-attr]
            shape[placement.dim] = part.stop - part.start  # type: ignore[union-attr]
        params[name] = _Local(tuple(shape), tuple(param.shape), param.dtype, param.requires_grad)
    return params


@dataclass(frozen=True)
class _Part:
    """A microbatch as one rank runs it."""

    rows: int
    tokens: int
    mask: Mask | None
    layout: Layout | None = None
    notes: tuple[str, ...] = ()


def _part_masks(mask: Mask | Sequence[Mask] | None, rows: list[int]) -> Mask | None:
    if mask is None or isinstance(mask, Mask):
        return mask
    return Mask.joined([mask[row] for row in rows]) if rows else None


def _split_part(
    model: nn.Module,
    plan: Plan,
    spec: MeshSpec,
    part: _Part,
    policy: ContextPolicy | None,
    memory: MemoryPolicy,
    sequence: bool,
    place: dict[str, int],
) -> _Part:
    """The part of the microbatch that this rank of `cp` holds."""
    dtype = memory.precision.compute if memory.precision else next(model.parameters()).dtype
    config = getattr(model, "config", None)
    shape = attention_shape(config, widest_heads(model, plan.tensor, size=spec.tp), dtype)
    mask = part.mask if part.mask is not None else Mask.causal(part.tokens)
    choice, alike = choose_for_rows(
        mask.windowed(model_window(config)),
        part.rows,
        part.tokens,
        spec.cp,
        policy or ContextPolicy(),
        shape,
        multiple=spec.tp if sequence else 1,
    )
    layout = choice.layout
    return _Part(alike, layout.lengths[place.get("cp", 0)], mask, layout, (f"cp={spec.cp}: {choice}",))


def _context_messages(
    ledger: _Ledger,
    model: nn.Module,
    plan: Plan,
    spec: MeshSpec,
    part: _Part,
    memory: MemoryPolicy,
    place: dict[str, int],
) -> None:
    """The cp axis in the forward and backward of one microbatch."""
    assert part.layout is not None
    ledger.add("cp", "all_reduce", 16, "batches compared")
    layers = attention_heads(model, plan.tensor, size=spec.tp)
    if not layers:
        raise PlanError(
            "explain: the plan names no attention() modules, so what they send on cp is not known. Give them the style "
            "attention() in the plan's tensor table, with the names of their projections."
        )
    dtype = memory.precision.compute if memory.precision else next(model.parameters()).dtype
    windows = layer_windows(getattr(model, "config", None), len(layers))
    for heads, window in zip(layers.values(), windows, strict=True):
        shape = replace(attention_shape(None, heads[place.get("tp", 0)], dtype), rows=part.rows)
        forward, backward = traffic(part.layout.windowed(window), place.get("cp", 0), shape)
        for (op, size), count in forward.items():
            ledger.add("cp", op, size, "attention, forward", count)
            ledger.add("cp", op, size, "attention, recompute", count * (memory.recompute == "full"))
        for (op, size), count in backward.items():
            ledger.add("cp", op, size, "attention, backward", count)


def _unit_params(params: dict[str, _Local], units: list[str]) -> Iterator[tuple[str, list[_Local]]]:
    rest = dict(params)
    for unit in units:
        own = [name for name in rest if name.startswith(f"{unit}.")]
        yield unit, [rest.pop(name) for name in own]
    yield "", list(rest.values())


def _data_messages(
    ledger: _Ledger,
    spec: MeshSpec,
    params: dict[str, _Local],
    units: list[str],
    kept: set[str],
    memory: MemoryPolicy,
    zero: Zero,
    microbatches: int,
) -> None:
    shards = spec.dp_shard * spec.cp
    axis = _shard_axis(spec)
    for unit, own in _unit_params(params, units):
        if not own:
            continue
        compute = memory.precision.compute if memory.precision else own[0].dtype
        gathered = sum(_padded(param, shards) for param in own) * compute.itemsize
        reduced = sum(
            _padded(param, shards) * reduction_dtype(torch.empty(0, dtype=param.dtype), memory.precision).itemsize
            for param in own
            if param.trains
        )
        again = zero.reshard_after_forward and unit and unit not in kept
        gathers = microbatches * (2 if again else 1) if zero.reshard_between_microbatches else 1
        reductions = microbatches if zero.reduce_every_microbatch else 1
        if shards > 1:
            ledger.add(axis, "all_gather", gathered, "parameters", gathers)
            ledger.add(axis, "reduce_scatter", reduced, "gradients", reductions)
        if spec.dp_replicate > 1:
            ledger.add("dp_replicate", "all_reduce", reduced // shards, "gradients")


def _shard_axis(spec: MeshSpec) -> str:
    """The axis over which fully_shard shards."""
    return "_".join(axis for axis in ("dp_shard", "cp") if getattr(spec, axis) > 1)


def _padded(param: _Local, shards: int) -> int:
    """Elements of the parameter with its first dim padded to a multiple of the shards, as FSDP2 sends it."""
    rows = param.shape[0] if param.shape else 1
    return -(-rows // shards) * shards * prod(param.shape[1:])


def _tensor_messages(
    ledger: _Ledger,
    layout: TensorLayout,
    params: dict[str, _Local],
    blocks: list[str],
    memory: MemoryPolicy,
    tokens: int,
    model: nn.Module,
    tp_rank: int,
) -> None:
    """The tensor axis in the forward and backward of one microbatch of `tokens` tokens."""
    compute = memory.precision.compute if memory.precision else next(iter(params.values())).dtype
    for call in layout.calls:
        size = tokens * call.width * compute.itemsize
        forward, backward = _call_ops(call, layout.sequence)
        again = memory.recompute == "full" and _repeated(call, layout, blocks)
        for op in forward:
            ledger.add("tp", op, size, "activations, forward", 1)
            ledger.add("tp", op, size, "activations, recompute", int(again))
        for op in backward:
            ledger.add("tp", op, size, "activations, backward", 1)
    for name, param in params.items():
        if layout.params[name].gradient == "sum" and param.trains:
            ledger.add("tp", "all_reduce", param.numel * compute.itemsize, "gradients of whole parameters")
    modules = dict(model.named_modules())
    if any(style.kind == "vocab" and isinstance(modules[name], nn.Linear) for name, style in layout.styles.items()):
        width = 8 if compute == torch.float64 else 4
        ledger.add("tp", "all_reduce", tokens * width, "loss: maximum")
        ledger.add("tp", "all_reduce", 2 * tokens * width, "loss: sums")


def _call_ops(call: Call, sequence: bool) -> tuple[list[str], list[str]]:
    """The collectives of one call in (forward, backward)."""
    if call.kind == "enter":
        return (["all_gather"], ["reduce_scatter"]) if sequence else ([], ["all_reduce"])
    if call.kind == "leave":
        return (["reduce_scatter"], ["all_gather"]) if sequence else (["all_reduce"], [])
    if call.kind == "leave_whole":
        return ["all_reduce"], []
    if call.kind == "split":
        return [], ["all_gather"]
    return ["all_gather"], ["all_gather"]  # gather_split: the input forward, the output's gradient backward


def _repeated(call: Call, layout: TensorLayout, blocks: list[str]) -> bool:
    """Does full recompute run this call again? Recompute stops at the last saved tensor, so not a block's last leave."""
    block = next((block for block in blocks if call.module.startswith(f"{block}.")), None)
    if block is None:
        return False
    leaves = [other for other in layout.calls if other.kind == "leave" and other.module.startswith(f"{block}.")]
    return not leaves or call is not leaves[-1]


def _scalar_messages(ledger: _Ledger, spec: MeshSpec, params: dict[str, _Local]) -> None:
    large = [axis for axis in ("dp_replicate", "dp_shard", "cp") if getattr(spec, axis) > 1]
    if large:
        ledger.add("_".join(large), "all_reduce", 8, "tokens and loss", 2)
    # clip_grad_norm: sums of squares by the axes that shard them, one all-reduce per axis of those still to be summed.
    data = {_shard_axis(spec)} if spec.dp_shard * spec.cp > 1 else set()
    sums = {
        frozenset(data | ({"tp"} if param.shape != param.whole else set())) for param in params.values() if param.trains
    }
    for axis in sorted({axis for axes in sums for axis in axes}):
        over = [axes for axes in sums if axis in axes]
        sums = {axes - {axis} for axes in sums}
        ledger.add(axis, "all_reduce", 8 * len(over), "gradient norm")


def _row(
    name: str, param: _Local, spec: MeshSpec, layout: TensorLayout | None, sharded: bool, place: dict[str, int]
) -> ParamRow:
    placements = {}
    if spec.dp_replicate > 1:
        placements["dp_replicate"] = "Replicate"
    shape = list(param.shape)
    if sharded and spec.dp_shard * spec.cp > 1:
        placements[_shard_axis(spec)] = "Shard(0)"
        index = place.get("dp_shard", 0) * spec.cp + place.get("cp", 0)
        part = chunk(shape[0], spec.dp_shard * spec.cp, index) if shape else slice(0, 1)
        shape[:1] = [part.stop - part.start]
    if layout is not None:
        placement = layout.params[name].placement
        placements["tp"] = f"Shard({placement.dim})" if placement.is_shard() else "Replicate"  # type: ignore[union-attr]
    return ParamRow(name, param.whole, param.dtype, placements, prod(shape) * param.dtype.itemsize)


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
