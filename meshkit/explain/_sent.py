"""The collectives of one optimizer step on one rank, read from the same tables that `parallelize` executes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

import torch
from torch import nn

from meshkit.errors import PlanError
from meshkit.explain._explanation import Message
from meshkit.explain._held import Held, Local, Part, shard_axis
from meshkit.parallel.context import attention_shape, layer_windows, traffic
from meshkit.parallel.data import Zero, kept_units, reduction_dtype, shard_units
from meshkit.parallel.pipeline import Checked, Cut
from meshkit.parallel.tensor_layout import Call, TensorLayout, attention_heads


class Ledger:
    def __init__(self) -> None:
        self.messages: Counter[Message] = Counter()
        self.reasons: dict[tuple[str, str], Counter[str]] = {}

    def add(self, axis: str, op: str, size: int, why: str, times: int = 1) -> None:
        if times and size:
            self.messages[Message(axis, op, size)] += times
            self.reasons.setdefault((axis, op), Counter())[why] += size * times


def add_context(ledger: Ledger, held: Held, part: Part) -> None:
    """The cp axis in the forward and backward of one microbatch."""
    assert part.layout is not None
    ledger.add("cp", "all_reduce", 16, "batches compared")
    layers = attention_heads(held.model, held.plan.tensor, size=held.spec.tp)
    if not layers:
        raise PlanError(
            "explain: the plan names no attention() modules, so what they send on cp is not known. Give them the style "
            "attention() in the plan's tensor table, with the names of their projections."
        )
    windows = layer_windows(getattr(held.model, "config", None), len(layers))
    for (module, heads), window in zip(layers.items(), windows, strict=True):
        if not held.runs(module):
            continue
        shape = replace(attention_shape(None, heads[held.at("tp")], held.compute), rows=part.rows)
        forward, backward = traffic(part.layout.windowed(window), held.at("cp"), shape)
        for (op, size), count in forward.items():
            ledger.add("cp", op, size, "attention, forward", count)
            ledger.add("cp", op, size, "attention, recompute", count * (held.memory.recompute == "full"))
        for (op, size), count in backward.items():
            ledger.add("cp", op, size, "attention, backward", count)


def add_data(ledger: Ledger, held: Held, microbatches: int) -> None:
    """Parameters gathered, gradients reduced."""
    spec, zero = held.spec, Zero(held.zero)
    shards = spec.dp_shard * spec.cp
    names = {name: param for name, param in held.model.named_parameters(remove_duplicate=False) if held.runs(name)}
    units = shard_units(names, [*held.blocks, *held.units])
    kept = kept_units(held.blocks, held.units)
    for unit, own in _unit_params(held.params, units):
        if not own:
            continue
        compute = held.memory.precision.compute if held.memory.precision else own[0].dtype
        gathered = sum(_padded(param, shards) for param in own) * compute.itemsize
        reduced = sum(_padded(param, shards) * _reduced(held, param).itemsize for param in own if param.trains)
        again = zero.reshard_after_forward and unit and unit not in kept
        gathers = microbatches * (2 if again else 1) if zero.reshard_between_microbatches else 1
        reductions = microbatches if zero.reduce_every_microbatch else 1
        if shards > 1:
            ledger.add(shard_axis(spec), "all_gather", gathered, "parameters", gathers)
            ledger.add(shard_axis(spec), "reduce_scatter", reduced, "gradients", reductions)
        if spec.dp_replicate > 1:
            ledger.add("dp_replicate", "all_reduce", reduced // shards, "gradients")


def _reduced(held: Held, param: Local) -> torch.dtype:
    return reduction_dtype(torch.empty(0, dtype=param.dtype), held.memory.precision)


def _unit_params(params: Mapping[str, Local], units: list[str]) -> Iterator[tuple[str, list[Local]]]:
    rest = dict(params)
    for unit in units:
        own = [name for name in rest if name.startswith(f"{unit}.")]
        yield unit, [rest.pop(name) for name in own]
    yield "", list(rest.values())


def _padded(param: Local, shards: int) -> int:
    """Elements of the parameter with its first dim padded to a multiple of the shards, as FSDP2 sends it."""
    rows = param.shape[0] if param.shape else 1
    return -(-rows // shards) * shards * prod(param.shape[1:])


def add_tensor(ledger: Ledger, held: Held, layout: TensorLayout, part: Part) -> None:
    """The tensor axis in the forward and backward of one microbatch."""
    tokens = part.rows * part.tokens
    for call in layout.calls:
        if not held.runs(call.module):
            continue
        size = tokens * call.width * held.compute.itemsize
        forward, backward = _call_ops(call, layout.sequence)
        again = held.memory.recompute == "full" and _repeated(call, layout, held.blocks)
        for op in forward:
            ledger.add("tp", op, size, "activations, forward", 1)
            ledger.add("tp", op, size, "activations, recompute", int(again))
        for op in backward:
            ledger.add("tp", op, size, "activations, backward", 1)
    for name, param in held.params.items():
        if layout.params[name].gradient == "sum" and param.trains:
            ledger.add("tp", "all_reduce", param.numel * held.compute.itemsize, "gradients of whole parameters")
    modules = dict(held.model.named_modules())
    heads = [name for name, style in layout.styles.items() if style.kind == "vocab" and held.runs(name)]
    if any(isinstance(modules[name], nn.Linear) for name in heads):
        width = 8 if held.compute == torch.float64 else 4
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


def add_pipeline(ledger: Ledger, held: Held, cut: Cut, checked: Checked, parts: list[Part]) -> None:
    """The hidden states and their gradients that this rank sends, and what the ranks of pp sum up."""
    rank = held.at("pp")
    shared = held.spec.tp if held.sequence else 1
    for message in checked.sends[rank]:
        part = parts[message.made.microbatch]
        size = part.rows * (part.tokens // shared) * cut.width * held.compute.itemsize
        why = "hidden states, forward" if message.made.op == "F" else "hidden states, backward"
        ledger.add("pp", "send", size, why)
    if rank in cut.ends:
        for names in cut.copied:
            row = held.row(names[0] if rank == cut.ends[0] else names[1])
            ledger.add("pp", "send", row.rank_bytes, "gradients of tied parameters")
    ledger.add("pp", "all_reduce", 8, "loss")
    ledger.add("pp", "all_reduce", 8, "gradient norm")


def add_scalars(ledger: Ledger, held: Held) -> None:
    spec = held.spec
    large = [axis for axis in ("dp_replicate", "dp_shard", "cp") if getattr(spec, axis) > 1]
    if large:
        ledger.add("_".join(large), "all_reduce", 8, "tokens and loss", 2)
    # clip_grad_norm: sums of squares by the axes that shard them, one all-reduce per axis of those still to be summed.
    data = {shard_axis(spec)} if spec.dp_shard * spec.cp > 1 else set()
    copies = held.cut.copies(held.at("pp")) if held.cut is not None else {}
    counted = [param for name, param in held.params.items() if param.trains and name not in copies]
    sums = {frozenset(data | ({"tp"} if param.shape != param.whole else set())) for param in counted}
    for axis in sorted({axis for axes in sums for axis in axes}):
        over = [axes for axes in sums if axis in axes]
        sums = {axes - {axis} for axes in sums}
        ledger.add(axis, "all_reduce", 8 * len(over), "gradient norm")
