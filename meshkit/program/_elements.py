"""Following elements through a trace: of every element of every tensor, which one of the single-device model's it is.

Each element has a number. Operators that only move elements (views, cat, indexing by constants) move the numbers; an operator
that computes gives its outputs new ones. Constants are computed, and elements of equal value have equal numbers, so masks and
positions that the forward makes itself are compared by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshkit.core._torch import tree_leaves, tree_map
from meshkit.program._records import Operation, TensorRef, Trace, tensors

_LARGEST = 1 << 24  # elements of a tensor that are followed one by one; 128 MiB of numbers
_FOLDED = 1 << 22  # elements of a constant that is computed


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of numbers are the same; at once for two views of one memory, as most are."""
    if a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr():
        return True
    return torch.equal(a, b)


def take(numbers: Tensor, dim: int, indices: Tensor) -> Tensor:
    """`index_select`; where indices follow each other, as most parts do, a view: compared with another of the same it is
    `equal` at once."""
    first = int(indices[0]) if len(indices) else 0
    if torch.equal(indices, torch.arange(first, first + len(indices))):
        return numbers.narrow(dim, first, len(indices))
    return numbers.index_select(dim, indices)


class TooLarge(Exception):
    """A tensor that would have to be followed element by element, and is too large for it."""


@dataclass
class Numbers:
    """Where numbers of elements come from; shared by the traces that are compared."""

    next: int = 0
    constants: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def fresh(self, count: int) -> int:
        self.next += count
        return self.next - count

    def of_values(self, values: Tensor) -> Tensor:
        """Equal numbers for equal values of one dtype; negative, so that no element that is computed has them."""
        if values.is_complex():  # by both parts
            rows = torch.view_as_real(values.to(torch.complex128).contiguous()).view(torch.int64).view(-1, 2)
            bits, where = torch.unique(rows, dim=0, return_inverse=True)
            found: list[Any] = [tuple(row) for row in bits.tolist()]
        else:
            bits, where = torch.unique(values.double().view(torch.int64), return_inverse=True)
            found = bits.tolist()
        numbers = [self.constants.setdefault((values.dtype, bit), -1 - len(self.constants)) for bit in found]
        return torch.tensor(numbers, dtype=torch.int64)[where].view(values.shape)


@dataclass
class Part:
    """A tensor of the single-device model of which a rank has some indices along one dim; all of them if None.

    base: number of the first element of the full tensor, which are numbered in order.
    """

    base: int
    shape: tuple[int, ...]
    dim: int = 0
    indices: Tensor | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        if self.indices is not None:
            shape[self.dim] = len(self.indices)
        return tuple(shape)

    def numbers(self) -> Tensor:
        count = torch.Size(self.shape).numel()
        if count > _LARGEST:
            raise TooLarge
        full = torch.arange(self.base, self.base + count).view(self.shape)
        return (full if self.indices is None else take(full, self.dim, self.indices)).flatten()


