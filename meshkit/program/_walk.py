"""The walk of a proof: the traces of all ranks beside that of the single-device model, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from meshkit.core._torch import tree_map
from meshkit.errors import PlanError
from meshkit.program._elements import Numbers, Part, Replay, equal, take
from meshkit.program._records import CLOSED, CLOSED_BY_VALUE, Operation, TensorRef, Trace, tensors
from meshkit.program._rules import EXPERTS_OF_PARTS, Dims, dims
from meshkit.program._states import Held, Kind, Slice, Unproved
from meshkit.program._tried import keeps_parts

Step = Callable[["Walk", Sequence[Operation]], None]


class Rank:
    """One rank's trace, and of what kind its tensors are."""

    def __init__(self, trace: Trace, held: Mapping[str, Held], proof: Walk) -> None:
        self.trace, self.held, self._proof = trace, held, proof
        self._kinds: dict[int, Kind] = {}
        self.replay = Replay(trace, proof.numbers, self._part, self._moved)

    def kind(self, ref: TensorRef) -> Kind:
        found = self._kinds.get(ref.storage)
        return found or self.held.get(self.trace.storages[ref.storage].source, Held()).kind

    def is_source(self, ref: TensorRef) -> bool:
        """Whether it looks at memory that the trace did not make: of a parameter, buffer or input."""
        return not self.trace.storages[ref.storage].source.startswith(("op ", "constant"))

    def define(self, ref: TensorRef, elements: Tensor, kind: Kind) -> None:
        if tuple(elements.shape) != ref.shape:
            raise Unproved(f"{ref} should be {list(elements.shape)}")
        self.replay.define(ref, elements)
        self._kinds[ref.storage] = kind

    def needs_gradient(self, ref: TensorRef) -> bool:
        return ref.requires_grad and self.replay.constant(ref) is None

    def where(self, operation: Operation) -> str:
        name = self.trace.calls[operation.call].name if operation.call >= 0 else ""
        return f"{name or 'the model'}: {operation}"

    def _part(self, storage: int) -> Part:
        kept = self.trace.storages[storage]
        full = self._proof.part(kept.source)
        held = self.held.get(kept.source, Held())
        if held.indices is None:
            return full
        return Part(full.base, full.shape, held.dim, torch.tensor(held.indices, dtype=torch.int64))

    def _moved(self, operation: Operation) -> None:
        inputs, outputs = tensors((operation.args, operation.kwargs)), tensors(operation.outputs)
        kinds = {self.kind(ref) for ref in inputs if self.replay.constant(ref) is None}
        if "partial" in kinds and len(kinds) > 1:
            raise Unproved(f"{self.where(operation)}: it joins summands that were not summed over the ranks yet.")
        trained = {self.kind(ref) for ref in inputs if self.needs_gradient(ref)}
        if "invariant" in trained and len(trained) > 1 and operation.trains:
            raise Unproved(
                f"{self.where(operation)}: it joins a tensor whose gradient is summed over ranks and one whose is not."
            )
        for kind in ("distributed", "partial", "varying", "replicated", "invariant"):
            if kind in kinds:
                for ref in outputs:
                    self._kinds[ref.storage] = kind  # type: ignore[assignment]
                return


