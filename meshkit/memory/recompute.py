"""Activation recompute: keep less in forward, run it again in backward."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import Context, copy_context
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshkit import _torch
from meshkit.errors import PlanError
from meshkit.memory.policy import RecomputeMode
from meshkit.swap import swap_class

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional

# What "selective" keeps: results that cost a matrix product, an attention, or a message to another rank.
SAVED_OPERATORS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _c10d.all_reduce.default,
        _c10d.all_gather_into_tensor.default,
        _c10d.reduce_scatter_tensor.default,
        _c10d.wait_tensor.default,
    }
)


def recompute(module: nn.Module, *, blocks: Iterable[str], mode: RecomputeMode = "full") -> nn.Module:
    """Recompute the named blocks in backward, in place; names of parameters do not change.

    full keeps each block's input only; selective keeps also the results of `SAVED_OPERATORS`. The random state is
    restored, so dropout draws the same mask. Gradients are bit-identical to mode "none" where kernels are deterministic.
    Wire: full repeats the block's forward collectives in backward; selective repeats none.
    Raises: PlanError for a block that is not in the module.
    Source: Chen et al. 2016; Korthikanti et al. 2022, section 5.
    """
    modules = dict(module.named_modules())
    for name in blocks:
        if name not in modules:
            raise PlanError(f"recompute: there is no block {name!r}. The first modules are {list(modules)[1:4]}.")
        if mode != "none":
            swap_class(modules[name], forward=_recomputed(type(modules[name]).forward, mode))
    return module


def _recomputed(forward: Any, mode: RecomputeMode) -> Any:
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        _torch.ignore_profiler_marks()
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _save_expensive)

    def recomputed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        again = partial(forward, self)
        if not torch.compiler.is_compiling():
            # By the time of backward another microbatch may have set them: run again with those of now.
            again = partial(_run_in_copy, copy_context(), again)
        return checkpoint(again, *args, **options, **kwargs)

    return recomputed_forward


def _run_in_copy(variables: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
    return variables.copy().run(function, *args, **kwargs)


def _save_expensive(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    ours = operator.namespace == "meshkit"  # each of our own operators sends something
    return CheckpointPolicy.MUST_SAVE if ours or operator in SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
