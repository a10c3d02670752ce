"""How operators treat dims (sharding rules): which dims of inputs and outputs run along together, and which are mixed.

A rule names the dims of each tensor, as an einsum does. A name in an input and an output: slice by slice. In inputs only, and
in `summed`: partial results add up. In `mixed`, or in inputs only: every output needs all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshkit.program._records import Operation, TensorRef, tensors

EXPERTS_OF_PARTS = "experts of parts"  # each rank has tokens of its own for them
Name = str
Names = tuple[Name | None, ...]  # None: a dim of size 1 that is broadcast


@dataclass(frozen=True)
class Dims:
    """inputs, outputs: for each tensor, in the order of `tensors(...)`, the names of its dims."""

    inputs: tuple[Names, ...]
    outputs: tuple[Names, ...]
    summed: frozenset[Name] = frozenset()
    mixed: frozenset[Name] = frozenset()


def dims(operation: Operation) -> Dims | None:
    """The rule of an operator; None for one without."""
    name = operation.op if isinstance(operation.op, str) else operation.op.overloadpacket.__name__
    rule = _RULES.get(name)
    if rule is not None:
        return rule(operation)
    if name.endswith("_") and (rule := _RULES.get(name[:-1])) is not None:
        return rule(operation)
    if not isinstance(operation.op, str) and torch.Tag.pointwise in operation.op.tags:
        return _pointwise(operation)
    return None


def _shapes(operation: Operation) -> tuple[list[TensorRef], list[TensorRef]]:
    return tensors((operation.args, operation.kwargs)), tensors(operation.outputs)


def _letters(count: int, prefix: str = "d") -> tuple[str, ...]:
    return tuple(f"{prefix}{index}" for index in range(count))


def _broadcast(ref: TensorRef, out: Sequence[Name | None], shape: Sequence[int]) -> Names:
    """Names of a tensor that is broadcast to dims `out` of `shape`."""
    skip = len(out) - len(ref.shape)
    return tuple(
        None if size == 1 and shape[skip + index] != 1 else out[skip + index] for index, size in enumerate(ref.shape)
    )


def _pointwise(operation: Operation) -> Dims:
    inputs, outputs = _shapes(operation)
    shape = outputs[0].shape
    out = _letters(len(shape))
    return Dims(tuple(_broadcast(ref, out, shape) for ref in inputs), tuple(out for _ in outputs))


def _mm(operation: Operation) -> Dims:
    return Dims((("m", "k"), ("k", "n")), (("m", "n"),), summed=frozenset("k"))


def _bmm(operation: Operation) -> Dims:
    return Dims((("b", "m", "k"), ("b", "k", "n")), (("b", "m", "n"),), summed=frozenset("k"))


def _baddbmm(operation: Operation) -> Dims:
    inputs, outputs = _shapes(operation)
    added = _broadcast(inputs[0], ("b", "m", "n"), outputs[0].shape)
    return Dims((added, ("b", "m", "k"), ("b", "k", "n")), (("b", "m", "n"),), mixed=frozenset("k"))


def _reduced(*, summed: bool = False) -> Callable[[Operation], Dims]:
    """Operators (tensor, dim or dims, keepdim) -> one or more tensors without those dims."""

    def rule(operation: Operation) -> Dims:
        inputs, outputs = _shapes(operation)
        ndim = len(inputs[0].shape)
        # Some take a number first: how many, or the order of the norm.
        kind = operation.op.overloadpacket.__name__
        index = 2 if kind in ("topk", "norm", "linalg_vector_norm") else 1
        default = -1 if kind in ("topk", "sort", "argsort") else None
        given = operation.args[index] if len(operation.args) > index else operation.kwargs.get("dim", default)
        gone = _dims_of(given, ndim)
        names = _letters(ndim)
        kept = len(outputs[0].shape) == ndim
        out = tuple(
            (None if kept and outputs[0].shape[index] == 1 else name) if index in gone else name
            for index, name in enumerate(names)
            if kept or index not in gone
        )
        lost = frozenset(names[index] for index in gone)
        return Dims(
            (names, *(_same_rank(ref, names) for ref in inputs[1:])),
            tuple(out for _ in outputs),
            summed=lost if summed else frozenset(),
            mixed=frozenset() if summed else lost,
        )

    return rule


def _same_rank(ref: TensorRef, names: Names) -> Names:
    return names if len(ref.shape) == len(names) else (None,) * len(ref.shape)


def _dims_of(given: Any, ndim: int) -> set[int]:
    if given is None or given == []:
        return set(range(ndim))
    return {index % ndim for index in ([given] if isinstance(given, int) else given)} if ndim else set()


def _layer_norm(operation: Operation) -> Dims:
    """native_layer_norm and rms_norm: (x, normalized_shape, weight, bias, eps)."""
    inputs, outputs = _shapes(operation)
    ndim = len(inputs[0].shape)
    inner = len(operation.args[1])
    names = _letters(ndim)
    out = tuple(
        tuple(
            None if index >= ndim - inner and ref.shape[index] == 1 else names[index] for index in range(len(ref.shape))
        )
        for ref in outputs
    )
    return Dims((names, *(names[ndim - inner :] for _ in inputs[1:])), out, mixed=frozenset(names[ndim - inner :]))


def _group_norm(operation: Operation) -> Dims:
    inputs, _ = _shapes(operation)
    names = _letters(len(inputs[0].shape))
    return Dims(
        (names, *(("d1",) for _ in inputs[1:])),
        (names, ("d0", None), ("d0", None)),
        mixed=frozenset(names[1:]),
    )


def _attention(operation: Operation) -> Dims:
    """Scaled dot products: q [b h t d], k [b g s d], v [b g s e], and a mask that is broadcast to [b h t s]."""
    inputs, outputs = _shapes(operation)
    q, k = inputs[:2]
    grouped = q.shape[1] != k.shape[1]
    causal = any(value is True for value in operation.args)
    kv = "g" if grouped else "h"
    mask = tuple(_broadcast(ref, ("b", "h", "t", "s"), (*q.shape[:3], k.shape[2])) for ref in inputs[3:])
    mixed = {"s", "d", *(("t",) if causal else ())}
    out: list[Names] = [("b", "h", "t", "e"), ("b", "h", "t")]
    return Dims(
        (("b", "h", "t", "d"), ("b", kv, "s", "d"), ("b", kv, "s", "e"), *mask),
        tuple(out[: len(outputs)]),
        mixed=frozenset(mixed),
    )


def _embedding(operation: Operation) -> Dims:
    inputs, _ = _shapes(operation)
    ids = _letters(len(inputs[1].shape))
    return Dims((("v", "c"), ids), ((*ids, "c"),), mixed=frozenset("v"))


def _convolution(operation: Operation) -> Dims:
    inputs, _ = _shapes(operation)
    space = _letters(len(inputs[0].shape) - 2, "x")
    groups, transposed = operation.args[8], operation.args[6]
    depthwise = groups == inputs[0].shape[1] and groups == inputs[1].shape[0] and not transposed
    channels = "o" if depthwise else "c"
    kernel: Names = ("i", "o", *_letters(len(space), "k")) if transposed else ("o", "i", *_letters(len(space), "k"))
    bias = tuple(("o",) for _ in inputs[2:])
    mixed = {*space, "i", *kernel[2:]} | ({"c"} if not depthwise else set())
    return Dims((("n", channels, *space), kernel, *bias), (("n", "o", *space),), mixed=frozenset(map(str, mixed)))


def _linear_attention(operation: Operation) -> Dims:
    """q, k [b t g k], v [b t h v], log_decay and beta [b t h], and a table of documents."""
    inputs, _ = _shapes(operation)
    q, v, *rest = inputs[0], inputs[2], *inputs[3:-1]
    # A rank that has whole groups of heads has the heads of q and k that they read.
    groups = "h" if q.shape[2] == v.shape[2] else "g"
    read: Names = ("b", "t", groups, "k")
    return Dims(
        (read, read, ("b", "t", "h", "v"), *(("b", "t", "h") for _ in rest), ("document", "edge")),
        (("b", "t", "h", "v"),),
        mixed=frozenset(("t", "g", "k", "document", "edge")),
    )


def _short_convolution(operation: Operation) -> Dims:
    """x [b t c], weight [c w], and a table of documents."""
    names: tuple[Names, ...] = (("b", "t", "c"), ("c", "w"), ("document", "edge"))
    return Dims(names, (("b", "t", "c"),), mixed=frozenset(("t", "w", "document", "edge")))


def _gather(operation: Operation) -> Dims:
    """gather: (tensor, dim, index). Along dim every output reads the tensor where its own index says."""
    (tensor, index, *_), _ = _shapes(operation)
    ndim = len(tensor.shape)
    dim = operation.args[1] % ndim if ndim else 0
    names = _letters(ndim)
    found = tuple("i" if number == dim else name for number, name in enumerate(names))
    uneven = {name for number, name in enumerate(names) if tensor.shape[number] != index.shape[number]}
    return Dims((names, found), (found,), mixed=frozenset(uneven | {names[dim]} if ndim else ()))


def _along(operation: Operation) -> Dims:
    """scatter, ...: (tensor, dim, index, ...). Other dims run along together where they are of one size."""
    inputs, outputs = _shapes(operation)
    ndim = len(inputs[0].shape)
    dim = operation.args[1] % ndim if ndim else 0
    names = _letters(ndim)
    even = [
        all(len(ref.shape) == ndim and ref.shape[index] == inputs[0].shape[index] for ref in inputs)
        for index in range(ndim)
    ]
    mixed = {names[index] for index in range(ndim) if index == dim or not even[index]}
    return Dims(tuple(_same_rank(ref, names) for ref in inputs), tuple(names for _ in outputs), mixed=frozenset(mixed))


def _index(operation: Operation) -> Dims:
    """tensor[indices]: dims without an index are kept; those of the indices stand where the first indexed dim stood."""
    inputs, outputs = _shapes(operation)
    indices = operation.args[1]
    indexed = [position for position, index in enumerate(indices) if index is not None]
    ndim = len(inputs[0].shape)
    names = _letters(ndim)
    lengths = [len(indices[position].shape) for position in indexed]
    rank = max(lengths)
    found = _letters(rank, "i")
    contiguous = indexed == list(range(indexed[0], indexed[-1] + 1))
    start = indexed[0] if contiguous else 0
    rest = [name for position, name in enumerate(names) if position not in indexed]
    out = (*rest[:start], *found, *rest[start:])
    shape = outputs[0].shape
    refs = [indices[position] for position in indexed]
    return Dims(
        (names, *(_broadcast(ref, found, shape[start : start + rank]) for ref in refs)),
        (out,),
        mixed=frozenset(names[position] for position in indexed),
    )


def _matrices(operation: Operation) -> Dims:
    """linalg: the last two dims are mixed, the others are a batch."""
    inputs, outputs = _shapes(operation)
    ndim = max(len(ref.shape) for ref in inputs)
    names = _letters(ndim)
    return Dims(
        tuple(names[ndim - len(ref.shape) :] for ref in inputs),
        tuple(names[ndim - len(ref.shape) :] for ref in outputs),
        mixed=frozenset(names[-2:]),
    )


def _last_pair(operation: Operation) -> Dims:
    """view_as_complex and view_as_real: a last dim of two is taken in or given out."""
    inputs, outputs = _shapes(operation)
    names = _letters(max(len(inputs[0].shape), len(outputs[0].shape)))
    return Dims((names[: len(inputs[0].shape)],), (names[: len(outputs[0].shape)],), mixed=frozenset(names[-1:]))


def _by_token(operation: Operation) -> Dims:
    """Experts: each token by itself. All dims of the first input but the last are those of tokens."""
    inputs, _ = _shapes(operation)
    tokens = _letters(len(inputs[0].shape) - 1)
    names = tuple(
        (*tokens, *(f"c{number}.{dim}" for dim in range(len(ref.shape) - len(tokens))))
        for number, ref in enumerate(inputs)
    )
    return Dims(names, ((*tokens, "c"),), mixed=frozenset(name for of in names for name in of) - frozenset(tokens))


# Operators (tensor, dim or dims, ...) whose every output needs all of those dims.
_MIXING = (
    *(
        "mean",
        "amax",
        "amin",
        "prod",
        "var",
        "std",
        "var_mean",
        "norm",
        "linalg_vector_norm",
        "logsumexp",
        "any",
        "all",
    ),
    *("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "topk"),
    *("argmax", "argmin", "median", "max", "min", "flip"),
)
_RULES: dict[str, Callable[[Operation], Dims | None]] = {
    "experts": _by_token,
    EXPERTS_OF_PARTS: _by_token,
    "counted": _pointwise,
    "mm": _mm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "sum": _reduced(summed=True),
    **dict.fromkeys(_MIXING, _reduced()),
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _layer_norm,
    "native_group_norm": _group_norm,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
        ),
        _attention,
    ),
    "embedding": _embedding,
    "convolution": _convolution,
    "linear_attention": _linear_attention,
    "short_convolution": _short_convolution,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "index_add"), _along),
    "index": _index,
    **dict.fromkeys(("linalg_solve_triangular", "linalg_inv_ex", "linalg_cholesky_ex"), _matrices),
    **dict.fromkeys(("view_as_complex", "view_as_real"), _last_pair),
    **dict.fromkeys(("_to_copy", "copy", "polar", "complex", "masked_fill", "fill", "where"), _pointwise),
    "log_sigmoid_forward": _pointwise,
}