class Replay:
    """One trace, run on numbers of elements."""

    def __init__(
        self,
        trace: Trace,
        numbers: Numbers,
        source: Callable[[int], Part],
        moved: Callable[[Operation], None] | None = None,
    ) -> None:
        """source: of a storage that the trace did not make (parameters, buffers, inputs). moved: called after each operation
        that moved elements into new memory."""
        self.trace, self._numbers, self._source, self._moved = trace, numbers, source, moved
        self._elements: dict[int, Tensor | Part] = {}
        self._values: dict[int, Tensor] = {}
        self._last_used = {
            ref.storage: number
            for number, operation in enumerate(trace.operations)
            for ref in tensors((operation.args, operation.kwargs, operation.outputs))
        }
        for ref in tensors((trace.output, dict(trace.kept))):
            self._last_used[ref.storage] = len(trace.operations)

    def operations(self) -> Iterator[Operation]:
        """The operations that compute, in order. The outputs of each must be given by `define` before the next."""
        for number, operation in enumerate(self.trace.operations):
            if not self._moves(operation):
                yield operation
            for ref in tensors((operation.args, operation.kwargs, operation.outputs)):
                if self._last_used[ref.storage] == number:
                    self._elements.pop(ref.storage, None)
                    self._values.pop(ref.storage, None)

    def part(self, ref: TensorRef) -> Part | None:
        """The parameter or input that a tensor looks at as it is, its dims in whatever order; None for any other."""
        found = self._known(ref.storage)
        return found if isinstance(found, Part) else None

    def is_constant(self, ref: TensorRef) -> bool:
        return ref.storage in self._values or self.trace.storages[ref.storage].value is not None

    def elements(self, ref: TensorRef) -> Tensor:
        """The numbers of a tensor's elements, in its shape."""
        flat = self._flat(ref.storage)  # which may itself lie in others' memory
        return torch.as_strided(flat, ref.shape, ref.stride, flat.storage_offset() + ref.offset)

    def define(self, ref: TensorRef, numbers: Tensor | None = None) -> None:
        """Give a tensor's elements their numbers; new ones by default."""
        count = torch.Size(ref.shape).numel()
        if max(count, self._size(ref.storage)) > _LARGEST:
            raise TooLarge
        if numbers is None:
            base = self._numbers.fresh(count)
            numbers = torch.arange(base, base + count).view(ref.shape)
        known = ref.storage in self._values or ref.storage in self._elements
        size = self._size(ref.storage)
        if not known and numbers.numel() == size and numbers.stride() == ref.stride and not ref.offset:
            # Shared with whoever gave them: numbers are never written to.
            self._elements[ref.storage] = torch.as_strided(numbers, (size,), (1,), numbers.storage_offset())
            return
        flat = self._flat(ref.storage).clone() if known else torch.zeros(size, dtype=torch.int64)
        self._values.pop(ref.storage, None)
        torch.as_strided(flat, ref.shape, ref.stride, ref.offset).copy_(numbers)
        self._elements[ref.storage] = flat

    def define_constant(self, ref: TensorRef, value: Tensor) -> None:
        """Of new memory, all of it."""
        flat = torch.zeros(self._size(ref.storage), dtype=ref.dtype)
        torch.as_strided(flat, ref.shape, ref.stride, ref.offset).copy_(value)
        self._values[ref.storage] = flat

    def _size(self, storage: int) -> int:
        return self.trace.storages[storage].size

    def _known(self, storage: int) -> Tensor | Part | None:
        if storage not in self._elements and storage not in self._values:
            kept = self.trace.storages[storage]
            if kept.value is not None:
                self._values[storage] = kept.value
            elif not kept.source.startswith("op "):
                self._elements[storage] = self._source(storage)
        return self._elements.get(storage)

    def _flat(self, storage: int) -> Tensor:
        found = self._known(storage)
        if isinstance(found, Part):
            found = found.numbers()
            if found.numel() < self._size(storage):  # a view of more than what was named
                found = torch.cat([found, torch.zeros(self._size(storage) - found.numel(), dtype=torch.int64)])
            self._elements[storage] = found
        if found is None:
            found = self._elements[storage] = self._numbers.of_values(self._values[storage])
            # The values stay: what is computed of constants alone is computed.
        return found

    def _moves(self, operation: Operation) -> bool:
        """Whether an operation is one that only moves elements, or computes a constant; then it is done."""
        if isinstance(operation.op, str):
            return False
        inputs, outputs = tensors((operation.args, operation.kwargs)), tensors(operation.outputs)
        mutable = operation.op._schema.is_mutable
        if not mutable and outputs and all(self._is_view(ref) for ref in outputs):
            return True
        if self._folds(operation, inputs, outputs):
            return True
        move = _MOVES.get(operation.op.overloadpacket.__name__)
        if move is None or not move(self, operation):
            return False
        if self._moved is not None:
            self._moved(operation)
        return True

    def _is_view(self, ref: TensorRef) -> bool:
        self._known(ref.storage)  # a constant that nothing has read yet has its values from here on
        return ref.storage in self._elements or ref.storage in self._values

    def _folds(self, operation: Operation, inputs: list[TensorRef], outputs: list[TensorRef]) -> bool:
        """Compute what depends on constants alone."""
        if operation.op.overloadpacket.__name__ in _FILLED:
            return self._fill(operation, outputs[0])
        for ref in inputs:
            self._known(ref.storage)
        if not all(ref.storage in self._values for ref in inputs):
            return False
        if torch.Tag.nondeterministic_seeded in operation.op.tags:
            return False
        if sum(torch.Size(ref.shape).numel() for ref in outputs) > _FOLDED:
            return False

        def value(leaf: Any) -> Any:
            if isinstance(leaf, TensorRef):
                return torch.as_strided(self._values[leaf.storage], leaf.shape, leaf.stride, leaf.offset)
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        if operation.op._schema.is_mutable:
            for ref in inputs:
                self._values[ref.storage] = self._values[ref.storage].clone()
        args, kwargs = tree_map(value, (operation.args, dict(operation.kwargs)))
        try:
            with torch.no_grad():
                result = operation.op(*args, **kwargs)
        except (IndexError, RuntimeError):  # of a part that it was not written for; then it is compared
            return False
        computed = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for ref, tensor in zip(outputs, computed, strict=True):
            if operation.op._schema.is_mutable and ref.storage in self._values:
                self._elements.pop(ref.storage, None)
                continue
            self.define_constant(ref, tensor)
        return True

    def _fill(self, operation: Operation, out: TensorRef) -> bool:
        """new_ones, zeros_like and their kind: of their input they read the shape alone."""
        if out.storage in self._values or self._size(out.storage) > _FOLDED:
            return False
        value = _FILLED[operation.op.overloadpacket.__name__]
        if value is None:
            value = operation.args[-1]
        self._values[out.storage] = torch.full((self._size(out.storage),), value, dtype=out.dtype)
        return True

    def constant(self, ref: TensorRef) -> Tensor | None:
        """The value of a constant."""
        self._known(ref.storage)
        if ref.storage not in self._values:
            return None
        return torch.as_strided(self._values[ref.storage], ref.shape, ref.stride, ref.offset)

    def number_of(self, value: Any, dtype: torch.dtype) -> Tensor:
        return self._numbers.of_values(torch.tensor([value], dtype=dtype))[0]


