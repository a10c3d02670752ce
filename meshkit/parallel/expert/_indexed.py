"""Experts that are called with indices (transformers' experts interface): their own forward, on the experts of one rank."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core.patch_class import patch_class
from meshkit.core.to_device import to_device
from meshkit.moe.routing import Routing


def add_compute(module: nn.Module) -> None:
    """Give the module `compute(rows [M, C], counts)`, as a dispatcher calls it, in place.

    The module's own forward runs on rows that each chose one expert, with weight 1: weights are applied where rows come
    back to. It runs on a stand-in for the module with this rank's experts, whose `num_experts` is their number.
    """
    plain: Any = type(module)

    def compute(self: Any, rows_MC: Tensor, counts: list[int] | Tensor) -> Tensor:
        stand_in = plain.__new__(plain)
        parameters = {key: getattr(self, key) for key in self._parameters}
        stand_in.__dict__ = {**self.__dict__, "_parameters": parameters, "num_experts": len(counts)}
        if _torch.is_fake(rows_MC):
            _compute_without_values(stand_in, rows_MC.dtype)
        # A row of zeros where there is none. By padding: then gradients of no rows reach the all-to-all before it, and those
        # of zeros the experts, and other ranks wait for both.
        padded_MC = rows_MC if len(rows_MC) else F.pad(rows_MC, (0, 0, 0, 1))
        if isinstance(counts, Tensor):  # rows after the last expert's are the last expert's too: nobody reads them
            index_M = torch.arange(len(padded_MC), device=counts.device)
            ids_M = torch.searchsorted(counts.cumsum(0), index_M, right=True).clamp(max=len(counts) - 1)
        else:
            lengths = torch.tensor(counts if len(rows_MC) else [1], dtype=torch.int64)
            ids_M = to_device(torch.arange(len(lengths)).repeat_interleave(lengths), rows_MC.device)
        ones_M1 = padded_MC.new_ones(len(padded_MC), 1)
        out: Tensor = stand_in.forward(padded_MC, ids_M.unsqueeze(1), ones_M1)
        return out[: len(rows_MC)]

    patch_class(module, compute=compute)


def _compute_without_values(stand_in: Any, dtype: torch.dtype) -> None:
    """By an implementation of the interface that loops over no values: one product for all experts, as a GPU has it, or where
    torch knows no shapes of that, one for each row, which copies weights for each."""
    config = stand_in.__dict__.get("config")
    sizes = [size for param in stand_in.__dict__["_parameters"].values() if param.ndim == 3 for size in param.shape[1:]]
    if config is not None and hasattr(config, "_experts_implementation"):
        stand_in.__dict__["config"] = config = copy.copy(config)
        config._experts_implementation = "grouped_mm" if _torch.knows_grouped_mm(dtype, sizes) else "batched_mm"


def by_indices(module: nn.Module, dispatch: Any) -> Any:
    """The forward that a module of indices has, of one that takes a `Routing`."""
    names = list(inspect.signature(module.forward).parameters)[:3]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(names, args, strict=False)) | kwargs
        x, indices, weights = (given[name] for name in names)
        rows_NC = rearrange(x, "... c -> (...) c")
        weights_NK = weights.to(torch.promote_types(weights.dtype, torch.float32))
        out: Tensor = dispatch(self, rows_NC, Routing(indices, weights_NK))
        return out if out.shape == x.shape else out.view_as(x)  # FSDP warns of a unit that returns a view

    return forward
