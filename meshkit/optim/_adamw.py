"""`adamw`: the AdamW optimizer that a run's memory policy selects."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from meshkit.core.model_state import copies_of
from meshkit.mesh.world import cores_of_rank
from meshkit.optim.fused import ShardedAdamW
from meshkit.optim.host_offload import OffloadedAdamW
from meshkit.optim.low_bit import LowBitAdamW
from meshkit.step import Run
from meshkit.strategy import OptimizerPolicy


def adamw(
    model: Run | nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> Optimizer:
    """AdamW with decay on matrices only: tensors of one dim (norms, biases) are not decayed.

    Of a run, as its `MemoryPolicy(optimizer=...)` says: fused, on the host, or with moments of few bits; of a plain
    module, fused. An update on the host of a run on devices uses the rank's share of the cores.
    Raises: PlanError for parameters on meta, and for what `LowBitAdamW` cannot hold.
    """
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    groups: list[dict[str, Any]] = [
        # Decay pulls weights of products to zero, where a norm after them makes up for the scale; norms' own weights
        # and biases have no such invariance.
        {"params": [param for param in named.values() if param.ndim > 1], "weight_decay": weight_decay},
        {"params": [param for param in named.values() if param.ndim <= 1], "weight_decay": 0.0},
    ]
    stages = isinstance(model, Run) and model.pipeline is not None
    # A rank whose stage has no norms has a group without parameters in their place: all ranks have the same groups, and
    # so the same schedule of each.
    groups = [group for group in groups if group["params"] or stages]
    return _optimizer(model, groups, {"lr": lr, "betas": betas, "eps": eps})


def adamw_over(run: Run, optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer | None:
    """The optimizer that `adamw` would make of these groups for the run, with the options of `optimizer`, and without state.

    None if that is no optimizer of meshkit's.
    """
    if not isinstance(optimizer, ShardedAdamW | OffloadedAdamW | LowBitAdamW):
        return None
    options = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps")}
    made = _optimizer(run, groups, options)
    if isinstance(made, LowBitAdamW) and isinstance(optimizer, LowBitAdamW):
        made.seed = optimizer.seed
    return made


def _optimizer(model: Run | nn.Module, groups: list[dict[str, Any]], options: dict[str, Any]) -> Optimizer:
    policy = model.resolved.memory.optimizer if isinstance(model, Run) else OptimizerPolicy()
    if policy.offload is not None:
        offload = policy.offload
        # With pp, stages add up gradients of tied weights after the last backward: they may not leave before.
        streams = not (isinstance(model, Run) and model.pipeline is not None)
        return OffloadedAdamW(
            groups,
            **options,
            resident=offload.resident,
            delayed=offload.delayed,
            stream=streams,
            # On a CPU the process computes all with its threads, of which its launcher decides.
            threads=cores_of_rank() if isinstance(model, Run) and model.mesh.device.type != "cpu" else None,
        )
    if policy.states != "fp32" or policy.stochastic_rounding:
        copies = copies_of(model.model) if isinstance(model, Run) else {}
        # Names seed stochastic rounding: the two copies of a tied parameter must draw the same bits to stay equal.
        names = {param: copies.get(name, name) for name, param in model.named_parameters()}
        for group in groups:
            group["params"] = [(names[param], param) for param in group["params"]]
        return LowBitAdamW(groups, **options, states=policy.states, stochastic_rounding=policy.stochastic_rounding)
    return ShardedAdamW(groups, **options)
