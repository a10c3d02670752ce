"""Wrong gradients: in which module the error begins, and what it looks like (unreduced, summed twice, averaged, scaled)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from meshkit.preflight.check._finding import Finding, Kind
from meshkit.preflight.check._outputs import gradient_states, next_module, paired_outputs
from meshkit.preflight.check._reference import OneDevice, Result
from meshkit.preflight.check._tables import Table, close, differing_axes, max_difference, ratio
from meshkit.preflight.check._verdict import (
    Verdict,
    axes_by_size,
    expected_shard,
    flat,
    gradient_in,
    judge,
    module_of,
    sum_over,
)

SMALL = 1e-3  # of the largest gradient: what is smaller may be rounding of what is zero
SMALL_COARSE = 0.3


def judge_gradients(
    table: Table, reference: OneDevice, expected: Result, *, torn: set[str]
) -> tuple[list[Finding], float | None]:
    """(findings, largest error relative to the largest gradient)"""
    gradients = {name: expected.gradients.get(name) for name in table.names if name not in torn}
    largest = max(
        (float(grad.abs().max()) for grad in gradients.values() if grad is not None and grad.numel()), default=0.0
    )
    scale = largest * (SMALL if table.tolerance < 1e-2 else SMALL_COARSE)
    # The order is that of causes: a loss that is no sum makes every other comparison meaningless, a factor of all gradients
    # comes before what differs between them, and a gradient that arrives wrong at a module before what the module does to it.
    uneven = reference.not_a_sum()
    if uneven is not None:
        return [_average(table, uneven)], None
    judged = {name: judge(table, reference, name, gradient, scale) for name, gradient in gradients.items()}
    wrong = {name: verdict for name, verdict in judged.items() if verdict is not None}
    error = _error(table, gradients) / largest if largest else None
    if not wrong:
        return [], error
    scale_finding = _scale_of_all(table, reference, gradients, scale)
    if scale_finding is not None:
        return [scale_finding], error
    module_states = gradient_states(table, expected, reference.rows, scale)
    later = [name for name in wrong if module_states.get(module_of(name)) == "wrong"]
    by_itself = {name: verdict for name, verdict in wrong.items() if name not in later}
    cause = _last_right(expected, by_itself, module_states) if later else None
    if cause is not None:  # earlier gradients that are wrong in the same way are probably its consequence
        first = next(name for name in by_itself if module_of(name) == cause)
        same = [
            name
            for name in by_itself
            if (by_itself[name].kind, by_itself[name].factor) == (by_itself[first].kind, by_itself[first].factor)
        ]
        by_itself = {
            first: by_itself[first],
            **dict.fromkeys(same, by_itself[first]),
            **{name: by_itself[name] for name in by_itself if name not in same},
        }
        return _findings_of(table, by_itself, before=later), error
    findings = _findings_of(table, by_itself)
    if later:
        findings.append(_caused_later(table, reference, expected, later, module_states, scale))
    return findings, error


def _last_right(expected: Result, by_itself: dict[str, Verdict], module_states: dict[str, str]) -> str | None:
    """The module nearest to the loss whose output gradient is right while its own parameters have wrong gradients."""
    # Backward runs from the loss to the input: what is wrong nearest to the loss cannot follow from what comes later.
    making = {module_of(name) for name in by_itself if module_states.get(module_of(name)) == "right"}
    return next((name for name, ended in reversed(expected.order) if ended and name in making), None)


# --------------------------------------------------------------------------------------------- one cause for all gradients


def _scale_of_all(
    table: Table, reference: OneDevice, gradients: dict[str, Tensor | None], scale: float
) -> Finding | None:
    """A finding if all gradients are wrong in one way: the loss is scaled, or averaged on each rank before it is summed."""
    expected = {name: grad for name, grad in gradients.items() if grad is not None}
    shards = [(name, shard) for name in expected for _, shard in table.shards(name) if shard.trained]
    if not shards or any(shard.gradient is None for _, shard in shards):
        return None

    def like(totals: dict[str, Tensor], factor: float) -> bool:
        return all(
            close(
                gradient_in(shard), factor * expected_shard(shard, totals[name]), table.tolerance, scale * abs(factor)
            )
            for name, shard in shards
        )

    factor = ratio(
        torch.cat([flat(shard.gradient) for _, shard in shards]),
        torch.cat([expected_shard(shard, expected[name]).flatten() for name, shard in shards]),
    )
    if len(expected) > 1 and abs(factor) > table.tolerance and like(expected, factor):
        axes = axes_by_size(table, factor) or axes_by_size(table, 1 / factor)
        losses = [facts.loss for facts in table.facts]
        return Finding(
            kind="wrong loss scale",
            module="",
            parameters=tuple(expected),
            axes=axes,
            seen=f"every gradient is {factor:.6g} times that of one device; the step returns {losses[0]} on rank 0",
            likely=_why_scaled(factor, axes),
            change="divide the summed loss once, by the tokens of the whole step, as run.forward_backward does",
        )
    ranks = reference.of_ranks() if len(reference.rows_of_ranks) > 1 else []
    if len(ranks) < 2:
        return None
    sums = {
        name: torch.stack([_or_zero(rank.gradients[name], expected[name]) for rank in ranks]).sum(0)
        for name in expected
    }
    # Averaged over a rank's own tokens first: then summed by meshkit, or averaged over data ranks, or over those that had
    # rows. Equal rows on all ranks would hide it, so `check` asks for uneven ones.
    for count, word in ((1, "the sum"), (len(reference.rows_of_ranks), "the mean"), (len(ranks), "the mean")):
        if like({name: total / count for name, total in sums.items()}, 1.0):
            over = ", ".join(table.token_axes)
            return Finding(
                kind="wrong loss scale",
                module="",
                parameters=tuple(expected),
                axes=table.token_axes,
                seen=f"every gradient is {word} of what ranks along {over} have for their own rows alone",
                likely="the loss is averaged over a rank's own tokens before it is summed over ranks: a token counts for "
                "more on a rank with few",
                change="sum the loss, and divide by the tokens of the whole step: all-reduce the count first "
                "(run.forward_backward does it)",
            )
    return None


def _why_scaled(factor: float, axes: tuple[str, ...]) -> str:
    if axes and factor > 1:
        return f"the loss is divided by the tokens of this rank, or summed once more, over {', '.join(axes)}"
    if axes:
        return f"gradients are averaged over {', '.join(axes)} where losses are summed already, or the loss is divided twice"
    return "the loss is divided by something else than the tokens of the whole step (microbatches, all tokens, nothing)"


def _average(table: Table, seen: str) -> Finding:
    return Finding(
        kind="wrong loss scale",
        module="",
        axes=table.token_axes,
        seen=seen,
        likely="the loss function averages (reduction='mean'), and the step divides by the tokens again",
        change="return the sum over what count() counts: F.cross_entropy(..., reduction='sum')",
    )


# ----------------------------------------------------------------------------------------------------------- findings


def _findings_of(table: Table, wrong: dict[str, Verdict], *, before: Sequence[str] = ()) -> list[Finding]:
    """One finding for all parameters with the same verdict. before: parameters that are wrong because of the first."""
    groups: dict[Verdict, list[str]] = {}
    for name, verdict in wrong.items():
        # Measured factors of equal mistakes differ in their last digits, and would each be a group of one.
        rounded = None if verdict.factor is None else round(verdict.factor, 6)
        groups.setdefault(Verdict(verdict.kind, verdict.axes, rounded, verdict.sums), []).append(name)
    findings = [_finding(table, verdict, names) for verdict, names in groups.items()]
    if before:
        first = findings[0]
        seen = f"{first.seen}; so is what comes before {first.module}"
        findings[0] = replace(first, parameters=(*first.parameters, *before), seen=seen)
    return findings


def _finding(table: Table, verdict: Verdict, names: list[str]) -> Finding:
    first, over = names[0], ", ".join(verdict.axes)
    data = set(verdict.axes) <= set(table.token_axes)
    seen, likely, change = "", "", ""
    if verdict.kind == "unreduced gradient":
        seen = f"ranks along {over} have different gradients of the same part of {first}" + (
            ", whose sum is that of one device"
            if verdict.sums
            else ", whose mean is that of one device"
            if verdict.factor
            else ""
        )
        likely, change = _WHY_UNREDUCED[data]
        change = change.format(axis=verdict.axes[0] if verdict.axes else "")
    elif verdict.kind == "gradient reduced twice":
        seen = f"the gradient of {first} is {verdict.factor:g} times that of one device, on every rank"
        likely = f"it is summed over {over} twice: by a hook or a loop of yours, and by the block that holds it"
        change = f"leave one of the two sums over {over} away"
    elif verdict.kind == "averaged gradient":
        seen = f"the gradient of {first} is {verdict.factor:g} times that of one device, on every rank"
        likely = f"it is averaged over {over}, while meshkit's losses are divided by the tokens of the whole step"
        change = "sum (ReduceOp.SUM), or leave the division away"
    elif verdict.kind == "missing gradient":
        seen = f"one device has a gradient of {first}, and a rank of the mesh none, or zero"
        likely = (
            "it is detached, replaced or not used; or FSDP was told not to reduce (set_requires_gradient_sync(False))"
        )
        change = "use it inside of the forward of the model that was parallelized, and reduce in the last microbatch"
    else:
        times = (
            f"{verdict.factor:g} times that of one device" if verdict.factor is not None else "not that of one device"
        )
        seen = f"the gradient of {first} is {times}, on every rank, and what comes back to its module is right"
        likely = "a backward of its own module (custom autograd function, hook) computes, scales or shifts it"
        change = "compare that backward with torch.autograd.gradcheck on one rank, and its sums over ranks by hand"
    return Finding(
        kind=verdict.kind,
        module=module_of(first),
        parameters=tuple(names),
        axes=verdict.axes,
        seen=seen,
        likely=likely,
        change=change,
    )


_WHY_UNREDUCED = {
    True: (
        "nobody sums it over the ranks with other rows: it is outside of fully_shard (added after parallelize), or its "
        "synchronisation was switched off",
        "add it before parallelize, or all-reduce its gradient over mesh['{axis}'] after backward",
    ),
    False: (
        "every rank uses it on its own part of the work (features, tokens), and nobody sums what they get",
        "read it through meshkit.core.collectives.copy_to_axis(param, mesh['{axis}']), or all-reduce its gradient over it",
    ),
}


def _caused_later(
    table: Table, reference: OneDevice, expected: Result, names: list[str], module_states: dict[str, str], scale: float
) -> Finding:
    """The finding for gradients that arrive wrong at these modules: the mistake is in the module after the last of them."""
    ends = [name for name, ended in expected.order if ended and module_states.get(name) == "wrong"]
    last = ends[-1]
    module = next_module(expected.order, last, module_states, {module_of(name) for name in reference.shapes})
    pairs = paired_outputs(table, last, "gradients", expected.output_gradients, reference.rows)
    facts, value, want = pairs[0]
    same = [(other_facts, replica) for other_facts, replica, _ in pairs if other_facts.rows == facts.rows]
    axes = differing_axes(table, same, scale)
    if axes and close(sum_over(table, same, axes), want, table.tolerance, scale):
        kind: Kind = "unreduced gradient"
        seen = (
            f"the gradient that {module} sends back differs along {', '.join(axes)}, and its sum is that of one device"
        )
        likely = "every rank computes with its own features, and the backward does not sum the gradients of their input"
        change = f"pass the input of {module} through meshkit.core.collectives.copy_to_axis(x, mesh['{axes[0]}'])"
    else:
        factor = ratio(value, want)
        axes = axes or axes_by_size(table, factor)
        exact = close(value, want * factor, table.tolerance)
        kind = "gradient reduced twice" if exact and axes and factor > 1 else "wrong gradient"
        times = f"{factor:g} times that of one device" if exact else "not that of one device"
        seen = f"the gradient that {module} sends back is {times}"
        likely = (
            f"its backward sums over {', '.join(axes)} what is summed already: an all-reduce whose backward is another"
            if kind == "gradient reduced twice"
            else f"the backward of {module} (custom autograd function, hook) is wrong"
            + (f" on ranks along {', '.join(axes)}" if axes else "")
        )
        change = "take meshkit.core.collectives' mirrored pairs: reduce_from_axis sends nothing back, copy_to_axis sums"
    return Finding(
        kind=kind,
        module=module,
        parameters=tuple(names),
        axes=axes,
        seen=f"{seen}; so all before it is wrong",
        likely=likely,
        change=change,
    )


# -------------------------------------------------------------------------------------------------------------- tensors


def _error(table: Table, gradients: dict[str, Tensor | None]) -> float:
    return max(
        (
            max_difference(shard.gradient, expected_shard(shard, expected))
            for name, expected in gradients.items()
            for _, shard in table.shards(name)
            if expected is not None and shard.gradient is not None
        ),
        default=0.0,
    )


def _or_zero(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient
