"""Feed-forwards on a part of the tokens at a time, for sequences whose intermediates would not fit.

A feed-forward treats every token alike, so its parts can run one after another, and what it holds in between is of one part:
forward keeps the parts' inputs only, and backward runs each part again just before its gradient. Gradients of weights add
up as autograd adds them, so nothing about FSDP or replicas changes.
With sequence parallelism a part is cut from this rank's tokens before they are gathered: it has the same part of every
rank's, and the reduce-scatter at its end gives each rank its own back.
Source: Rajbhandari et al. 2025 (Arctic long sequence training), section 3.1.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError
from meshkit.memory._recompute import Treatment, run_in_copy
from meshkit.parallel.tensor.regather import regions
from meshkit.strategy import Budget, MemoryPolicy

TOKENS = -2  # of [B, T, C] and of [T, C]


def chunk_mlp(module: nn.Module, *, mlps: Iterable[str], chunks: int) -> nn.Module:
    """Run the named feed-forwards on `chunks` parts of their tokens, in place; fewer where there are fewer tokens.

    Each takes and returns one tensor [..., T, C] and treats tokens alike. Their own hooks run once a part.
    Wire: what the feed-forward sends, in `chunks` messages each; backward repeats what its forward sends, but the last.
    Raises: PlanError for a module that is not there.
    """
    modules = dict(module.named_modules())
    for name in mlps:
        if name not in modules:
            raise PlanError(
                f"chunk_mlp: there is no feed-forward {name!r}. The first modules are {list(modules)[1:4]}."
            )
        if chunks > 1:
            _chunk(modules[name], name, chunks)
    return module


def part_sizes(tokens: int, chunks: int) -> list[int]:
    """Tokens of each part."""
    parts = max(1, min(chunks, tokens))
    return [tokens // parts + (part < tokens % parts) for part in range(parts)]


def _chunk(mlp: nn.Module, name: str, chunks: int) -> None:
    whole_call = type(mlp).__call__
    for region in regions(mlp):
        region.hooked = False  # a part runs again in backward, and gathers then

    def chunked_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if len(given) != 1 or not isinstance(given[0], Tensor):
            raise PlanError(
                f"mlp_chunks={chunks}: {name!r} is called with {len(given)} arguments, and only one tensor [..., T, C] "
                "can be cut into parts. Leave it out of the plan's `mlps`."
            )
        (x,) = given
        sizes = part_sizes(x.shape[TOKENS], chunks)
        run = partial(whole_call, self)
        if torch.is_grad_enabled():
            again = partial(run_in_copy, copy_context(), run)
            run = partial(checkpoint, again, use_reentrant=False)
        return torch.cat([run(part) for part in x.split(sizes, dim=TOKENS)], dim=TOKENS)

    # Around the module's hooks, which gather its input and would be called once for all parts.
    patch_class(mlp, __call__=chunked_call)


def refuse_mlp_chunks(
    memory: MemoryPolicy,
    *,
    mlps: Sequence[str],
    experts: Iterable[str],
    units: Iterable[str],
    treated: Mapping[str, Treatment],
    compiled: bool = False,
    splits_backward: bool = False,
) -> None:
    """Raise PlanError for what cannot run in parts. experts, units: names of modules of routed experts, and of FSDP's.
    treated: what blocks keep.
    """
    if memory.mlp_chunks == 1:
        return
    asked = f"mlp_chunks={memory.mlp_chunks}"
    if not mlps:
        raise PlanError(
            f"{asked}, but the plan names no feed-forwards. Give Plan(mlps=('layers.*.mlp',)), or mlp_chunks=1."
        )
    for name in mlps:
        if any(other == name or other.startswith(f"{name}.") for other in experts):
            raise PlanError(
                f"{asked}: {name!r} has routed experts, which see all tokens at once. Leave it out of the plan's `mlps`."
            )
        if any(other == name or other.startswith(f"{name}.") for other in units):
            raise PlanError(
                f"{asked}: {name!r} is or holds a unit of sharding, which would be gathered once a part. Leave it out of the "
                "plan's `units` and `blocks`."
            )
    modes = [each.recompute.mode for each in treated.values()]
    keeping = next((mode for mode in modes if mode in ("selective", "activation")), None)
    if keeping is not None or isinstance(memory.recompute, Budget):
        raise PlanError(
            f"{asked} with recompute={memory.recompute if keeping is None else keeping!r}: it would keep results of "
            "products inside of a feed-forward, which chunks exist to let go. Use recompute='none' or 'full'."
        )
    if compiled:
        raise PlanError(
            f"{asked} with compile: a compiled block may run all parts again before the first is needed. Use compile=False, "
            "or mlp_chunks=1."
        )
    if splits_backward:
        raise PlanError(
            f"{asked} with a schedule that computes weight gradients apart: it keeps every part's intermediates until then. "
            "Use a schedule such as '1f1b', or mlp_chunks=1."
        )
