"""The collectives of one optimizer step on one rank, read from the same tables that `parallelize` executes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

import torch

from meshkit.errors import PlanError
from meshkit.loss.linear_logits import head_of
from meshkit.parallel.context import attention_shape, layer_windows, traffic
from meshkit.parallel.data import Zero, kept_units, reduction_dtype, shard_units
from meshkit.parallel.expert import in_expert_view
from meshkit.parallel.pipeline import Checked, Cut
from meshkit.parallel.tensor.layout import attention_heads
from meshkit.preflight.explain._explanation import TrafficLog
from meshkit.preflight.explain._rank import Local, Part, RankModel


def add_context(ledger: TrafficLog, held: RankModel, part: Part) -> None:
    """The cp axis in the forward and backward of one microbatch."""
    assert part.layout is not None
    ledger.add("cp", "all_reduce", 16, "batches compared, forward")
    layers = attention_heads(held.model, held.plan.tensor, size=held.spec.tp)
    if not layers:
        raise PlanError(
            "explain: the plan names no attention() modules, so what they send on cp is not known. Give them the style "
            "attention() in the plan's tensor table, with the names of their projections, or enter(query=...) where keys and "
            "values come out of a latent."
        )
    windows = layer_windows(getattr(held.model, "config", None), len(layers))
    for (module, heads), window in zip(layers.items(), windows, strict=True):
        if not held.runs(module):
            continue
        shape = replace(attention_shape(None, heads[held.at("tp")], held.compute), rows=part.rows)
        forward, backward = traffic(part.layout.windowed(window), held.at("cp"), shape)
        chosen = held.treatment(module).recompute
        again = not (chosen.keeps("attention") or chosen.keeps("collective"))
        for (op, size), count in forward.items():
            ledger.add("cp", op, size, "attention, forward", count)
            ledger.add("cp", op, size, "attention, recompute", count * again)
        for (op, size), count in backward.items():
            ledger.add("cp", op, size, "attention, backward", count * held.flow.attends(module))


def add_data(ledger: TrafficLog, held: RankModel, microbatches: int) -> None:
    """Parameters gathered, gradients reduced."""
    names = {name: param for name, param in held.model.named_parameters(remove_duplicate=False) if held.runs(name)}
    units = shard_units(names, [*held.blocks, *held.units])
    apart = [name for name in held.experts if held.runs(name) and in_expert_view(held.spec)]
    head = None if held.memory.loss is None else head_of(held.model, held.plan)
    kept = kept_units(held.blocks, held.units, head)
    # FSDP gathers a unit ahead in backward. The last before the first gradient is not used there: it stays for the next
    # microbatch's forward, so that there is one gather more in all.
    ahead = held.flow.last_without_gradient([*held.blocks, *held.units])
    for unit, own in _unit_params(held.params, [*apart, *units]):
        if own:
            around = next((block for block in held.blocks if unit.startswith(f"{block}.")), unit)
            freed = bool(unit) and around not in kept
            flows = held.flow.leaves(around)
            again = microbatches if flows else int(unit == ahead)
            _add_unit(ledger, held, own, microbatches, again=again * freed)


def _add_unit(ledger: TrafficLog, held: RankModel, own: dict[str, Local], microbatches: int, *, again: int) -> None:
    """One unit. again: how often its parameters are gathered in backwards, if the ZeRO stage frees any."""
    zero = Zero(held.zero)
    axis, shards, _ = held.sharded_over(next(iter(own)))
    gathered = sum(_padded(param, shards) * _gathered(held, param).itemsize for param in own.values())
    reduced = sum(_padded(param, shards) * _reduced(held, param).itemsize for param in own.values() if param.trains)
    gathers = microbatches if zero.reshard_between_microbatches else 1
    reductions = microbatches if zero.reduce_every_microbatch else 1
    if shards > 1:
        ledger.add(axis, "all_gather", gathered, "parameters, forward", gathers)
        ledger.add(axis, "all_gather", gathered, "parameters, backward", again * zero.reshard_after_forward)
        ledger.add(axis, "reduce_scatter", reduced, "gradients, backward", reductions)
    if held.spec.dp_replicate > 1:
        ledger.add("dp_replicate", "all_reduce", reduced // shards, "gradients, backward")


def _gathered(held: RankModel, param: Local) -> torch.dtype:
    """Codes of weights in few bits travel as they are."""
    precision = held.memory.precision
    return precision.compute if precision is not None and param.dtype.is_floating_point else param.dtype


def _reduced(held: RankModel, param: Local) -> torch.dtype:
    return reduction_dtype(torch.empty(0, dtype=param.dtype), held.memory.precision)


def _unit_params(params: Mapping[str, Local], units: list[str]) -> Iterator[tuple[str, dict[str, Local]]]:
    rest = dict(params)
    for unit in units:
        own = [name for name in rest if name.startswith(f"{unit}.")]
        yield unit, {name: rest.pop(name) for name in own}
    yield "", rest


def _padded(param: Local, shards: int) -> int:
    """Elements of the parameter with its first dim padded to a multiple of the shards, as FSDP2 sends it."""
    rows = param.shape[0] if param.shape else 1
    return -(-rows // shards) * shards * prod(param.shape[1:])


def add_pipeline(ledger: TrafficLog, held: RankModel, cut: Cut, checked: Checked, parts: list[Part]) -> None:
    """The hidden states and their gradients that this rank sends, and what the ranks of pp sum up."""
    rank = held.at("pp")
    shared = held.spec.tp if held.sequence else 1
    for message in checked.sends[rank]:
        part = parts[message.output.microbatch]
        size = part.rows * (part.tokens // shared) * cut.width * held.compute.itemsize
        why = "hidden states, forward" if message.output.op == "F" else "hidden states, backward"
        ledger.add("pp", "send", size, why)
    if rank in cut.ends:
        for names in cut.copied:
            row = held.row(names[0] if rank == cut.ends[0] else names[1])
            ledger.add("pp", "send", row.rank_bytes, "gradients of tied parameters, backward")
    ledger.add("pp", "all_reduce", 8, "loss")
    ledger.add("pp", "all_reduce", 8, "gradient norm")


def add_scalars(ledger: TrafficLog, held: RankModel) -> None:
    spec = held.spec
    large = [axis for axis in ("dp_replicate", "dp_shard", "cp") if getattr(spec, axis) > 1]
    if large:
        ledger.add("_".join(large), "all_reduce", 8, "tokens and loss", 2)
    # clip_grad_norm: sums of squares by the axes that shard them, one all-reduce per axis of those still to be summed.
    copies = held.cut.copies(held.at("pp")) if held.cut is not None else {}
    counted = {name: param for name, param in held.params.items() if param.trains and name not in copies}
    sums = {frozenset(_axes(held, name, param)) for name, param in counted.items()}
    for axis in sorted({axis for axes in sums for axis in axes}):
        over = [axes for axes in sums if axis in axes]
        sums = {axes - {axis} for axes in sums}
        ledger.add(axis, "all_reduce", 8 * len(over), "gradient norm")


def _axes(held: RankModel, name: str, param: Local) -> set[str]:
    """The axes that split the parameter."""
    axis, shards, _ = held.sharded_over(name)
    axes = {axis} if shards > 1 else set()
    if param.expert:
        return axes | set(param.dims)
    return axes | ({"tp"} if param.shape != param.whole else set())
