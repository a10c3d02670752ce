"""The records of a trace: operators, tensors, memory, calls of modules. Data without PyTorch's dispatch.

What is recorded of a tensor is its storage and how it looks at it: that says by itself which tensors share memory, and what a
write changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.errors import PlanError

OF_OUTPUT = "the output's "  # so begin the names of what objects that are returned hold, see `Trace.kept`


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of the program, without values. storage: a number of `Trace.storages`; the rest as in torch.as_strided.

    requires_grad: of inputs. Operators are seen below autograd, which marks their outputs afterwards.
    """

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"t{self.storage}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that tensors share. source: "parameter NAME", "buffer NAME", "input NAME", "constant" or "op N", which made it.

    size: in elements. value: of a constant, which the model's code made outside of the forward; flat.
    """

    source: str
    size: int
    shape: tuple[int, ...]
    value: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator. args, kwargs and outputs have a `TensorRef` for each tensor.

    call: number of the module call that runs it. where: FILE:LINE of the model's code. grad_mode: whether autograd recorded.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Any
    call: int
    where: str
    grad_mode: bool

    @property
    def name(self) -> str:
        return str(self.op)

    @property
    def operator(self) -> str:
        """Its name without that of the overload."""
        return self.op if isinstance(self.op, str) else str(self.op.overloadpacket.__name__)

    @property
    def trains(self) -> bool:
        """Whether gradients flow through it, from outputs to inputs."""
        floats = any(ref.dtype.is_floating_point or ref.dtype.is_complex for ref in tensors(self.outputs))
        return self.grad_mode and floats and any(ref.requires_grad for ref in tensors((self.args, self.kwargs)))

    def __str__(self) -> str:
        return f"{self.name} at {self.where}"


@dataclass(slots=True)
class ModuleCall:
    """One call of a module. name: "" for the model. parent: number of the call around it, -1 for none.

    operations: [first, last) of what runs inside. swapped: a parameter of the module in whose place another tensor is, as in
    torch.func.functional_call.
    """

    name: str
    parent: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any = None
    operations: tuple[int, int] = (0, 0)
    swapped: str | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    operations: tuple[Operation, ...]
    calls: tuple[ModuleCall, ...]
    storages: tuple[Storage, ...]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    result: Any = None
    """the logits, where the output has such, else all of it: what a loss reads"""
    kept: Mapping[str, TensorRef] = field(default_factory=dict)
    """tensors with gradients that a loss may read beside the output: what modules keep of this call, and objects have"""
    assigned: Mapping[str, int] = field(default_factory=dict)
    """buffers that are another tensor after the call -> its storage"""
    asked: bool = False
    """whether it asked for a value, was told that there is none, and went on (`except Exception`)"""
    differentiated: Mapping[str, str] = field(default_factory=dict)
    """modules through whose output the forward itself runs a backward (torch.autograd.grad) -> FILE:LINE of that"""

    @property
    def output(self) -> Any:
        return self.calls[0].output

    def __str__(self) -> str:
        lines, depth = [], {-1: -1}
        starts: dict[int, list[int]] = {}
        for number, call in enumerate(self.calls):
            depth[number] = depth[call.parent] + 1
            starts.setdefault(call.operations[0], []).append(number)
        for index, operation in enumerate(self.operations):
            for number in starts.get(index, ()):
                lines.append(f"{'  ' * depth[number]}{self.calls[number].name or '(the model)'}")
            shown = ", ".join(str(value) for value in operation.args)
            step = f"{_text(operation.outputs)} = {operation.name}({shown})"
            lines.append(f"{'  ' * (depth[operation.call] + 1)}{step}  {operation.where}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Fold:
    """Blocks that need not be read. kept: those that are; what each returns is noted as an operation, RETURNED. left_out:
    others -> the kept one, called before, whose output they return. counted: some have the number of the block in them."""

    kept: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    counted: bool = False


RETURNED = "returned"


def tensors(tree: Any) -> list[TensorRef]:
    """The tensors of a tree of arguments, in order."""
    return [leaf for leaf in _torch.tree_leaves(tree) if isinstance(leaf, TensorRef)]


def _text(tree: Any) -> str:
    return ", ".join(map(str, tensors(tree))) or str(tree)


class Unreadable(PlanError):
    """What the forward does cannot be followed."""


class Draws(Unreadable):
    """It draws random numbers of Python's or numpy's."""


class OnlyAlone(PlanError):
    """What the forward does was followed, and is not the same on a mesh."""


class ClassRead(OnlyAlone):
    """What runs depends on the class of a module."""

    def __init__(self, model: str, where: str) -> None:
        super().__init__(
            f"{model}: what runs at {where} depends on the exact class of a module (type(module) is ..., module.__class__), "
            "which on a mesh is a subclass of the same name. Use isinstance(module, ...)."
        )


class Rewritten(OnlyAlone):
    """The forward changes a parameter, which would be lost."""

    def __init__(self, model: nn.Module, what: str) -> None:
        super().__init__(
            f"{type(model).__name__} {what}, which would be lost: on a mesh a forward runs on parts or on gathered copies of "
            "parameters. Do it after the optimizer's step, or compute what is read from the parameter "
            "(torch.nn.utils.parametrize)."
        )


class ReadingError(PlanError):
    """The forward raised. module: the innermost one."""

    def __init__(self, module: str, where: str, error: Exception) -> None:
        said = FUNCTIONAL if is_functional(error) else f"{type(error).__name__}: {error}"
        super().__init__(f"{module or 'the model'} at {where}: {said}")
        self.module = module


FUNCTIONAL = (
    "torch.func.grad and its kin (vjp, jacrev, hessian) let nobody look at what backward saves, so a forward with them is "
    "not read, nor run under recompute or offload. Write torch.autograd.grad(..., create_graph=True), or use dp axes only, "
    "without recompute and offload."
)


def is_functional(error: BaseException) -> bool:
    """Whether torch.func raised since tensors are saved otherwise."""
    return "yet support saved tensor hooks" in str(error)


CLOSED, CLOSED_BY_VALUE = "closed", "closed by a value"
