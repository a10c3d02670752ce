"""What a model's own code does with all tokens in a line of its own, and what a rank runs there: positions that it counts
(torch.arange), the number of tokens as a factor, sums and means over the tokens, attention by hand, and what reads some
tokens for others.

The lines are found in the single-device model's program, read on two numbers of tokens: what differs there is the number of
tokens. That a rank computes the same with them is proved as everything else is; a line that is not only about the tokens is
left as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from meshkit.core.collectives import all_reduce
from meshkit.core.noting import noted
from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError
from meshkit.parallel.context._by_hand import (
    CONSTANTS,
    OWN_POSITIONS,
    PAIRS,
    PRODUCTS,
    TRIANGLES,
    constant,
    cut,
    is_of_pairs,
    is_product,
    multiply,
    multiply_and_add,
    own_positions,
    triangle,
)
from meshkit.parallel.context._foreign import mask_of_forward
from meshkit.parallel.context._moved import ALONG, CUT, JOIN, MOVING, Moved, move, moved
from meshkit.parallel.context._read_attention import ReadMask
from meshkit.parallel.context._split_mask import SplitMask
from meshkit.parallel.context._whole import is_split, refuse_end_to_end
from meshkit.program import Operation, TensorRef, Trace, Unproved, model_line, tensors

SUM_TOKENS = "sum_tokens"


Call = tuple[str, str]  # operator, FILE:LINE
KEYS: Final = "keys"
Line = Moved | Literal["keys"] | None


@dataclass(frozen=True)
class Counted:
    """Lines of a module's code that are about all tokens. calls: what it does along the tokens, for one that moves them; KEYS
    for one that a rank runs as it is, since it is of the keys, which it has of all tokens."""

    module: str
    calls: Mapping[Call, Line]

    @property
    def by_hand(self) -> bool:
        """Whether it attends by products of its own."""
        return any(operator in PRODUCTS for operator, _ in self.calls)

    def without(self, *operators: str) -> Counted:
        return Counted(self.module, {call: line for call, line in self.calls.items() if call[0] not in operators})

    def without_tables(self) -> Counted:
        """Without cuts of what is as long whatever a row is."""
        return Counted(self.module, {call: line for call, line in self.calls.items() if not _is_of_a_table(line)})

    def open(self, model: nn.Module) -> None:
        module = model.get_submodule(self.module)
        patch_class(module, forward=_of_all_tokens(type(module).forward, tuple(sorted(self.calls.items()))))


def counted_in(full: Trace, wider: Trace) -> dict[str, Counted]:
    """By module. full, wider: the single-device model's program on two numbers of tokens."""
    found, others = _calls_in(full, wider)
    # All or nothing of a line: which of its calls is meant could not be told when it runs.
    lines_of = {
        module: {call: line for call, line in calls.items() if call not in others} for module, calls in found.items()
    }
    return {module: Counted(module, calls) for module, calls in lines_of.items() if calls}


def crowded_in(full: Trace, wider: Trace) -> list[Call]:
    """Lines that would be of all tokens, but for another call of the same operator there. full, wider: as of `counted_in`."""
    found, others = _calls_in(full, wider)
    return sorted({call for calls in found.values() for call in calls} & others)


def _calls_in(full: Trace, wider: Trace) -> tuple[dict[str, dict[Call, Moved | None]], set[Call]]:
    """(by module, lines that are about all tokens; those of them that do something else too)."""
    found: dict[str, dict[Call, Moved | None]] = {}
    others: set[Call] = set()
    if len(full.operations) != len(wider.operations):
        return found, others
    tokens = _row_tokens(full), _row_tokens(wider)
    for a, b in zip(full.operations, wider.operations, strict=True):
        if isinstance(a.op, str) or a.name != b.name or a.where.startswith(_MASKS):
            continue
        name = a.op.overloadpacket.__name__
        if name not in _NAMES:
            continue
        call = name, a.where
        about = _of_tokens(name, a, b, tokens)
        if about is None:
            continue
        if about is False:
            others.add(call)
            continue
        lines, line = found.setdefault(full.calls[a.call].name, {}), about if isinstance(about, Moved) else None
        if call not in lines or line is None:  # of a mask a cut of its rows comes first
            lines[call] = line
        elif lines[call] not in (None, line):
            others.add(call)
    return found, others


