"""Attention that a model writes by hand, as two products: this rank's queries times the keys of all ranks, and their weights
times the values of all ranks. Keys and values are gathered where the products stand; what lies between the two, the model's
own mask and softmax, is of this rank's rows and all columns. So are masks where a line makes one of a row's tokens with one
another: a triangle of a constant, or what is cut out of a buffer.

It needs memory for own tokens × all tokens, as the model's own code does for all × all, and is not balanced: a kernel that
takes a mask, or F.scaled_dot_product_attention, is better wherever the model can have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshkit.core.noting import noted
from meshkit.errors import PlanError
from meshkit.parallel.context._foreign import mask_to_make
from meshkit.parallel.context._moved import CUT
from meshkit.parallel.context._pattern import of_all_tokens
from meshkit.parallel.context._read_attention import ReadMask
from meshkit.parallel.context._split_mask import SplitMask
from meshkit.parallel.context._whole import gather_tokens, refuse_end_to_end
from meshkit.program import Operation, TensorRef, model_line, tensors

OWN_POSITIONS = "own_positions"
PRODUCTS = ("bmm", "baddbmm")
CONSTANTS = ("ones", "zeros", "full")
TRIANGLES = ("tril", "triu")
PAIRS = (*CONSTANTS, *TRIANGLES, CUT)
_KEYS = ({1}, {2})  # the dims of tokens of the two factors: queries [b T d] times keys [b d T]
_VALUES = ({1, 2}, {1})  # weights [b T T] times values [b T d]


def is_product(a: Operation, b: Operation, tokens: tuple[int, ...]) -> bool:
    """Whether it is of a row's tokens with one another. a, b: the same product, of two numbers of tokens."""
    factors = zip(tensors(a.args)[-2:], tensors(b.args)[-2:], strict=True)
    return tuple(_token_dims(one, other, tokens) for one, other in factors) in (_KEYS, _VALUES)


def is_of_pairs(name: str, a: Operation, b: Operation, tokens: tuple[int, ...]) -> bool | None:
    """Whether its result has a row and a column for each token; None for a cut of a buffer with one of the two."""
    (one,), (other,) = tensors(a.outputs), tensors(b.outputs)
    dims = _token_dims(one, other, tokens)
    if name == CUT and len(dims) < 2:
        return None
    return dims == {len(one.shape) - 2, len(one.shape) - 1}


def _token_dims(one: TensorRef, other: TensorRef, tokens: tuple[int, ...]) -> set[int]:
    sizes = enumerate(zip(one.shape, other.shape, strict=True))
    return {dim for dim, pair in sizes if pair == tokens}


# ------------------------------------------------------------------------------------------------------------ running


def multiply(func: Callable[..., Any], mask: Any, *args: Any, **kwargs: Any) -> Any:
    """matmul and bmm (x, y), of which y is gathered. Wire: all-gather of y, backward reduce-scatter."""
    x, y = _named(args, kwargs, ("input", ("other", "mat2")))
    return func(x, _of_all_tokens(x, y, mask))


def multiply_and_add(
    func: Callable[..., Any], mask: Any, added: Tensor, *args: Any, beta: float = 1, alpha: float = 1, **kwargs: Any
) -> Any:
    """baddbmm(added, x, y), of which y is gathered, and what is added to each key. Wire: as `multiply`, of both."""
    x, y = _named(args, kwargs, ("batch1", ("batch2",)))
    if added.shape[-1] == mask.tokens and added.shape[-2] == 1:
        added = gather_tokens(added, added.ndim - 1, mask)
    return func(added, x, _of_all_tokens(x, y, mask), beta=beta, alpha=alpha)


def constant(func: Callable[..., Any], mask: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.ones, zeros and full (size, ...) of all tokens with one another, which are its last two dims."""

    def sized(sizes: Sequence[Any]) -> tuple[Any, ...]:
        pairs = (mask.row_tokens if size == mask.tokens else size for size in sizes[-2:])
        return (*sizes[:-2], *pairs)

    if "size" in kwargs:
        return func(*args, **{**kwargs, "size": sized(kwargs["size"])})
    if isinstance(args[0], (tuple, list)):
        return func(sized(args[0]), *args[1:], **kwargs)
    return func(*sized(args), **kwargs)


def triangle(func: Callable[..., Any], mask: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """tril and triu: this rank's rows of the mask of all tokens."""
    if tuple(x.shape[-2:]) != (mask.row_tokens, mask.row_tokens):
        raise PlanError(
            f"context parallelism: {func.__name__} at {model_line()} is of {tuple(x.shape)}, and a row has {mask.row_tokens} "
            "tokens. Use cp=1, or leave it to the other axes."
        )
    rows: Tensor = own_rows(func(x, *args, **kwargs), mask)
    return rows


def cut(func: Callable[..., Any], mask: Any, x: Tensor, index: Any) -> Any:
    """tensor[..., :tokens, :tokens] of a mask that the model keeps."""
    sizes = (mask.tokens, mask.row_tokens)
    each = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in each):
        at = next(place for place, part in enumerate(each) if part is Ellipsis)
        each[at : at + 1] = [slice(None)] * (x.ndim + 1 - len(each))
    if len(each) != x.ndim or not all(_is_from_the_first(part) and part.stop in sizes for part in each[-2:]):
        return func(x, index)
    return own_rows(func(x, (*each[:-2], *[slice(None, mask.row_tokens)] * 2)), mask)


