"""Mixture of experts (MoE) layer: many feed-forwards in stacked parameters, each on the tokens that chose it. No mesh.

A token passes through `sort_by_expert`, `take_rows`, `Experts.compute`, `combine`. Where the experts are on several ranks,
rows travel before and after `compute`, which runs whatever experts it holds on rows that are already sorted.
Dims: N tokens, K experts that a token chooses, M rows (N * K here), C hidden_size, F intermediate_size, E experts.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core.to_device import tensor_on
from meshkit.errors import PlanError
from meshkit.models.layers import GatedMLP
from meshkit.models.router import Router, RouterConfig
from meshkit.moe.routing import Overlapped, Routing, combine, sort_by_expert, take_rows

Kernel = Literal["grouped", "loop"]
ONE_KERNEL_FROM = (9, 0)  # compute capability of torch's grouped_mm on CUDA; below it loops


class MoE(nn.Module):
    """The sum of the experts that a token chose, by their weights, and of experts that every token visits, if any."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, router: RouterConfig, *, shared_size: int | None = None
    ) -> None:
        super().__init__()
        self.gate = Router(hidden_size, router)
        self.experts = Experts(router.experts, hidden_size, intermediate_size)
        self.shared_experts = GatedMLP(hidden_size, shared_size) if shared_size else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        routing = self.gate(x_BTC)
        if (
            self.shared_experts is None or torch.compiler.is_compiling()
        ):  # experts are outside of graphs, the rest inside
            out: Tensor = self.experts(rearrange(x_BTC, "... c -> (...) c"), routing).view_as(x_BTC)
            return out if self.shared_experts is None else out + self.shared_experts(x_BTC)
        shared = Overlapped(partial(self.shared_experts, x_BTC))
        out = self.experts(rearrange(x_BTC, "... c -> (...) c"), routing, shared).view_as(x_BTC)
        return out + shared.result()


class Experts(nn.Module):
    """SwiGLU experts, dropless. kernel: how their products are computed; None is what `expert_kernel` says."""

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, *, kernel: Kernel | None = None
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.kernel = kernel
        # Gate and up projections apart, where transformers fuses them: a plan splits features as in a dense layer,
        # and a folder's tensor is one expert of one parameter.
        self.gate_proj = _stacked(num_experts, intermediate_size, hidden_size)
        self.up_proj = _stacked(num_experts, intermediate_size, hidden_size)
        self.down_proj = _stacked(num_experts, hidden_size, intermediate_size)

    def forward(self, x_NC: Tensor, routing: Routing, meanwhile: Overlapped | None = None) -> Tensor:
        """meanwhile: work to overlap with all-to-alls; here nothing is sent, and the caller does it."""
        order_M, counts_E = sort_by_expert(routing.experts_NK, self.num_experts)
        rows_MC = take_rows(x_NC, order_M, choices=routing.experts_NK.shape[-1])
        return combine(self.compute(rows_MC, counts_E), order_M, routing.weights_NK).to(x_NC.dtype)

    def kernel_text(self, dtype: torch.dtype) -> str:
        """Which kernel computes rows of this dtype, and why."""
        chosen = expert_kernel(dtype, self.gate_proj.device, self.gate_proj.shape[1:])
        return f"{chosen.kernel}: {chosen.why}" if self.kernel is None else f"{self.kernel}: as the module was told"

    def compute(self, x_MC: Tensor, counts_E: Tensor | list[int]) -> Tensor:
        """Run this rank's experts on sorted rows: the first counts[0] rows go to the first expert, and so on. Returns [M, C].

        There may be more rows than a tensor of counts has; what is returned for those means nothing.
        Raises: PlanError if `kernel` is "grouped" where it cannot be.
        """
        sizes = self.gate_proj.shape[1:]
        chosen = expert_kernel(x_MC.dtype, x_MC.device, sizes)
        if self.kernel == "grouped" and chosen.kernel != "grouped":
            raise PlanError(f"Experts: kernel='grouped' cannot be: {chosen.why}. Use kernel='loop', or None.")
        unknown = _torch.is_fake(x_MC) and not _torch.knows_grouped_mm(x_MC.dtype)
        run = _grouped if (self.kernel or chosen.kernel) == "grouped" and not unknown else _loop
        return run(x_MC, counts_E, self.gate_proj, self.up_proj, self.down_proj)


