"""Conformance tests for token dispatchers, meshkit's and other libraries': run `check_dispatcher` on its ranks.

Outputs and all gradients are compared in fp64 with a plain loop over experts. The cases: different tokens on every rank,
experts without tokens, one expert that gets all of them, ranks without tokens, uninitialised memory filled with NaN, a second
backward, and a forward that recompute repeats.
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

TOLERANCE = 1e-10  # in fp64: only the order of sums differs
HIDDEN, FEATURES = 8, 12


class ExpertShard(NamedTuple):
    """The part of all experts' weights that this rank holds."""

    experts: range
    features: slice = slice(None)


def check_dispatcher(
    make: Callable[[int], Dispatcher], shard: Callable[[int], ExpertShard], group: ProcessGroup, *, device: torch.device
) -> int:
    """Run every case on the ranks of `group`, which share the experts; returns how many there were.

    make, shard: functions of the number of experts; they return the dispatcher and this rank's shard of the weights.
    Raises: AssertionError that names the case, what differs and by how much.
    """
    cases = list(_cases(dist.get_rank(group), group.size(), device))
    for name, experts, x_NC, routing in cases:
        _check(name, make(experts), shard(experts), experts, x_NC, routing, group)
    return len(cases)


def _cases(rank: int, ranks: int, device: torch.device) -> Iterator[tuple[str, int, Tensor, Routing]]:
    """(name, experts, tokens [N, C], routing), different on every rank."""
    # A seed for each rank: equal tokens everywhere would hide rows that came from the wrong one.
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
    single = scores(9, 8)
    single[:, 5] = 1e9
    yield "one expert gets all", 8, tokens(9), routed(single, 1)
    count = 7 if rank % 2 else 0
    yield "ranks without tokens", 8, tokens(count), routed(scores(count, 8), 2)
    yield "no tokens at all", 8, tokens(0), routed(scores(0, 8), 2)


class _Weights(NamedTuple):
    """Both weights of all experts, the same on every rank, or of a shard of them."""

    into_EFC: Tensor
    out_ECF: Tensor

    def local(self, shard: ExpertShard) -> _Weights:
        experts, features = slice(shard.experts.start, shard.experts.stop), shard.features
        slices = self.into_EFC[experts, features], self.out_ECF[experts, :, features]
        return _Weights(*(weight.clone().requires_grad_() for weight in slices))

    def compute(self, rows_MC: Tensor, counts: list[int]) -> Tensor:
        assert sum(counts) == len(rows_MC), f"{len(rows_MC)} rows came with counts {counts}"
        parts = zip(rows_MC.split(counts), self.into_EFC, self.out_ECF, strict=True)
        out = [F.linear(F.silu(F.linear(rows, into)), back) for rows, into, back in parts]
        # Without experts the weights still take part, so that backward gives each a gradient.
        return torch.cat(out) if out else rows_MC + self.into_EFC.sum() + self.out_ECF.sum()


def _check(
    name: str,
    dispatcher: Dispatcher,
    shard: ExpertShard,
    experts: int,
    x_NC: Tensor,
    routing: Routing,
    group: ProcessGroup,
) -> None:
    # One seed on all ranks: they hold shards of the same experts.
    generator = torch.Generator().manual_seed(7)
    shapes = (experts, FEATURES, HIDDEN), (experts, HIDDEN, FEATURES)
    weights_of_all = _Weights(
        *(torch.randn(s, generator=generator, dtype=torch.float64).to(x_NC.device) for s in shapes)
    )
    dout = torch.randn(x_NC.shape, generator=generator, dtype=torch.float64).to(x_NC.device)
    expected = _naive(weights_of_all, x_NC, routing, dout, group)

    local = weights_of_all.local(shard)
    x, routing_weights = x_NC.clone().requires_grad_(), routing.weights_NK.clone().requires_grad_()

    def run(x: Tensor, routing_weights: Tensor) -> Tensor:
        return dispatcher(x, Routing(routing.experts_NK, routing_weights), local.compute)

    for again in ("", "a second step, ", "recomputed, "):
        # A second step finds state that the first one left in the dispatcher; recompute runs its forward twice.
        for tensor in (x, routing_weights, *local):
            tensor.grad = None
        with _poisoned_memory():
            out = (
                checkpoint(run, x, routing_weights, use_reentrant=False)
                if again == "recomputed, "
                else run(x, routing_weights)
            )
            out.backward(dout.expand_as(out))
        expected_grads = _Weights(expected[3], expected[4]).local(shard)
        results = {
            "output": (out, expected[0]),
            "gradient of the tokens": (x.grad, expected[1]),
            "gradient of the routing weights": (routing_weights.grad, expected[2]),
            "gradient of the experts, in": (local.into_EFC.grad, expected_grads.into_EFC),
            "gradient of the experts, out": (local.out_ECF.grad, expected_grads.out_ECF),
        }
        for what, (value, expected_value) in results.items():
            assert value is not None, f"{name}: {again}{what} is None on rank {dist.get_rank(group)}"
            distance = float((value.detach() - expected_value.detach()).abs().max()) if expected_value.numel() else 0.0
            assert distance <= TOLERANCE, f"{name}: {again}{what} is off by {distance} on rank {dist.get_rank(group)}"


def _naive(
    weights_of_all: _Weights, x_NC: Tensor, routing: Routing, dout: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(output, gradients of tokens, of routing weights, of the experts' two weights summed over the ranks)."""
    x, routing_weights = x_NC.clone().requires_grad_(), routing.weights_NK.clone().requires_grad_()
    into, out = (tensor.clone().requires_grad_() for tensor in weights_of_all)
    total = torch.zeros_like(x)
    # No sorting, no exchange: every expert runs on all tokens, with weight 0 for those that did not choose it.
    for expert in range(len(into)):
        count = (routing_weights * (routing.experts_NK == expert)).sum(-1, keepdim=True)
        total = total + count * F.linear(F.silu(F.linear(x, into[expert])), out[expert])
    total.backward(dout)
    grads = [
        tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
        for tensor in (x, routing_weights, into, out)
    ]
    # An expert's gradient is a sum over the tokens of all ranks; those of tokens and routing weights are this rank's.
    for grad in grads[2:]:
        dist.all_reduce(grad, group=group)
    return total.detach(), grads[0], grads[1], grads[2], grads[3]


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Inside, uninitialised tensors are NaN, since deterministic algorithms fill them: a row that nobody wrote shows."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
