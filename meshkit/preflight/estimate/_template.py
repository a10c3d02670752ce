"""Template of a microbatch: the chunks of a thin model's trace in the order in which a model of any depth runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshkit.errors import PlanError
from meshkit.preflight.estimate._step_trace import Chunk, Edge, StepTrace


@dataclass(frozen=True, eq=False, slots=True)
class Item:
    """A chunk, and the module at whose edge it begins. index: of the chunk in the trace."""

    edge: Edge
    module: str
    index: int


@dataclass(frozen=True, eq=False)
class Template:
    """before, blocks, after: of forward, where blocks has those of one kind, by its first block; then of backward.

    Between `loss` and the last block's backward is `after_backward`, and after the first block's is `before_backward`.
    """

    trace: StepTrace
    before: tuple[Item, ...]
    blocks: Mapping[str, tuple[Item, ...]]
    after: tuple[Item, ...]
    after_backward: tuple[Item, ...]
    blocks_backward: Mapping[str, tuple[Item, ...]]
    before_backward: tuple[Item, ...]


class Unlike(PlanError):
    """A model whose step is not made of blocks in a row."""


def template(trace: StepTrace, blocks: set[str]) -> Template:
    """blocks: those of the thin model. Raises: Unlike where they do not run in a row, each once."""
    items = [Item(chunk.mark.edge, chunk.mark.module, index) for index, chunk in enumerate(trace.chunks)]
    loss = next((at for at, item in enumerate(items) if item.edge == "loss"), None)
    if loss is None:
        raise Unlike("compose: the loss of this model is not known when its function returns.")
    before, forward, after = _around(items[:loss], blocks, "enter", "leave")
    after_backward, backward, before_backward = _around(items[loss:], blocks, "backward", "done")
    if set(forward) != blocks or set(backward) - blocks:
        raise Unlike("compose: not every block of this model runs.")
    return Template(trace, before, forward, after, after_backward, backward, before_backward)


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
