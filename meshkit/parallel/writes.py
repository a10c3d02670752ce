"""What a model does to its parameters beside computing: writes in forward, shared memory, stand-ins, backwards of its own.

On a mesh a parameter is a part of itself in memory of its own, gathered for a forward and freed: neither would be seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.errors import PlanError
from meshkit.program import Operation, Rewritten, TensorRef, Trace, tensors

# Done again they change nothing.
_ONCE = (
    "aten.clamp_.",
    "aten.clamp_min_.",
    "aten.clamp_max_.",
    "aten.embedding_renorm_.",
    "aten.fill_.",
    "aten.zero_.",
)


def refuse_writes(read: Trace, model: nn.Module, *, gathered: bool = True) -> None:
    """Raises: PlanError for a forward that changes a parameter's values, and for gradients that are sparse or divided by how
    often a batch has a token.

    gathered: whether it runs on gathered or split parameters; else in several microbatches alone."""
    kind = type(model).__name__
    for operation in read.operations:
        for source in _written(operation, read):
            if gathered:
                raise Rewritten(model, f"writes into its {source} in forward ({operation})")
            if not operation.name.startswith(_ONCE):
                raise PlanError(
                    f"{kind} writes into its {source} in forward ({operation}), which each microbatch does again, and a "
                    "single device once in a step. Do it after the optimizer's step, or use microbatches=1."
                )
        if operation.name == "aten.embedding.default":
            frequent, sparse = (*operation.args[3:], False, False)[:2]
            if frequent or sparse:
                option = "scale_grad_by_freq" if frequent else "sparse"
                raise PlanError(
                    f"{kind} looks tokens up with {option}=True ({operation}), whose gradient is "
                    + ("of the rows of one rank, not of the batch. " if frequent else "no dense tensor. ")
                    + f"Use {option}=False."
                )


def refuse_backwards(read: Trace, model: nn.Module, units: Collection[str], *, staged: bool = False) -> None:
    """Raises: PlanError for a forward that runs a backward through what FSDP units return, or stages.

    units: FSDP units, the blocks among them. staged: on pp; a backward inside of one block is right there too.
    """
    for name, where in read.differentiated.items():
        inside = any(name.startswith(f"{unit}.") for unit in units)
        if name in units or (staged and not inside):
            raise PlanError(
                f"{type(model).__name__} at {where}: its forward runs a backward of its own (torch.autograd.grad) through "
                f"{name!r}, as for forces of an energy. On dp and cp FSDP would free parameters and reduce gradients in the "
                "middle of the forward, and on pp the rest of the graph is on other ranks. Use a mesh of tp alone, or run "
                "that backward inside of one block."
            )


def refuse_swapped(read: Trace, model: nn.Module, units: Collection[str]) -> None:
    """Raises: PlanError for an FSDP unit that the forward calls with other tensors in place of its parameters."""
    for call in read.calls:
        if call.swapped is not None and call.name in units:
            raise swapped(type(model).__name__, call.swapped)


def swapped(kind: str, name: str) -> PlanError:
    """Of a call of an FSDP unit with another tensor in place of a parameter."""
    return PlanError(
        f"{kind} is called with another tensor in place of its parameter {name!r} (torch.func.functional_call, or an "
        "assignment), which FSDP would overwrite with the parameter that it gathers. Call functional_call on a module inside "
        "of a block, in the block's own forward, or compute with the tensor itself (F.linear(x, weight)); to change the "
        "parameter, param.copy_(value) under torch.no_grad."
    )


def _written(operation: Operation, read: Trace) -> Iterator[str]:
    """Parameters that an operation changes in place."""
    if isinstance(operation.op, str) or not operation.op._schema.is_mutable:
        return
    for argument, value in zip(operation.op._schema.arguments, operation.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for ref in tensors([value] if isinstance(value, TensorRef) else value):
                source = read.storages[ref.storage].source
                if source.startswith("parameter "):
                    yield source.replace(" ", " '") + "'"


def refuse_shared_memory(model: nn.Module) -> None:
    """Raises: PlanError for a parameter whose memory another parameter, a buffer or an attribute has a part in.

    One parameter under two names is tied, and stays so; that is not meant.
    """
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, param in model.named_parameters():
        _add(spans, f"parameter {name!r}", param)
    others = [(f"buffer {name!r}", buffer) for name, buffer in model.named_buffers()]
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                leaves = _torch.tree_leaves(value) if isinstance(value, list | tuple | dict) else [value]
                others += [(f"{prefix}.{key}".lstrip("."), leaf) for leaf in leaves]
    for name, value in others:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            _add(spans, name, value, keep=False)


def _add(spans: dict[int, list[tuple[int, int, str]]], name: str, tensor: Any, *, keep: bool = True) -> None:
    if type(tensor.data) is not Tensor or tensor.is_meta or not tensor.numel() or tensor.is_sparse:
        return
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, last = first * tensor.itemsize, (last + 1) * tensor.itemsize
    there = spans.setdefault(_torch.storage_key(tensor), [])
    for begin, end, other in there:
        if first < end and begin < last:
            raise PlanError(
                f"parallelize: {other} and {name} share memory, and on a mesh each would have its own, so that what changes "
                "one no longer changes the other. Tie parameters as one (a.weight = b.weight), compute views in forward, or "
                "copy (.clone())."
            )
    if keep:
        there.append((first, last, name))
