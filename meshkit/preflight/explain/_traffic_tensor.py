"""Communication volume of tensor and sequence parallelism in one microbatch."""

from __future__ import annotations

import torch
from torch import nn

from meshkit.loss.linear_logits import head_of
from meshkit.memory import part_sizes
from meshkit.parallel.tensor.layout import Call, TensorLayout, readers
from meshkit.preflight.explain._explanation import TrafficLog
from meshkit.preflight.explain._rank import LocalBatch, RankModel
from meshkit.preflight.explain._traffic_experts import overlaps


def add_tensor(log: TrafficLog, rank_model: RankModel, layout: TensorLayout, batch: LocalBatch) -> None:
    """Collectives on `tp` in the forward, recompute and backward of one microbatch."""
    tokens = batch.rows * batch.tokens
    for call in layout.calls:
        if not rank_model.runs(call.module):
            continue
        size = tokens * call.width * rank_model.compute.itemsize
        forward, backward = _call_ops(call, layout.sequence and not call.whole)
        backward = backward if _goes_back(rank_model, call) else []
        # Selective recompute keeps what cost a message; full recompute repeats all but those after its last saved tensor.
        again = not rank_model.treatment(call.module).recompute.keeps("collective") and _repeated(
            call, layout, rank_model
        )
        if _is_in_chunked_mlp(rank_model, call.module):
            _add_chunked_mlp(log, rank_model, call, batch, forward, backward)
            continue
        for op in forward:
            log.add("tp", op, size, "activations, forward", 1, module=call.module)
            log.add("tp", op, size, "activations, recompute", int(again), module=call.module)
        for op in backward:
            log.add("tp", op, size, "activations, backward", 1, module=call.module)
        if (
            call.kind == "enter"
            and layout.sequence
            and not call.whole
            and not again
            and _gathered_again(rank_model, layout, call)
        ):
            log.add("tp", "all_gather", size, "activations gathered again, backward", module=call.module)
    # A whole parameter that computes on a part of the tokens or heads (a norm, a bias, key/value heads that all ranks
    # have) has a part of its gradient on each rank. It is summed in each backward, so chunks of a feed-forward take one each.
    chunks = len(_chunk_tokens(rank_model, batch))
    for name, param in rank_model.params.items():
        if not param.expert and layout.params[name].gradient == "sum" and param.trains:
            size, in_chunks = param.numel * rank_model.compute.itemsize, _is_in_chunked_mlp(rank_model, name)
            log.add(
                "tp",
                "all_reduce",
                size,
                "gradients of whole parameters, backward",
                chunks if in_chunks else 1,
                module=name,
            )
    modules = dict(rank_model.model.named_modules())
    heads = [name for name, style in layout.styles.items() if style.kind == "vocab" and rank_model.runs(name)]
    if any(isinstance(modules[name], nn.Linear) for name in heads):
        # Cross-entropy over a split vocabulary needs of each token the largest logit, then the sum of exponentials and the
        # label's logit, in fp32 at least; backward needs nothing more. Source: Shoeybi et al. 2019, section 3.
        width = 8 if rank_model.compute == torch.float64 else 4
        size = tokens if rank_model.memory.loss is None else rank_model.memory.loss.tokens
        for start in range(0, tokens, size):
            chunk = min(size, tokens - start)
            log.add("tp", "all_reduce", chunk * width, "loss: maximum, forward", module=heads[0])
            log.add("tp", "all_reduce", 2 * chunk * width, "loss: sums, forward", module=heads[0])


