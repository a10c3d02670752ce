"""What replicas must have alike when they meet: their mesh, their values, their steps; and a mean that is finite."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core.sharding import local_tensor
from meshkit.errors import AgreementError, PlanError, StepError
from meshkit.mesh import Mesh
from meshkit.step import Run


def refuse_other_mesh(run: Run, mesh: Mesh, policy: str) -> None:
    """Raises: PlanError for a run on anything but the mesh of a replica of `mesh`."""
    replicas = run.mesh.spec.dp_replicate
    if replicas > 1:
        raise PlanError(
            f"{policy}: the run is on a mesh with dp_replicate={replicas}, over which it sums gradients in each step. "
            "Parallelize on replica_mesh(mesh), and give the whole mesh here."
        )
    if run.mesh.spec.world_size * mesh.spec.dp_replicate != mesh.spec.world_size or run.mesh.rank != _place(mesh):
        raise PlanError(
            f"{policy}: the run is on {run.mesh.spec.world_size} ranks, and the mesh has {mesh.spec.world_size} with "
            f"dp_replicate={mesh.spec.dp_replicate}. Parallelize on replica_mesh(mesh)."
        )


def _place(mesh: Mesh) -> int:
    """This rank's rank in its replica's mesh."""
    place = 0
    for axis in ("pp", "dp_shard", "cp", "tp"):
        place = place * mesh[axis].size() + mesh[axis].get_local_rank()
    return place


def refuse_different_values(run: Run, mesh: Mesh, tensors: Mapping[str, Tensor], trained: set[str]) -> None:
    """Raises: PlanError on every rank, for values that replicas have not alike, for those that are not finite, and where
    replicas train other parameters.

    Wire: a gather of a digest over the mesh.
    """
    if mesh.agreement.alone:
        return
    digest, finite = hashlib.sha256(), True
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        finite = finite and (not local.is_floating_point() or bool(local.isfinite().all()))
        digest.update(f"{name} {name in trained}".encode())
        digest.update(local.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    told: list[Any] = [None] * mesh.spec.world_size
    dist.all_gather_object(told, (run.mesh.rank, digest.hexdigest(), finite), group=mesh.group)
    if not all(finite for *_, finite in told):
        raise PlanError(
            "OuterOptimizer: some parameters are not finite, as before init_weights or load_pretrained. Give them values "
            "first."
        )
    first = {rank: text for rank, text, _ in reversed(told)}
    if any(text != first[rank] for rank, text, _ in told):
        raise PlanError(
            "OuterOptimizer: replicas begin with different values, or train other parameters. Initialise them from one seed, "
            "or load one checkpoint on all."
        )


def refuse_other_steps(steps: list[int], own: int) -> None:
    """steps: of each replica when it sent; all of them see the same. Raises: AgreementError where they differ."""
    if any(step != own for step in steps):
        counted = ", ".join(f"{step} on replica {index}" for index, step in enumerate(steps))
        raise AgreementError(
            f"replicas meet after different numbers of steps: {counted}. Call OuterOptimizer.step() once after each step on "
            "every replica, also where the inner step was skipped."
        )


def refuse_not_finite(run: Run, mesh: Mesh, means: list[Tensor], finite: Tensor | None, *, step: int) -> None:
    """Raises: StepError on every rank of every replica, for means of which some element on some rank is not finite.

    finite: whether what each replica sent to this rank is; None where that is no longer known.
    Wire: an all-reduce of a few numbers over the replica's mesh; the other replicas have the same means.
    """
    bad = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for mean in means:
        bad += (~mean.isfinite().all()).double()
    (count,) = run.mesh.agreement.meet("a meeting of replicas", bad, facts={"step": step})
    if not float(count):
        return
    told: list[Any] = [None] * mesh.spec.world_size
    own = [] if finite is None else (~finite).nonzero().view(-1).tolist()
    dist.all_gather_object(told, own, group=mesh.group)
    replicas = sorted({replica for each in told for replica in each})
    which = f" Those of replica {', '.join(map(str, replicas))} are not." if replicas else ""
    raise StepError(
        f"step {step}: the mean of the replicas' parameters is not finite.{which} Go on from a checkpoint before it, and let "
        "a NonFiniteGuard skip such steps."
    )
