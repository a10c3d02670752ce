"""Chunked MLP (tiled feed-forward): a feed-forward on some tokens at a time, for sequences whose intermediates do not fit.

A feed-forward treats every token alike, so its chunks can run one after another, and intermediates of only one chunk are
alive: forward saves the chunks' inputs, and backward recomputes each chunk just before its gradient. Autograd adds up the
gradients of weights as always, so FSDP and replicas are not concerned.
With sequence parallelism each rank chunks its own tokens before the all-gather. A gathered chunk has the same chunk of every
rank, and the reduce-scatter at its end returns each rank's own tokens.
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

    Each takes and returns one tensor [..., T, C] and treats tokens alike. Their own hooks run once per chunk.
    Wire: each message of the feed-forward becomes `chunks` messages; backward repeats those of forward, except the last.
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
    """Tokens of each chunk."""
    parts = max(1, min(chunks, tokens))
    return [tokens // parts + (part < tokens % parts) for part in range(parts)]


def _chunk(mlp: nn.Module, name: str, chunks: int) -> None:
    whole_call = type(mlp).__call__
    for region in regions(mlp):
        region.hooked = False  # a chunk is recomputed in backward, and gathers again then

    def chunked_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inputs = (*args, *kwargs.values())
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            raise PlanError(
                f"mlp_chunks={chunks}: {name!r} is called with {len(inputs)} arguments, and only one tensor [..., T, C] "
                "can be cut into parts. Leave it out of the plan's `mlps`."
            )
        (x,) = inputs
        sizes = part_sizes(x.shape[TOKENS], chunks)
        run = partial(whole_call, self)
        if torch.is_grad_enabled():
            # With the context variables of this forward: see `recompute`.
            rerun = partial(run_in_copy, copy_context(), run)
            run = partial(checkpoint, rerun, use_reentrant=False)
        return torch.cat([run(chunk) for chunk in x.split(sizes, dim=TOKENS)], dim=TOKENS)

    # Patches __call__ and not forward, so that the module's hooks, which gather its input, run for each chunk.
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
    """Raise PlanError for feed-forwards that cannot run in chunks.

    experts, units: names of modules with routed experts, and of FSDP units. treated: the treatment of each block.
    """
    if memory.mlp_chunks == 1:
        return
    flag = f"mlp_chunks={memory.mlp_chunks}"
    if not mlps:
        raise PlanError(
            f"{flag}, but the plan names no feed-forwards. Give Plan(mlps=('layers.*.mlp',)), or mlp_chunks=1."
        )
    for name in mlps:
        if any(other == name or other.startswith(f"{name}.") for other in experts):
            raise PlanError(
                f"{flag}: {name!r} has routed experts, which see all tokens at once. Leave it out of the plan's `mlps`."
            )
        if any(other == name or other.startswith(f"{name}.") for other in units):
            raise PlanError(
                f"{flag}: {name!r} is or holds a unit of sharding, which would be gathered once a part. Leave it out of the "
                "plan's `units` and `blocks`."
            )
    modes = [treatment.recompute.mode for treatment in treated.values()]
    keeping = next((mode for mode in modes if mode in ("selective", "activation")), None)
    if keeping is not None or isinstance(memory.recompute, Budget):
        raise PlanError(
            f"{flag} with recompute={memory.recompute if keeping is None else keeping!r}: it would keep results of "
            "products inside of a feed-forward, which chunks exist to let go. Use recompute='none' or 'full'."
        )
    if compiled:
        raise PlanError(
            f"{flag} with compile: a compiled block may run all parts again before the first is needed. Use compile=False, "
            "or mlp_chunks=1."
        )
    if splits_backward:
        raise PlanError(
            f"{flag} with a schedule that computes weight gradients apart: it keeps every part's intermediates until then. "
            "Use a schedule such as '1f1b', or mlp_chunks=1."
        )
