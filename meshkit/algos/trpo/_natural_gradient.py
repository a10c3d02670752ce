"""Natural gradient (Hessian-free, conjugate gradients): the gradient by which the policy itself changes least.

The Fisher matrix is that of whole distributions, or of the policy's likeliest tokens with the rest as one outcome. Its
products are differences of gradients of a KL, so any model, mesh and schedule that trains has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshkit.algos.distill import Distillation, distill_objective, teacher_values
from meshkit.core.gradient import gradient_of
from meshkit.core.sharding import local_tensor
from meshkit.errors import PlanError
from meshkit.loss import Divergence
from meshkit.step import Batch, Run, inner_product

OLD = "old"  # the entry of the batch with the policy's distributions before the step


@dataclass(frozen=True, kw_only=True, eq=False)
class NaturalGradient:
    """x with (F + damping) x = g, of this rank's shards in the order of `run.parameters()`.

    curvature: x F x, twice the KL of a step of size 1 to second order, nats per token. residual: |g - (F + damping) x| / |g|.
    products: by the Fisher matrix.
    """

    shards: list[Tensor]
    curvature: float
    residual: float
    products: int


@torch.no_grad()
def natural_gradient(
    run: Run,
    batch: Batch,
    *,
    damping: float = 0.1,
    products: int = 10,
    tolerance: float = 1e-8,
    top: int | None = None,
    temperature: float = 1.0,
    microbatches: int = 1,
) -> NaturalGradient:
    """The natural gradient of what `run.forward_backward` has just left in the gradients, which it takes away.

    F is the mean over the batch's learnt tokens of the Fisher matrix of the policy's distribution of the next token, at its
    present weights. damping is added to its diagonal; products: at most so many steps of conjugate gradients, fewer where the
    residual falls below `tolerance`. top: see `Distillation`; None is the whole vocabulary, kept for each token of the batch.
    A product by v is (dKL(w + hv) - dKL(w - hv)) / 2h, with h such that the weights change by the cube root of their
    precision: relative errors of 1e-9 in fp64, some 1e-3 in fp32.
    Every rank must call it. Memory: five copies of this rank's parameters, and the distributions. Wire: a forward pass, and
    for each product two steps' forward and backward passes and sums of two numbers.
    Raises: PlanError for numbers out of range, a run that computes in bf16, and dropout, under which differences are noise.
    Source: Schulman et al. 2015 (1502.05477), appendix C; Martens 2010 for products without the matrix.
    """
    if damping < 0 or products < 1 or tolerance < 0:
        raise PlanError(
            f"natural_gradient(damping={damping}, products={products}, tolerance={tolerance}): out of range."
        )
    _refuse_noise(run)
    parameters = [parameter for parameter in run.parameters() if parameter.requires_grad]
    gradient = _take_gradients(run, parameters)
    weight = temperature**-2  # `distill_objective` multiplies by the temperature's square
    what = Distillation(divergence=Divergence(temperature=temperature), top=top, teachers={OLD: weight})
    told = {**batch, OLD: teacher_values(run, batch, what, microbatches=microbatches).cpu()}
    objective = distill_objective(what)

    def kl_gradient() -> list[Tensor]:
        with torch.enable_grad():
            run.forward_backward(told, loss=objective, microbatches=microbatches)
        return _take_gradients(run, parameters)

    product = _fisher(run, parameters, kl_gradient)
    return _conjugate_gradients(
        gradient, product, lambda a, b: inner_product(run, parameters, a, b), damping, products, tolerance
    )


def _fisher(
    run: Run, parameters: Sequence[nn.Parameter], kl_gradient: Callable[[], list[Tensor]]
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    shards = [local_tensor(parameter) for parameter in parameters]
    before = [shard.clone() for shard in shards]
    epsilon = max(torch.finfo(parameter.dtype).eps for parameter in parameters)
    size = float(inner_product(run, parameters, before, before)) ** 0.5 or 1.0

    def product(vector: Sequence[Tensor]) -> list[Tensor]:
        length = float(inner_product(run, parameters, vector, vector)) ** 0.5
        if not length:
            return [torch.zeros_like(each) for each in vector]
        h = epsilon ** (1 / 3) * size / length
        sides = []
        for sign in (1, -1):
            for shard, old, each in zip(shards, before, vector, strict=True):
                torch.add(old, each, alpha=sign * h, out=shard)
            sides.append(kl_gradient())
        for shard, old in zip(shards, before, strict=True):
            shard.copy_(old)  # what was there, to the bit
        return [(ahead - behind) / (2 * h) for ahead, behind in zip(*sides, strict=True)]

    return product


def _conjugate_gradients(
    gradient: Sequence[Tensor],
    product: Callable[[Sequence[Tensor]], list[Tensor]],
    dot: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor],
    damping: float,
    products: int,
    tolerance: float,
) -> NaturalGradient:
    """Hestenes & Stiefel 1952. Numbers of `dot` are the same on every rank, so all make the same steps."""
    solution = [torch.zeros_like(each) for each in gradient]
    image = [torch.zeros_like(each) for each in gradient]  # F times the solution
    residual, direction = [each.clone() for each in gradient], [each.clone() for each in gradient]
    first = squared = float(dot(residual, residual))
    made = 0
    while made < products and squared > tolerance**2 * first:
        of_direction = product(direction)
        made += 1
        curvature = float(dot(direction, of_direction)) + damping * float(dot(direction, direction))
        if curvature <= 0:  # rounding: F has no negative curvature
            break
        size = squared / curvature
        for x, fx, r, d, fd in zip(solution, image, residual, direction, of_direction, strict=True):
            x.add_(d, alpha=size)
            fx.add_(fd, alpha=size)
            r.sub_(fd, alpha=size).sub_(d, alpha=size * damping)
        before, squared = squared, float(dot(residual, residual))
        for r, d in zip(residual, direction, strict=True):
            d.mul_(squared / before).add_(r)
    relative = (squared / first) ** 0.5 if first else 0.0
    return NaturalGradient(shards=solution, curvature=float(dot(solution, image)), residual=relative, products=made)


def _take_gradients(run: Run, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """This rank's shards, zeros where a parameter has none; the parameters keep none."""
    found = []
    for parameter in parameters:
        grad = gradient_of(parameter)
        shard = local_tensor(parameter)
        found.append(torch.zeros_like(shard) if grad is None else local_tensor(grad).to(shard.dtype, copy=True))
        parameter.grad = None
    return found


def _refuse_noise(run: Run) -> None:
    if run.resolved.memory.precision is not None:
        raise PlanError(
            "natural_gradient: the run computes in lower precision, in which differences of gradients are rounding. Train "
            "in fp32, without MemoryPolicy(precision=...)."
        )
    if any(isinstance(module, nn.Dropout) and module.p > 0 and module.training for module in run.model.modules()):
        raise PlanError("natural_gradient: the model has dropout, under which no two gradients are alike. Set p to 0.")