def _row_tokens(trace: Trace) -> int:
    return next(int(ref.shape[1]) for ref in tensors(dict(trace.inputs)) if len(ref.shape) > 1)


def _of_tokens(name: str, a: Operation, b: Operation, tokens: tuple[int, int]) -> Moved | bool | None:
    """Whether an operator reads the number of tokens, or sums over them, or how it moves them; None for what does neither."""
    if name in MOVING:
        along = moved(name, a, b, tokens)
        if name != CUT or isinstance(along, Moved):
            return along
    if name == "arange":
        (first, after, step), (other_first, other_after, other_step) = _range(a), _range(b)
        whole = (after - first, other_after - other_first) == tokens
        return whole and first == other_first and step == other_step == 1
    if name in ("mul", "div"):
        numbers = a.args[1], b.args[1]
        return not any(isinstance(each, TensorRef) for each in numbers) and numbers == tokens
    if name in PRODUCTS:
        return is_product(a, b, tokens)
    if name in PAIRS:
        return is_of_pairs(name, a, b, tokens)
    refs, others = tensors(a.args), tensors(b.args)
    dims = a.args[1] if len(a.args) > 1 else None
    if not isinstance(dims, list) or len(dims) != 1 or not refs[0].dtype.is_floating_point or a.kwargs:
        return False
    return (refs[0].shape[dims[0]], others[0].shape[dims[0]]) == tokens


def _range(operation: Operation) -> tuple[Any, Any, Any]:
    given = operation.args
    return (0, given[0], 1) if len(given) == 1 else (given[0], given[1], given[2] if len(given) > 2 else 1)


def of_keys(counted: Mapping[str, Counted], rank: Trace, row_tokens: int) -> dict[str, Counted]:
    """With the lines marked that run on what a rank has of all tokens. rank: its program. Sizes tell it where the program is
    read, and only there: in a run a batch of some rows may have as many tokens on a rank as a row has.

    Raises: Unproved for a line that is of a rank's own tokens, too.
    """
    plain: set[Call] = set()
    own: set[Call] = set()
    for operation in rank.operations:
        if operation.name == OWN_POSITIONS:
            own.add(("arange", operation.where))
        elif operation.name == SUM_TOKENS:
            own.add(("mean" if operation.args[3] else "sum", operation.where))
        elif not isinstance(operation.op, str) and (name := operation.op.overloadpacket.__name__) in ("arange", *_SUMS):
            ref = (tensors(operation.outputs) if name == "arange" else tensors(operation.args))[0]
            dims = [0] if name == "arange" else operation.args[1] if len(operation.args) > 1 else []
            if isinstance(dims, list) and len(dims) == 1 and ref.shape and ref.shape[dims[0]] == row_tokens:
                plain.add((name, operation.where))
    found = {}
    for module, each in counted.items():
        lines: dict[Call, Line] = {
            call: KEYS if line is None and call in plain else line for call, line in each.calls.items()
        }
        for call in plain & own & lines.keys():
            raise Unproved("{} at {} is of a rank's own tokens at one time, and of all at another.".format(*call))
        found[module] = Counted(module, lines)
    return found


def _is_of_a_table(line: Line) -> bool:
    return isinstance(line, Moved) and set(line.before) == {None}


def positions_known(trace: Trace, own: tuple[int, ...]) -> dict[int, Tensor]:
    """By storage, the values of positions that are those of a rank's tokens."""
    found = {}
    for operation in trace.operations:
        if operation.name == OWN_POSITIONS:
            out = tensors(operation.outputs)[0]
            found[out.storage] = (torch.tensor(own) + operation.args[1]).to(out.dtype)
    return found


