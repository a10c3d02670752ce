"""Weight initialisation: a parameter's first value depends on the seed, its name and the element's index, on nothing else.

Element i of parameter p is a function of (seed, name of p, i), by a counter-based random generator. So every mesh draws the
same model, each rank draws only its shard, and no seed checkpoint is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from meshkit.core.arguments import require
from meshkit.core.model_state import copies_of, note
from meshkit.core.rng import indexed_parts, random_bits, stream_of
from meshkit.core.sharding import local_tensor
from meshkit.errors import PlanError
from meshkit.plan import Init, Plan, match_table


def normal(std: float) -> Init:
    """Normal with mean 0."""
    return Init("normal", std)


def uniform(half_width: float) -> Init:
    """Uniform in [-half_width, half_width)."""
    return Init("uniform", half_width)


def constant(value: float) -> Init:
    """The same value everywhere."""
    return Init("constant", value)


def default_init(module: nn.Module, key: str, param: Tensor) -> Init:
    """The first value of a parameter that the plan does not name.

    It is the module's attribute `first_value`, if it has one, of all its own parameters or some by their names; else biases
    are 0, weights of one dim (norms) are 1, and matrices are normal with std 0.02.
    """
    first_value = getattr(module, "first_value", None)
    if isinstance(first_value, Mapping):
        first_value = first_value.get(key)
    if isinstance(first_value, Init):
        return first_value
    if key.endswith("bias"):
        return constant(0.0)
    return constant(1.0) if param.ndim <= 1 else normal(0.02)


def init_weights(module: nn.Module, *, seed: int, plan: Plan | None = None) -> nn.Module:
    """Give every parameter its first value, in place, the same on any mesh; parameters on meta must be materialised.

    Wire: nothing. Raises: PlanError for a parameter still on meta or in few bits, or an init pattern that matches nothing.
    """
    require("init_weights", "module", module, nn.Module)
    note(module, "init_weights", {"seed": seed})
    names = dict(module.named_parameters())
    owners = {id(param): (owner, key) for owner in module.modules() for key, param in owner._parameters.items()}
    rules = match_table(plan.init if plan is not None else {}, names, what="parameter")
    copies = copies_of(module)
    for name, param in names.items():
        if param.is_meta:
            raise PlanError(f"init_weights: {name!r} is still on meta. Call parallelize() or module.to_empty() first.")
        if not param.is_floating_point():
            raise PlanError(
                f"init_weights: {name!r} holds the codes of a frozen weight in few bits. Read them by load_pretrained and "
                "call init_lora, or give mk.lora.attach(base=...) a model that has its values."
            )
        rule = rules.get(name) or default_init(*owners[id(param)], param)
        fill(param, rule, seed=seed, name=copies.get(name, name))
    return module


def fill(param: Tensor, rule: Init, *, seed: int, name: str) -> None:
    """Write this rank's shard of the parameter's first value."""
    local = local_tensor(param)
    if rule.kind == "constant":
        local.fill_(rule.scale)
        return
    stream = stream_of(seed, name)
    for rows, index in indexed_parts(param):
        local[rows if param.ndim else ...] = _draw(index, stream, rule)


def _draw(index: Tensor, stream: int, rule: Init) -> Tensor:
    """fp64 values, so that a last-bit difference between two devices' log and cos is rounded away."""
    first = _uniform(index * 2, stream)
    if rule.kind == "uniform":
        return (first * 2 - 1) * rule.scale
    second = _uniform(index * 2 + 1, stream)
    radius = (-2 * (1 - first).log()).sqrt_()  # Box-Muller; 1 - first is in (0, 1]
    return radius.mul_((second * (2 * math.pi)).cos_()).mul_(rule.scale)


def _uniform(counter: Tensor, stream: int) -> Tensor:
    """Uniform in [0, 1) with 53 bits."""
    return random_bits(counter, stream, 53).double() * 2.0**-53
