"""Reading a model for context parallelism: where it attends, what each layer sees, and that nothing else mixes tokens.

Two programs are read on a row of few tokens: the model's own, and that of a rank, which holds some of the tokens and attends
through us. In both, attention is one operation. The rest must treat each token by itself, with its own position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meshkit.core import _torch
from meshkit.core.asked_once import AskedOnce
from meshkit.errors import PlanError
from meshkit.loss import IGNORED
from meshkit.parallel.context._by_hand import PRODUCTS
from meshkit.parallel.context._cache import not_kept, takes_cache
from meshkit.parallel.context._counted import SUM_TOKENS, Counted, counted_in, crowded_in, of_keys, positions_known
from meshkit.parallel.context._doors import Attention, Doors, Mixer, Sent
from meshkit.parallel.context._foreign import is_transformers
from meshkit.parallel.context._pattern import FULL, Pattern
from meshkit.parallel.context._read_attention import ATTEND, CONVOLVE, SCAN, ReadMask, read_calls, read_registry
from meshkit.parallel.context._whole import GATHER_TOKENS, Whole, whole_around
from meshkit.parallel.writes import refuse_writes
from meshkit.program import (
    CLOSED,
    CLOSED_BY_VALUE,
    Again,
    Example,
    Held,
    Operation,
    Program,
    ReadingError,
    Trace,
    Unproved,
    differences,
    live,
    prove,
    tensors,
    trace,
    without_values,
)

# The tokens of two ranks, in no order that something else could follow too: zigzag is the same from both ends, and with whole
# runs of tokens, pairs of neighbours stay together.
_TOKENS = ((0, 1, 3, 6, 7, 11, 12, 14), (2, 4, 5, 8, 9, 10, 13, 15))


_OTHERWISE = " Use cp=1, or leave it to the other axes."


@dataclass(frozen=True)
class Call:
    """A call of a rank's forward, less the mask; dim 1 of tensors that have `tokens` there is the tokens.

    given: names of the batch before it was split. position_ids that it has not are those of the tokens. rows: of the batch,
    where some of it is whole.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tokens: int
    given: frozenset[str] = frozenset({"input_ids"})
    rows: int | None = None

    def of(self, tokens: int, *, rows: int = 1) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the same kind for rows of so many tokens."""

        def resized(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.ndim > 1 and leaf.shape[1] == self.tokens:
                return torch.empty((rows, tokens, *leaf.shape[2:]), dtype=leaf.dtype, device="meta")
            if leaf.ndim and leaf.shape[0] == self.rows:
                return torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")
            return leaf

        args, kwargs = _torch.tree_map(resized, (tuple(self.args), dict(self.kwargs)))
        return args, kwargs

    def alone(self, tokens: int, *, rows: int = 1) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the single-device model, of all tokens."""
        args, kwargs = self.of(tokens, rows=rows)
        if "position_ids" not in self.given:
            kwargs.pop("position_ids", None)
        if "attention_mask" in self.given:
            kwargs["attention_mask"] = torch.empty((rows, tokens), dtype=torch.int64, device="meta")
        return args, kwargs