def notes_of_counted(counted: Mapping[str, Counted], ranks: int) -> list[str]:
    """Which lines are about all tokens: a line for each place in the code."""
    modules: dict[tuple[Call, str], list[str]] = {}
    for name, each in counted.items():
        for call in sorted(each.calls):
            line = each.calls[call]
            meaning = _MOVED if isinstance(line, Moved) else _OF_KEYS if line == KEYS else _MEANING[call[0]]
            modules.setdefault((call, meaning), []).append(name)
    return [
        f"cp={ranks}: {operator} at {where} in {names[0] or 'the model'}"
        f"{f' and {len(names) - 1} more' * (len(names) > 1)} is of all tokens: {meaning}"
        for ((operator, where), meaning), names in modules.items()
    ]


# ------------------------------------------------------------------------------------------------------------ running


def _of_all_tokens(forward: Callable[..., Any], calls: tuple[tuple[Call, Line], ...]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def with_all_tokens(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mask = mask_of_forward()
        if not is_split(mask):
            return forward(self, *args, **kwargs)
        # Nor does a function see the lines that somebody has compiled by itself.
        with torch.compiler.set_stance("force_eager"), _Lines(dict(calls), mask):
            return forward(self, *args, **kwargs)

    # A line is told by its frame: in a graph that somebody compiles around it, it would stay one of a rank's own tokens.
    disabled: Callable[..., Any] = torch.compiler.disable(with_all_tokens)
    return disabled


_busy: ContextVar[bool] = ContextVar("a line of all tokens is running", default=False)


class _Lines(TorchFunctionMode):
    """Inside, the lines do what they do of all tokens. A mode, as `Interception`: for this thread and forward only."""

    def __init__(self, calls: Mapping[Call, Line], mask: SplitMask | ReadMask) -> None:
        super().__init__()
        self.calls, self.mask = calls, mask

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = _OPERATORS.get(getattr(func, "__name__", ""))
        if operator is None or _busy.get() or (call := (operator, model_line())) not in self.calls:
            return func(*args, **kwargs)
        _refuse_checkpoint(operator)
        token = _busy.set(True)
        try:
            line = self.calls[call]
            if isinstance(line, Moved):
                return move(line, func, self.mask, *args, **kwargs)
            if line == KEYS:
                return _of_keys(operator, func, self.mask, *args, **kwargs)
            return _RUN[operator](func, self.mask, *args, **kwargs)
        finally:
            _busy.reset(token)


def _arange(func: Callable[..., Any], mask: Any, *args: Any, **kwargs: Any) -> Tensor:
    counted: Tensor = func(*args, **kwargs)
    if isinstance(mask, ReadMask) and counted.shape[0] == mask.row_tokens:  # of the keys: see `of_keys`
        return counted
    _refuse_other_size("arange", counted.shape[0], mask.tokens)
    first = args[0] if len(args) > 1 else kwargs.get("start", 0)
    positions: Tensor = own_positions(counted, first, mask)
    return positions


def _of_keys(operator: str, func: Callable[..., Any], mask: Any, *args: Any, **kwargs: Any) -> Any:
    """A range or a sum over what a rank has of all tokens."""
    found = func(*args, **kwargs)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    size = found.shape[0] if operator == "arange" else args[0].shape[dim[0] if isinstance(dim, (tuple, list)) else dim]
    _refuse_other_size(operator, size, mask.row_tokens)
    return found


def _factor(func: Callable[..., Any], mask: Any, x: Any, number: Any, **kwargs: Any) -> Any:
    if isinstance(x, Tensor) and not isinstance(number, Tensor):
        _refuse_other_size("a factor", number, mask.tokens)
        return func(x, mask.row_tokens, **kwargs)
    return func(x, number, **kwargs)


def _summed(mean: bool, func: Callable[..., Any], mask: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    dim = args[0] if args else kwargs.get("dim")
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    (only,) = dim if isinstance(dim, (tuple, list)) else (dim,)
    if isinstance(mask, ReadMask) and x.shape[only] == mask.row_tokens:  # of the keys: see `of_keys`
        of_columns: Tensor = func(x, *args, **kwargs)
        return of_columns
    _refuse_other_size("a sum", x.shape[only], mask.tokens)
    total: Tensor = sum_tokens(x, only, keepdim, mean, mask)
    return total


def _refuse_checkpoint(operator: str) -> None:
    """Raises: PlanError for a line that a checkpoint inside of the module's forward runs: in backward it runs again, without
    the forward around it, and would be one of a rank's own tokens."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "with_all_tokens":
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            raise PlanError(
                f"context parallelism: {operator} at {model_line()} is of all tokens, and runs in a checkpoint "
                "(torch.utils.checkpoint) inside of its module's forward, which would run it on a rank's own tokens in "
                "backward. Use MemoryPolicy(recompute=) in its place, or cp=1."
            )
        frame = frame.f_back  # type: ignore[assignment]


def _refuse_other_size(what: str, size: Any, tokens: int) -> None:
    if size != tokens:
        raise PlanError(
            f"context parallelism: {what} at {model_line()} was one of all tokens when the model was read, but is of {size} "
            f"now, where there are {tokens} tokens. Use cp=1, or leave it to the other axes."
        )


def _as_summed(x: Tensor, dim: int, keepdim: bool, mean: bool, mask: Any) -> Tensor:
    return x.sum(dim, keepdim=keepdim)


@noted(reading=_as_summed)
def sum_tokens(x: Tensor, dim: int, keepdim: bool, mean: bool, mask: Any) -> Tensor:
    """The sum, or mean, over the tokens of all ranks, for each row. Wire: all-reduce; backward the same.

    Sums are at least fp32. Raises: PlanError for rows that are laid end to end, of which a rank has parts.
    """
    refuse_end_to_end("sums over the tokens of a row", mask)
    # What fills a rank up is no token.
    local = x.narrow(dim, 0, mask.real_tokens).sum(dim, keepdim=keepdim, dtype=wide(x.dtype))
    total: Tensor = _SumOverAxis.apply(local, mask.axis)
    return (total / mask.row_tokens if mean else total).to(x.dtype)


class _SumOverAxis(torch.autograd.Function):
    """All-reduce, both ways: each rank reads the sum as it likes, so its gradients are summands."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: DeviceMesh) -> Tensor:
        ctx.axis = axis
        # Recompute stops after the last tensor that is saved: with one here it comes this far always, as `explain` says.
        ctx.save_for_backward(tensor.new_empty(0))
        return all_reduce(tensor, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        return _SumOverAxis.apply(grad, ctx.axis), None


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


_MASKS = "masking_utils.py:"  # of transformers: pairs of tokens, and no positions
_SUMS = ("sum", "mean")
_NAMES = ("arange", "mul", "div", *_SUMS, *MOVING, *PRODUCTS, *PAIRS)
_MOVED = "it reads some tokens for others, so they are gathered, and what comes out is a rank's own"
_OF_KEYS = "it is of the keys, which a rank has of all"
_MEANING = {
    "arange": "positions of a rank's own tokens",
    "mul": "the number of tokens is that of a row",
    "div": "the number of tokens is that of a row",
    "sum": "summed over the ranks",
    "mean": "summed over the ranks",
    **dict.fromkeys(PRODUCTS, "attention by hand, whose keys and values are gathered"),
    **dict.fromkeys(PAIRS, "a mask of which a rank has its rows"),
}
_RUN: dict[str, Callable[..., Any]] = {
    "arange": _arange,
    "mul": _factor,
    "div": _factor,
    "sum": functools.partial(_summed, False),
    "mean": functools.partial(_summed, True),
    "bmm": multiply,
    "baddbmm": multiply_and_add,
    **dict.fromkeys(CONSTANTS, constant),
    **dict.fromkeys(TRIANGLES, triangle),
    CUT: cut,
}
# By the name that torch's functions have in Python.
_OPERATORS = {
    "arange": "arange",
    "sum": "sum",
    "mean": "mean",
    **{name: name for name in ALONG},
    "conv1d": "convolution",
    "pad": "constant_pad_nd",
    **dict.fromkeys(("cat", "concat", "concatenate"), JOIN),
    "baddbmm": "baddbmm",
    **{name: name for name in (*CONSTANTS, *TRIANGLES)},
    "__getitem__": CUT,
    **dict.fromkeys(("bmm", "matmul", "__matmul__"), "bmm"),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), "mul"),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), "div"),
}
