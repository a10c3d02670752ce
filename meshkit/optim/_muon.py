"""Muon: momentum of matrices, orthogonalised, for the matrices of a run's blocks; AdamW for all else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshkit.core.model_state import model_tensors
from meshkit.core.optimizer_state import parameter_names
from meshkit.core.sharding import local_tensor, placed
from meshkit.errors import PlanError
from meshkit.optim._whole import WholeMatrices
from meshkit.optim.fused import ShardedAdamW, placed_gradient
from meshkit.step import Run
from meshkit.strategy import OptimizerPolicy

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Keller Jordan's quintic iteration, as torch.optim.Muon has them
_EPS = 1e-7


class Muon(ShardedAdamW):
    """The optimizer that `muon` makes. Its state is sharded as parameters are, and saved and loaded as that of AdamW.

    Memory: a momentum for each matrix, two moments for all else; for the time of `step` what `WholeMatrices` holds.
    Wire: that of `WholeMatrices.apply`, once a step.
    """

    def __init__(self, run: Run, groups: list[dict[str, Any]], *, dtype: torch.dtype | None, **options: Any) -> None:
        super().__init__(groups, **options)
        names = parameter_names(run.model)
        self._named = {names[id(param)]: param for param in self.param_groups[0]["params"]}
        self.whole = WholeMatrices(run.mesh, self._named, dtype=dtype)

    def update(self, group: dict[str, Any]) -> None:
        if "momentum" not in group:
            return super().update(group)
        updates = {name: self._direction(param, group) for name, param in self._named.items()}
        self.whole.apply(updates, lambda matrix: orthogonalise(matrix, steps=group["steps"]))
        for name, param in self._named.items():
            if param.grad is None:
                continue
            rows, columns = param.shape[-2:]
            local = local_tensor(param)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            # The root mean square of AdamW's updates, so that one learning rate serves both.
            local.add_(local_tensor(updates[name]), alpha=-group["lr"] * 0.2 * max(rows, columns) ** 0.5)
        torch.autograd.graph.increment_version(group["params"])

    def _direction(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """What is orthogonalised, laid out as the parameter. A matrix without a gradient keeps its momentum."""
        if param.grad is None:
            return placed(param, torch.zeros_like(local_tensor(param)))
        gradient = local_tensor(placed_gradient(param))
        if not self.state[param]:
            self.state[param]["momentum_buffer"] = placed(param, torch.zeros_like(local_tensor(param)))
        momentum = local_tensor(self.state[param]["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        return placed(param, gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone())


def muon(
    run: Run,
    *,
    lr: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    dtype: torch.dtype | None = torch.bfloat16,
) -> Muon:
    """Muon for the matrices inside of the run's blocks, those of experts one by one; AdamW for embedding, head and vectors.

    lr: of both; updates of matrices have the root mean square that AdamW's have, as in Moonlight. weight_decay: of matrices,
    as `adamw` has it. momentum, nesterov: of matrices. betas, eps: of AdamW. steps: of Newton-Schulz. dtype: in which that
    computes, and matrices travel; None is the parameters'.
    On every mesh each update is that of one device: see `WholeMatrices`.
    Raises: PlanError where the strategy wants the optimizer on the host or in few bits, and for a run without blocks.
    Source: Jordan et al. 2024; Liu et al. 2025 (2502.16982) for the scale. torch.optim.Muon with
    adjust_lr_fn="match_rms_adamw" is the same on one device.
    """
    if run.resolved.memory.optimizer != OptimizerPolicy():
        raise PlanError(
            "muon: MemoryPolicy(optimizer=...) wants the optimizer on the host or in few bits, and Muon's momentum is whole "
            "and on the device. Leave it away, or use mk.adamw."
        )
    model_tensors(run.model)  # for its side effect: FSDP puts its shards back
    blocks = tuple(f"{block}." for block in run.resolved.blocks)
    named = {name: param for name, param in run.named_parameters() if param.requires_grad}
    names = parameter_names(run.model)
    is_matrix = {
        name: param.ndim in (2, 3) and names[id(param)].startswith(blocks) and bool(blocks)
        for name, param in named.items()
    }
    if not any(is_matrix.values()) and run.pipeline is None:
        raise PlanError("muon: the run has no matrices in blocks. Name its blocks in the plan, or use mk.adamw.")
    others = [param for name, param in named.items() if not is_matrix[name]]
    groups = [
        {
            "params": [param for name, param in named.items() if is_matrix[name]],
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "steps": steps,
        },
        {"params": [param for param in others if param.ndim > 1], "weight_decay": weight_decay},
        {"params": [param for param in others if param.ndim <= 1], "weight_decay": 0.0},
    ]
    return Muon(run, groups, dtype=dtype, lr=lr, betas=betas, eps=eps)


def orthogonalise(matrix: Tensor, *, steps: int = 5) -> Tensor:
    """About U Vᵀ of the matrix U S Vᵀ [..., rows, columns], in its dtype: singular values of about 0.7 to 1.2.

    Source: Jordan et al. 2024, a quintic Newton-Schulz iteration.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x: Tensor = matrix if wide else matrix.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT
