"""What can be wrong besides the gradients: first values, ties, the optimizer and its step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshkit.mesh import Mesh
from meshkit.preflight.check._finding import Finding
from meshkit.preflight.check._reference import OneDevice
from meshkit.preflight.check._tables import Table, apart, close, differing_axes, same_region
from meshkit.preflight.check._verdict import module_of


def different_first_values(model: nn.Module, mesh: Mesh) -> Finding | None:
    """Whether ranks built different models. Wire: an all-gather of a sum for each parameter, as objects."""
    real = {name: param.detach() for name, param in model.named_parameters() if not param.is_meta}
    sums = {name: float(param.double().abs().sum()) for name, param in real.items()}
    everyone: list[dict[str, float]] = [sums] * len(mesh.ranks)
    dist.all_gather_object(everyone, sums, group=mesh.group)
    wrong = [name for name in sums if any(other.get(name) != everyone[0].get(name) for other in everyone)]
    if not wrong:
        return None
    values = ", ".join(f"{other[wrong[0]]:.6g}" for other in everyone[:8])
    return Finding(
        kind="different initialisation",
        module=module_of(wrong[0]),
        parameters=tuple(wrong),
        seen=f"the sum of absolute values of {wrong[0]} is {values} on ranks 0, 1, ...",
        likely="the model is built from random numbers without a seed, or with one that depends on the rank",
        change="call torch.manual_seed with one seed on every rank before building, or build on meta and call init_weights",
    )


def first_values(table: Table, one: OneDevice) -> list[Finding]:
    empty = [name for name in table.names if any(bool(part.value.isnan().any()) for _, part in table.parts(name))]
    if empty:
        return [
            Finding(
                kind="not initialised",
                module=module_of(empty[0]),
                parameters=tuple(empty),
                seen=f"{empty[0]} holds NaN before the first step",
                likely="the model was built on meta, and nothing gave it values afterwards",
                change="call init_weights(run.model, seed=...) or load_pretrained after parallelize",
            )
        ]
    axes: set[str] = set()
    different = []
    for name in table.names:
        for replicas in same_region(table.parts(name)):
            found = differing_axes(table, [(facts, part.value) for facts, part in replicas])
            axes |= set(found)
            different += [name] * bool(found)
    if different:
        return [_different(table, list(dict.fromkeys(different)), tuple(axis for axis in table.axes if axis in axes))]
    moved = [
        name
        for name in table.names
        if name in one.first and not bool(one.first[name].isnan().any()) and not _equals_first(table, name, one)
    ]
    if moved:
        repeated = _repeats(table, moved[0])
        return [
            Finding(
                kind="different initialisation",
                module=module_of(moved[0]),
                parameters=tuple(moved),
                axes=repeated,
                seen=f"{moved[0]} has other first values than the same function gives on one device"
                + (f"; its parts are equal on the ranks of {', '.join(repeated)}" if repeated else ""),
                likely="values are drawn after the split: each rank draws its part from the start of the same stream"
                if repeated
                else "values are drawn after the split, or with a seed that depends on the mesh",
                change="draw before parallelize, or with init_weights(run.model, seed=...), which no mesh changes",
            )
        ]
    return []


def _different(table: Table, names: list[str], axes: tuple[str, ...]) -> Finding:
    largest = max(
        apart(part.value, replicas[0][1].value)
        for name in names
        for replicas in same_region(table.parts(name))
        for _, part in replicas
    )
    return Finding(
        kind="different initialisation",
        module=module_of(names[0]),
        parameters=tuple(names),
        axes=axes,
        seen=f"ranks along {', '.join(axes)} hold the same part of {names[0]}, with values up to {largest:.2g} apart",
        likely="values are drawn, or changed, after the split with a seed that differs between ranks; or only some load",
        change="draw with one seed on every rank of the axis, or with init_weights(run.model, seed=...)",
    )


def _equals_first(table: Table, name: str, one: OneDevice) -> bool:
    return all(close(part.value, one.first[name][part.slices], table.tolerance) for _, part in table.parts(name))


def _repeats(table: Table, name: str) -> tuple[str, ...]:
    """Axes along which different parts have the same values."""
    parts = [(facts, part) for facts, part in table.parts(name) if part.value.numel() > 1]
    found = []
    for axis in table.axes:
        pairs = [
            (one, other)
            for facts, one in parts
            for others, other in parts
            if table.differ_only_in(axis, facts, others) and one.region != other.region
        ]
        if pairs and all(
            one.value.shape == other.value.shape and close(one.value, other.value, 0.0) for one, other in pairs
        ):
            found.append(axis)
    return tuple(found)


def torn(table: Table, one: OneDevice) -> list[Finding]:
    findings = []
    for names in (group for group in one.tied if len(group) > 1):
        for facts in table.facts:
            here = [group for group in facts.tied if set(group) & set(names)]
            if len(here) > 1:
                apart_ = tuple(group[0] for group in here)
                findings.append(
                    Finding(
                        kind="tied weights torn",
                        module=module_of(apart_[-1]),
                        parameters=tuple(dict.fromkeys([*apart_[1:], apart_[0]])),
                        seen=f"{' and '.join(names)} are one parameter on one device, and {len(here)} on the mesh",
                        likely="a parameter was replaced after the tie was made (a copy, to_empty, load with assign=True), "
                        "so each name has a part of the gradient and is stepped on its own",
                        change=f"tie again, before parallelize: model.{names[1]} = model.{names[0]}",
                    )
                )
                break
    return findings


def optimizer(table: Table) -> list[Finding]:
    unseen = [name for name in table.names if any(part.trained and not part.stepped for _, part in table.parts(name))]
    if not unseen:
        return []
    strangers = max(facts.strangers for facts in table.facts)
    likely = (
        "it is in no param_group: a filter by name or shape left it out, or it was added after the optimizer was made"
    )
    if strangers:
        likely = f"the optimizer holds {strangers} tensors that are not the model's: it was made before the model was changed"
    return [
        Finding(
            kind="not in the optimizer",
            module=module_of(unseen[0]),
            parameters=tuple(unseen),
            seen=f"{len(unseen)} of {len(table.names)} parameters require a gradient, and no optimizer sees them",
            likely=likely,
            change="make the optimizer of run.parameters() after parallelize and every change of the model, or freeze them",
        )
    ]


def after_the_step(table: Table, gradients: dict[str, Tensor | None]) -> list[Finding]:
    findings: list[Finding] = []
    still, drifting, axes = [], [], set[str]()
    for name in table.names:
        parts = [(facts, part) for facts, part in table.parts(name) if part.after is not None]
        moving = [part for _, part in parts if part.stepped and part.gradient is not None and bool(part.gradient.any())]
        if moving and all(part.after is not None and torch.equal(part.after, part.value) for part in moving):
            still.append(name)
        for replicas in same_region(parts):
            moves = [(facts, part.after - part.value) for facts, part in replicas if part.after is not None]
            found = differing_axes(table, moves)
            if found:
                drifting.append(name)
                axes |= set(found)
    if still:
        findings.append(
            Finding(
                kind="not updated",
                module=module_of(still[0]),
                parameters=tuple(still),
                seen=f"the optimizer has {still[0]}, its gradient is not zero, and a step leaves it as it was",
                likely="the step is taken on copies (gathered or offloaded weights), or its learning rate is 0",
                change="step the parameters of the run, with a learning rate; after a forward without backward call "
                "meshkit.parallel.data.after_inference(run.model)",
            )
        )
    if drifting:
        findings.append(
            Finding(
                kind="replicas drift apart",
                module=module_of(drifting[0]),
                parameters=tuple(dict.fromkeys(drifting)),
                axes=tuple(axis for axis in table.axes if axis in axes),
                seen=f"gradients are right, and after the optimizer's step ranks along {', '.join(sorted(axes))} hold "
                f"different values of {drifting[0]}",
                likely="something between backward and step differs between ranks: a norm of this rank's part alone, by "
                "which gradients are clipped, a learning rate, noise",
                change="clip by mk.clip_grad_norm, whose norm is the same on every rank; step with the same numbers",
            )
        )
    return findings
