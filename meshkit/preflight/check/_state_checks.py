"""State checks besides gradients: initial values, tied weights, the optimizer and its step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshkit.mesh import Mesh
from meshkit.preflight.check._finding import Finding
from meshkit.preflight.check._reference import OneDevice
from meshkit.preflight.check._tables import Table, close, differing_axes, max_difference, same_region
from meshkit.preflight.check._verdict import module_of


def different_first_values(model: nn.Module, mesh: Mesh) -> Finding | None:
    """A finding if ranks built models with different values. Wire: an all-gather of a sum for each parameter, as objects."""
    real = {name: param.detach() for name, param in model.named_parameters() if not param.is_meta}
    sums = {name: float(param.double().abs().sum()) for name, param in real.items()}
    everyone: list[dict[str, float]] = [sums] * len(mesh.ranks)
    dist.all_gather_object(everyone, sums, group=mesh.group)
    wrong = [name for name in sums if any(sums_of_rank.get(name) != everyone[0].get(name) for sums_of_rank in everyone)]
    if not wrong:
        return None
    values = ", ".join(f"{sums_of_rank[wrong[0]]:.6g}" for sums_of_rank in everyone[:8])
    return Finding(
        kind="different initialisation",
        module=module_of(wrong[0]),
        parameters=tuple(wrong),
        seen=f"the sum of absolute values of {wrong[0]} is {values} on ranks 0, 1, ...",
        likely="the model is built from random numbers without a seed, or with one that depends on the rank",
        change="call torch.manual_seed with one seed on every rank before building, or build on meta and call init_weights",
    )


def first_values(table: Table, reference: OneDevice) -> list[Finding]:
    empty = [name for name in table.names if any(bool(shard.value.isnan().any()) for _, shard in table.shards(name))]
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
        for replicas in same_region(table.shards(name)):
            axes_found = differing_axes(table, [(facts, shard.value) for facts, shard in replicas])
            axes |= set(axes_found)
            different += [name] * bool(axes_found)
    if different:
        return [_different(table, list(dict.fromkeys(different)), tuple(axis for axis in table.axes if axis in axes))]
    moved = [
        name
        for name in table.names
        if name in reference.first_values
        and not bool(reference.first_values[name].isnan().any())
        and not _equals_first(table, name, reference)
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
        max_difference(shard.value, replicas[0][1].value)
        for name in names
        for replicas in same_region(table.shards(name))
        for _, shard in replicas
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


def _equals_first(table: Table, name: str, reference: OneDevice) -> bool:
    return all(
        close(shard.value, reference.first_values[name][shard.slices], table.tolerance)
        for _, shard in table.shards(name)
    )


def _repeats(table: Table, name: str) -> tuple[str, ...]:
    """Axes along which different shards have the same values."""
    shards = [(facts, shard) for facts, shard in table.shards(name) if shard.value.numel() > 1]
    repeated = []
    for axis in table.axes:
        pairs = [
            (shard, other_shard)
            for facts, shard in shards
            for other_facts, other_shard in shards
            if table.differ_only_in(axis, facts, other_facts) and shard.region != other_shard.region
        ]
        if pairs and all(
            shard.value.shape == other_shard.value.shape and close(shard.value, other_shard.value, 0.0)
            for shard, other_shard in pairs
        ):
            repeated.append(axis)
    return tuple(repeated)


def torn(table: Table, reference: OneDevice) -> list[Finding]:
    findings = []
    for names in (group for group in reference.tied if len(group) > 1):
        for facts in table.facts:
            groups = [group for group in facts.tied if set(group) & set(names)]
            if len(groups) > 1:
                roots = tuple(group[0] for group in groups)
                findings.append(
                    Finding(
                        kind="tied weights torn",
                        module=module_of(roots[-1]),
                        parameters=tuple(dict.fromkeys([*roots[1:], roots[0]])),
                        seen=f"{' and '.join(names)} are one parameter on one device, and {len(groups)} on the mesh",
                        likely="a parameter was replaced after the tie was made (a copy, to_empty, load with assign=True), "
                        "so each name has a part of the gradient and is stepped on its own",
                        change=f"tie again, before parallelize: model.{names[1]} = model.{names[0]}",
                    )
                )
                break
    return findings


def optimizer(table: Table) -> list[Finding]:
    unseen = [
        name for name in table.names if any(shard.trained and not shard.stepped for _, shard in table.shards(name))
    ]
    if not unseen:
        return []
    strangers = max(facts.foreign_tensors for facts in table.facts)
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
        shards = [(facts, shard) for facts, shard in table.shards(name) if shard.after is not None]
        moving = [
            shard for _, shard in shards if shard.stepped and shard.gradient is not None and bool(shard.gradient.any())
        ]
        if moving and all(shard.after is not None and torch.equal(shard.after, shard.value) for shard in moving):
            still.append(name)
        for replicas in same_region(shards):
            moves = [(facts, shard.after - shard.value) for facts, shard in replicas if shard.after is not None]
            axes_found = differing_axes(table, moves)
            if axes_found:
                drifting.append(name)
                axes |= set(axes_found)
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
