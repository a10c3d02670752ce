"""Tracing operations (a FLOP counter with owners): every operator of a step with its module, phase, shapes, FLOPs and bytes.

Works on fake tensors. The phase of an operator is told by where it runs: in a forward, in a forward inside of a backward
(recompute), or in a backward, where a matrix product of two activations is the gradient of a weight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils.flop_counter import flop_registry

from meshkit.cluster import Op
from meshkit.core import _torch
from meshkit.core._torch import TorchDispatchMode, tree_leaves
from meshkit.core.custom_op import watching_bodies
from meshkit.preflight._collectives import SPACES
from meshkit.preflight.forecast._profile import Profile

# Operators that launch nothing: they make memory, or read what the host knows.
_LAUNCH_NOTHING = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias"),
    "_unsafe_view",
    *("lift_fresh", "set_", "resize_", "record_stream", "_local_scalar_dense", "scalar_tensor"),
)


@dataclass(frozen=True)
class _Ran:
    """One operator as it ran: whose it is, and the tensors that it read and wrote, each as (number, bytes)."""

    owner: str
    op: Op
    read: tuple[tuple[int, int], ...]
    wrote: tuple[tuple[int, int], ...]


class OpTrace:
    """A context that records the operators of `model`'s steps.

    owners: modules to which operators are counted, the outermost of those that run; the rest belongs to "". fused: what
    torch.compile makes of the operators between matrix products inside of these: one kernel.
    """

    def __init__(self, model: nn.Module, owners: Collection[str], *, fused: Collection[str] = ()) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._owners, self._fused = frozenset(owners), frozenset(fused)
        self._stack: list[str] = []
        self._backward_of = ""
        self._skipping = 0
        self._ran: list[_Ran] = []
        self._numbers: dict[int, int] = {}  # storage -> number of the tensor that lies there
        self._storages: list[UntypedStorage] = []  # of those; kept, so that nothing else comes to lie there
        self._count = 0
        self._active = ExitStack()
        self.called: list[str] = []

    def __enter__(self) -> OpTrace:
        with ExitStack() as stack:
            for hook in (
                nn.modules.module.register_module_forward_pre_hook(self._enter_module),
                nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
            ):
                stack.callback(hook.remove)
            # What FSDP copies when it gathers and reduces is priced with its messages.
            stack.enter_context(_torch.around_fsdp(self._skipped, self._skipped, lambda grads: None))
            stack.enter_context(_Mode(self))
            self._active = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._active.close()

    def profiles(self) -> dict[str, Profile]:
        """By owner."""
        ops: defaultdict[str, list[Op]] = defaultdict(list)
        launches: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for owner, op in _fuse(self._ran, self._fused):
            ops[owner].append(op)
            launches[owner][op.phase] += 1
        return {owner: Profile.of(each, launches[owner]) for owner, each in ops.items()}

    # ---------------------------------------------------------------------------------------------------- modules

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name not in self._owners:
            return
        assert name is not None
        self._stack.append(name)
        if not _torch.in_backward():
            self.called.append(name)
            for value in tree_leaves(args):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(lambda grad: self._end_backward(name))
                    break

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        name = self._names.get(id(module))
        if name not in self._owners or not self._stack:
            return
        assert name is not None
        self._stack.pop()
        if _torch.in_backward():
            return
        for value in tree_leaves(out):
            # A hook on the output: backward of the module begins when its gradient arrives.
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda grad: self._begin_backward(name))
                break

    def _begin_backward(self, name: str) -> None:
        self._backward_of = name

    def _end_backward(self, name: str) -> None:
        # The gradient of a module's input is also that of the output of the one before, whose hook may have come first.
        if self._backward_of == name:
            self._backward_of = ""

    @contextmanager
    def _skipped(self) -> Iterator[None]:
        self._skipping += 1
        try:
            yield
        finally:
            self._skipping -= 1

    # -------------------------------------------------------------------------------------------------- operators

    def saw(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        space, _, name = func.name().partition(".")[0].partition("::")
        if self._skipping:
            return
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        read = tuple((self._number(tensor), _bytes(tensor)) for tensor in inputs)
        numbers = {number for number, _ in read}
        wrote = tuple((self._made(tensor, numbers), _bytes(tensor)) for tensor in outputs)
        if space in (*SPACES, "prim") or func.is_view or name in _LAUNCH_NOTHING:
            return
        in_backward = _torch.in_backward()
        owner = self._stack[0] if self._stack else self._backward_of if in_backward else ""
        # A forward that backward runs again makes a graph of its own, which a backward does not.
        phase = "forward" if not in_backward else "recompute" if torch.is_grad_enabled() else "backward"
        # A matrix product of which neither factor is a parameter; where rows of experts begin is no factor.
        activations = all(self._number(tensor) >= 0 for tensor in inputs if tensor.is_floating_point())
        op = _op_of(func, name, args, kwargs, out, inputs, outputs, phase)
        if op.kind == "matmul" and phase == "backward" and activations and "bmm" not in name:
            op = replace(op, phase="weight")
        self._ran.append(_Ran(owner, op, read, wrote))

    def _number(self, tensor: Tensor) -> int:
        """Of what an operator made it is 0 or more; of parameters and inputs it is below."""
        key = _torch.storage_key(tensor)
        return self._numbers.get(key, -1 - key)

    def _made(self, tensor: Tensor, read: set[int]) -> int:
        """The number of an operator's result: a new one, unless the result lies where an input does."""
        number = self._number(tensor)
        if number in read:
            return number
        self._count += 1
        self._numbers[_torch.storage_key(tensor)] = self._count
        self._storages.append(tensor.untyped_storage())
        return self._count


