"""What one microbatch sends on the tensor axis."""

from __future__ import annotations

import torch
from torch import nn

from meshkit.loss.linear_logits import head_of
from meshkit.memory import part_sizes
from meshkit.parallel.tensor.layout import Call, TensorLayout, readers
from meshkit.preflight.explain._explanation import TrafficLog
from meshkit.preflight.explain._rank import Part, RankModel
from meshkit.preflight.explain._traffic_experts import overlaps


def add_tensor(ledger: TrafficLog, held: RankModel, layout: TensorLayout, part: Part) -> None:
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


def _is_tiled(held: RankModel, name: str) -> bool:
    return any(_is_in(name, mlp) for mlp in held.tiled)


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _tile_tokens(held: RankModel, part: Part) -> list[int]:
    """Tokens of a row in each part of a feed-forward, those of all ranks of tp together."""
    ranks = held.spec.tp if held.sequence else 1
    return [own * ranks for own in part_sizes(part.tokens // ranks, held.memory.mlp_chunks)]


def _add_tiles(
    ledger: TrafficLog, held: RankModel, call: Call, part: Part, forward: list[str], backward: list[str]
) -> None:
    """A call inside of a feed-forward in parts: each runs again in backward, up to the sum that it ends with."""
    full = held.treatment(call.module).recompute.mode == "full"
    part_again = held.flow.leaves(next(mlp for mlp in held.tiled if _is_in(call.module, mlp)))
    sizes = [part.rows * tokens * call.width * held.compute.itemsize for tokens in _tile_tokens(held, part)]
    # Shared experts run while rows travel, so what the routed ones save comes after.
    followed = any(overlaps(held, name) and _is_in(call.module, name.rpartition(".")[0]) for name in held.experts)
    for index, size in enumerate(sizes):
        # A block that runs again stops at the last that it saved: the input of the last part.
        block_again = full and (followed or index < len(sizes) - 1)
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


def _goes_back(held: RankModel, call: Call) -> bool:
    """Is there a gradient for what the call sends in backward?"""
    if call.kind in ("enter", "split"):
        return held.flow.enters(call.module)
    return held.flow.leaves(call.module)


def _gathered_again(held: RankModel, layout: TensorLayout, call: Call) -> bool:
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


def _repeated(call: Call, layout: TensorLayout, held: RankModel) -> bool:
    """Does full recompute run this call again? Recompute stops at the last saved tensor, so not what a block ends with."""
    block = next((block for block in held.blocks if call.module.startswith(f"{block}.")), None)
    if block is None:
        return False
    leaves = [other for other in layout.calls if other.kind == "leave" and other.module.startswith(f"{block}.")]
    if not leaves or call is not leaves[-1]:
        return True
    experts = [name for name in held.experts if name.startswith(f"{block}.")]
    # Do experts come after it?
    return any(overlaps(held, name) or not call.module.startswith(f"{name.rpartition('.')[0]}.") for name in experts)
