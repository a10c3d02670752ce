"""Whether feed-forwards treat every token alike, so that they may run on some tokens at a time: proved of what they run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from meshkit.core.linear import linear_shape
from meshkit.errors import PlanError
from meshkit.program import Held, TensorRef, Trace, prove, tensors, trace, without_values

_PARTS = ((0, 1), (2, 3))  # not one token: a module may treat that apart


def refuse_mixed_tokens(
    modules: Mapping[str, nn.Module], read: Trace | None, *, mlps: Iterable[str], chunks: int
) -> None:
    """read: the forward, which says what each is called with; else it is guessed of its first linear layer.

    Raises: PlanError for one whose output at a token depends on other tokens, or of which that cannot be said.
    """
    calls = {call.name: call for call in (read.calls if read is not None else ())}
    for name in mlps:
        call, module = calls.get(name), modules[name]
        given = tensors((call.args, dict(call.kwargs))) if call is not None else []
        like = given[0] if given else None
        try:
            _prove(module, like)
        except PlanError as error:
            raise PlanError(
                f"mlp_chunks={chunks}: {name!r} cannot be seen to treat each token alike, as running on some at a time "
                f"needs: {error} Leave it out of the plan's `mlps`, or use mlp_chunks=1."
            ) from error


def _prove(module: nn.Module, like: TensorRef | None) -> None:
    before, width, dtype = _input(module, like)
    module = without_values(module)
    for child in module.modules():
        if isinstance(child, nn.Dropout):  # of each element alone, and drawn again alike when a chunk runs again
            child.eval()
    full, part = (
        trace(module, (torch.empty(*before, tokens, width, dtype=dtype, device="meta"),), {})
        for tokens in (sum(map(len, _PARTS)), len(_PARTS[0]))
    )
    params = {f"parameter {name}": Held("replicated") for name, _ in module.named_parameters()}
    held = [params | {"input 0": Held("varying", len(before), tokens)} for tokens in _PARTS]
    prove(full, [part] * len(_PARTS), held, tokens=_PARTS)


def _input(module: nn.Module, like: TensorRef | None) -> tuple[tuple[int, ...], int, torch.dtype]:
    """Of its input: the dims before that of tokens, the width, the dtype."""
    if like is not None:
        return like.shape[:-2], like.shape[-1], like.dtype
    shape = next((found for child in module.modules() if (found := linear_shape(child)) is not None), None)
    if shape is None:
        raise PlanError("it is not known what it is called with.")
    return (1,), shape.in_features, next(module.parameters()).dtype