def _is_from_the_first(part: Any) -> bool:
    return isinstance(part, slice) and part.start in (None, 0) and part.step in (None, 1)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, tuple[str, ...]]) -> tuple[Tensor, Tensor]:
    given = [*args, *(kwargs[name] for name in (names[0], *names[1]) if name in kwargs)]
    x, y = given
    return x, y


def _of_all_tokens(x: Tensor, y: Tensor, mask: Any) -> Tensor:
    # Of a row of one token a rank has as many tokens as the row: there both factors of both products may fit.
    is_keys = x.shape[-1] == y.shape[-2] and y.shape[-1] == mask.tokens
    dim = y.ndim - (1 if is_keys else 2)
    if y.shape[dim] != mask.tokens or not (is_keys or x.shape[-1] == mask.row_tokens):
        raise PlanError(
            f"context parallelism: {model_line()} was attention by hand when the model was read, but multiplies "
            f"{tuple(x.shape)} by {tuple(y.shape)} now, and this rank has {mask.tokens} tokens. Use cp=1, or leave it to the "
            "other axes."
        )
    return gather_keys(y, dim, mask)


def masks_of_own_rows(
    make: Callable[..., Any],
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **given: Any,
) -> Any:
    """A mask of transformers for attention by hand: this rank's rows of that of all tokens.

    make: transformers' own function for the rest. Documents and padding are no part of it: a batch with such is refused,
    for there the single-device model's mask depends on the batch.
    """
    mask = mask_to_make()
    if not isinstance(mask, SplitMask | ReadMask):
        return make(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **given,
        )
    if q_length != mask.tokens or kv_length not in (mask.tokens, mask.row_tokens):
        raise PlanError(f"its mask is of {q_length} × {kv_length} tokens, and this rank has {mask.tokens}.")
    function = of_all_tokens(mask_function, lambda ids: gather_keys(ids[:, : mask.tokens], 1, mask))
    given["allow_is_causal_skip"] = False  # its own is of as many keys as queries
    of_all = make(
        batch_size=batch_size, q_length=mask.row_tokens, kv_length=mask.row_tokens, mask_function=function, **given
    )
    return own_rows(of_all, mask) if isinstance(of_all, Tensor) else of_all


def _as_counted(counted: Tensor, first: int, mask: Any) -> Tensor:
    return counted


@noted(reading=_as_counted)
def own_positions(counted: Tensor, first: int, mask: Any) -> Tensor:
    """The positions of this rank's tokens in their row, from `first` on, of the dtype and on the device of `counted`."""
    positions: Tensor = mask.positions.to(counted.device)
    return (positions + first).to(counted.dtype)


def gather_keys(tensor: Tensor, dim: int, mask: Any) -> Tensor:
    """As `gather_tokens`, of what every token of a row is multiplied with.

    Raises: PlanError for rows that are laid end to end, and for a tensor that is not of this rank's tokens.
    """
    refuse_end_to_end("attends by hand over the tokens of a row", mask)
    if tensor.shape[dim] != mask.tokens:
        raise PlanError(
            f"context parallelism: {model_line()} attends to {tensor.shape[dim]} keys, but this rank has {mask.tokens} "
            "tokens. Use cp=1, or leave it to the other axes."
        )
    gathered: Tensor = gather_tokens(tensor, dim, mask)
    return gathered


def own_rows(of_all: Tensor, mask: Any) -> Tensor:
    """This rank's rows of a mask [..., tokens, tokens]. What fills a rank up has those of the first token: of a row that sees
    nothing there is no softmax."""
    positions = torch.arange(mask.tokens, device=of_all.device)
    return of_all.index_select(of_all.ndim - 2, own_positions(positions, 0, mask))
