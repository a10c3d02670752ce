"""State that a forward writes (buffers, running statistics, counters): what runs twice in a step writes it twice.

Recompute runs a block's forward again in backward, and microbatches run all of it several times; one device writes once, from
all rows, and what it computes depends on that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from meshkit.core import _torch
from meshkit.core.asked_once import AskedOnce, shapes
from meshkit.errors import PlanError
from meshkit.parallel.other_calls import refuse_other_calls
from meshkit.parallel.rows import of_rows, read_forward
from meshkit.parallel.snapshot import Snapshot
from meshkit.program import (
    Example,
    Operation,
    Program,
    Trace,
    draws_by_hand,
    follow_mode,
    kind_of_call,
    mode_of,
    tensors,
)

FORWARDS_READ = 2  # what a first forward makes, as a table that is kept, the second does not write


@dataclass(frozen=True)
class StateWrite:
    """name: of the buffer. where: the operator with its line, "" where it is not known. from_rows: whether its new values
    depend on the batch's. is_read: whether the output depends on it."""

    name: str
    where: str = ""
    from_rows: bool = False
    is_read: bool = True

    def __str__(self) -> str:
        return f"the forward writes {self.name!r}{f' ({self.where})' if self.where else ''}"


_KNOWN: WeakKeyDictionary[Trace, list[StateWrite]] = WeakKeyDictionary()


def state_writes(read: Trace) -> list[StateWrite]:
    """The buffers that a forward writes, in place or by an assignment. Looked for once in each trace."""
    if read not in _KNOWN:
        _KNOWN[read] = _state_writes(read)
    return _KNOWN[read]


def _state_writes(read: Trace) -> list[StateWrite]:
    rows = {number for number, each in enumerate(read.storages) if each.source.startswith("input ") and each.shape}
    by_name: dict[str, Operation | None] = {}
    written = dict(read.assigned)  # name -> storage of its new value
    for operation in read.operations:
        changed = {ref.storage for ref in changed_by(operation)}
        if _reads(operation) & rows:
            rows |= _makes(operation)
        for storage in changed:
            kind, _, name = read.storages[storage].source.partition(" ")
            if kind == "buffer":
                written.setdefault(name, storage)
                by_name.setdefault(name, operation)
    for name, storage in read.assigned.items():
        makes = (operation for operation in read.operations if storage in _makes(operation))
        by_name.setdefault(name, next(makes, None))
    result = {ref.storage for ref in tensors((read.output, dict(read.kept)))}
    return [
        StateWrite(name, str(by_name[name] or ""), storage in rows, bool(_dependents(read, name, storage) & result))
        for name, storage in written.items()
    ]


def changed_by(operation: Operation) -> list[Any]:
    """The tensors that an operation changes in place."""
    if isinstance(operation.op, str) or not operation.op._schema.is_mutable:
        return []
    arguments = operation.op._schema.arguments
    given = {each.name: value for each, value in zip(arguments, operation.args, strict=False)} | dict(operation.kwargs)
    writes = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return tensors([given[name] for name in writes if name in given])


def _dependents(read: Trace, name: str, storage: int) -> set[int]:
    """The storages whose values depend on a buffer's, before or after it is written."""
    found = {storage} | {number for number, each in enumerate(read.storages) if each.source == f"buffer {name}"}
    for operation in read.operations:
        if _reads(operation) & found:
            found |= _makes(operation)
    return found


def _reads(operation: Operation) -> set[int]:
    return {ref.storage for ref in tensors((operation.args, dict(operation.kwargs)))}


def _makes(operation: Operation) -> set[int]:
    return {ref.storage for ref in (*tensors(operation.outputs), *changed_by(operation))}


def refuse_state_writes(writes: Iterable[StateWrite], repeated: Mapping[str, str], microbatches: int) -> None:
    """Raises: PlanError for what is written in a module that runs again, and for what microbatches write in another way than
    one device, which has all rows at once.

    repeated: modules whose forward runs again -> by what, and what to change.
    """
    for write in writes:
        module = next((name for name in repeated if write.name.startswith(f"{name}.")), None)
        if module is not None:
            raise PlanError(
                f"{write}, and {repeated[module]} Or write it outside of {module!r}, as in the model's own forward."
            )
        if microbatches > 1 and write.from_rows:
            raise PlanError(
                f"{write} from the rows of each of {microbatches} microbatches, and a single device would write it from all "
                "rows. Do not write it in training (module.eval(), a GroupNorm instead), or use microbatches=1."
            )
        if microbatches > 1 and write.is_read:
            raise PlanError(
                f"{write} in each of {microbatches} microbatches, and what it computes depends on it: a single device would "
                "write it once in a step. Write it after the optimizer's step, or use microbatches=1."
            )


def refuse_of_microbatches(read: Trace, microbatches: int) -> None:
    """`refuse_state_writes` of a forward, where nothing but microbatches runs it again."""
    refuse_state_writes(state_writes(read), {}, microbatches)


