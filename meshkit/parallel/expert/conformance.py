"""What any dispatcher must get right, meshkit's own and another library's: run `check_dispatcher` on its ranks.

Outputs and all gradients are held against a plain loop over experts, in fp64: different tokens on every rank, experts without
tokens, one expert that gets all of them, ranks without tokens, uninitialised memory filled with NaN, a second backward, and
the forward repeated by recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from meshkit.moe.routing import Routing
from meshkit.parallel.expert._dispatch import Dispatcher

TOLERANCE = 1e-10
HIDDEN, FEATURES = 8, 12


class Held(NamedTuple):
    """What this rank holds of every expert's weights."""

    experts: range
    features: slice = slice(None)


def check_dispatcher(
    make: Callable[[int], Dispatcher], held: Callable[[int], Held], group: ProcessGroup, *, device: torch.device
) -> int:
    """Run every case on the ranks of `group`, which share the experts; returns how many there were.

    make, held: of a number of experts, the dispatcher and what this rank holds of them.
    Raises: AssertionError that names the case, what differs and by how much.
    """
    cases = list(_cases(dist.get_rank(group), group.size(), device))
    for name, experts, x_NC, routing in cases:
        _check(name, make(experts), held(experts), experts, x_NC, routing, group)
    return len(cases)


def _cases(rank: int, ranks: int, device: torch.device) -> Iterator[tuple[str, int, Tensor, Routing]]:
    """(name, experts, tokens [N, C], routing), different on every rank."""
    generator = torch.Generator().manual_seed(100 + rank)

    def tokens(count: int) -> Tensor:
        return torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64).to(device)

    def routed(scores_NE: Tensor, chosen: int) -> Routing:
        weights, experts = scores_NE.softmax(-1).topk(chosen)
        return Routing(experts.to(device), weights.to(device))

    def scores(count: int, experts: int) -> Tensor:
        return torch.randn(count, experts, generator=generator, dtype=torch.float64)

    for experts, chosen in ((8, 2), (ranks + 1, 1), (2 * ranks, 2 * ranks), (ranks, 1)):
        count = 5 + 3 * rank
        yield f"{experts} experts, {chosen} chosen", experts, tokens(count), routed(scores(count, experts), chosen)
    few = scores(11, 8)
    few[:, 2:6] = -1e9
    yield "experts without tokens", 8, tokens(11), routed(few, 2)
    one = scores(9, 8)
    one[:, 5] = 1e9
    yield "one expert gets all", 8, tokens(9), routed(one, 1)
    count = 7 if rank % 2 else 0
    yield "ranks without tokens", 8, tokens(count), routed(scores(count, 8), 2)
    yield "no tokens at all", 8, tokens(0), routed(scores(0, 8), 2)


class _Weights(NamedTuple):
    """Of all experts, the same on every rank."""

    into_EFC: Tensor
    out_ECF: Tensor

    def part(self, held: Held) -> _Weights:
        experts, features = slice(held.experts.start, held.experts.stop), held.features
        parts = self.into_EFC[experts, features], self.out_ECF[experts, :, features]
        return _Weights(*(part.clone().requires_grad_() for part in parts))

    def compute(self, rows_MC: Tensor, counts: list[int]) -> Tensor:
        assert sum(counts) == len(rows_MC), f"{len(rows_MC)} rows came with counts {counts}"
        parts = zip(rows_MC.split(counts), self.into_EFC, self.out_ECF, strict=True)
        out = [F.linear(F.silu(F.linear(rows, into)), back) for rows, into, back in parts]
        return torch.cat(out) if out else rows_MC + self.into_EFC.sum() + self.out_ECF.sum()


def _check(
    name: str,
    dispatcher: Dispatcher,
    held: Held,
    experts: int,
    x_NC: Tensor,
    routing: Routing,
    group: ProcessGroup,
) -> None:
    generator = torch.Generator().manual_seed(7)
    shapes = (experts, FEATURES, HIDDEN), (experts, HIDDEN, FEATURES)
    whole = _Weights(*(torch.randn(s, generator=generator, dtype=torch.float64).to(x_NC.device) for s in shapes))
    back = torch.randn(x_NC.shape, generator=generator, dtype=torch.float64).to(x_NC.device)
    expected = _naive(whole, x_NC, routing, back, group)

    own = whole.part(held)
    x, weights = x_NC.clone().requires_grad_(), routing.weights_NK.clone().requires_grad_()

    def run(x: Tensor, weights: Tensor) -> Tensor:
        return dispatcher(x, Routing(routing.experts_NK, weights), own.compute)

    for again in ("", "a second step, ", "recomputed, "):
        for tensor in (x, weights, *own):
            tensor.grad = None
        with _poisoned_memory():
            out = checkpoint(run, x, weights, use_reentrant=False) if again == "recomputed, " else run(x, weights)
            out.backward(back.expand_as(out))
        part = _Weights(expected[3], expected[4]).part(held)
        found = {
            "output": (out, expected[0]),
            "gradient of the tokens": (x.grad, expected[1]),
            "gradient of the routing weights": (weights.grad, expected[2]),
            "gradient of the experts, in": (own.into_EFC.grad, part.into_EFC),
            "gradient of the experts, out": (own.out_ECF.grad, part.out_ECF),
        }
        for what, (value, wanted) in found.items():
            assert value is not None, f"{name}: {again}{what} is None on rank {dist.get_rank(group)}"
            distance = float((value.detach() - wanted.detach()).abs().max()) if wanted.numel() else 0.0
            assert distance <= TOLERANCE, f"{name}: {again}{what} is off by {distance} on rank {dist.get_rank(group)}"


def _naive(
    whole: _Weights, x_NC: Tensor, routing: Routing, back: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(output, gradients of tokens, of routing weights, of the experts' two weights summed over the ranks)."""
    x, weights = x_NC.clone().requires_grad_(), routing.weights_NK.clone().requires_grad_()
    into, out = (tensor.clone().requires_grad_() for tensor in whole)
    total = torch.zeros_like(x)
    for expert in range(len(into)):
        count = (weights * (routing.experts_NK == expert)).sum(-1, keepdim=True)
        total = total + count * F.linear(F.silu(F.linear(x, into[expert])), out[expert])
    total.backward(back)
    grads = [tensor.grad if tensor.grad is not None else torch.zeros_like(tensor) for tensor in (x, weights, into, out)]
    for grad in grads[2:]:
        dist.all_reduce(grad, group=group)
    return total.detach(), grads[0], grads[1], grads[2], grads[3]


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Uninitialised tensors are NaN inside, as deterministic algorithms fill them."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
