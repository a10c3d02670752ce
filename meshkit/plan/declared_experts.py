"""Stacked experts that a module declares: transformers' experts interface, read as an `experts()` style."""

from __future__ import annotations

from torch import nn

from meshkit.plan.styles import Packed, Style, experts

# What `use_experts_implementation` of transformers writes on every module whose class it decorates.
_DECLARED = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")


def declared_experts(module: nn.Module) -> Style | None:
    """The style of a module of transformers' experts interface; None for any other, and for one that is not as it declares.

    The interface is a contract: forward(x [N, C], index [N, K], weights [N, K]) is, for each token, the sum over its choices
    of weights times what expert index makes of x, and an index of `num_experts` is no expert. All that an expert reads is
    its slice of the stacks: up projections, with has_gate and gate (one after the other with is_concatenated, else in
    turn), and down projections; with has_bias, biases under the same names. Kernels rely on it as meshkit does.
    """
    told = {name: getattr(module, name, None) for name in _DECLARED}
    if not all(isinstance(value, bool) for value in told.values()) or told["has_post_expert_norm"]:
        return None
    up, down = "gate_up_proj" if told["has_gate"] else "up_proj", "down_proj"
    columns, rows = ((name, f"{name}_bias") if told["has_bias"] else (name,) for name in (up, down))
    params = dict(module.named_parameters())  # those of children too: a learned activation is no slice of a stack
    if set(params) != {*columns, *rows} or {len(param) for param in params.values()} != {_count(module)}:
        return None
    together: Packed = "halves" if told["is_concatenated"] else "pairs"
    packed: Packed = together if told["has_gate"] else ""
    return experts(columns=columns, rows=rows, packed=packed, transposed=bool(told["is_transposed"]), takes="indices")


def _count(module: nn.Module) -> object:
    return getattr(module, "num_experts", None)
