"""Lines that read some tokens of a row for others: short convolutions, paddings and cuts along the tokens, running sums. A
rank gathers the tokens of the tensor, runs the line on those of all ranks, and keeps its own as soon as what comes out is of
a row's tokens.

So a convolution that is padded and then cut is two lines, and what is between them each rank has of all tokens: it is for
what is cheap beside the layers around it. A halo of the few tokens before would be less to send.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshkit.errors import PlanError
from meshkit.parallel.context._whole import gather_tokens, own_tokens, refuse_end_to_end
from meshkit.program import Operation, TensorRef, model_line, tensors

CUT = "slice"
JOIN = "cat"
ALONG = ("cumsum", "roll", "flip")
MOVING = ("convolution", "constant_pad_nd", CUT, JOIN, *ALONG)
_TO_THE_END = (1 << 63) - 1

Bound = tuple[int, int] | None  # (n, c): n times a row's tokens, and c


@dataclass(frozen=True)
class Moved:
    """What a line does along the tokens.

    dim: theirs, counted from the last. before, after: how many more than a row's tokens each of its tensors has there, and
    its result; None for one whose number does not depend on the row's. bounds: of a cut.
    """

    dim: int
    before: tuple[int | None, ...]
    after: int | None
    bounds: tuple[Bound, Bound] = (None, None)

    @property
    def alone(self) -> bool:
        """Whether a rank's own tokens come in and go out, and none of what is between them."""
        return self.before == (0,) and self.after == 0


