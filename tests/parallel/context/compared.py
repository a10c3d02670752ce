"""A run on ranks against one device: the largest difference in the loss and in any gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.sharding import full_tensor
from tests.laws.parity.cases import mesh_for


def worst_difference(
    one: nn.Module,
    model: nn.Module,
    batch: dict[str, Tensor],
    mesh: str,
    *,
    plan: mk.Plan,
    recompute: str,
    microbatches: int,
) -> float:
    """one, model: the same values; the second is split. batch: of all ranks."""
    with torch.compiler.set_stance("force_eager"):
        loss = F.cross_entropy(one(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    expected = {name: param.grad for name, param in one.named_parameters()}
    run = mk.parallelize(model, mesh_for(mesh), plan=plan, memory=mk.MemoryPolicy(recompute=recompute))
    own = {name: x.tensor_split(run.mesh.data_ranks)[run.mesh.data_rank] for name, x in batch.items()}
    found = abs(float(run.forward_backward(own, microbatches=microbatches).detach()) - float(loss.detach()))
    errors = [
        float((full_tensor(param.grad) - expected[name]).abs().max())
        for name, param in run.named_parameters()
        if expected[name] is not None
    ]
    return max(found, *errors)