class Walk:
    def __init__(
        self,
        full: Trace,
        ranks: Sequence[Trace],
        held: Sequence[Mapping[str, Held]],
        tokens: Sequence[Sequence[int]] | None,
        steps: Mapping[str, Step],
        sums_counts: bool,
    ) -> None:
        self.steps, self.sums_counts = steps, sums_counts
        self.trace, self.numbers = full, Numbers()
        self.tokens = None if tokens is None else [torch.tensor(list(each), dtype=torch.int64) for each in tokens]
        self.all_tokens = sum(map(len, self.tokens or ()))
        self._parts: dict[str, Part] = {}
        self.full = Replay(full, self.numbers, lambda storage: self.part(full.storages[storage].source))
        self.ranks = [Rank(trace, had, self) for trace, had in zip(ranks, held, strict=True)]
        self._model = iter(self.full.operations())
        self.at, self.module, self.before = "the model", "", ""  # what is followed now, and the module that ran before
        self.returned: list[Hashable] = []  # the states of what folded blocks return
        self.by_value = False  # whether something was put in another place by values, which are not known

    def part(self, source: str) -> Part:
        """A parameter, buffer or input of the single-device model."""
        if source not in self._parts:
            shape = next((kept.shape for kept in self.trace.storages if kept.source == source), None)
            if shape is None:
                raise Unproved(f"the split model reads {source!r}, which the single-device model does not.")
            self._parts[source] = Part(self.numbers.fresh(torch.Size(shape).numel()), shape)
        return self._parts[source]

    def run(self) -> list[Kind]:
        walks = [rank.replay.operations() for rank in self.ranks]
        for operations in zip_longest(*walks):
            first = operations[0]
            if any(other is None or other.name != first.name for other in operations):
                raise Unproved(f"{self.ranks[0].where(first)}: other ranks run something else there.")
            module = self.ranks[0].trace.calls[first.call].name
            self.before = self.module if module != self.module else self.before
            self.at, self.module = self.ranks[0].where(first), module
            step = self.steps.get(first.name)
            try:
                if step is not None:
                    step(self, operations)
                else:
                    self._follow(self.next(first), operations)
            except PlanError:
                raise
            except (IndexError, ValueError, RuntimeError) as error:  # sizes, or tensors, that do not belong together
                raise Unproved(f"{self.at}: it cannot be followed: {error}") from error
        if (left := next(self._model, None)) is not None:
            raise Unproved(f"{left}: the split model does not run it.")
        for name, ref in self.trace.kept.items():
            if all(name in rank.trace.kept for rank in self.ranks):
                self._output(f"{name}, which a loss may read,", ref, [rank.trace.kept[name] for rank in self.ranks])
        of_ranks = zip(*(tensors(rank.trace.output) for rank in self.ranks), strict=True)
        return [
            self._output("the output", ref, refs)
            for ref, refs in zip(tensors(self.trace.output), of_ranks, strict=False)
        ]

    def next(self, operation: Operation) -> Operation:
        found = next(self._model, None)
        if found is None:
            raise Unproved(f"{self.ranks[0].where(operation)}: the single-device model does not run it.")
        return found

    def _output(self, name: str, full: TensorRef, refs: Sequence[TensorRef]) -> Kind:
        kinds = {rank.kind(ref) for rank, ref in zip(self.ranks, refs, strict=True)}
        for rank, ref in zip(self.ranks, refs, strict=True):
            part = self.slice(rank, full, ref, name)
            if self.tokens is not None:
                # In whatever dim: of a cache, tokens come after heads.
                if rank.kind(ref) != "varying" or not self.is_tokens(rank, part, part.dim):
                    raise Unproved(f"{name} {ref} is none with a place for each token of a rank.", wrong=False)
            elif part.indices is not None or rank.kind(ref) in ("varying", "partial"):
                raise Unproved(f"{name} {ref} is only this rank's part; it must be gathered or summed.")
        (kind,) = kinds
        return kind

    # ------------------------------------------------------------------------------------------------- operators

    def _follow(self, full: Operation, operations: Sequence[Operation]) -> None:
        """One operator on all ranks."""
        rule = dims(full)
        sorts = not isinstance(full.op, str) and full.op.overloadpacket.__name__ in _SORTING
        self.by_value |= not sorts and self._goes_by_value(full)
        outs = tensors(full.outputs)
        results = [self._on_rank(rank, full, local, rule) for rank, local in zip(self.ranks, operations, strict=True)]
        for ref in outs:
            self.full.define(ref)
        for rank, local, (kind, name, indices) in zip(self.ranks, operations, results, strict=True):
            for position, (out, own) in enumerate(zip(outs, tensors(local.outputs), strict=True)):
                elements = self.full.elements(out)
                if kind == "varying" and name is not None:
                    assert rule is not None
                    elements = take(elements, rule.outputs[position].index(name), indices)
                elements = self._aligned(elements, len(own.shape))
                if tuple(elements.shape) != own.shape:
                    raise Unproved(f"{rank.where(local)}: its output is {own}, and should be {list(elements.shape)}.")
                # What is written into a parameter by hand leaves it one: its gradient is summed as before.
                inside = rank.kind(own) if kind == "invariant" and rank.is_source(own) else kind
                rank.define(own, elements, inside)
        self.by_value |= sorts  # which by itself may mix

    def _goes_by_value(self, full: Operation) -> bool:
        if isinstance(full.op, str):
            return full.op in (CLOSED, CLOSED_BY_VALUE)
        places = [ref for ref in tensors((full.args, full.kwargs)) if not ref.dtype.is_floating_point]
        return full.op.overloadpacket.__name__ in _ORDERING and any(self.full.constant(ref) is None for ref in places)

    def _on_rank(
        self, rank: Rank, full: Operation, local: Operation, rule: Dims | None
    ) -> tuple[Kind, str | None, Tensor]:
        """(the kind of the outputs, the dim along which the rank has a part by its name in the rule, indices)."""

        def unproved(why: str) -> Unproved:
            return Unproved(f"{rank.where(local)}: {why}.")

        if full.name != local.name:
            raise unproved(f"the single-device model runs {full} there")
        if _numbers(full) != _numbers(local):
            raise unproved(f"its arguments are {_numbers(local)}, and the single-device model's {_numbers(full)}")
        if draws(full):
            text = "it draws random numbers, which need not be the same on all ranks. Set its rate to 0."
            raise Unproved(f"{rank.where(local)}: {text}", wrong=False)
        theirs, mine = tensors((full.args, full.kwargs)), tensors((local.args, local.kwargs))
        if len(theirs) != len(mine):
            raise unproved("the single-device model runs it with other arguments")
        slices = [self.slice(rank, a, b, rank.where(local)) for a, b in zip(theirs, mine, strict=True)]
        kinds = [rank.kind(ref) for ref in mine if rank.replay.constant(ref) is None]
        nothing = torch.empty(0, dtype=torch.int64)
        if "distributed" in kinds:
            if set(kinds) != {"distributed"}:
                raise unproved("it mixes a DTensor with plain tensors")
            return "distributed", None, nothing
        split = [index for index, part in enumerate(slices) if part.indices is not None]
        if not split and full.op == EXPERTS_OF_PARTS:
            raise unproved(
                "it would run every token on each rank, and add up their gradients: it takes a rank's own tokens"
            )
        if not split:
            return self._joined(rank, local, rule, unproved), None, nothing
        if rule is None:
            text = f"{rank.where(local)}: it reads a part, and nothing is known of how it treats parts."
            raise Unproved(text, wrong=keeps_parts(full, slices) is False)
        names = {rule.inputs[index][slices[index].dim] for index in split}
        if len(names) != 1 or None in names:
            raise unproved("it runs on parts along different dims")
        (name,) = names
        assert name is not None
        indices = max((slices[index].indices for index in split), key=lambda found: found.unique().numel())  # type: ignore[union-attr]
        assert indices is not None
        for index, of_input in enumerate(rule.inputs):
            if name not in of_input:
                continue
            part, dim = slices[index], of_input.index(name)
            if part.indices is not None and part.dim == dim and equal(part.indices, indices):
                continue
            if not self._fits(rank, theirs[index], mine[index], dim, indices):
                text = f"{rank.where(local)}: it meets {mine[index]} with another part of another tensor."
                raise Unproved(text, wrong=self._is_part(rank, theirs[index], mine[index], dim))
        for ref in mine:
            kind = rank.kind(ref)
            if kind == "partial":
                raise unproved(f"it reads {ref}, summands that were not summed over the ranks yet")
            if kind == "invariant" and local.trains and rank.needs_gradient(ref):
                source = rank.trace.storages[ref.storage].source
                raise unproved(
                    f"it meets {source} ({ref}) with a part, and its gradient would not be summed over ranks"
                )
        if name in rule.summed:
            return "partial", name, indices
        if name in rule.mixed or any(name not in of_output for of_output in rule.outputs):
            text = f"{rank.where(local)}: it needs all of a dim, of which this rank has a part."
            raise Unproved(text, wrong=not _only_orders(full) or _orders_trained(full))
        return "varying", name, indices

    def _joined(self, rank: Rank, local: Operation, rule: Dims | None, unproved: Callable[[str], Unproved]) -> Kind:
        """The kind of what is computed from tensors of which the rank has all elements."""
        refs = [ref for ref in tensors((local.args, local.kwargs)) if rank.replay.constant(ref) is None]
        kinds = {rank.kind(ref) for ref in refs}
        if "partial" in kinds:
            if rule is None or not self._keeps_sums(rank, local):
                raise unproved("it reads summands that were not summed over the ranks yet")
            return "partial"
        if not local.trains:
            return "invariant"
        trained = {rank.kind(ref) for ref in refs if rank.needs_gradient(ref)}
        if "invariant" in trained and len(trained) > 1:
            raise unproved("the gradient of one of its inputs is summed over ranks, and that of another is not")
        return "varying" if "varying" in trained else trained.pop() if trained else "invariant"

    def _keeps_sums(self, rank: Rank, local: Operation) -> bool:
        """Whether a linear operator of summands gives summands of what it gives of their sum."""
        refs = tensors((local.args, local.kwargs))
        name = local.op.overloadpacket.__name__.rstrip("_")
        partial = [rank.kind(ref) == "partial" and rank.replay.constant(ref) is None for ref in refs]
        if name in ("add", "sub"):
            return all(partial) and len(refs) == 2
        if name in ("mul", "div", "mm", "bmm"):
            # Linear in the summands. The gradient of the other factor is a summand too.
            others = [ref for ref, summand in zip(refs, partial, strict=True) if not summand]
            return (
                sum(partial) == 1
                and (name != "div" or partial[0])
                and all(rank.kind(ref) == "replicated" or not rank.needs_gradient(ref) for ref in others)
            )
        if name == "index":
            return partial[0] and not any(partial[1:])
        return name in ("neg", "_to_copy", "clone", "sum", "alias") and all(partial)

    # ---------------------------------------------------------------------------------------------------- parts

    def state(self, rank: Rank, full: TensorRef, local: TensorRef, where: str) -> Hashable:
        """What the rank has of a tensor."""
        part = self.slice(rank, full, local, where)
        constant = rank.replay.constant(local) is not None
        return constant or rank.kind(local), part.dim, None if part.indices is None else tuple(part.indices.tolist())

    def slice(self, rank: Rank, full: TensorRef, local: TensorRef, where: str) -> Slice:
        if len(full.shape) == len(local.shape) and (fast := self._slice_of_parts(rank, full, local)) is not None:
            return fast
        a = self.full.elements(full)
        b = self._aligned(rank.replay.elements(local), a.ndim)
        if a.ndim != b.ndim:
            raise Unproved(f"{where}: it reads {local}, and the single-device model {full}.")
        if equal(a, b):
            return Slice()
        if self.tokens is not None:  # of values that repeat, other tokens would fit too
            own = self.tokens[self.ranks.index(rank)]
            for dim in range(a.ndim):
                if a.shape[dim] == self.all_tokens and equal(take(a, dim, own), b):
                    return Slice(dim, own)
        uneven = [dim for dim in range(a.ndim) if a.shape[dim] != b.shape[dim]]
        for dim in uneven if len(uneven) == 1 else range(a.ndim) if not uneven else ():
            if (indices := _indices(a, b, dim)) is not None:
                return Slice(dim, indices)
        # Parts of values that repeat are not always found.
        wrong = a.shape == b.shape
        raise Unproved(f"{where}: it reads {local}, which is no part along one dim of {full}.", wrong=wrong)

    def _fits(self, rank: Rank, full: TensorRef, local: TensorRef, dim: int, indices: Tensor) -> bool:
        """Whether the rank's tensor is those indices of the single-device model's."""
        fast = self._slice_of_parts(rank, full, local) if len(full.shape) == len(local.shape) else None
        if fast is not None:
            return fast.indices is not None and fast.dim == dim and torch.equal(fast.indices, indices)
        a = self.full.elements(full)
        return equal(take(a, dim, indices), self._aligned(rank.replay.elements(local), a.ndim))

    def _is_part(self, rank: Rank, full: TensorRef, local: TensorRef, dim: int) -> bool:
        """Whether it is, each place once: of values that repeat, another part would fit too."""
        whole = self.full.elements(full)
        found = _indices(whole, self._aligned(rank.replay.elements(local), whole.ndim), dim)
        return found is not None and found.unique().numel() == found.numel()

    def _aligned(self, elements: Tensor, ndim: int) -> Tensor:
        """With as many dims, where the first ones are of size 1: positions that a batch has are those of a row, and positions
        that a model counts are often of no row."""
        if self.tokens is None:
            return elements
        while elements.ndim > ndim and elements.shape[0] == 1:
            elements = elements[0]
        while elements.ndim < ndim:
            elements = elements[None]
        return elements

    def _slice_of_parts(self, rank: Rank, full: TensorRef, local: TensorRef) -> Slice | None:
        """Without looking at elements: views of one parameter with its dims in another order."""
        a, b = self.full.part(full), rank.replay.part(local)
        if a is None or b is None or a.base != b.base or full.offset or local.offset:
            return None
        order = _order(full, a.shape)
        if order is None or order != _order(local, b.local_shape):
            return None
        return Slice() if b.indices is None else Slice(order.index(b.dim), b.indices)

    def is_tokens(self, rank: Rank, part: Slice, dim: int = 1) -> bool:
        """Whether a part is the rank's tokens."""
        assert self.tokens is not None
        own = self.tokens[self.ranks.index(rank)]
        return part.dim == dim and part.indices is not None and torch.equal(part.indices, own)

    # ---------------------------------------------------------------------------------------------- our own steps

    def each(self, operations: Sequence[Operation]) -> Iterator[tuple[Rank, Operation, TensorRef, TensorRef]]:
        for rank, operation in zip(self.ranks, operations, strict=True):
            yield rank, operation, tensors(operation.args)[0], tensors(operation.outputs)[0]

    def require(self, rank: Rank, operation: Operation, ref: TensorRef, kind: Kind) -> None:
        found = rank.kind(ref)
        if not rank.needs_gradient(ref) and {found, kind} <= {"invariant", "replicated"}:
            return
        if found != kind:
            raise Unproved(
                f"{rank.where(operation)}: it takes a tensor that is {kind} on the axis, but this one is {found}."
            )

    def require_same(self, operations: Sequence[Operation]) -> None:
        """All ranks give the same elements."""
        elements = [rank.replay.elements(source) for rank, _, source, _ in self.each(operations)]
        if any(not equal(other, elements[0]) for other in elements):
            raise Unproved(f"{self.ranks[0].where(operations[0])}: the ranks give different tensors.")


def _indices(full: Tensor, local: Tensor, dim: int) -> Tensor | None:
    """The indices along `dim` whose slices of `full` are `local`; None if there are none."""
    if any(size != local.shape[other] for other, size in enumerate(full.shape) if other != dim):
        return None
    if not local.shape[dim]:
        return torch.empty(0, dtype=torch.int64)  # the last of many ranks may have none of a few features
    if not local.numel():
        return None
    # One line along the dim tells which they are, if any.
    a, b = (each[tuple(slice(None) if other == dim else 0 for other in range(each.ndim))] for each in (full, local))
    numbers, places = a.sort(stable=True)  # so that the first of equal ones is found
    at = torch.searchsorted(numbers, b.contiguous()).clamp(max=len(numbers) - 1)
    if not torch.equal(numbers[at], b):
        return None
    indices = places[at]
    return indices if equal(take(full, dim, indices), local) else None


def _order(ref: TensorRef, shape: Sequence[int]) -> list[int] | None:
    """Which dim of a contiguous tensor each dim of its view is; None for other views."""
    if len(ref.shape) != len(shape):
        return None
    strides = torch.empty(tuple(shape), device="meta").stride()
    left = list(range(len(shape)))
    order = []
    for size, stride in zip(ref.shape, ref.stride, strict=True):
        found = next((dim for dim in left if shape[dim] == size and strides[dim] == stride), None)
        if found is None:
            return None
        left.remove(found)
        order.append(found)
    return order