class _Mode(TorchDispatchMode):
    def __init__(self, trace: OpTrace) -> None:
        super().__init__()
        self.trace = trace

    @watching_bodies
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_torch.wraps_tensors(kind) for kind in types):
            return NotImplemented  # a tensor made of tensors: those inside are seen when it gets to them
        out = func(*args, **(kwargs or {}))
        self.trace.saw(func, args, kwargs or {}, out)
        return out


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# What an operator computes


def _op_of(
    func: Any, name: str, args: Any, kwargs: Any, out: Any, inputs: list[Tensor], outputs: list[Tensor], phase: str
) -> Op:
    size = float(sum(map(_bytes, inputs)) + sum(map(_bytes, outputs)))
    if "attention" in name and (shape := _attention(func, name, args, kwargs, phase)) is not None:
        dtype, flops, work, queries, keys, head, batch = shape
        return Op("attention", dtype, flops, work, queries, keys, head, batch, size, phase)
    if name == "_grouped_mm":
        return _grouped(inputs[0], inputs[1], outputs[0], size, phase)
    counted = flop_registry.get(func.overloadpacket)
    if counted is None:
        return Op("memory", "", 0.0, 0.0, 0, 0, 0, 1, size, phase)
    flops = float(counted(*args, **kwargs, out_val=out))
    rows, columns = outputs[0].shape[-2:] if outputs[0].ndim >= 2 else (1, outputs[0].numel())
    batch = prod(outputs[0].shape[:-2])
    depth = round(flops / (2 * rows * columns * batch)) if rows * columns * batch else 0
    # A bias comes before the factors, and scales of an fp8 product's rows after them.
    sizes = (rows * depth, depth * columns)
    factors = [tensor for tensor in inputs if tensor.ndim >= 2 and tensor.shape[-2] * tensor.shape[-1] in sizes]
    dtype = str((factors or inputs)[-1].dtype).removeprefix("torch.")
    return Op("matmul", dtype, flops, flops, rows, columns, depth, batch, size, phase)


def _grouped(one: Tensor, other: Tensor, out: Tensor, size: float, phase: str) -> Op:
    """Products of all experts in one kernel: rows [M, K] with weights [E, K, N], or, of gradients of weights, over rows."""
    dtype = str(one.dtype).removeprefix("torch.")
    flops = 2.0 * one.shape[0] * one.shape[1] * other.shape[-1]
    if out.ndim == 3:
        experts, rows, columns = out.shape
        return Op("matmul", dtype, flops, flops, rows, columns, one.shape[1] // experts, experts, size, phase)
    experts, depth, columns = other.shape
    return Op("matmul", dtype, flops, flops, one.shape[0] // experts, columns, depth, experts, size, phase)


def _attention(func: Any, name: str, args: Any, kwargs: Any, phase: str) -> tuple[Any, ...] | None:
    """(dtype, FLOPs, those executed, queries, keys, features of a head, heads of all rows) of fused attention."""
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    query, key, value = (given.get(each) for each in ("query", "key", "value"))
    if not all(isinstance(each, Tensor) and each.ndim == 4 for each in (query, key, value)):
        return None
    rows, heads, queries, width = query.shape
    keys, value_width = key.shape[-2], value.shape[-1]
    batch = rows * heads
    product = 2.0 * batch * queries * keys
    forward = product * (width + value_width)
    # Backward of papers is twice the forward; the kernel multiplies queries and keys once more: Dao 2023, section 3.1.
    flops = forward if phase != "backward" else 2 * forward
    work = forward if phase != "backward" else 2 * forward + product * width
    if given.get("is_causal"):
        work *= (keys - queries + (queries + 1) / 2) / keys
    return str(query.dtype).removeprefix("torch."), flops, work, queries, keys, width, batch


# What a compiler fuses


def _fuse(ran: list[_Ran], fused: Collection[str]) -> Iterator[tuple[str, Op]]:
    """(owner, operator) of what ran. Operators of the memory in a row, of one owner and phase, become one where it is fused.

    A fused kernel reads what comes from outside of it, and writes what something after it reads.
    """
    last_read: dict[int, int] = {}
    for index, each in enumerate(ran):
        for number, _ in each.read:
            last_read[number] = index
    group: list[int] = []
    for index, each in enumerate(ran):
        fusible = each.op.kind == "memory" and each.owner in fused
        if group and not (fusible and (ran[group[0]].owner, ran[group[0]].op.phase) == (each.owner, each.op.phase)):
            yield _merged(ran, group, last_read)
            group = []
        if fusible:
            group.append(index)
        else:
            yield each.owner, each.op
    if group:
        yield _merged(ran, group, last_read)


def _merged(ran: list[_Ran], group: list[int], last_read: Mapping[int, int]) -> tuple[str, Op]:
    wrote: dict[int, int] = {}
    read: dict[int, int] = {}
    for index in group:
        read |= {number: size for number, size in ran[index].read if number not in wrote}
        wrote |= dict(ran[index].wrote)
    written = sum(size for number, size in wrote.items() if last_read.get(number, len(ran)) > group[-1])
    first = ran[group[0]]
    return first.owner, replace(first.op, bytes=float(sum(read.values()) + written))