class StateGuard:
    """Before a call of a kind that none was before: `refuse_state_writes` by its reading. For stages, whose ranks must all
    refuse.

    closed: modules whose inside is not read. repeated: as in `refuse_state_writes`.
    """

    def __init__(
        self, program: Program, *, closed: Mapping[str, str], repeated: Mapping[str, str], asked: AskedOnce
    ) -> None:
        self._program, self._closed, self._repeated, self._asked = program, closed, repeated, asked
        self._microbatches = 1
        self._writes: dict[tuple[Hashable, Hashable], list[StateWrite]] = {}  # by mode and kind of call

    def begin_step(self, model: nn.Module, microbatches: int) -> None:
        self._microbatches = microbatches
        for (mode, _), writes in self._writes.items():
            if mode == mode_of(model):
                refuse_state_writes(writes, self._repeated, microbatches)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or any(map(_torch.is_fake, _torch.tree_leaves((args, kwargs)))):
            return
        example = Example(args, {name: value for name, value in kwargs.items() if name != "mask"})
        call = mode_of(model), kind_of_call(model, example)
        if call not in self._writes:
            question = "writes", call, shapes((args, example.kwargs)), self._microbatches
            self._writes[call] = self._asked.ask(question, lambda: self._look(model, example))
        refuse_state_writes(self._writes[call], self._repeated, self._microbatches)

    def _look(self, model: nn.Module, example: Example) -> list[StateWrite]:
        read = _read(self._program, model, example, self._closed)
        if read is not None and draws_by_hand(read):
            refuse_other_calls(
                self._program,
                of_rows(example, 2),
                closed=self._closed,
                repeated=self._repeated,
                microbatches=self._microbatches,
            )
        return [] if read is None else state_writes(read)


class StateWatch:
    """Sees what forwards of training steps write, in the first two of a kind: of the same modules in training, and with one
    microbatch or several. A reading then tells the line, and whether what is written is read.

    closed, repeated: as in `StateGuard`.
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        *,
        closed: Mapping[str, str],
        repeated: Mapping[str, str],
        compiled: bool,
        asked: AskedOnce,
    ) -> None:
        self._asked = asked
        self._model, self._program, self._closed, self._repeated = model, program, closed, repeated
        self._compiled = compiled  # which a mode that sees what is read would prevent
        self._microbatches, self._forwards = 1, Counter[Hashable]()
        self._call: Example | None = None
        self._watching, self._looked = False, set[Hashable]()
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def begin_step(self, model: nn.Module, microbatches: int) -> None:
        self._microbatches = microbatches

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward and its loss. Raises: PlanError, as `refuse_state_writes` does."""
        kind = mode_of(self._model), self._microbatches > 1
        if self._forwards[kind] >= FORWARDS_READ or not (self._repeated or self._microbatches > 1):
            yield
            return
        before = Snapshot(self._model)
        self._watching, self._call = True, None
        try:
            with before.reads if before.reads.tensors and not self._compiled else nullcontext():
                yield
            self._forwards[kind] += 1
            if written := before.written():
                refuse_state_writes(self._known(written), self._repeated, 1)
                if self._forwards[kind] == FORWARDS_READ:
                    refuse_state_writes(self._known(written), {}, self._microbatches)
        finally:
            self._watching, self._call = False, None

    def _note(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._watching:
            return
        self._call = Example(args, {name: value for name, value in kwargs.items() if name != "mask"})
        kind = mode_of(model), kind_of_call(model, self._call), self._microbatches > 1
        if kind in self._looked or any(map(_torch.is_fake, _torch.tree_leaves((args, kwargs)))):
            return
        self._looked.add(kind)
        follow_mode(self._program.model, model)
        question = "calls", mode_of(self._program.model), shapes((args, self._call.kwargs)), self._microbatches
        with torch.inference_mode(False):
            self._asked.ask(question, self._look)

    def _look(self) -> None:
        assert self._call is not None
        refuse_other_calls(
            self._program,
            self._call,
            closed=self._closed,
            repeated=self._repeated,
            microbatches=self._microbatches,
        )

    def _known(self, written: Iterable[str]) -> list[StateWrite]:
        """What a reading tells of them; of a model that cannot be read, that they are read."""
        read = None if self._call is None else _read(self._program, self._model, self._call, self._closed)
        known = {} if read is None else {each.name: each for each in state_writes(read)}
        return [known.get(name) or StateWrite(name) for name in written]


def _read(program: Program, model: nn.Module, example: Example, closed: Mapping[str, str]) -> Trace | None:
    follow_mode(program.model, model)
    try:
        with torch.inference_mode(False):
            found = read_forward(program, of_rows(example, 2), closed)
    except PlanError:  # told where it matters
        return None
    return None if found is None else found[0]
