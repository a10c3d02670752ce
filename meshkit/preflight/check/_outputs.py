"""Where in the model the first difference is: outputs in the order of forward, gradients of outputs against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from meshkit.preflight.check._finding import Finding
from meshkit.preflight.check._record import Facts
from meshkit.preflight.check._reference import Result
from meshkit.preflight.check._tables import Table, close, differing_axes, ratio


def on_rows(whole: Tensor, rows: tuple[int, int], total: int) -> Tensor:
    """The part of these rows, where the first dim is the row, or rows flattened with something else."""
    if whole.ndim == 0 or whole.shape[0] % total:
        return whole
    each = whole.shape[0] // total
    return whole[rows[0] * each : rows[1] * each]


def compared(
    table: Table, name: str, of_rank: str, whole: Mapping[str, Tensor], total: int
) -> list[tuple[Facts, Tensor, Tensor]]:
    """(rank, what it has, what one device has for the same rows) where shapes say that they are the same thing."""
    if name not in whole:
        return []
    pairs = []
    for facts in table.facts:
        value = getattr(facts, of_rank).get(name)
        if value is not None and facts.rows[0] < facts.rows[1]:
            expected = on_rows(whole[name], facts.rows, total)
            if expected.shape == value.shape:
                pairs.append((facts, value, expected))
    return pairs


def states(table: Table, expected: Result, total: int, scale: float) -> dict[str, str]:
    """Module -> whether the gradient of its output is "right" or "wrong", where that can be said."""
    largest = max((float(grad.abs().max()) for grad in expected.output_gradients.values() if grad.numel()), default=0.0)
    found = {}
    for name in expected.output_gradients:
        pairs = compared(table, name, "gradients", expected.output_gradients, total)
        if pairs:
            right = all(close(value, want, table.tolerance, 1e-3 * largest) for _, value, want in pairs)
            found[name] = "right" if right else "wrong"
    return found


def next_module(order: Iterable[tuple[str, bool]], last: str, found: Mapping[str, str], holders: Iterable[str]) -> str:
    """The first module that begins after `last` ended, holds parameters, and gets back what is right."""
    events, holding = list(order), set(holders)
    after = events[events.index((last, True)) + 1 :]
    for name, ended in after:
        if not ended and name in holding and found.get(name) != "wrong":
            return name
    return last.rpartition(".")[0]


def first_wrong_output(table: Table, expected: Result, total: int) -> Finding | None:
    """Of the modules whose output is wrong, the first to end, unless one around it ends right: then it is meant so."""
    wrong: dict[str, list[tuple[Facts, Tensor, Tensor]]] = {}
    right: set[str] = set()
    for name in expected.outputs:
        pairs = compared(table, name, "outputs", expected.outputs, total)
        if pairs and all(close(value, want, table.tolerance) for _, value, want in pairs):
            right.add(name)
        elif pairs:
            wrong[name] = pairs
    for name, ended in expected.order:
        if ended and name in wrong and not any(_around(outer, name) for outer in right):
            return _finding(table, name, wrong[name])
    return None


def _around(outer: str, name: str) -> bool:
    return name != outer and (outer == "" or name.startswith(f"{outer}."))


def _finding(table: Table, name: str, pairs: list[tuple[Facts, Tensor, Tensor]]) -> Finding:
    facts, value, want = pairs[0]
    same = [(others, other) for others, other, _ in pairs if others.rows == facts.rows]
    axes = differing_axes(table, same)
    rest = [axis for axis in table.axes if axis not in axes]
    mine = [other for others, other in same if all(others.place[axis] == facts.place[axis] for axis in rest)]
    factor = ratio(value, want)
    said = f"the output of {name or 'the model'}"
    if axes and close(sum(mine[1:], mine[0]), want, table.tolerance):
        seen = f"{said} differs along {', '.join(axes)}, and its sum over them is that of one device"
        likely = "every rank holds a summand (a row-split linear layer), and the forward does not sum them"
        change = f"end it by meshkit.core.collectives.reduce_from_axis(out, mesh['{axes[0]}'])"
    elif axes:
        seen = f"{said} differs along {', '.join(axes)}, whose ranks have the same rows"
        likely = (
            "ranks compute with different parts or inputs and do not bring them together, or something random differs"
        )
        change = "bring the parts together before it returns: reduce_from_axis for summands, join_dim for features"
    elif close(value, want * factor, table.tolerance):
        seen = f"{said} is {factor:g} times that of one device, on every rank"
        likely = "whole results are summed over ranks that all have them, or a sum is made twice"
        change = "sum summands only, once"
    else:
        shift = (value - want).flatten(0, -2) if value.ndim > 1 else (value - want).unsqueeze(0)
        constant = close(shift, shift[:1].expand_as(shift), table.tolerance, float(want.abs().max()))
        seen = f"{said} is not that of one device, and is the same on ranks with the same rows"
        likely, change = "its forward depends on the mesh in a way that one device does not", "compare it on one rank"
        if constant:
            seen += "; the difference is the same for every token"
            likely, change = "a bias is added on every rank before the sum", "add the bias after the sum over ranks"
    return Finding(kind="wrong output", module=name, axes=axes, seen=seen, likely=likely, change=change)
