"""Compare the facts of all ranks with one device, and list findings. It needs no ranks: the facts are tables of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.preflight.check._finding import Finding
from meshkit.preflight.check._gradients import judge_gradients
from meshkit.preflight.check._outputs import first_wrong_output
from meshkit.preflight.check._record import Facts, Shard
from meshkit.preflight.check._reference import OneDevice, Result
from meshkit.preflight.check._state_checks import after_the_step, first_values, optimizer, torn
from meshkit.preflight.check._tables import Table, close, same_region


def compare(
    facts: Sequence[Facts], reference: OneDevice, spec: MeshSpec, compute: torch.dtype
) -> tuple[list[Finding], float | None, float | None]:
    """(findings, largest relative error of a gradient, of the loss). The errors are None where nothing could be compared.

    compute: the dtype of matrix products.
    """
    table = Table(facts, spec, compute)
    ties = torn(table, reference)
    _refuse_other_parameters(table, reference, {name for finding in ties for name in finding.parameters})
    findings = [*first_values(table, reference), *ties, *optimizer(table)]
    if any(finding.kind in ("different initialisation", "not initialised") for finding in findings):
        return findings, None, None
    # One device gets the values of the mesh, put together from shards: how they were drawn is compared apart, above.
    reference.load({_aliases(name, reference)[0]: _full_value(table, name, reference) for name in table.names})
    expected = reference.run()
    wrong, gradient_error = judge_gradients(table, reference, expected, torn=_names(ties))
    loss_error = _loss_error(table, expected.loss)
    # Outputs are compared only when something is wrong: a forward that goes wrong explains gradients, and not the other way.
    if wrong or (loss_error or 0.0) > table.tolerance:
        _refuse_random(reference, expected, table)
        output = first_wrong_output(table, expected, reference.rows)
        if output is not None:
            return [*findings, output], gradient_error, loss_error
    if not wrong and (loss_error or 0.0) > table.tolerance:
        wrong = [_wrong_loss(table, expected.loss)]
    findings += wrong
    if not wrong:
        findings += after_the_step(table, expected.gradients)
    return findings, gradient_error, loss_error


def _refuse_other_parameters(table: Table, reference: OneDevice, torn: set[str]) -> None:
    reference_names = set(reference.shapes)
    strange = [name for name in table.names if name not in reference_names]
    missing = [
        names[0]
        for names in reference.tied
        if math.prod(reference.shapes[names[0]]) and not set(names) & set(table.names)
    ]
    if strange or missing:
        raise PlanError(
            f"check: the mesh has parameters {strange[:3]} that one device does not have, and lacks {missing[:3]}. Keep the "
            "names, or give the model they are of as reference=."
        )
    for name in table.names:
        full_shape = reference.shapes[name]
        for _, shard in table.shards(name):
            if len(shard.region) != len(full_shape) or any(
                after > size for (_, after), size in zip(shard.region, full_shape, strict=True)
            ):
                raise PlanError(
                    f"check: {name!r} is {_shape(shard)} on a rank, more than the {full_shape} of one device."
                )
        if sum(_size(replicas[0][1]) for replicas in same_region(table.shards(name))) < math.prod(full_shape):
            shape = _shape(table.shards(name)[0][1])
            raise PlanError(
                f"check: {name!r} is {shape} on a rank, and {full_shape} on one device. If ranks hold parts of it, say over "
                f"which axis and dim: sharded={{{name!r}: ('tp', 0)}}."
            )


def _refuse_random(reference: OneDevice, first: Result, table: Table) -> None:
    """Raises: PlanError if the step on one device is not the same twice."""
    again = reference.run()
    pairs = ((value, again.gradients[name]) for name, value in first.gradients.items() if value is not None)
    if first.loss != again.loss or not all(
        value_again is not None and close(value_again, value, table.tolerance) for value, value_again in pairs
    ):
        raise PlanError(
            f"check: two steps on one device give the losses {first.loss} and {again.loss}: the model draws random numbers "
            "(F.dropout, noise), or remembers something. Switch that off for the check."
        )


def _full_value(table: Table, name: str, reference: OneDevice) -> Tensor:
    shards = [entry for alias in _aliases(name, reference) for entry in table.shards(alias)]
    full = torch.empty(reference.shapes[name], dtype=shards[0][1].value.dtype)
    for _, shard in shards:
        full[shard.slices] = shard.value
    return full


def _aliases(name: str, reference: OneDevice) -> tuple[str, ...]:
    return next(names for names in reference.tied if name in names)


def _loss_error(table: Table, expected: float | None) -> float | None:
    losses = [facts.loss for facts in table.facts]
    if expected is None or any(loss is None for loss in losses):
        return None
    return max(abs(loss - expected) for loss in losses if loss is not None) / max(abs(expected), 1e-30)


def _wrong_loss(table: Table, expected: float | None) -> Finding:
    losses = ", ".join(f"{facts.loss:.6g}" for facts in table.facts[:8])
    differ = len({f"{facts.loss:.9g}" for facts in table.facts}) > 1
    return Finding(
        kind="wrong loss",
        module="",
        axes=table.token_axes if differ else (),
        seen=f"gradients are right, but the step returns {losses} on ranks 0, 1, ..., and {expected:.6g} on one device",
        likely="each rank returns the loss of its own rows"
        if differ
        else "the returned number is scaled, or not a mean",
        change="sum losses and counts over the ranks with different tokens (mesh.tokens), then divide",
    )


def _names(findings: Sequence[Finding]) -> set[str]:
    return {name for finding in findings for name in finding.parameters}


def _shape(shard: Shard) -> tuple[int, ...]:
    return tuple(shard.value.shape)


def _size(shard: Shard) -> int:
    return shard.value.numel()
