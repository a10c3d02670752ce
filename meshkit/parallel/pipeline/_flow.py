"""Data flow between pipeline stages: what each stage needs of the others, read from the program (a trace of the forward).

A stage runs the model's own forward. Its own modules run; what those of earlier stages returned and the stage needs is
received, and whatever else modules of other stages return has no values. What lies between the modules (additions, norms
without parameters, masks, a scale of logits) belongs to no stage: each stage that needs its result computes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from meshkit.core import _torch
from meshkit.errors import PlanError
from meshkit.program import CLOSED_BY_VALUE, OF_OUTPUT, ModuleCall, Operation, TensorRef, Trace, draws, tensors

# What a module may be given and return beside tensors: the same for every batch of these shapes.
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def plain_leaves(tree: Any) -> tuple[Any, ...]:
    """Those of PLAIN; less devices, which are others when a model is read."""
    return tuple(
        leaf for leaf in _torch.tree_leaves(tree) if isinstance(leaf, PLAIN) and not isinstance(leaf, torch.device)
    )


@dataclass(frozen=True, order=True)
class Value:
    """A tensor that a module of a stage returned. call: number of the call, among those of all stages' modules; leaf: which
    of its output."""

    call: int
    leaf: int


@dataclass(frozen=True, eq=False)
class Flow:
    """calls: of all stages' modules, in order; a value's number is an index of it. cuts[stage]: the values that the stage
    hands on to the next. refs: what each is like. written: values that are changed in place afterwards. between: storages
    that operations between the modules read or write, or that are returned. given: what the model is called with beside
    tensors. writes_given: whether it changes tensors in place that it is called with. hidden: entries of the output that come
    of what other stages' modules make and do not return, as by hooks: the last stage cannot compute them. By name or place,
    what they are like. beside: why a loss may not read more than the output: modules of other stages keep some of their
    results. Empty where they keep none."""

    calls: tuple[ModuleCall, ...]
    cuts: tuple[tuple[Value, ...], ...]
    refs: Mapping[Value, TensorRef] = field(default_factory=dict)
    written: frozenset[Value] = frozenset()
    between: frozenset[int] = frozenset()
    given: tuple[Any, ...] = ()
    writes_given: bool = False
    hidden: Mapping[Any, Any] = field(default_factory=dict)
    beside: str = ""

    @cached_property
    def outputs(self) -> list[tuple[list[Any], Any, list[Any]]]:
        """Of each call: the leaves of what it returns, their tree, and the leaves of what it is given."""
        return [
            (*_torch.tree_flatten(call.output), _torch.tree_leaves((call.args, call.kwargs))) for call in self.calls
        ]

    def crossing(self, cut: int) -> list[TensorRef]:
        """What crosses a cut."""
        return [self.refs[value] for value in self.cuts[cut]]

    def width(self, rows_tokens: tuple[int, ...]) -> int | None:
        """The features of the hidden state [B, T, C], where that alone crosses every cut. rows_tokens: (B, T)."""
        crossing = [self.crossing(cut) for cut in range(len(self.cuts))]
        shapes = {ref.shape for refs in crossing for ref in refs if ref.dtype.is_floating_point}
        if len(shapes) != 1 or any(len(refs) != 1 for refs in crossing):
            return None
        (shape,) = shapes
        return shape[-1] if len(shape) == 3 and shape[:2] == rows_tokens else None


def data_flow(
    trace: Trace,
    stages: int,
    stage_of: Callable[[str], int | None],
    *,
    modules: Collection[str],
    holders: Callable[[str], Collection[int]],
) -> Flow:
    """What crosses each cut. stage_of: of a module or tensor, or of what contains it; None for what is of no stage. modules:
    those that belong to a stage as a whole. holders: the stages that hold a parameter, under any of its names.

    Raises: PlanError for a model that cannot run in these stages, with the operation and its line.
    """
    for operation in trace.operations:
        if operation.op == CLOSED_BY_VALUE:
            raise PlanError(
                f"pipeline: {_name(trace, operation.call)!r} reads a value that all rows of a batch have part in, and a "
                "stage is given a microbatch at a time. Write it row by row (torch.where), or use a mesh without pp."
            )
    return _Walk(trace, stages, stage_of, modules, holders).flow()


def positions(trace: Trace, blocks: Sequence[str], pieces: Collection[str]) -> dict[str, int]:
    """For each module of `pieces` that is called: the number of blocks, in their order, that must have run before it.

    The largest over its calls; blocks themselves are left out.
    """
    order = {name: index + 1 for index, name in enumerate(blocks)}
    walk = _Walk(trace, 1, lambda name: 0, {*blocks, *pieces}, lambda name: ())
    found: dict[str, int] = {}
    of_call: list[int] = []
    for number, call in enumerate(walk.calls):
        before = [of_call[earlier] for earlier in walk.calls_before(number)]
        position = max(before, default=0)
        if call.name in order:
            position = max(position, order[call.name])
        else:
            found[call.name] = max(position, found.get(call.name, 0))
        of_call.append(position)
    return found


def outermost(trace: Trace, blocks: Collection[str], trained: Collection[str]) -> list[str]:
    """The outermost modules that are called, contain parameters (names in `trained`) and neither are nor contain a block."""
    found: dict[str, None] = {}
    for call in trace.calls:
        name = call.name
        if not name or name in found or any(_inside(name, other) for other in (*found, *blocks)):
            continue
        if any(_inside(block, name) for block in blocks) or not any(_inside(param, name) for param in trained):
            continue
        found[name] = None
    return list(found)


def _inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


class _Walk:
    def __init__(
        self,
        trace: Trace,
        stages: int,
        stage_of: Callable[[str], int | None],
        modules: Collection[str],
        holders: Callable[[str], Collection[int]],
    ) -> None:
        self.trace, self.stages, self.stage_of, self.holders = trace, stages, stage_of, holders
        self.calls: list[ModuleCall] = []
        self.owner: list[int | None] = [None] * len(trace.operations)  # of each operation: the number of its call
        within: set[int] = set()
        for number, call in enumerate(trace.calls):
            if call.parent in within:
                within.add(number)
            elif call.name in modules:
                within.add(number)
                for index in range(*call.operations):
                    self.owner[index] = len(self.calls)
                self.calls.append(call)
            elif (inner := next((name for name in modules if _inside(call.name, name)), None)) is not None:
                raise PlanError(
                    f"pipeline: {call.name!r} is called by {_name(trace, call.parent)!r} and not by {inner!r}, of which it "
                    "is a part: a rank without that has nothing to call. Call it there, or use a mesh without pp."
                )
        self.writers = self._writers()

    def _writers(self) -> dict[int, list[int]]:
        """By storage: the operations that made it or wrote to it."""
        writers: dict[int, list[int]] = {}
        for index, operation in enumerate(self.trace.operations):
            for storage in {ref.storage for ref in tensors(operation.outputs)}:
                if self.trace.storages[storage].source == f"op {index}":
                    writers.setdefault(storage, []).append(index)
            for ref in _written(operation):
                if writers.setdefault(ref.storage, [])[-1:] != [index]:
                    writers[ref.storage].append(index)
        return writers

    # ------------------------------------------------------------------------------------------------- the analysis

    def flow(self) -> Flow:
        end = len(self.trace.operations)
        needs: dict[Value, int] = {}  # the last stage that needs it
        computed: dict[int, int] = {}  # operations that draw random numbers: the stage that runs them
        for stage in range(self.stages):
            seen: set[tuple[int, int]] = set()
            for number in range(len(self.calls)):
                if self._stage(number) == stage:
                    for ref, before in self._reads(number):
                        self._need(ref, before, stage, number, seen, needs, computed)
            if stage == self.stages - 1:
                for ref in tensors(self.trace.result):
                    self._need(ref, end, stage, None, seen, needs, computed)
        beside = self._beside()
        cuts: list[tuple[Value, ...]] = []
        for cut in range(self.stages - 1):
            cuts.append(tuple(sorted(v for v, last in needs.items() if self._stage(v.call) <= cut < last)))
        refs = {value: _leaves(self.calls[value.call].output)[value.leaf] for value in needs}
        written = frozenset(value for value in needs if self._changed(value, refs[value]))
        writes_given = any(
            self.trace.storages[ref.storage].source.startswith("input ")
            for operation in self.trace.operations
            for ref in _written(operation)
        )
        return Flow(
            tuple(self.calls),
            tuple(cuts),
            refs,
            written,
            frozenset(self._between()),
            writes_given=writes_given,
            hidden=self._hidden(),
            beside=beside,
        )

    def _need(
        self,
        ref: TensorRef,
        before: int,
        stage: int,
        consumer: int | None,
        seen: set[tuple[int, int]],
        needs: dict[Value, int],
        computed: dict[int, int],
    ) -> None:
        """Walk back from a tensor, as it is before an operation, to what earlier stages return."""
        pending = [(ref, before, consumer)]
        while pending:
            ref, before, consumer = pending.pop()
            writers = [index for index in self.writers.get(ref.storage, ()) if index < before]
            self._refuse_held(ref, before, stage, consumer)
            for index in writers:
                owner = self.owner[index]
                if owner is None:
                    if (ref.storage, index) in seen:
                        continue
                    seen.add((ref.storage, index))
                    operation = self.trace.operations[index]
                    if draws(operation) and computed.setdefault(index, stage) != stage:
                        raise PlanError(
                            f"pipeline: {self._line(operation)} draws random numbers that stages {computed[index]} and "
                            f"{stage} both need, and each would draw its own. Set its rate to 0, or use a mesh without pp."
                        )
                    pending += [(each, index, None) for each in tensors((operation.args, operation.kwargs))]
                elif owner != consumer and self._stage(owner) != stage:
                    self._receive(ref, index, owner, stage, before, needs)

    def _receive(
        self, ref: TensorRef, index: int, owner: int, stage: int, before: int, needs: dict[Value, int]
    ) -> None:
        producer, source = self._stage(owner), self.calls[owner]
        operation = self.trace.operations[index]
        user = self._user(before)
        if producer > stage:
            raise PlanError(
                f"pipeline: {user} of stage {stage} needs what {source.name!r} of stage {producer} returns, which runs after "
                "it: blocks run again. Use fewer stages, or a mesh without pp."
            )
        if self.trace.storages[ref.storage].source != f"op {index}" and not self._made_in(ref.storage, owner):
            raise PlanError(
                f"pipeline: {self._line(operation)} in {source.name!r} of stage {producer} changes in place what it was "
                f"given, which {user} of stage {stage} reads afterwards. Write it without (x + y in place of x += y)."
            )
        found = [
            Value(owner, leaf)
            for leaf, each in enumerate(_leaves(source.output))
            if isinstance(each, TensorRef) and each.storage == ref.storage
        ]
        if not found:
            raise PlanError(
                f"pipeline: {user} of stage {stage} reads a tensor that {self._line(operation)} makes in {source.name!r} of "
                f"stage {producer}, which does not return it. Return it, or use a mesh without pp."
            )
        for value in found:
            needs[value] = max(stage, needs.get(value, 0))

    def _refuse_held(self, ref: TensorRef, before: int, stage: int, consumer: int | None) -> None:
        """A parameter or buffer that is another stage's, or that is read outside of the module that has it."""
        kind, _, name = self.trace.storages[ref.storage].source.partition(" ")
        if kind not in ("parameter", "buffer") or before >= len(self.trace.operations):
            return
        holders = self.holders(name)
        if not holders or (consumer is not None and stage in holders):
            return
        if consumer is None:
            raise PlanError(
                f"pipeline: {self._line(self.trace.operations[before])} reads {name!r} outside of the module that has it, so "
                "no stage can compute it alone. Let a module before, in or after the blocks do it, or use a mesh without pp; "
                "a penalty on weights is the optimizer's weight_decay."
            )
        raise PlanError(
            f"pipeline: {self.calls[consumer].name!r} of stage {stage} reads {name!r}, which stage {min(holders)} has. Use a "
            "mesh without pp."
        )

    def _beside(self) -> str:
        """See `Flow.beside`. Raises: PlanError for what the model's own code computes of it, or of parameters outside of the
        modules that have them."""
        found = ""
        read = {each.storage for ref in tensors(self.trace.output) for each, _ in self._outside(ref)}
        for name, ref in self.trace.kept.items():
            for outside, before in self._outside(ref):
                self._refuse_held(outside, before, self.stages - 1, None)
            for index, owner, returned in self._of_other_stages(ref):
                of_output = name.startswith(OF_OUTPUT)
                if returned and of_output:
                    continue  # it has no values there, and says so
                text = (
                    f"pipeline: {name}, which a loss may read, comes of {self._line(self.trace.operations[index])} in "
                    f"{self.calls[owner].name!r} of stage {self._stage(owner)}, and the loss is computed by the last. Return "
                    "it from module to module, detach what only logs read, or use a mesh without pp."
                )
                if of_output or (not returned and ref.storage in read):
                    raise PlanError(text)
                found = found or text
        return found

    def _hidden(self) -> dict[Any, Any]:
        """See `Flow.hidden`."""
        result = {ref.storage for ref in tensors(self.trace.result)}
        output = self.trace.output
        if isinstance(output, Mapping):
            entries = dict(output)
        else:
            entries = dict(enumerate(output)) if isinstance(output, tuple | list) else {}
        return {
            key: entry
            for key, entry in entries.items()
            if not any(ref.storage in result for ref in tensors(entry))
            and any(not returned for ref in tensors(entry) for *_, returned in self._of_other_stages(ref))
        }

    def _outside(self, ref: TensorRef) -> Iterator[tuple[TensorRef, int]]:
        """The tensor, and those it is computed of outside of the stages' modules, each as it is before an operation."""
        pending, seen = [(ref, len(self.trace.operations))], set[int]()
        while pending:
            ref, before = pending.pop()
            yield ref, before
            for index in self.writers.get(ref.storage, ()):
                if index < before and index not in seen and self.owner[index] is None:
                    seen.add(index)
                    operation = self.trace.operations[index]
                    pending += [(each, index) for each in tensors((operation.args, operation.kwargs))]

    def _of_other_stages(self, ref: TensorRef) -> Iterator[tuple[int, int, bool]]:
        """(operation of a module of a stage before the last, the module's call, whether the module returns its result) for
        each that the tensor is computed of."""
        for made, before in self._outside(ref):
            for index in self.writers.get(made.storage, ()):
                owner = self.owner[index]
                if index < before and owner is not None and self._stage(owner) != self.stages - 1:
                    leaves = _leaves(self.calls[owner].output)
                    yield index, owner, any(isinstance(x, TensorRef) and x.storage == made.storage for x in leaves)

    def calls_before(self, number: int) -> set[int]:
        """The calls whose results the call reads, at once or through operations between modules."""
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()
        pending = list(self._reads(number))
        while pending:
            ref, before = pending.pop()
            for index in self.writers.get(ref.storage, ()):
                if index >= before or (ref.storage, index) in seen:
                    continue
                owner = self.owner[index]
                if owner == number:
                    continue
                if owner is not None:
                    found.add(owner)
                    continue
                seen.add((ref.storage, index))
                operation = self.trace.operations[index]
                pending += [(each, index) for each in tensors((operation.args, operation.kwargs))]
        return {each for each in found if each < number}

    # ------------------------------------------------------------------------------------------------- small things

    def _between(self) -> Iterator[int]:
        for owner, operation in zip(self.owner, self.trace.operations, strict=True):
            if owner is None:
                yield from (ref.storage for ref in tensors((operation.args, operation.kwargs, operation.outputs)))
        yield from (ref.storage for ref in tensors(self.trace.result))

    def _reads(self, number: int) -> Iterator[tuple[TensorRef, int]]:
        """What the call is given, and what its operations read, each before which operation."""
        call = self.calls[number]
        first, last = call.operations
        for ref in tensors((call.args, call.kwargs)):
            yield ref, first
        for index in range(first, last):
            operation = self.trace.operations[index]
            for ref in tensors((operation.args, operation.kwargs)):
                yield ref, index

    def _stage(self, number: int) -> int:
        stage = self.stage_of(self.calls[number].name)
        assert stage is not None
        return stage

    def _made_in(self, storage: int, number: int) -> bool:
        first, last = self.calls[number].operations
        kind, _, index = self.trace.storages[storage].source.partition(" ")
        return kind == "op" and first <= int(index) < last

    def _changed(self, value: Value, ref: TensorRef) -> bool:
        last = self.calls[value.call].operations[1]
        return any(index >= last for index in self.writers.get(ref.storage, ()))

    def _user(self, before: int) -> str:
        if before >= len(self.trace.operations):
            return "the output"
        owner = self.owner[before]
        following = [n for n, call in enumerate(self.calls) if call.operations[0] == before]
        if owner is not None or following:
            return repr(self.calls[owner if owner is not None else following[0]].name)
        return self._line(self.trace.operations[before])

    def _line(self, operation: Operation) -> str:
        name = _name(self.trace, operation.call)
        return f"{operation.name} at {operation.where} of {name!r}"


def _name(trace: Trace, call: int) -> str:
    return (trace.calls[call].name if call >= 0 else "") or "the model"


def _leaves(tree: Any) -> list[Any]:
    return _torch.tree_leaves(tree)


def _written(operation: Operation) -> list[TensorRef]:
    """The arguments that an operator writes to."""
    schema = getattr(operation.op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found: list[Any] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = operation.kwargs.get(argument.name, operation.args[index] if index < len(operation.args) else None)
            found += tensors(given)
    return found