@dataclass(frozen=True)
class Reader:
    """Reads a model for its attention. named: modules that the user named, else all that are found. closed: see `trace`.
    replicate: whether modules that mix tokens in another way run on all of them, on every rank; else they are refused.
    blocks: the repeated layers. asked: where ranks prove other calls together."""

    program: Program
    named: tuple[str, ...] = ()
    closed: Mapping[str, str] = field(default_factory=dict)
    replicate: bool = False
    blocks: tuple[str, ...] = ()
    asked: AskedOnce = field(default_factory=lambda: AskedOnce(None))

    @property
    def takes_mask(self) -> bool:
        """Whether the forward takes a `mask` to attend with, and no other way is asked for."""
        model = self.program.model
        return not is_transformers(model) and not self.named and "mask" in inspect.signature(model.forward).parameters

    def doors(self, call: Call, fits: Callable[[Doors], None] = lambda doors: None) -> Doors:
        """How the model's attention is reached, proved on this call.

        fits: raises PlanError for doors that do not go with what else is asked for; then others are looked for.
        Raises: PlanError for a model that cannot be split by its tokens.
        """
        with self._explained():
            found, misfit = self._doors(self._complete(call), fits)
        if found is None:
            assert misfit is not None
            raise misfit
        return found

    def _doors(self, call: Call, fits: Callable[[Doors], None]) -> tuple[Doors | None, PlanError | None]:
        """(the doors, or what those that were proved do not go with). Raises: PlanError where none was proved."""
        first: PlanError | None = None
        misfit: PlanError | None = None
        refused: PlanError | None = None
        tokens, cached = sum(map(len, _TOKENS)), False
        for registry in (True, False) if is_transformers(self.program.model) and not self.named else (False,):
            try:
                full = self._alone(call, tokens, registry=registry)
            except ReadingError as error:
                if registry:  # It adds the mask, or a bias, to scores that it computes itself.
                    refused = error
                    continue
                if not takes_cache(self.program.model):
                    raise refused or error from error
                first, cached, full = error, True, self._alone(call, tokens, registry=False, cached=True)
            places = tuple(dict.fromkeys(name for name, _ in _attentions(full)))
            if self.takes_mask:
                doors = Doors()
            elif registry:
                doors = Doors(registry=True, patterns=_patterns(full))
            else:
                doors = Doors(intercepted=self.named or places)
            if places or not registry:
                break
        calls = tuple(_attention(name, each) for name, each in _attentions(full))
        doors = replace(doors, cached=cached, calls=calls, mixers=_mixers(full))
        for replicate in (False, True) if self.replicate else (False,):
            for each in self._ways(doors, full, call):
                try:
                    found = self._proved(each, full, call, replicate=replicate)
                except (Unproved, ReadingError) as error:
                    first = first or error
                    continue
                try:
                    fits(found)
                except PlanError as error:
                    misfit = misfit or error
                    continue
                return found, None
        if misfit is None:
            assert first is not None
            crowded = crowded_in(full, self._wider(doors, call))
            if crowded:
                operator, where = crowded[0]
                raise PlanError(
                    f"{first} {operator} at {where} is called more than once, and a rank tells what it does along the tokens "
                    "by its line: put each on a line of its own."
                ) from first
            raise first
        return None, misfit

    def _ways(self, doors: Doors, full: Trace, call: Call) -> Iterator[Doors]:
        """As it is; with lines of its code that are of all tokens; and where the model counts positions itself. Others are
        looked for only after the first has failed."""
        yield doors
        counted = counted_in(full, self._wider(doors, call))
        takes = any(
            "position_ids" in each for each in (call.kwargs, inspect.signature(self.program.model.forward).parameters)
        )
        counts_itself = takes and "position_ids" not in call.given
        by_cache = takes_cache(self.program.model) and not doors.registry
        for cached in (True,) if doors.cached else (False, True) if by_cache else (False,):
            for lines in _sets_of_lines(counted, cached):
                if lines or cached != doors.cached:
                    yield replace(doors, counted=lines, cached=cached)
                if counts_itself:
                    yield replace(doors, counted=lines, cached=cached, positions=False)

    def _proved(self, doors: Doors, full: Trace, call: Call, *, replicate: bool) -> Doors:
        while True:
            try:
                self._prove(full, doors, call, _TOKENS)
                if doors.counted:
                    own = len(_TOKENS[0])
                    marked = of_keys(doors.counted, self._on_rank(doors, call, own), own * ReadMask().ranks)
                    doors = replace(doors, counted=marked)
                return replace(doors, sent=self._sent(doors, call))
            except (Unproved, ReadingError) as error:
                if not replicate or not (found := self._whole_around(error, full, doors, call)):
                    raise
                inside = {name for name in doors.whole if any(name.startswith(f"{other}.") for other in found)}
                kept = {name: each for name, each in doors.whole.items() if name not in inside}
                doors = replace(doors, whole={**kept, **found})

    def _sent(self, doors: Doors, call: Call) -> dict[str, tuple[Sent, ...]]:
        """What a rank sends by lines and by its cache; modules that run on all tokens know of theirs."""
        found: dict[str, tuple[Sent, ...]] = {}
        if not (doors.counted or doors.cached):
            return found
        own = len(_TOKENS[0])
        rank = self._on_rank(doors, call, own)
        read = {id(each) for each in live(rank, (rank.result, dict(rank.kept)), writes=False).operations}
        for operation in rank.operations:
            name = rank.calls[operation.call].name
            gathers = operation.name == GATHER_TOKENS
            if name not in doors.whole and (gathers or operation.name == SUM_TOKENS):
                (ref,) = tensors(operation.args) if gathers else tensors(operation.outputs)
                count = torch.Size(ref.shape).numel() // (own if gathers else 1)
                one_row = gathers and operation.args[1] == 0
                trains = operation.trains and id(operation) in read  # what a cache keeps alone does not
                found[name] = (*found.get(name, ()), Sent(gathers, count, ref.dtype, trains, one_row))
        return found

    def _wider(self, doors: Doors, call: Call) -> Trace:
        return self._alone(call, sum(map(len, _TOKENS)) + 8, registry=doors.registry, cached=doors.cached)

    def _whole_around(
        self, error: Unproved | ReadingError, full: Trace, doors: Doors, call: Call
    ) -> Mapping[str, Whole]:
        wider = self._wider(doors, call)
        return whole_around(error, full, wider, apart=self.closed.keys(), known=doors.whole, blocks=self.blocks)

    def prove(self, doors: Doors, call: Call) -> None:
        """Raises: PlanError unless the model follows its split on another call too."""
        call = self._complete(call)
        with self._explained():
            try:
                self._prove_again(doors, call)
            except PlanError as error:
                for other, advice in self._nearby(call):
                    if self._is_proved(doors, other):
                        raise PlanError(f"{error} {advice}") from error
                raise

    def _nearby(self, call: Call) -> Iterator[tuple[Call, str]]:
        """Calls that may be split where this one is not, and what to change for them."""
        if "attention_mask" in call.given:
            yield (
                _unmasked(call),
                "Without the batch's attention_mask it can be: leave it away where it hides nothing, or only padding that "
                f"comes last and has label {IGNORED}.",
            )
        ids = next((leaf for leaf in _torch.tree_leaves(call.args) if getattr(leaf, "ndim", 0) > 1), None)
        takes = "position_ids" in inspect.signature(self.program.model.forward).parameters
        if ids is not None and takes and len(call.args) == 1 and "position_ids" not in call.kwargs:
            positions = torch.empty(ids.shape[:2], dtype=torch.int64, device="meta")
            yield (
                replace(call, kwargs={**call.kwargs, "position_ids": positions}),
                "With the positions of its tokens it can be: let the loss hand on position_ids=part['position_ids'] to the "
                "model where the part has them, as it does with mask.",
            )

    def _is_proved(self, doors: Doors, call: Call) -> bool:
        try:
            self._prove_again(doors, call)
        except PlanError:
            return False
        return True

    def _complete(self, call: Call) -> Call:
        """With position_ids in the batch, where the model cannot run without."""
        asked = inspect.signature(self.program.model.forward).parameters.get("position_ids")
        if asked is None or asked.default is not asked.empty:
            return call
        return replace(call, given=call.given | {"position_ids"})

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except PlanError as error:
            said = str(error).removesuffix(_OTHERWISE)  # what a line of it raised while it was read says so already
            raise PlanError(
                f"context parallelism: {type(self.program.model).__name__} cannot be split by its tokens. {said}{_OTHERWISE}"
            ) from error

    def _prove_again(self, doors: Doors, call: Call) -> None:
        full = self._alone(call, sum(map(len, _TOKENS)), registry=doors.registry, cached=doors.cached)
        if doors.registry and (found := _patterns(full)) != doors.patterns:
            name = next(each for each in {**found, **doors.patterns} if found.get(each) != doors.patterns.get(each))
            raise PlanError(
                f"{name} attends by {found.get(name)} on this batch, and by {doors.patterns.get(name)} on the example by "
                "which it was read. Give parallelize(example=...) with the arguments of the batch."
            )
        self._prove(full, doors, call, _TOKENS)

    def refuse_other_programs(self, doors: Doors, call: Call, *, tokens: int, lengths: Iterable[int]) -> None:
        """Raises: PlanError if the model runs other operations on so many tokens than on the few that it was proved on.

        tokens: of the single-device model. lengths: of ranks.
        """

        def alone(count: int) -> Trace:
            return self._alone(call, count, registry=doors.registry, cached=doors.cached)

        def on_rank(count: int) -> Trace:
            return self._on_rank(doors, call, count)

        call = self._complete(call)
        with self._explained():
            counted = frozenset(call for each in doors.counted.values() for call in each.calls)
            _refuse_difference(alone, sum(map(len, _TOKENS)), [tokens], counted)
            _refuse_difference(on_rank, len(_TOKENS[0]), lengths, counted, ranks=ReadMask().ranks)

    def refuse_other_rows(self, doors: Doors, call: Call, *, rows: int) -> None:
        """Raises: PlanError if the single-device model runs other operations on so many rows than on the one that it was
        proved on."""

        def alone(count: int) -> Trace:
            tokens = sum(map(len, _TOKENS))
            return self._alone(call, tokens, registry=doors.registry, cached=doors.cached, rows=count)

        call = self._complete(call)
        with self._explained():
            _refuse_difference(alone, 1, [rows], frozenset(), of="rows")

    def _alone(self, call: Call, tokens: int, *, registry: bool, cached: bool = False, rows: int = 1) -> Trace:
        """The single-device model's program. cached: it may attend with masks of its own."""
        args, kwargs = call.alone(tokens, rows=rows)
        packed, masked = "position_ids" in call.given, cached or self.replicate
        if cached:
            kwargs |= not_kept(self.program.model)

        def read(again: Again) -> Trace:
            model = without_values(self.program.model)
            if self.takes_mask:
                kwargs["mask"] = ReadMask()
            elif registry:
                read_registry(model, packed=packed)
            else:
                for name in self.named or ("",):
                    read_calls(model.get_submodule(name), tokens=tokens, masked=masked)
            found = trace(model, args, kwargs, closed=self.closed, again=again)
            refuse_writes(found, self.program.model)
            return self._with_values(live(found))

        of = "attention", registry, packed, self.named, masked, frozenset(self.closed.items())
        return self.program.kept(of, Example(args, dict(kwargs)), read)

    def _on_rank(self, doors: Doors, call: Call, tokens: int) -> Trace:
        args, kwargs = call.of(tokens)

        def read(again: Again) -> Trace:
            model = without_values(self.program.model)
            doors.open(model)
            return self._with_values(
                live(trace(model, args, {**kwargs, "mask": ReadMask(tokens=tokens)}, closed=self.closed))
            )

        of = "on a rank", doors.key, frozenset(self.closed.items())
        return self.program.kept(of, Example(args, kwargs), read)

    def _with_values(self, trace: Trace) -> Trace:
        """The trace with the values of whole numbers that the model keeps: positions, and kinds of tokens."""
        values = {
            f"buffer {name}": buffer
            for name, buffer in self.program.model.named_buffers()
            if not buffer.is_floating_point() and not buffer.is_complex() and not buffer.is_meta
        }
        storages = [
            replace(kept, value=values[kept.source].detach().cpu().flatten())
            if kept.source in values and values[kept.source].numel() == kept.size
            else kept
            for kept in trace.storages
        ]
        return replace(trace, storages=tuple(storages))

    def _prove(self, full: Trace, doors: Doors, call: Call, tokens: tuple[tuple[int, ...], ...]) -> None:
        # What was found to read values need not be found again, which takes a reading for each module.
        guessed = {
            full.calls[each.call].name: each.name for each in full.operations if each.name in (CLOSED, CLOSED_BY_VALUE)
        }
        reader = replace(self, closed={**self.closed, **guessed})
        ranks = [_with_positions(reader._on_rank(doors, call, len(own)), call, own) for own in tokens]
        held = []
        for trace_of_rank, own in zip(ranks, tokens, strict=True):
            of_inputs = {
                kept.source: Held("varying", 1, own)
                for kept in trace_of_rank.storages
                if kept.source.startswith("input ") and len(kept.shape) > 1 and kept.shape[1] == len(own)
            }
            # The gradients of parameters are summed over the axis, as over data ranks.
            params = {f"parameter {name}": Held("replicated") for name in self.program.parameters}
            held.append({**params, **of_inputs})
        prove(full, ranks, held, tokens=tokens)


