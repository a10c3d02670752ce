"""The elementwise middle of gated feed-forwards, made again in backward: half of what a feed-forward keeps, for little.

Of F features a token, down(silu(gate) * up) keeps gate, up, silu(gate) and the product: 4 F. All but the first two are one
pass over memory away.
Source: Shazeer 2020 for the layer; Korthikanti et al. 2022, section 5, for keeping what is dear to make.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshkit.errors import PlanError
from meshkit.swap import swap_class


def recompute_activations(block: nn.Module, *, keep_product: bool) -> None:
    """Let the block's feed-forwards keep gate and up only, or with keep_product also their product, in place.

    A feed-forward is a module with the steps `product(gate, up)` and `finish(gate, up)`, as `GatedMLP` has them: the latter
    calls the former, and one linear layer on what it gives. That layer does not run again: recompute stops at its input.
    Raises: PlanError for a block without one.
    """
    found = feed_forwards(block)
    step = "product" if keep_product else "finish"
    for child in found:
        swap_class(child, **{step: _made_again(getattr(type(child), step))})


def feed_forwards(block: nn.Module, name: str = "") -> list[nn.Module]:
    """Those whose middle can be made again. Raises: PlanError if there is none."""
    found = [child for child in block.modules() if hasattr(type(child), "product") and hasattr(type(child), "finish")]
    if not found:
        kind = type(block).__name__
        raise PlanError(
            f"recompute='activation': {f'{name!r}, a {kind},' if name else kind} has no feed-forward with the "
            "steps `product` and `finish`, as mk.models' GatedMLP has them; routed experts have not. Use "
            "recompute='selective'."
        )
    return found


def _made_again(step: Any) -> Any:
    def again(self: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return step(self, gate, up)
        return checkpoint(partial(step, self), gate, up, use_reentrant=False, preserve_rng_state=False)

    return again