def _is_in_chunked_mlp(rank_model: RankModel, name: str) -> bool:
    return any(_is_in(name, mlp) for mlp in rank_model.chunked_mlps)


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _chunk_tokens(rank_model: RankModel, batch: LocalBatch) -> list[int]:
    """Tokens of a row in each chunk of a feed-forward, those of all ranks of tp together."""
    ranks = rank_model.spec.tp if rank_model.sequence else 1
    return [tokens * ranks for tokens in part_sizes(batch.tokens // ranks, rank_model.memory.mlp_chunks)]


def _add_chunked_mlp(
    log: TrafficLog, rank_model: RankModel, call: Call, batch: LocalBatch, forward: list[str], backward: list[str]
) -> None:
    """A call inside of a feed-forward in chunks: backward runs each chunk again, up to the sum that it ends with."""
    full = rank_model.treatment(call.module).recompute.mode == "full"
    chunk_again = rank_model.flow.leaves(next(mlp for mlp in rank_model.chunked_mlps if _is_in(call.module, mlp)))
    sizes = [
        batch.rows * tokens * call.width * rank_model.compute.itemsize for tokens in _chunk_tokens(rank_model, batch)
    ]
    # Shared experts run during the all-to-all, so the tensors that the routed ones save come after theirs.
    followed = any(
        overlaps(rank_model, name) and _is_in(call.module, name.rpartition(".")[0]) for name in rank_model.experts
    )
    for index, size in enumerate(sizes):
        # Recompute of a block stops at the last tensor that it saved: the input of the last chunk.
        block_again = full and (followed or index < len(sizes) - 1)
        for op in forward:
            log.add("tp", op, size, "activations, forward", 1, module=call.module)
            log.add(
                "tp",
                op,
                size,
                "activations, recompute",
                block_again + (chunk_again and call.kind != "leave"),
                module=call.module,
            )
        for op in backward:
            log.add("tp", op, size, "activations, backward", 1, module=call.module)


def _call_ops(call: Call, sequence: bool) -> tuple[list[str], list[str]]:
    """The collectives of one call in (forward, backward)."""
    # The conjugate pairs f and g of Shoeybi et al. 2019, figure 3: what is copied in forward is summed in backward, and what
    # is summed is copied. With sequence parallelism an all-reduce becomes its two halves, in two places, with the same
    # bytes: Korthikanti et al. 2022, section 4.2.2.
    if call.kind == "enter":
        return (["all_gather"], ["reduce_scatter"]) if sequence else ([], ["all_reduce"])
    if call.kind == "leave":
        return (["reduce_scatter"], ["all_gather"]) if sequence else (["all_reduce"], [])
    if call.kind == "gather":
        return ["all_gather"], []
    if call.kind == "leave_whole":
        return ["all_reduce"], []
    if call.kind in ("split", "split_after"):
        return [], ["all_gather"]
    if call.kind == "join_features":
        return ["all_gather"], []
    if call.kind == "gather_features":
        return ["all_gather"], ["reduce_scatter"]
    return ["all_gather"], ["all_gather"]  # gather_split: the input forward, the output's gradient backward


def _goes_back(rank_model: RankModel, call: Call) -> bool:
    """Whether the call sends a gradient in backward."""
    if call.kind in ("enter", "split"):
        return rank_model.flow.enters(call.module)
    return rank_model.flow.leaves(call.module)


def _gathered_again(rank_model: RankModel, layout: TensorLayout, call: Call) -> bool:
    """Whether backward gathers an input that was kept sharded. Frozen weights do not need it, nor does the head of a chunked
    loss, which has computed its gradients in forward.
    """
    treatment = rank_model.treatment(call.module)
    modules = dict(rank_model.model.get_submodule(call.module).named_modules(prefix=call.module))
    names = readers(modules, layout, call)
    if rank_model.memory.loss is not None and head_of(rank_model.model, rank_model.plan) in names:
        return False
    trains = any(modules[name].weight.requires_grad for name in names)
    return treatment.regather and (trains or treatment.recompute.mode == "selective")


def _repeated(call: Call, layout: TensorLayout, rank_model: RankModel) -> bool:
    """Whether full recompute runs this call again. It stops at the last saved tensor, so the last call of a block is not."""
    block = next((block for block in rank_model.blocks if call.module.startswith(f"{block}.")), None)
    if block is None:
        return False
    leaves = [other for other in layout.calls if other.kind == "leave" and other.module.startswith(f"{block}.")]
    if not leaves or call is not leaves[-1]:
        return True
    experts = [name for name in rank_model.experts if name.startswith(f"{block}.")]
    # Do experts come after it?
    return any(
        overlaps(rank_model, name) or not call.module.startswith(f"{name.rpartition('.')[0]}.") for name in experts
    )
