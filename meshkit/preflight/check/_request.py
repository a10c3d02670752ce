"""Request: the arguments of a check, and how model and step are built from them, on a mesh and on one device."""

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
from meshkit.errors import CheckError, PlanError
from meshkit.mesh import Mesh
from meshkit.moe.aux_loss import collect
from meshkit.optim import adamw
from meshkit.preflight.check._reference import Step, model_of
from meshkit.step import Batch, Count, Loss, Run
from meshkit.strategy import Strategy


@dataclass(frozen=True)
class Request:
    """The arguments of `check`. random: the RNG state with which every building of the model begins."""

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
    random: torch.Tensor = field(default_factory=torch.get_rng_state)

    @property
    def builds_all(self) -> bool:
        return not isinstance(self.model, nn.Module) and bool(inspect.signature(self.model).parameters)

    def refuse(self) -> None:
        choices = list(self.strategy.changes)
        if self.builds_all and choices:
            raise PlanError(
                f"check: a function of the mesh makes its own choices, but got {', '.join(choices)} as well. Leave them out."
            )
        if self.given_step is not None and self.microbatches > 1:
            raise PlanError("check: microbatches are what the default step makes; with step=, make them there.")
        if not self.batch or len({tensor.shape[0] for tensor in self.batch.values()}) != 1:
            raise PlanError(
                "check: batch is a dict of tensors with the same number of rows, the rows of the whole step."
            )

    def built(self, make: Callable[..., Any], *args: Any) -> Any:
        """make(*args) with the same random numbers in every call: a constructor of modules seeds nothing by itself."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random)
            return make(*args)

    def plain(self) -> nn.Module:
        """The model on no mesh, in `dtype`."""
        model: nn.Module = _copy(self.model) if isinstance(self.model, nn.Module) else self.built(self.model)
        return model.to(self.dtype)

    def on_one_device(self, mesh: Mesh) -> Run | nn.Module:
        """The model of one device. mesh: of this rank alone."""
        built_model: Run | nn.Module
        with default_dtype(self.dtype):
            if self.builds_all and self.reference is None:
                built_model = self.built(self.model, mesh)
            else:
                built_model = self.plain() if self.reference is None else self.built(self.reference).to(self.dtype)
                if any(param.is_meta for param in built_model.parameters()) or self.given_step is not None:
                    built_model = parallelize(built_model, mesh, plan=self.strategy.plan)
        return built_model

    def step(self, built_run: Run | nn.Module, rows: Batch) -> Any:
        if self.given_step is not None:
            return self.given_step(built_run, rows)
        assert isinstance(built_run, Run)
        return built_run.forward_backward(rows, microbatches=self.microbatches, loss=self.loss, count=self.count)

    def reference_step(self, built_run: Run | nn.Module, rows: Batch) -> Any:
        """The step on one device. Written out again, so that the reference is not the code under test."""
        if self.given_step is not None:
            return self.given_step(built_run, rows)
        with collect() as auxiliary:
            total = self.loss(model_of(built_run), rows)
        tokens = self.count(rows).clamp(min=1)
        ((total + auxiliary.total()) / tokens).backward()
        return total.detach() / tokens

    def optimizer(self, built_run: Run | nn.Module) -> torch.optim.Optimizer:
        return adamw(built_run, lr=1e-3) if self.given_optimizer is None else self.given_optimizer(built_run)

    def rows_of(self, data_rank: int, ranks: int) -> slice:
        total = next(iter(self.batch.values())).shape[0]
        parts = torch.arange(total).tensor_split(ranks)
        first = sum(len(rows_of_rank) for rows_of_rank in parts[:data_rank])
        return slice(first, first + len(parts[data_rank]))


def _copy(model: nn.Module) -> nn.Module:
    """Without gradients. Raises: CheckError for what a module holds of which there is no copy."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise CheckError(
            f"check: the mesh and one device run a copy of {type(model).__name__} each, and {_without_copy(model)} "
            f"({type(error).__name__}: {str(error).partition('. ')[0]}). Give a function that builds the model, as "
            "check(lambda: Model(), ...), or take it off the module before."
        ) from error
    twin.zero_grad()
    return twin


def _without_copy(model: nn.Module) -> str:
    """The attribute of which there is no copy, in words."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key != "_modules":
                try:
                    copy.deepcopy(value)
                except Exception:
                    return f"there is none of {f'{name}.{key}'.lstrip('.')!r}, {_words(value)}"
    return "there is none of it"


def _words(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return "a tensor with the graph that made it (keep value.detach())"
    return f"a {type(value).__name__}"


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