def _stacked(num_experts: int, out_features: int, in_features: int) -> nn.Parameter:
    """Weights of all experts, with initial values as in nn.Linear."""
    # nn.Linear's kaiming_uniform with a = sqrt(5) is uniform in +-1/sqrt(in).
    return nn.Parameter(torch.empty(num_experts, out_features, in_features).uniform_(-1, 1).mul_(in_features**-0.5))


# --------------------------------------------------------------------------------------------------------- kernels


class KernelChoice(NamedTuple):
    kernel: Kernel
    why: str


def expert_kernel(dtype: torch.dtype, device: torch.device, sizes: tuple[int, ...]) -> KernelChoice:
    """The faster kernel that can compute experts of `sizes` features, and why.

    Measured on a CPU, forward and backward: grouped takes 0.8 to 1.0 of the loop's time for 64 experts, and 0.9 to 1.1 for 8.
    On CUDA the loop waits for the counts, and grouped does not where it is one kernel: bf16, from compute capability 9.0 on.
    Elsewhere there torch loops over the experts itself, and reads back where their rows end.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return KernelChoice("loop", f"torch's grouped_mm takes no {dtype}")
    if torch.compiler.is_compiling() and not _torch.knows_grouped_mm(dtype):
        return KernelChoice("loop", f"this torch compiles grouped_mm in bf16 only, not in {dtype}")
    # Rows must begin at multiples of 16 bytes; padding them would copy weights and rows in every call.
    if any(size * dtype.itemsize % 16 for size in sizes):
        return KernelChoice(
            "loop", f"torch's grouped_mm needs rows of a multiple of 16 bytes, but has {tuple(sizes)} {dtype}"
        )
    if device.type != "cuda":
        return KernelChoice("grouped", f"torch's grouped_mm is one call for all experts on {device.type}")
    if dtype != torch.bfloat16:
        return KernelChoice("loop", f"torch's grouped_mm is one kernel on cuda in bf16 alone, and a loop in {dtype}")
    # On a machine without a GPU a plan for GPUs passes: there is nothing to ask.
    if torch.version.cuda and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < ONE_KERNEL_FROM:
            had = ".".join(map(str, capability))
            return KernelChoice(
                "loop", f"torch's grouped_mm is one kernel from compute capability 9.0 on, and this is {had}"
            )
    return KernelChoice("grouped", "torch's grouped_mm is one kernel for all experts on cuda")


def _loop(x_MC: Tensor, counts_E: Tensor | list[int], gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    # The host waits here for the device, unless whoever exchanged the rows has the counts as a list already.
    sizes = counts_E.tolist() if isinstance(counts_E, Tensor) else counts_E
    *rows, others = x_MC.split([*sizes, len(x_MC) - sum(sizes)])
    parts = zip(rows, gate.unbind(), up.unbind(), down.unbind(), strict=True)
    out = [F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d) for x, g, u, d in parts]
    return torch.cat([*out, others])


def _grouped(x_MC: Tensor, counts_E: Tensor | list[int], gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    # grouped_mm takes where each expert's rows end, in int32. An expert without rows ends where the one before it
    # does.
    if isinstance(counts_E, Tensor):
        ends = counts_E.cumsum(0, dtype=torch.int32)
    else:
        ends = tensor_on(list(accumulate(counts_E)), x_MC.device, dtype=torch.int32)

    def product(rows: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
        return out

    out_MC = product(F.silu(product(x_MC, gate)) * product(x_MC, up), down)
    # After the last product alone: gradients between the products are outputs of kernels, and contiguous.
    laid_out: Tensor = _ContiguousGradient.apply(out_MC)
    return laid_out


class _ContiguousGradient(torch.autograd.Function):
    """Does nothing forward; grouped_mm takes no expanded gradient, such as that of sum()."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # An expanded tensor of no elements counts as contiguous, with strides of 0.
        return grad.contiguous() if grad.numel() else torch.zeros_like(grad, memory_format=torch.contiguous_format)