def _unmasked(call: Call) -> Call:
    return replace(call, given=call.given - {"attention_mask"})


def _sets_of_lines(counted: Mapping[str, Counted], cached: bool) -> list[Mapping[str, Counted]]:
    """Lines that may be of all tokens: without cuts of tables, which may be as long as the keys are, and all of them. What a
    cache has gathered, no line gathers."""
    if cached:
        sets = [
            {name: each for name, each in counted.items() if not each.by_hand},
            {name: each.without(*PRODUCTS) for name, each in counted.items()},
        ]
    else:
        sets = [{name: each.without_tables() for name, each in counted.items()}, dict(counted)]
    found: list[Mapping[str, Counted]] = []
    for lines in ({name: each for name, each in lines.items() if each.calls} for lines in sets):
        if lines not in found:
            found.append(lines)
    return found


def _with_positions(trace: Trace, call: Call, tokens: tuple[int, ...]) -> Trace:
    """The trace with the values of positions that the batch did not have: they are the numbers of the tokens. So are those
    that the model counts."""
    own, known = torch.tensor(tokens), positions_known(trace, tokens)
    given = "position_ids" in call.given
    storages = [
        replace(kept, value=known[number])
        if number in known
        else replace(kept, value=own)
        if kept.source == "input position_ids" and not given
        else kept
        for number, kept in enumerate(trace.storages)
    ]
    return replace(trace, storages=tuple(storages))