def draws(operation: Operation) -> bool:
    """Whether an operator draws random numbers. Attention says that it might: it does with a rate of dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation.op, "tags", ()):
        return False
    if "attention" in operation.name:
        schema = operation.op._schema.arguments
        given = dict(zip((argument.name for argument in schema), operation.args, strict=False)) | dict(operation.kwargs)
        return bool(given.get("dropout_p", 0.0))
    return True


def _only_orders(operation: Operation) -> bool:
    """Whether an operator puts elements in another place, which a later one may undo, or counts: that alone mixes nothing."""
    counts = not any(ref.dtype.is_floating_point for ref in tensors(operation.outputs))
    return counts or isinstance(operation.op, str) or operation.op.overloadpacket.__name__ in _ORDERING


def _orders_trained(operation: Operation) -> bool:
    """Whether what is sorted has a gradient: what becomes of it is no order of tokens that a later step undoes."""
    sorts = not isinstance(operation.op, str) and operation.op.overloadpacket.__name__ in _SORTING
    return sorts and operation.trains


_SORTING = {"sort", "argsort", "topk", "masked_select"}
_ORDERING = {*_SORTING, "gather", "scatter", "scatter_add", "index", "index_put"}
_ORDERING |= {"index_select", "index_add", "index_copy"}


def _numbers(operation: Operation) -> Any:
    """The arguments that are no tensors. Not the groups of a convolution: of a channel each there are as many as channels."""
    args = list(operation.args)
    if not isinstance(operation.op, str) and operation.op.overloadpacket.__name__ == "convolution":
        args = args[:8]
    return tree_map(_comparable, (args, dict(operation.kwargs)))


def _comparable(leaf: Any) -> Any:
    """Numbers, names and dtypes as they are; of objects of a model's own only the type, which no operator of torch takes."""
    if isinstance(leaf, TensorRef | torch.device):
        return None
    known = int | float | complex | str | None | torch.dtype | torch.memory_format | torch.layout
    return leaf if isinstance(leaf, known) else type(leaf).__name__
