"""First wrong output: module outputs in the order of forward, gradients of outputs in the order of backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from meshkit.preflight.check._finding import Finding
from meshkit.preflight.check._record import Facts
from meshkit.preflight.check._reference import Result
from meshkit.preflight.check._tables import Table, close, differing_axes, ratio


def on_rows(full: Tensor, rows: tuple[int, int], total: int) -> Tensor:
    """The slice of these rows, where the first dim is the row, or rows flattened with something else."""
    if full.ndim == 0 or full.shape[0] % total:
        return full
    each = full.shape[0] // total
    return full[rows[0] * each : rows[1] * each]


def paired_outputs(
    table: Table, name: str, of_rank: str, full: Mapping[str, Tensor], total: int
) -> list[tuple[Facts, Tensor, Tensor]]:
    """(facts of a rank, its tensor, the tensor of one device for the same rows), where the shapes are equal."""
    if name not in full:
        return []
    pairs = []
    for facts in table.facts:
        value = getattr(facts, of_rank).get(name)
        if value is not None and facts.rows[0] < facts.rows[1]:
            expected = on_rows(full[name], facts.rows, total)
            if expected.shape == value.shape:
                pairs.append((facts, value, expected))
    return pairs


def gradient_states(table: Table, expected: Result, total: int, scale: float) -> dict[str, str]:
    """Module -> "right" or "wrong": the gradient of its output, where it can be compared."""
    largest = max((float(grad.abs().max()) for grad in expected.output_gradients.values() if grad.numel()), default=0.0)
    states = {}
    for name in expected.output_gradients:
        pairs = paired_outputs(table, name, "gradients", expected.output_gradients, total)
        if pairs:
            right = all(close(value, want, table.tolerance, 1e-3 * largest) for _, value, want in pairs)
            states[name] = "right" if right else "wrong"
    return states


def next_module(
    order: Iterable[tuple[str, bool]], last: str, gradient_states: Mapping[str, str], holders: Iterable[str]
) -> str:
    """The first module that begins after `last` ended, holds parameters, and has a right output gradient."""
    events, holding = list(order), set(holders)
    after = events[events.index((last, True)) + 1 :]
    for name, ended in after:
        if not ended and name in holding and gradient_states.get(name) != "wrong":
            return name
    return last.rpartition(".")[0]


def first_wrong_output(table: Table, expected: Result, total: int) -> Finding | None:
    """Of the modules whose output is wrong, the first to end. One inside of a module with a right output does not count."""
    wrong: dict[str, list[tuple[Facts, Tensor, Tensor]]] = {}
    right: set[str] = set()
    for name in expected.outputs:
        pairs = paired_outputs(table, name, "outputs", expected.outputs, total)
        if pairs and all(close(value, want, table.tolerance) for _, value, want in pairs):
            right.add(name)
        elif pairs:
            wrong[name] = pairs
    for name, ended in expected.order:
        if ended and name in wrong and not any(_contains(outer, name) for outer in right):
            return _finding(table, name, wrong[name])
    return None


def _contains(outer: str, name: str) -> bool:
    return name != outer and (outer == "" or name.startswith(f"{outer}."))


def _finding(table: Table, name: str, pairs: list[tuple[Facts, Tensor, Tensor]]) -> Finding:
    facts, value, want = pairs[0]
    same = [(other_facts, replica) for other_facts, replica, _ in pairs if other_facts.rows == facts.rows]
    axes = differing_axes(table, same)
    rest = [axis for axis in table.axes if axis not in axes]
    mine = [
        replica
        for other_facts, replica in same
        if all(other_facts.coordinate[axis] == facts.coordinate[axis] for axis in rest)
    ]
    factor = ratio(value, want)
    output = f"the output of {name or 'the model'}"
    if axes and close(sum(mine[1:], mine[0]), want, table.tolerance):
        seen = f"{output} differs along {', '.join(axes)}, and its sum over them is that of one device"
        likely = "every rank holds a summand (a row-split linear layer), and the forward does not sum them"
        change = f"end it by meshkit.core.collectives.reduce_from_axis(out, mesh['{axes[0]}'])"
    elif axes:
        seen = f"{output} differs along {', '.join(axes)}, whose ranks have the same rows"
        likely = (
            "ranks compute with different parts or inputs and do not bring them together, or something random differs"
        )
        change = "bring the parts together before it returns: reduce_from_axis for summands, join_dim for features"
    elif close(value, want * factor, table.tolerance):
        seen = f"{output} is {factor:g} times that of one device, on every rank"
        likely = "whole results are summed over ranks that all have them, or a sum is made twice"
        change = "sum summands only, once"
    else:
        shift = (value - want).flatten(0, -2) if value.ndim > 1 else (value - want).unsqueeze(0)
        constant = close(shift, shift[:1].expand_as(shift), table.tolerance, float(want.abs().max()))
        seen = f"{output} is not that of one device, and is the same on ranks with the same rows"
        likely, change = "its forward depends on the mesh in a way that one device does not", "compare it on one rank"
        if constant:
            seen += "; the difference is the same for every token"
            likely, change = "a bias is added on every rank before the sum", "add the bias after the sum over ranks"
    return Finding(kind="wrong output", module=name, axes=axes, seen=seen, likely=likely, change=change)