def _refuse_difference(
    read: Callable[[int], Trace],
    proved: int,
    counts: Iterable[int],
    counted: Collection[tuple[str, str]],
    *,
    ranks: int = 1,
    of: str = "tokens",
) -> None:
    """counted: lines whose factor is the number of tokens of a row, of which one of `ranks` is read."""
    expected = read(proved)
    for count in counts:
        for difference in differences(expected, read(count), by_keywords=(ATTEND,)):
            a, b = difference.one, difference.other
            if difference.factor is None:
                runs, runs_not = (count, proved) if b is not None else (proved, count)
                raise PlanError(
                    f"{b or a}: of {runs} {of} it is run, and of {runs_not} not, so what runs depends on their number."
                )
            name, there, here = difference.factor
            is_count = b is not None and (b.operator, b.where) in counted
            if not (is_count and (there, here) == (proved * ranks, count * ranks)):
                raise PlanError(
                    f"{b}: of {count} {of} it computes with {name}={here}, and of {proved} with {there}, so its values "
                    f"depend on the number of {of}, of which a rank has a part."
                )


def _attentions(trace: Trace) -> list[tuple[str, Operation]]:
    """(module that runs it, attention) of each."""
    return [(trace.calls[each.call].name, each) for each in trace.operations if each.name == ATTEND]


def _attention(name: str, operation: Operation) -> Attention:
    query, key, value = tensors(operation.args)[:3]
    width = max(key.shape[3], value.shape[3])
    return Attention(name, query.shape[2], key.shape[2], width, operation.kwargs["pattern"] or FULL)


def _mixers(trace: Trace) -> tuple[Mixer, ...]:
    found = []
    for each in trace.operations:
        if each.name not in (SCAN, CONVOLVE):
            continue
        inputs, name = tensors(each.args), trace.calls[each.call].name
        trains = any(ref.requires_grad for ref in inputs)
        if each.name == SCAN:
            q, _, v = inputs[:3]
            found.append(Mixer(name, trains, state=(v.shape[2], q.shape[3], v.shape[3])))
        else:
            found.append(Mixer(name, trains, channels=inputs[1].shape[0], width=inputs[1].shape[1]))
    return tuple(found)


def _patterns(trace: Trace) -> dict[str, Pattern]:
    patterns: dict[str, Pattern] = {}
    for name, operation in _attentions(trace):
        pattern = operation.kwargs["pattern"]
        if patterns.setdefault(name, pattern) != pattern:
            raise PlanError(f"{name}: it attends by {patterns[name]} and by {pattern}, so no pattern is the module's.")
    return patterns