# --------------------------------------------------------------------------------------- operators that move elements

Move = Callable[[Replay, Operation], bool]


def _same(replay: Replay, operation: Operation) -> bool:
    """clone: the operator applied to the numbers."""
    (source,) = tensors(operation.args)
    replay.define(tensors(operation.outputs)[0], replay.elements(source))
    return True


def _on_numbers(replay: Replay, operation: Operation) -> bool:
    """Operators whose tensors are all moved: cat, stack, repeat, flip, roll."""
    args = tree_map(lambda leaf: replay.elements(leaf) if isinstance(leaf, TensorRef) else leaf, operation.args)
    result = operation.op(*args)
    for ref, numbers in zip(
        tensors(operation.outputs), [result] if isinstance(result, Tensor) else result, strict=True
    ):
        replay.define(ref, numbers)
    return True


def _to_copy(replay: Replay, operation: Operation) -> bool:
    """A copy to a device or memory format; another dtype rounds, which is computing."""
    (source,), (out,) = tensors(operation.args), tensors(operation.outputs)
    return source.dtype == out.dtype and _same(replay, operation)


def _copy_into(replay: Replay, operation: Operation) -> bool:
    target, source = tensors(operation.args)[:2]
    if target.dtype != source.dtype:
        return False
    replay.define(target, replay.elements(source).expand(target.shape))
    return True


def _by_constant(replay: Replay, operation: Operation) -> bool:
    """Indexing by indices that are known: index_select, index."""
    refs = tensors((operation.args, operation.kwargs))
    if any(replay.constant(ref) is None for ref in refs[1:]):
        return False

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, TensorRef):
            return leaf
        return replay.elements(leaf) if leaf is refs[0] else replay.constant(leaf)

    try:
        moved = operation.op(*tree_map(value, operation.args))
    except (IndexError, RuntimeError):  # of a part that it was not written for; then it is compared
        return False
    replay.define(tensors(operation.outputs)[0], moved)
    return True


def _pad(replay: Replay, operation: Operation) -> bool:
    (source,), (out,) = tensors(operation.args[:1]), tensors(operation.outputs)
    fill = operation.args[2] if len(operation.args) > 2 else 0
    number = int(replay.number_of(fill, out.dtype))
    replay.define(out, torch.constant_pad_nd(replay.elements(source), operation.args[1], number))
    return True


def _triangle(replay: Replay, operation: Operation) -> bool:
    (source,), (out,) = tensors(operation.args[:1]), tensors(operation.outputs)
    keep = operation.op(torch.ones(source.shape, dtype=torch.bool), *operation.args[1:])
    replay.define(out, torch.where(keep, replay.elements(source), replay.number_of(0, out.dtype)))
    return True


# What new tensors are filled with; None: the last argument. Memory that was not written yet counts as zeros: what reads it is
# not the same twice on one device either.
_FILLED: Mapping[str, float | None] = {
    **dict.fromkeys(("new_ones", "ones_like"), 1),
    **dict.fromkeys(
        ("new_zeros", "zeros_like", "new_empty", "empty_like", "new_empty_strided", "empty", "empty_strided"), 0
    ),
    **dict.fromkeys(("new_full", "full_like"), None),
}
_MOVES: Mapping[str, Move] = {
    "clone": _same,
    "lift_fresh_copy": _same,
    "_to_copy": _to_copy,
    "copy_": _copy_into,
    **dict.fromkeys(("cat", "stack", "repeat", "flip", "roll", "_reshape_copy", "view_copy"), _on_numbers),
    **dict.fromkeys(("index_select", "index"), _by_constant),
    "constant_pad_nd": _pad,
    **dict.fromkeys(("tril", "triu"), _triangle),
}
