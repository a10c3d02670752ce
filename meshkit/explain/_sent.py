"""The collectives of one optimizer step on one rank, read from the same tables that `parallelize` executes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from meshkit.errors import PlanError
from meshkit.explain._explanation import Message
from meshkit.explain._held import Held, Local, Part
from meshkit.memory.linear_logits import head_of
from meshkit.memory.tiles import part_sizes
from meshkit.models.experts import MoE
from meshkit.parallel.context import attention_shape, layer_windows, traffic
from meshkit.parallel.data import Zero, kept_units, reduction_dtype, shard_units
from meshkit.parallel.expert import ExpertPolicy, dispatch_traffic, even_routing, in_expert_view
from meshkit.parallel.pipeline import Checked, Cut
from meshkit.parallel.tensor_layout import Call, TensorLayout, attention_heads, readers
from meshkit.sharding import even_part


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


def add_data(ledger: Ledger, held: Held, microbatches: int) -> None:
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


def _add_unit(ledger: Ledger, held: Held, own: dict[str, Local], microbatches: int, *, again: int) -> None:
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


def _gathered(held: Held, param: Local) -> torch.dtype:
    """Codes of weights in few bits travel as they are."""
    precision = held.memory.precision
    return precision.compute if precision is not None and param.dtype.is_floating_point else param.dtype


def _reduced(held: Held, param: Local) -> torch.dtype:
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


def add_tensor(ledger: Ledger, held: Held, layout: TensorLayout, part: Part) -> None:
    """The tensor axis in the forward and backward of one microbatch."""
    tokens = part.rows * part.tokens
    for call in layout.calls:
        if not held.runs(call.module):
            continue
        size = tokens * call.width * held.compute.itemsize
        forward, backward = _call_ops(call, layout.sequence)
        backward = backward if _goes_back(held, call) else []
        again = not held.treatment(call.module).recompute.keeps("collective") and _repeated(call, layout, held)
        if _is_tiled(held, call.module):
            _add_tiles(ledger, held, call, part, forward, backward)
            continue
        for op in forward:
            ledger.add("tp", op, size, "activations, forward", 1)
            ledger.add("tp", op, size, "activations, recompute", int(again))
        for op in backward:
            ledger.add("tp", op, size, "activations, backward", 1)
        if call.kind == "enter" and layout.sequence and not again and _gathered_again(held, layout, call):
            ledger.add("tp", "all_gather", size, "activations gathered again, backward")
    parts = len(_tile_tokens(held, part))
    for name, param in held.params.items():
        if not param.expert and layout.params[name].gradient == "sum" and param.trains:
            size, tiled = param.numel * held.compute.itemsize, _is_tiled(held, name)
            ledger.add("tp", "all_reduce", size, "gradients of whole parameters, backward", parts if tiled else 1)
    modules = dict(held.model.named_modules())
    heads = [name for name, style in layout.styles.items() if style.kind == "vocab" and held.runs(name)]
    if any(isinstance(modules[name], nn.Linear) for name in heads):
        width = 8 if held.compute == torch.float64 else 4
        size = tokens if held.memory.loss is None else held.memory.loss.tokens
        for start in range(0, tokens, size):
            chunk = min(size, tokens - start)
            ledger.add("tp", "all_reduce", chunk * width, "loss: maximum, forward")
            ledger.add("tp", "all_reduce", 2 * chunk * width, "loss: sums, forward")


def _is_tiled(held: Held, name: str) -> bool:
    return any(_is_in(name, mlp) for mlp in held.tiled)


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _tile_tokens(held: Held, part: Part) -> list[int]:
    """Tokens of a row in each part of a feed-forward, those of all ranks of tp together."""
    ranks = held.spec.tp if held.sequence else 1
    return [own * ranks for own in part_sizes(part.tokens // ranks, held.memory.tiles)]


def _add_tiles(ledger: Ledger, held: Held, call: Call, part: Part, forward: list[str], backward: list[str]) -> None:
    """A call inside of a feed-forward in parts: each runs again in backward, up to the sum that it ends with."""
    full = held.treatment(call.module).recompute.mode == "full"
    part_again = held.flow.leaves(next(mlp for mlp in held.tiled if _is_in(call.module, mlp)))
    sizes = [part.rows * tokens * call.width * held.compute.itemsize for tokens in _tile_tokens(held, part)]
    for index, size in enumerate(sizes):
        # A block that runs again stops at the last that it saved: the input of the last part.
        block_again = full and index < len(sizes) - 1
        for op in forward:
            ledger.add("tp", op, size, "activations, forward", 1)
            ledger.add("tp", op, size, "activations, recompute", block_again + (part_again and call.kind != "leave"))
        for op in backward:
            ledger.add("tp", op, size, "activations, backward", 1)


def _call_ops(call: Call, sequence: bool) -> tuple[list[str], list[str]]:
    """The collectives of one call in (forward, backward)."""
    if call.kind == "enter":
        return (["all_gather"], ["reduce_scatter"]) if sequence else ([], ["all_reduce"])
    if call.kind == "leave":
        return (["reduce_scatter"], ["all_gather"]) if sequence else (["all_reduce"], [])
    if call.kind == "gather":
        return ["all_gather"], []
    if call.kind == "leave_whole":
        return ["all_reduce"], []
    if call.kind == "split":
        return [], ["all_gather"]
    return ["all_gather"], ["all_gather"]  # gather_split: the input forward, the output's gradient backward


def _goes_back(held: Held, call: Call) -> bool:
    """Is there a gradient for what the call sends in backward?"""
    if call.kind in ("enter", "split"):
        return held.flow.enters(call.module)
    return held.flow.leaves(call.module)


def _gathered_again(held: Held, layout: TensorLayout, call: Call) -> bool:
    """Does a region that keeps its input sharded need the whole in backward? Weights that do not train do not, nor does the
    head of a chunked loss, which has made its gradients by then.
    """
    treatment = held.treatment(call.module)
    modules = dict(held.model.named_modules())
    names = readers(modules, layout, call)
    if held.memory.loss is not None and head_of(held.model, held.plan) in names:
        return False
    trains = any(modules[name].weight.requires_grad for name in names)
    return treatment.regather and (trains or treatment.recompute.mode == "selective")


def _repeated(call: Call, layout: TensorLayout, held: Held) -> bool:
    """Does full recompute run this call again? Recompute stops at the last saved tensor, so not what a block ends with."""
    block = next((block for block in held.blocks if call.module.startswith(f"{block}.")), None)
    if block is None:
        return False
    leaves = [other for other in layout.calls if other.kind == "leave" and other.module.startswith(f"{block}.")]
    if not leaves or call is not leaves[-1]:
        return True
    experts = [name for name in held.experts if name.startswith(f"{block}.")]
    # Do experts come after it?
    return any(_overlaps(held, name) or not call.module.startswith(f"{name.rpartition('.')[0]}.") for name in experts)


def _overlaps(held: Held, experts: str) -> bool:
    """Do shared experts run while rows travel, and so before the experts?"""
    return held.spec.ep > 1 and isinstance(held.model.get_submodule(experts.rpartition(".")[0]), MoE)


def add_experts(ledger: Ledger, held: Held, part: Part) -> None:
    """The way of tokens to their experts in one microbatch, as if they chose all alike."""
    spec = held.spec
    own = part.rows * part.tokens
    if spec.tp > 1:
        own = own // spec.tp if held.sequence else len(even_part(own, spec.tp, held.at("tp")))
    for name, layout in held.experts.items():
        if not held.runs(name):
            continue
        again = held.treatment(name).recompute.runs_block_again
        flows = held.flow.leaves(name)
        chosen = _chosen(held, name)
        plan = even_routing(layout.experts, own * chosen, ep=spec.ep, etp=spec.etp, place=held.expert_place)
        told = dispatch_traffic(plan, width=layout.width, itemsize=held.compute.itemsize)
        if spec.tp > 1 and not held.sequence:
            _add_token_parts(ledger, held, name, part, chosen, layout.width)
        for (axis, op, size), times in told.counts.items():
            ledger.add(axis, op, size, "tokens per expert, forward", times)
            ledger.add(axis, op, size, "tokens per expert, recompute", times * again)
        for (axis, op, size), times in told.rows.items():
            ledger.add(axis, op, size, "tokens to experts, forward", times)
            ledger.add(axis, op, size, "tokens to experts, recompute", times * again)
            ledger.add(axis, op, size, "tokens to experts, backward", times * flows)


def _add_token_parts(ledger: Ledger, held: Held, name: str, part: Part, chosen: int, width: int) -> None:
    """Without sequence parallelism the ranks of tp have the same tokens: each brings a part, and gets all outputs."""
    tp = held.spec.tp
    longest = max(len(even_part(part.rows * part.tokens, tp, rank)) for rank in range(tp)) * tp
    size = longest * width * held.compute.itemsize
    ledger.add("tp", "all_gather", size, "tokens of experts, forward")
    # What runs again sends again, whatever is kept: these are no operators whose results could be.
    again = held.treatment(name).recompute.runs_block_again and not _overlaps(held, name)
    if again and _is_followed(held.model, name):
        ledger.add("tp", "all_gather", size, "tokens of experts, recompute")
    if held.flow.leaves(name):
        weight = torch.promote_types(held.compute, torch.float32).itemsize
        ledger.add("tp", "all_gather", size, "tokens of experts, backward")
        ledger.add("tp", "all_gather", longest * chosen * weight, "routing weights, backward")


def _is_followed(model: nn.Module, name: str) -> bool:
    """Does a module with parameters come after this one, beside it? Recompute stops at the last that has saved something."""
    around, _, key = name.rpartition(".")
    children = dict(model.get_submodule(around).named_children())
    after = list(children)[list(children).index(key) + 1 :]
    return any(list(children[other].parameters()) for other in after)


def _chosen(held: Held, name: str) -> int:
    """Experts that a token chooses, as the router beside them says."""
    around = name.rpartition(".")[0]
    found = [router.config.chosen for other, router in _routers(held) if other.startswith(f"{around}.")]
    return int(found[0]) if found else 1


def _routers(held: Held) -> list[tuple[str, Any]]:
    return [
        (name, child)
        for name, child in held.model.named_modules()
        if hasattr(child, "reduce_counts") and held.runs(name)
    ]


def _token_axes(held: Held) -> list[str]:
    """Whose ranks have different tokens of one stage."""
    large = "_".join(axis for axis in ("dp_replicate", "dp_shard", "cp") if getattr(held.spec, axis) > 1)
    return [axis for axis in (large, "tp" if held.sequence else "") if axis]


def add_balance(ledger: Ledger, held: Held, parts: list[Part]) -> None:
    """Counts of tokens per expert: for losses in each forward, and of the step."""
    routers = _routers(held)
    for name, router in routers:
        again = held.treatment(name).recompute.runs_block_again
        losses = router.config.losses
        if not losses.balance or losses.per == "global":
            continue
        for part in parts:
            rows = part.rows if losses.per == "sequence" else 1
            for axis in ["tp"] * held.sequence if losses.per == "sequence" else _token_axes(held):
                size = rows * router.config.experts * 8
                ledger.add(axis, "all_reduce", size, "tokens per expert, forward")
                ledger.add(axis, "all_reduce", size, "tokens per expert, recompute", int(again))
    if not routers:
        return
    widest = max(router.config.experts for _, router in routers)
    kinds = {kind for _, router in routers for kind in ("balance", "z") if getattr(router.config.losses, kind)}
    for axis in _token_axes(held):
        ledger.add(axis, "all_reduce", len(routers) * widest * 8, "tokens per expert of the step")
        ledger.add(axis, "all_reduce", len(kinds) * 8, "auxiliary losses")


def expert_notes(held: Held, policy: ExpertPolicy) -> list[str]:
    """How the experts are computed, and that their messages depend on the routing."""
    first: Any = held.model.get_submodule(next(iter(held.experts)))
    notes = [f"experts: {first.kernel_text(held.compute)}"] if hasattr(first, "kernel_text") else []
    if held.spec.ep * held.spec.etp > 1:
        notes.append("experts: what is sent on ep and etp is what it would be if tokens chose all experts alike")
    around = {name.rpartition(".")[0] for name, _ in _routers(held)}
    if any(name.rpartition(".")[0] not in around for name in held.experts if held.runs(name)):
        notes.append("experts: no router is known beside some of them, which are counted as if a token chose one")
    if policy.hot:
        notes.append(f"experts: {policy.hot} of each layer are copied to all ranks of ep, which is not counted above")
    if policy.capacity is not None:
        notes.append(
            f"experts: more than {policy.capacity.factor} of the even share is dropped, which is not counted above"
        )
    return notes


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
            ledger.add("pp", "send", row.rank_bytes, "gradients of tied parameters, backward")
    ledger.add("pp", "all_reduce", 8, "loss")
    ledger.add("pp", "all_reduce", 8, "gradient norm")


def add_scalars(ledger: Ledger, held: Held) -> None:
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


def _axes(held: Held, name: str, param: Local) -> set[str]:
    """The axes that split the parameter."""
    axis, shards, _ = held.sharded_over(name)
    axes = {axis} if shards > 1 else set()
    if param.expert:
        return axes | set(param.dims)
    return axes | ({"tp"} if param.shape != param.whole else set())
