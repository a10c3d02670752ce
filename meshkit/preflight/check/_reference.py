"""Reference: the same step on one device, with which all ranks are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core._torch import TorchDispatchMode
from meshkit.core.sharding import local_tensor
from meshkit.errors import PlanError
from meshkit.parallel.data import after_inference
from meshkit.preflight.check._record import Recorder, tied_names
from meshkit.step import Count, Loss, Run

Step = Callable[[Any, dict[str, Tensor]], Any]


@dataclass(frozen=True)
class Result:
    """gradients: by every name of a parameter. outputs, output_gradients: of modules. order: (module, whether it ends)."""

    loss: float | None
    gradients: dict[str, Tensor | None]
    outputs: dict[str, Tensor]
    output_gradients: dict[str, Tensor]
    order: list[tuple[str, bool]]


class OneDevice:
    """The model on one device. built: a Run on a mesh of one rank, or a plain module. loss_and_count: None if not known."""

    def __init__(
        self,
        built: Run | nn.Module,
        step: Step,
        batch: Mapping[str, Tensor],
        rows_of_ranks: list[slice],
        *,
        loss_and_count: tuple[Loss, Count] | None,
    ) -> None:
        self.built, self.step, self.batch, self.rows_of_ranks, self.loss_and_count = (
            built,
            step,
            batch,
            rows_of_ranks,
            loss_and_count,
        )
        self.model = model_of(built)
        self.tied = tied_names(self.model)
        self.rows = next(iter(batch.values())).shape[0]
        self.shapes = {name: tuple(param.shape) for name, param in self.model.named_parameters(remove_duplicate=False)}
        self.first_values = {
            name: local_tensor(param).cpu().clone()
            for name, param in self.model.named_parameters()
            if not param.is_meta
        }

    def load(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                if param.numel():
                    local_tensor(param).copy_(values[name])  # on one rank a shard is the full tensor

    def run(self, rows: slice = slice(None)) -> Result:
        """Loss and gradients of these rows as a step of their own."""
        recorder = Recorder(self.model)
        self.model.zero_grad()
        try:
            with torch.compiler.set_stance("force_eager"), _NoCollectives():
                loss = self.step(self.built, self._rows(rows))
        finally:
            recorder.remove()
        grads = {
            name: None if param.grad is None else local_tensor(param.grad).cpu().clone()
            for name, param in self.model.named_parameters(remove_duplicate=False)
        }
        return Result(as_number(loss), grads, recorder.outputs, recorder.gradients, recorder.order)

    # What a rank would compute alone, to tell sums over ranks that are missing from sums that are made twice.
    def of_ranks(self) -> list[Result]:
        """Results of the rows of each data rank that has some, each as a step of its own."""
        return [self.run(rows) for rows in self.rows_of_ranks if rows.start < rows.stop]

    @torch.no_grad()
    def not_a_sum(self) -> str | None:
        """Evidence, as a sentence, that the loss or the count is not a sum over rows; None if it is one."""
        if self.loss_and_count is None or self.rows < 2:
            return None
        halves = [slice(0, self.rows // 2), slice(self.rows // 2, self.rows)]
        loss, count = self.loss_and_count
        evidence = None
        for name, function in (("loss", lambda batch: loss(self.model, batch)), ("count", count)):
            total, first, second = (float(function(self._rows(rows))) for rows in (slice(None), *halves))
            # A mean of halves is off by a half of the total; rounding in bf16 by less than this hundredth.
            if abs(total - first - second) > 1e-2 * max(abs(total), abs(first) + abs(second)):
                evidence = (
                    f"the {name} of all rows is {total:.6g}, of their halves {first:.6g} and {second:.6g}: it is no sum"
                )
                break
        after_inference(self.model)
        return evidence

    def _rows(self, rows: slice) -> dict[str, Tensor]:
        device = next(self.model.parameters()).device
        return {name: tensor[rows].to(device) for name, tensor in self.batch.items()}


class _NoCollectives(TorchDispatchMode):
    """Refuses collectives over several ranks: the others do not take part, and the step would hang."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait_tensor" not in name:
            size = _torch.group_of_call(args).size()
            if size > 1:
                raise PlanError(
                    f"check: the model of one device calls {name} over {size} ranks. Take groups from the mesh that your "
                    "function gets, or give the plain model as reference=."
                )
        return func(*args, **(kwargs or {}))


def model_of(built: Run | nn.Module) -> nn.Module:
    return built.model if isinstance(built, Run) else built


def as_number(loss: Any) -> float | None:
    if isinstance(loss, Tensor):
        loss = loss.detach()
        return float(loss) if loss.numel() == 1 else None
    return float(loss) if isinstance(loss, int | float) else None