def moved(name: str, a: Operation, b: Operation, tokens: tuple[int, int]) -> Moved | bool | None:
    """What the operator does along the tokens; None where they are no matter of it, False where it is not known.

    a, b: the same operator, of two numbers of tokens.
    """
    out = tensors(a.outputs)[0], tensors(b.outputs)[0]
    inputs = [*zip(tensors(a.args), tensors(b.args), strict=True)]
    given = inputs if name == JOIN else inputs[:1]
    dims = {dim for pair in (*given, out) for dim in _grown(*pair)}
    if not dims:
        return None
    bounds: tuple[Bound, Bound] = None, None
    if name == JOIN:
        along = {_last(a.args[1] if len(a.args) > 1 else 0, out[0])}
    elif name == CUT:
        along = {_last(a.args[1], out[0])}
        pairs = [*zip(_ends(a), _ends(b), strict=True)]
        first, after_last = (_bound(*pair, tokens) for pair in pairs)
        if any(
            (bound is None) != (pair == (None, None)) for bound, pair in zip((first, after_last), pairs, strict=True)
        ):
            return False
        bounds = first, after_last
    elif name == "constant_pad_nd":
        along = {-1 - index // 2 for index, width in enumerate(a.args[1]) if width}
    elif name == "convolution":
        if len(out[0].shape) != 3 or a.args[3] != [1] or a.args[6]:
            return False
        along = {-1}
    else:
        found = a.args[1] if name != "roll" else a.args[2] if len(a.args) > 2 else []
        along = {_last(each, out[0]) for each in (found if isinstance(found, list) else [found])}
    if not along & dims:
        return None
    if along != dims or len(along) != 1:
        return False
    (dim,) = along
    if any(len(ref.shape) < -dim for pair in (*given, out) for ref in pair):
        return False
    before = tuple(_more(*pair, dim, tokens) for pair in given)
    after = _more(*out, dim, tokens)
    if any(more is None and dim in _grown(*pair) for more, pair in zip((*before, after), (*given, out), strict=True)):
        return False
    line = Moved(dim, before, after, bounds)
    of_all = 0 not in before and after != 0 and not any(bounds)  # as it is
    return None if of_all or (line.alone and name == CUT) else line


def _last(dim: int, ref: TensorRef) -> int:
    return dim if dim < 0 else dim - len(ref.shape)


def _grown(one: TensorRef, other: TensorRef) -> set[int]:
    pairs = enumerate(zip(one.shape, other.shape, strict=True))
    return {dim - len(one.shape) for dim, (a, b) in pairs if a != b}


def _more(one: TensorRef, other: TensorRef, dim: int, tokens: tuple[int, int]) -> int | None:
    more = int(one.shape[dim]) - tokens[0]
    return more if int(other.shape[dim]) - tokens[1] == more else None


def _ends(cut: Operation) -> tuple[int | None, int | None]:
    first = cut.args[2] if len(cut.args) > 2 else None
    after = cut.args[3] if len(cut.args) > 3 else None
    return (None if first == 0 else first), (None if after == _TO_THE_END else after)


def _bound(one: int | None, other: int | None, tokens: tuple[int, int]) -> Bound:
    if one is None or other is None:
        return None
    for times in (0, 1, -1):
        if one - times * tokens[0] == other - times * tokens[1]:
            return times, one - times * tokens[0]
    return None


# ------------------------------------------------------------------------------------------------------------ running


def move(line: Moved, func: Callable[..., Any], mask: Any, *args: Any, **kwargs: Any) -> Any:
    """Run such a line. Wire: all-gather of each tensor of a rank's own tokens, backward reduce-scatter."""
    if not line.alone:
        refuse_end_to_end("reads some tokens of a row for others", mask)
    name = next((key for key in ("input", "tensors") if key in kwargs), None)
    given = kwargs.pop(name) if name else args[0]
    rest = args if name else args[1:]
    several = isinstance(given, (tuple, list))
    each = list(given) if several else [given]
    if len(each) != len(line.before):
        raise _other(f"joins {len(each)} tensors", f"{len(line.before)}")
    gathered = [_of_all(x, more, line.dim, mask) for x, more in zip(each, line.before, strict=True)]
    if func.__name__ == "__getitem__":
        rest = (_index_of_row(rest[0], each[0], line, mask),)
    out = func(gathered if several else gathered[0], *rest, **kwargs)
    return own_tokens(out, out.ndim + line.dim, mask) if line.after == 0 else out


def _of_all(x: Tensor, more: int | None, dim: int, mask: Any) -> Tensor:
    if more is None:
        return x
    expected = mask.row_tokens + more if more else mask.tokens
    if x.ndim < -dim or x.shape[dim] != expected:
        raise _other(f"is of {tuple(x.shape)}", f"{expected} in dim {dim}")
    gathered: Tensor = x if more else gather_tokens(x, x.ndim + dim, mask)
    return gathered


def _index_of_row(index: Any, x: Tensor, line: Moved, mask: Any) -> Any:
    """The index with which the single-device model cuts the tokens of a row."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is not Ellipsis and not isinstance(part, slice) for part in parts):
        raise _other("indexes by more than a cut", "one cut")
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (x.ndim + 1 - len(parts))
    dim = x.ndim + line.dim
    for number, part in enumerate(parts):
        if number != dim and part != slice(None):
            raise _other("cuts other dims too", "one cut")
    cut = parts[dim]
    begin = None if cut.start == 0 else cut.start
    ends = [_of_row(end, bound, mask) for end, bound in zip((begin, cut.stop), line.bounds, strict=True)]
    if cut.step not in (None, 1):
        raise _other(f"takes each {cut.step}th token", "every one")
    parts[dim] = slice(*ends)
    return tuple(parts)


def _of_row(end: Any, bound: Bound, mask: Any) -> int | None:
    if bound is None:
        if end is not None:
            raise _other(f"cuts at {end}", "no cut there")
        return None
    times, more = bound
    known = [times * count + more for count in ((mask.tokens, mask.row_tokens) if times else (0,))]
    if end not in known:
        raise _other(f"cuts at {end}", " or ".join(map(str, known)))
    return times * int(mask.row_tokens) + more


def _other(found: str, expected: str) -> PlanError:
    return PlanError(
        f"context parallelism: {model_line()} reads some tokens of a row for others, but {found} now, where it was "
        f"{expected} when the model was read. Use cp=1, or leave it to the other axes."
    )
