"""What a check was asked for: the model, and a step of it, on a mesh and on one device."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshkit._parallelize import parallelize
from meshkit.errors import PlanError
from meshkit.mesh import Mesh
from meshkit.moe.aux_loss import collect
from meshkit.optim import adamw
from meshkit.preflight.check._reference import Step, model_of
from meshkit.step import Batch, Count, Loss, Run
from meshkit.strategy import Strategy


@dataclass(frozen=True)
class Request:
    """The arguments of `check`, and what is made of them on a rank."""

    model: Any
    batch: Batch
    microbatches: int
    loss: Loss
    count: Count
    given_step: Step | None
    given_optimizer: Callable[[Any], torch.optim.Optimizer] | None
    reference: Callable[[], nn.Module] | None
    sharded: Mapping[str, tuple[str, int]]
    dtype: torch.dtype
    timeout_s: float
    strategy: Strategy
    random: torch.Tensor = field(default_factory=torch.get_rng_state)  # where every building begins to draw

    @property
    def builds_all(self) -> bool:
        return not isinstance(self.model, nn.Module) and bool(inspect.signature(self.model).parameters)

    def refuse(self) -> None:
        given = list(self.strategy.changes)
        if self.builds_all and given:
            raise PlanError(
                f"check: a function of the mesh makes its own choices, but got {', '.join(given)} as well. Leave them out."
            )
        if self.given_step is not None and self.microbatches > 1:
            raise PlanError("check: microbatches are what the default step makes; with step=, make them there.")
        if not self.batch or len({tensor.shape[0] for tensor in self.batch.values()}) != 1:
            raise PlanError(
                "check: batch is a dict of tensors with the same number of rows, the rows of the whole step."
            )

    def built(self, make: Callable[..., Any], *args: Any) -> Any:
        """make(*args), drawing the same numbers in every call: a class of modules seeds nothing by itself."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random)
            return make(*args)

    def plain(self) -> nn.Module:
        """The model on no mesh, in `dtype`."""
        model: nn.Module = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.built(self.model)
        return model.to(self.dtype)

    def on_one(self, mesh: Mesh) -> Run | nn.Module:
        """The model of one device. mesh: of this rank alone."""
        made: Run | nn.Module
        with default_dtype(self.dtype):
            if self.builds_all and self.reference is None:
                made = self.built(self.model, mesh)
            else:
                made = self.plain() if self.reference is None else self.built(self.reference).to(self.dtype)
                if any(param.is_meta for param in made.parameters()) or self.given_step is not None:
                    made = parallelize(made, mesh, plan=self.strategy.plan)
        return made

    def step(self, made: Run | nn.Module, rows: Batch) -> Any:
        if self.given_step is not None:
            return self.given_step(made, rows)
        assert isinstance(made, Run)
        return made.forward_backward(rows, microbatches=self.microbatches, loss=self.loss, count=self.count)

    def step_of_one(self, made: Run | nn.Module, rows: Batch) -> Any:
        """Written out again, so that it is not the step under test."""
        if self.given_step is not None:
            return self.given_step(made, rows)
        with collect() as found:
            total = self.loss(model_of(made), rows)
        tokens = self.count(rows).clamp(min=1)
        ((total + found.total()) / tokens).backward()
        return total.detach() / tokens

    def optimizer(self, made: Run | nn.Module) -> torch.optim.Optimizer:
        return adamw(made, lr=1e-3) if self.given_optimizer is None else self.given_optimizer(made)

    def rows_of(self, data_rank: int, ranks: int) -> slice:
        total = next(iter(self.batch.values())).shape[0]
        parts = torch.arange(total).tensor_split(ranks)
        first = sum(len(part) for part in parts[:data_rank])
        return slice(first, first + len(parts[data_rank]))


def cast(batch: Batch, model: nn.Module) -> Batch:
    dtype = next(model.parameters()).dtype
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
