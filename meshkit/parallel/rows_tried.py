"""Rows of a batch, tried on values: what no reading shows, as of a forward that reads whole numbers or makes sizes of values,
and of a loss.

A copy of the model with random parameters runs on eight rows, and on each half of them. What it returns of a row must not
depend on the other rows, and a loss of all must be the sum of those of the halves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshkit.core import _torch
from meshkit.core.reach import Reach, reach_of
from meshkit.moe.aux_loss import collect_nothing
from meshkit.program import Example, copied

ROWS = 8
_MOST = 1 << 33  # elements of parameters times those of an input: a second or so of one core for each call
_FEW = 1 << 28  # beyond it one draw
_LARGE, _PERIOD = 1 << 24, (1 << 20) - 3  # elements; a prime number
_HELD = 1 << 24  # elements that a loss holds, copied for each call
_DRAWS = 3  # of parameters and rows: the largest of two halves may be alike once
_DTYPES = ((torch.float64, 1e-8), (torch.float32, 1e-4))  # some models compute in fp32 whatever they are given
_SCALE = 0.1  # of random numbers: gates neither close nor open for all

Returned = list[Tensor]
OfParts = Literal["sum", "between", "neither"]
Laid = Literal["end to end", "filled up"]  # what else a rank of cp may get: its rows as one, tokens that are none
Verdict = TypeVar("Verdict")


def mixes_rows(model: nn.Module, example: Example) -> bool | None:
    """Whether each tensor that the model returns for a batch of rows is another for a part of them. Runs nothing of the
    model itself, whose parameters are not read, so all ranks are told the same.

    None where that is not shown: of a large model, one that draws random numbers beside dropout, one whose forward raises
    on random values, and one that returns no tensor with rows.
    """
    verdicts = _tried(model, example, _forward, _keeps_rows)
    return False in verdicts if verdicts else None


@dataclass(eq=False)
class Trial:
    """Of a loss. why: it is not tried, or the trial showed nothing. carries: what it keeps makes the next call another.
    error: that it raised."""

    loss: Callable[[nn.Module, Any], Tensor]
    why: str = ""
    carries: bool = False
    error: Exception | None = None

    @cached_property
    def reach(self) -> Reach:
        reach = reach_of(self.loss)
        if not reach.obstacle and sum(each.numel() for each in reach.tensors) > _HELD:
            reach.obstacle = f"it holds tensors of more than {_HELD:,} elements"
        self.why = reach.obstacle
        return reach

    def has_raised(self, error: Exception) -> None:
        self.error = error
        self.why = f"on random values it raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"

    def call(self, model: Any, part: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
        """The loss, with copies of what it holds. Afterwards nothing has changed."""
        with (
            torch.compiler.set_stance("force_eager"),
            torch.enable_grad(),  # it may differentiate its model
            warnings.catch_warnings(),
            self.reach.put_back() as changed,
            Replaced(self.reach.tensors, dtype),
            Undrawn() as undrawn,
            NoMessages(),
        ):
            warnings.simplefilter("ignore")
            value = self.loss(model, {name: _cloned(each) for name, each in part.items()})
            if not self.carries and changed():
                undrawn.calls = 0
                if isinstance(model, Restarts):
                    model.restart()
                again = self.loss(model, {name: _cloned(each) for name, each in part.items()})
                self.carries = not torch.equal(value, again) and bool(value.isfinite().all())
            return value


@runtime_checkable
class Restarts(Protocol):
    """What stands for a model, and returns the same again."""

    def restart(self) -> None: ...


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def loss_of_rows(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Mapping[str, Tensor], trial: Trial | None = None
) -> OfParts | None:
    """What the loss of a batch is of those of its rows' parts: their sum, or between them, as a mean is, or neither. loss: is
    called some times, on copies of the model, as in `mixes_rows`, and what it has changed is put back.

    None where that is not shown: also of a loss that may change what cannot be put back, as a file.
    """
    trial = trial or Trial(loss)
    if trial.reach.obstacle:
        return None

    def call(model: nn.Module, part: Any) -> Tensor:
        try:
            return trial.call(model, part, next(model.parameters()).dtype)
        except Exception as error:
            trial.has_raised(error)
            raise

    verdicts = _tried(model, Example((dict(batch),)), call, _of_parts)
    return next((verdict for verdict in ("neither", "between", "sum") if verdict in verdicts), None)


def _forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    output = model(*args, **kwargs)
    return getattr(output, "logits", output)


def _tried(
    model: nn.Module,
    example: Example,
    call: Callable[..., Any],
    judge: Callable[[list[Returned], float], Verdict | None],
) -> list[Verdict]:
    """What `judge` says of several draws. It gets what is returned for all rows, all again and each half, and a tolerance;
    its None says nothing."""
    leaves = _torch.tree_leaves((example.args, dict(example.kwargs)))
    rows = next((leaf.shape[0] for leaf in leaves if _has_rows(leaf)), 0)
    taken = max((leaf.numel() * ROWS // rows for leaf in leaves if rows and _has_rows(leaf)), default=0)
    work = taken * sum(param.numel() for param in model.parameters())
    if not rows or work > _MOST:
        return []
    with _torch.without_modes():  # an estimate's would let tensors have no values
        for dtype, tolerance in _DTYPES:
            verdicts = list[Verdict]()
            for seed in range(_DRAWS if work < _FEW else 1):
                if (returned := _run(model, example, rows, call, dtype, seed)) is None:
                    break
                if (verdict := judge(returned, tolerance)) is not None:
                    verdicts.append(verdict)
            if verdicts:
                return verdicts
        return []


def _run(
    model: nn.Module, example: Example, rows: int, call: Callable[..., Any], dtype: torch.dtype, seed: int
) -> list[Returned] | None:
    """The tensors that are returned for all rows, for all again, and for each half of them; None where it raises."""
    generator = torch.Generator().manual_seed(seed)
    valued = random_values(model, dtype, generator)
    ids = min((each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), default=2)

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        size = (ROWS, *leaf.shape[1:]) if _has_rows(leaf) and leaf.shape[0] == rows else leaf.shape
        if not leaf.is_meta and not _torch.is_fake(leaf):  # ids, kinds and masks of the user's: in their range
            own = more_rows(leaf.detach().cpu(), size)
            return own.to(dtype) if own.is_floating_point() else own
        if leaf.dtype.is_floating_point:
            return torch.randn(size, generator=generator, dtype=dtype)
        return torch.randint(0, 2 if leaf.dtype == torch.bool else ids, size, generator=generator).to(leaf.dtype)

    def part(leaf: Any, begin: int, end: int) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return (leaf[begin:end] if _has_rows(leaf) and leaf.shape[0] == ROWS else leaf).clone()

    given, found = _torch.tree_map(filled, (example.args, dict(example.kwargs))), list[Returned]()
    half = ROWS // 2
    for number, (begin, end) in enumerate(((0, ROWS), (0, ROWS), (0, half), (half, ROWS))):
        args, kwargs = _torch.tree_map(partial(part, begin=begin, end=end), given)
        # Of its own, for a forward may keep state.
        tensors: dict[int, Any] = {id(each): _own(each) for each in (*valued.parameters(), *valued.buffers())}
        copy = copied(valued, tensors, {})
        with torch.no_grad(), torch.random.fork_rng(devices=[]), collect_nothing(), Undropped():
            torch.default_generator.manual_seed(number)  # and no device's, as torch.manual_seed would
            try:
                output = call(copy, *args, **kwargs)
            except Exception:  # of random values where it wants others, or of a dtype
                return None
        found.append([leaf for leaf in _torch.tree_leaves(output) if isinstance(leaf, Tensor)])
    return found


def _own(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()


def _keeps_rows(returned: list[Returned], tolerance: float) -> bool | None:
    """Whether the rows of some tensor are the same in the parts as in the whole; None where two calls differ, or none has
    rows."""
    whole, again, first, last = returned
    if not all(torch.equal(one, other) for one, other in zip(whole, again, strict=True)):
        return None
    kept = []
    for every, one, other in zip(whole, first, last, strict=True):
        if every.ndim == 0 or every.shape[0] != ROWS or not every.isfinite().all():
            continue
        if one.shape == other.shape == (ROWS // 2, *every.shape[1:]):
            scale = max(1.0, float(every.abs().max()))
            kept.append(float((torch.cat((one, other)) - every).abs().max()) <= tolerance * scale)
    return any(kept) if kept else None


def _of_parts(returned: list[Returned], tolerance: float) -> OfParts | None:
    """None where two calls differ."""
    if any(len(each) != 1 for each in returned):
        return None
    return of_parts(*(each[0] for each in returned), tolerance=tolerance)


def of_parts(
    whole: Tensor, again: Tensor, one: Tensor, other: Tensor, *, tolerance: float, inside: bool = False
) -> OfParts | None:
    """What the value of the whole is of those of two parts; of several values, what each is, else neither. inside: between
    them, and none of them. None where two calls differ, and of what is no number."""
    values = [each.detach().double().cpu().flatten() for each in (whole, again, one, other)]
    if len({each.shape for each in values}) > 1 or not values[0].numel() or not torch.equal(values[0], values[1]):
        return None
    whole, _, one, other = values
    if not (whole + one + other).isfinite().all():
        return None
    least, most = torch.minimum(one, other), torch.maximum(one, other)
    allowed = tolerance * torch.stack([whole.abs(), one.abs(), other.abs()]).amax(0).clamp(min=1.0)
    if bool(((one + other - whole).abs() <= allowed).all()):
        return "sum"
    between = (least - allowed <= whole) & (whole <= most + allowed)
    if inside:  # not the loss of one of the halves, which that of the last token is
        between = ((least + allowed < whole) & (whole < most - allowed)) | ((one - other).abs() <= allowed)
    return "between" if bool(between.all()) else "neither"


def random_values(
    model: nn.Module, dtype: torch.dtype, generator: torch.Generator, *, alike: bool = False
) -> nn.Module:
    """A copy with parameters of its own; buffers have their values, or random ones where they are on meta. alike: matrices in
    one tensor, as experts are, are one in memory where they are large."""
    made: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        shape, whole = tensor.shape, not tensor.dtype.is_floating_point
        if not isinstance(tensor, nn.Parameter) and not tensor.is_meta and not _torch.is_fake(tensor):
            made[id(tensor)] = tensor.detach().cpu().clone() if whole else tensor.detach().cpu().to(dtype, copy=True)
        elif whole:
            made[id(tensor)] = torch.zeros(shape, dtype=tensor.dtype)
        elif tensor.ndim > 1:  # of an input of size 1 it makes an output of that size
            one = (1, *shape[1:]) if alike and tensor.ndim > 2 and tensor.numel() > _LARGE else shape
            made[id(tensor)] = _drawn(one, dtype, generator).div_(max(1, shape[-1]) ** 0.5).expand(shape)
        else:  # gains and biases
            made[id(tensor)] = 1 + _SCALE * torch.randn(shape, generator=generator, dtype=dtype)
        if isinstance(tensor, nn.Parameter):
            made[id(tensor)] = nn.Parameter(made[id(tensor)], requires_grad=False)
    return copied(model, made, {})


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Of a large tensor the same numbers again and again, of which no two rows begin at the same one."""
    if prod(shape) <= _LARGE:
        return torch.randn(shape, generator=generator, dtype=dtype)
    some = torch.randn(_PERIOD, generator=generator, dtype=dtype)
    return some.repeat(-(-prod(shape) // _PERIOD))[: prod(shape)].view(shape)


def more_rows(tensor: Tensor, size: torch.Size | tuple[int, ...]) -> Tensor:
    """Of so many rows: its own, each beside itself with its elements in another place. So what the halves have differs, and a
    mean by what labels weigh is another in each."""
    if tensor.shape == torch.Size(size) or (rows := tensor.shape[0]) >= size[0]:
        return tensor[: size[0]] if size else tensor
    rolled = tensor.roll(1, -1) if tensor.ndim > 1 else tensor
    both = torch.stack([tensor, rolled], 1).flatten(0, 1)
    return both[torch.arange(size[0]) * 2 * rows // size[0]]


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


class Replaced(TorchFunctionMode):
    """Inside, copies are in place of some tensors, on the host and in a dtype: what a loss reads is there, and what it writes
    is lost."""

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self._copies = {id(each): self._copied(each, dtype) for each in tensors}

    @staticmethod
    def _copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _torch.tree_map(lambda leaf: self._copies.get(id(leaf), leaf), (args, dict(kwargs or {})))
        return func(*args, **kwargs)


class OfTrial(torch.Generator):
    """The trial's own, of which `Undrawn` takes nothing."""


class Undrawn(TorchFunctionMode):
    """Inside, random numbers are the same for all rows and tokens, others in each call: one that draws them for each row is a
    sum as one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _DRAWS_OF or isinstance(dict(kwargs or {}).get("generator"), OfTrial):
            return func(*args, **dict(kwargs or {}))
        self.calls += 1
        torch.default_generator.manual_seed(self.calls)
        drawn = func(*args, **dict(kwargs or {}))
        if not drawn.numel():
            return drawn
        return (
            drawn.fill_(0.1 + 0.618 * self.calls % 0.8)
            if drawn.is_floating_point()
            else drawn.fill_(drawn.flatten()[0])
        )


class NoMessages(_torch.TorchDispatchMode):
    """Inside, a message between ranks raises: of a trial it would be about other numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("it sends messages, and a trial sends nothing")
        return func(*args, **(kwargs or {}))


class Undropped(TorchFunctionMode):
    """Inside, dropout drops nothing: it draws other numbers for another number of rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > _AT:
                args = (*args[:_AT], 0.0, *args[_AT + 1 :])
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


_AT = 4  # among the arguments of attention
_DROPOUT = frozenset((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout))
_IN_PLACE = (Tensor.bernoulli_, Tensor.normal_, Tensor.uniform_, Tensor.random_, Tensor.exponential_)
_LIKE = (torch.rand_like, torch.randn_like, torch.randint_like, torch.normal, torch.bernoulli, Tensor.bernoulli)
_DRAWS_OF = frozenset((torch.rand, torch.randn, torch.randint, *_LIKE, *_IN_PLACE))
