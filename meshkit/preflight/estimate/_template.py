"""Template of a microbatch: the chunks of a thin model's trace in the order in which a model of any depth runs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshkit.errors import PlanError
from meshkit.preflight.estimate._replay import Swing
from meshkit.preflight.estimate._step_trace import Chunk, Edge, StepTrace
from meshkit.preflight.estimate._tracker import GROUPS, Change


@dataclass(frozen=True, eq=False, slots=True)
class Item:
    """A chunk, and the module at whose edge it begins. index: of the chunk in the trace."""

    edge: Edge
    module: str
    index: int


@dataclass(frozen=True, eq=False)
class Template:
    """before, blocks, after: of forward, where blocks has those of one kind, by its first block; then of backward.

    A block that the loss has no need of, as one that predicts further tokens, has none.
    Between `loss` and the last block's backward is `after_backward`, and after the first block's is `before_backward`.
    shared: storages that are made before the blocks and read by all of them, such as rotary tables; they are freed with the
    last of them, and not with each. locals: those that are made before the blocks and freed when the model returns, with
    what they free.
    """

    trace: StepTrace
    before: tuple[Item, ...]
    blocks: Mapping[str, tuple[Item, ...]]
    after: tuple[Item, ...]
    after_backward: tuple[Item, ...]
    blocks_backward: Mapping[str, tuple[Item, ...]]
    before_backward: tuple[Item, ...]
    shared: frozenset[int]
    shares: Swing
    locals: frozenset[int]
    returns: Swing


class Unlike(PlanError):
    """A model whose step is not made of blocks in a row."""


def template(trace: StepTrace, blocks: set[str]) -> Template:
    """blocks: those of the thin model. Raises: Unlike where they do not run in a row, each once."""
    items = [Item(chunk.mark.edge, chunk.mark.module, index) for index, chunk in enumerate(trace.chunks)]
    loss = next((at for at, item in enumerate(items) if item.edge == "loss"), None)
    if loss is None:
        raise Unlike("compose: the loss of this model is not known when its function returns.")
    before, forward, after = _around(items[:loss], blocks, "enter", "leave")
    trace = _with_input(trace, forward, after)
    after_backward, backward, before_backward = _around(items[loss:], blocks, "backward", "done")
    trace = _with_fetched(trace, backward)
    if set(backward) - set(forward):
        raise Unlike("compose: a block of this model runs in backward alone.")
    shared = _freed_in(trace, before, [*forward.values(), *backward.values()])
    locals_ = _freed_in(trace, before, [after])
    return Template(
        trace,
        before,
        {name: forward.get(name, ()) for name in blocks},
        after,
        after_backward,
        backward,
        before_backward,
        frozenset(shared),
        _swing(shared.values()),
        frozenset(locals_),
        _swing(locals_.values()).undone,
    )


def _with_input(trace: StepTrace, forward: Mapping[str, tuple[Item, ...]], after: Sequence[Item]) -> StepTrace:
    """Where the last block's input is freed when the caller drops it, that belongs to the block, as for the others."""
    chunks = list(trace.chunks)
    for name, items in forward.items():
        storage = trace.hidden.get(name)
        for item in after:
            dropped = tuple(
                change
                for change in chunks[item.index].changes
                if isinstance(change, Change) and change.storage == storage and change.bytes < 0
            )
            if dropped:
                last = items[-1].index
                chunks[last] = replace(chunks[last], changes=(*chunks[last].changes, *dropped))
                kept = tuple(change for change in chunks[item.index].changes if change not in dropped)
                chunks[item.index] = replace(chunks[item.index], changes=kept)
    return replace(trace, chunks=tuple(chunks))


def _with_fetched(trace: StepTrace, backward: Mapping[str, tuple[Item, ...]]) -> StepTrace:
    """What a block has fetched and does not use is freed when the next block begins, or not here: that belongs to it too."""
    if not trace.fetched:
        return trace
    chunks = list(trace.chunks)
    for name, items in backward.items():
        last, fetched = items[-1].index, trace.fetched.get(name, frozenset())
        left: dict[int, Change] = {}
        for index, chunk in enumerate(chunks):
            for change in chunk.changes:
                if isinstance(change, Change) and change.storage in fetched:
                    if change.bytes > 0:
                        left[change.storage] = change
                    elif index <= last:
                        left.pop(change.storage, None)
            if index > last:
                kept = tuple(each for each in chunk.changes if getattr(each, "storage", None) not in left)
                chunks[index] = replace(chunk, changes=kept)
        freed = tuple(replace(each, bytes=-each.bytes) for each in left.values())
        chunks[last] = replace(chunks[last], changes=(*chunks[last].changes, *freed))
    return replace(trace, chunks=tuple(chunks))


def _freed_in(trace: StepTrace, before: Sequence[Item], rows: Sequence[Sequence[Item]]) -> dict[int, Change]:
    """Storages other than inputs of blocks that are made before the blocks and freed in one of these."""
    made = {
        change.storage: change
        for item in before
        for change in trace.chunks[item.index].changes
        if isinstance(change, Change) and change.bytes > 0
    }
    inputs = set(trace.hidden.values())
    freed = {
        change.storage
        for items in rows
        for item in items
        for change in trace.chunks[item.index].changes
        if isinstance(change, Change) and change.bytes < 0
    }
    return {storage: change for storage, change in made.items() if storage in freed and storage not in inputs}


def _swing(changes: Iterable[Change]) -> Swing:
    left = [0] * len(GROUPS)
    for change in changes:
        left[change.group] += change.bytes
    return Swing(tuple(left), tuple(left), "forward of the model")


def _around(
    items: list[Item], blocks: set[str], begin: Edge, end: Edge
) -> tuple[tuple[Item, ...], dict[str, tuple[Item, ...]], tuple[Item, ...]]:
    """(items before the first block, of each block, after the last one). What is between blocks belongs to the one before."""
    starts = [at for at, item in enumerate(items) if item.edge == begin and item.module in blocks]
    if not starts:
        return tuple(items), {}, ()
    names = [items[at].module for at in starts]
    if len(set(names)) < len(names):
        raise Unlike(f"compose: {names[0]!r} runs more than once in a microbatch.")
    last = next(
        (at for at, item in enumerate(items) if item.edge == end and item.module == names[-1] and at > starts[-1]), None
    )
    # The input of a first block that nothing trained made has no gradient: its backward goes on to the end.
    stop = len(items) if last is None else last
    found = {
        name: tuple(items[at : stop if at == starts[-1] else following])
        for name, at, following in zip(names, starts, [*starts[1:], stop], strict=True)
    }
    return tuple(items[: starts[0]]), found, tuple(items[stop:])


def chunk_of(template: Template, item: Item) -> Chunk:
    return template.trace.chunks[item.index]
