"""First values that depend on the seed, the parameter's name and the element's index, and on nothing else.

Element i of parameter p is a function of (seed, name of p, i): a counter-based generator, so every mesh draws the same
model, each rank draws only its own shard, and no seed checkpoint is needed.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from meshkit.errors import PlanError
from meshkit.plan import Init, Plan, match_table
from meshkit.sharding import local_slices, local_tensor
from meshkit.whole import copies_of

CHUNK = 1 << 22  # elements drawn at a time: bounds the scratch memory to about 300 MiB


def normal(std: float) -> Init:
    return Init("normal", std)


def uniform(half_width: float) -> Init:
    """Uniform in [-half_width, half_width)."""
    return Init("uniform", half_width)


def constant(value: float) -> Init:
    return Init("constant", value)


def default_init(module: nn.Module, key: str, param: Tensor) -> Init:
    """What a parameter that the plan does not name starts as.

    Biases are 0, weights of one dim (norms) are 1, matrices are normal with std 0.02.
    """
    if key.endswith("bias"):
        return constant(0.0)
    return constant(1.0) if param.ndim <= 1 else normal(0.02)


def init_weights(module: nn.Module, *, seed: int, plan: Plan | None = None) -> nn.Module:
    """Give every parameter its first value, in place, on any mesh the same; parameters on meta must be materialised.

    Wire: nothing. Raises: PlanError for a parameter still on meta, or an init pattern that matches nothing.
    """
    names = dict(module.named_parameters())
    owners = {id(param): (owner, key) for owner in module.modules() for key, param in owner._parameters.items()}
    rules = match_table(plan.init if plan is not None else {}, names, what="parameter")
    copies = copies_of(module)
    for name, param in names.items():
        if param.is_meta:
            raise PlanError(f"init_weights: {name!r} is still on meta. Call parallelize() or module.to_empty() first.")
        rule = rules.get(name) or default_init(*owners[id(param)], param)
        fill(param, rule, seed=seed, name=copies.get(name, name))
    return module


def fill(param: Tensor, rule: Init, *, seed: int, name: str) -> None:
    """Write this rank's part of the parameter's first value."""
    local = local_tensor(param)
    if rule.kind == "constant":
        local.fill_(rule.scale)
        return
    stream = _stream(seed, name)
    rows = local_slices(param)
    strides = torch.empty(param.shape, device="meta").stride()
    index = torch.zeros((), dtype=torch.int64, device=local.device)
    # Draw along dim 0 in chunks; the other dims whole.
    for part, stride in list(zip(rows, strides, strict=True))[1:]:
        index = index.unsqueeze(-1) + torch.arange(part.start, part.stop, device=local.device) * stride
    if not rows:
        local.copy_(_draw(index, stream, rule))
        return
    step = max(1, CHUNK // max(1, index.numel()))
    for start in range(rows[0].start, rows[0].stop, step):
        count = min(step, rows[0].stop - start)
        first = torch.arange(start, start + count, device=local.device) * strides[0]
        chunk_index = first.reshape(-1, *[1] * index.ndim) + index
        local.narrow(0, start - rows[0].start, count).copy_(_draw(chunk_index, stream, rule))


def _draw(index: Tensor, stream: int, rule: Init) -> Tensor:
    """fp64 values, so that a last-bit difference between two devices' log and cos is rounded away."""
    first = _uniform(index * 2, stream)
    if rule.kind == "uniform":
        return (first * 2 - 1) * rule.scale
    second = _uniform(index * 2 + 1, stream)
    radius = (-2 * (1 - first).log()).sqrt_()  # Box-Muller; 1 - first is in (0, 1]
    return radius.mul_((second * (2 * math.pi)).cos_()).mul_(rule.scale)


def _uniform(counter: Tensor, stream: int) -> Tensor:
    """Uniform in [0, 1) with 53 bits, by the finaliser of SplitMix64 (Steele et al. 2014) on stream + counter."""
    z = counter * _signed(0x9E3779B97F4A7C15) + stream
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return _shift(z ^ _shift(z, 31), 11).double() * 2.0**-53


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _stream(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
