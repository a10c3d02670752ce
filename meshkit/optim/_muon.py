"""Muon: momentum of matrices, orthogonalised, for the matrices of a run's blocks; AdamW for all else."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from meshkit.core.model_state import model_tensors
from meshkit.core.optimizer_state import parameter_names
from meshkit.core.sharding import local_tensor, placed
from meshkit.errors import PlanError
from meshkit.mesh import Mesh
from meshkit.optim._products import product_weights
from meshkit.optim._whole import WholeMatrices
from meshkit.optim.fused import ShardedAdamW, loss_of, placed_gradient
from meshkit.step import Run
from meshkit.strategy import OptimizerPolicy

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Keller Jordan's quintic iteration, as torch.optim.Muon has them
_EPS = 1e-7
_OF_MATRICES = {"momentum": 0.95, "nesterov": True, "steps": 5}


class Muon(ShardedAdamW):
    """The optimizer that `muon` makes. Its state is sharded as parameters are, and saved and loaded as that of AdamW.

    A group with "momentum" has matrices, [rows, columns] or [experts, rows, columns], each other one what AdamW steps. Groups
    may change as those of torch do: every rank calls `add_param_group` alike.
    Memory: a momentum for each matrix, two moments for all else; for the time of `step` what `WholeMatrices` holds.
    Wire: that of `WholeMatrices.apply`, once a step.
    """

    def __init__(self, run: Run, groups: list[dict[str, Any]], *, dtype: torch.dtype | None, **options: Any) -> None:
        self._mesh: Mesh | None = run.mesh
        self._names, self._dtype = parameter_names(run.model), dtype
        super().__init__(groups, **options)
        self._gather_matrices()

    @property
    def _matrices(self) -> list[tuple[str, Tensor, dict[str, Any]]]:
        """(name, matrix, its group)"""
        groups = [group for group in self.param_groups if "momentum" in group]
        return [(self._names[id(param)], param, group) for group in groups for param in group["params"]]

    def _gather_matrices(self) -> None:
        """A new exchange of those that there are now, which first asks all ranks what they hold."""
        assert self._mesh is not None
        held = {name: param for name, param, _ in self._matrices}
        self.whole = WholeMatrices(self._mesh, held, dtype=self._dtype)
        self._held = held

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; one with "momentum" has matrices. Raises: PlanError for parameters that are not the run's."""
        if "momentum" in param_group:
            param_group = _OF_MATRICES | param_group
        _refuse_odd(param_group, called="Muon.add_param_group")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for param in group["params"]:
                if id(param) not in self._names:
                    raise PlanError(
                        f"Muon.add_param_group: a parameter of shape {list(param.shape)} is not the run's. Give those of "
                        "run.parameters(), after parallelize."
                    )
                if "momentum" in group and param.ndim not in (2, 3):
                    raise PlanError(
                        f"Muon.add_param_group: {self._names[id(param)]!r} of shape {list(param.shape)} is no matrix. Put it "
                        'into a group without "momentum", which AdamW steps.'
                    )
        except PlanError:
            del self.param_groups[-1]
            raise
        if "momentum" in group and hasattr(self, "whole"):
            self._gather_matrices()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch's is a decorated one
        loss = loss_of(closure)
        self._step_matrices()
        for group in self.param_groups:
            if "momentum" not in group:
                self.update(group)
        return loss

    def _step_matrices(self) -> None:
        if self._mesh is None:
            raise PlanError(
                "Muon.step: this one was unpickled, and is of no run. Make it by mk.muon(run, lr=), and load its state_dict."
            )
        matrices = self._matrices
        for name, _, _ in matrices:
            if name not in self._held:
                raise PlanError(f"Muon.step: {name!r} was put into a group's list. Give it to add_param_group.")
        # What has left its group goes along with zeros: the other ranks count on it.
        left = self._held.keys() - {name for name, _, _ in matrices}
        updates = {name: placed(param, torch.zeros_like(local_tensor(param))) for name, param in self._held.items()
                   if name in left}  # fmt: skip
        updates |= {name: self._direction(param, group) for name, param, group in matrices}
        steps = dict.fromkeys(left, 0) | {name: group["steps"] for name, _, group in matrices}
        self.whole.apply(updates, {name: partial(orthogonalise, steps=steps[name]) for name in steps})
        for name, param, group in matrices:
            if param.grad is None:
                continue
            rows, columns = param.shape[-2:]
            local = local_tensor(param)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            # The root mean square of AdamW's updates, so that one learning rate serves both.
            local.add_(local_tensor(updates[name]), alpha=-group["lr"] * 0.2 * max(rows, columns) ** 0.5)
        torch.autograd.graph.increment_version([param for _, param, _ in matrices])

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

    # ------------------------------------------------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        params = [param for group in self.param_groups for param in group["params"]]
        return super().__getstate__() | {
            "named": [(param, self._names[id(param)]) for param in params],
            "dtype": self._dtype,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of `load_state_dict`, and of a copy, which is of no run before `__deepcopy__` gives it one."""
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's looks into each parameter's state for its step
        if "named" in state:
            self._mesh, self._dtype = None, state["dtype"]
            self._names = {id(param): name for param, name in state["named"]}
            del self.__dict__["named"], self.__dict__["dtype"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__setstate__(deepcopy(self.__getstate__(), memo))
        if self._mesh is not None:
            copy._mesh = self._mesh
            copy._gather_matrices()
        return copy


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
    """Muon for weights of products inside of the run's blocks, those of experts one by one; AdamW for all else.

    A weight of a product is what the model multiplies as a matrix. Embedding, head, vectors, biases, also those of experts,
    convolutions and diagonals of states have AdamW.
    lr: of both; updates of matrices have the root mean square that AdamW's have, as in Moonlight. weight_decay: of matrices,
    as `adamw` has it. momentum, nesterov: of matrices. betas, eps: of AdamW. steps: of Newton-Schulz. dtype: in which that
    computes, and matrices travel; None is the parameters'.
    On every mesh each update is that of one device: see `WholeMatrices`.
    Raises: PlanError where the strategy wants the optimizer on the host or in few bits, for a run without blocks, and for
    options that are no numbers, or out of range.
    Source: Jordan et al. 2024; Liu et al. 2025 (2502.16982) for the scale. torch.optim.Muon with
    adjust_lr_fn="match_rms_adamw" is the same on one device.
    """
    if run.resolved.memory.optimizer != OptimizerPolicy():
        raise PlanError(
            "muon: MemoryPolicy(optimizer=...) wants the optimizer on the host or in few bits, and Muon's momentum is whole "
            "and on the device. Leave it away, or use mk.adamw."
        )
    _refuse_odd({"lr": lr, "momentum": momentum, "steps": steps, "weight_decay": weight_decay}, called="muon")
    model_tensors(run.model)  # for its side effect: FSDP puts its shards back
    blocks = tuple(f"{block}." for block in run.resolved.blocks)
    named = {name: param for name, param in run.named_parameters() if param.requires_grad}
    names = parameter_names(run.model)
    products = product_weights(run.resolved) if blocks else frozenset()
    is_matrix = {
        name: param.ndim in (2, 3) and names[id(param)].startswith(blocks) and names[id(param)] in products
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


def _refuse_odd(options: dict[str, Any], *, called: str) -> None:
    """Raises: PlanError for an option that is no number, or out of range. lr and weight_decay may be tensors."""

    def refuse(name: str, wanted: str) -> None:
        raise PlanError(f"{called}({name}={options[name]!r}): give {wanted}.")

    for name in ("lr", "weight_decay"):
        value = options.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float | Tensor) or not 0 <= float(value) < math.inf:
            refuse(name, "a number, at least 0")
    momentum, steps = options.get("momentum", 0.0), options.get("steps", 1)
    if isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        refuse("momentum", "a number from 0 to less than 1")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        refuse("steps", "a whole number, at least 1")


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
