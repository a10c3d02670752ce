"""The default loss of a step and its count; the kinds of both, of a user's too."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

from torch import Tensor, nn

from meshkit.errors import DataError, PlanError
from meshkit.loss import IGNORED, cross_entropy
from meshkit.loss.linear_logits import LinearLogits
from meshkit.parallel.context import is_transformers, not_kept

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
Count = Callable[[Batch], Tensor]
AnyLoss = TypeVar("AnyLoss", bound=Callable[..., Tensor])
_VOUCHED = "__meshkit_additive__"
_TAKEN = ("input_ids", "position_ids", "attention_mask", "mask")


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of `labels` (already shifted, -100 ignored), summed over the valid tokens; a scalar.

    batch: input_ids [B, T], labels [B, T], position_ids [B, T] where documents are packed, attention_mask [B, T] where some
    tokens are padding, and `mask` where the run's batches have one. The model returns logits [B, T, V], plain or as
    `.logits`. Raises: DataError for an attention_mask that the model does not take.
    """
    _named(batch, "input_ids")
    given = model_inputs(model, batch, asked="next_token_loss")
    output = model(given.pop("input_ids"), **given)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor | LinearLogits):
        raise PlanError(
            f"next_token_loss: {type(model).__name__} returns a {type(output).__name__}, and the loss of forward_backward "
            "takes logits [B, T, V], plain or as `.logits`. Return those, or give it a loss of your own: "
            "forward_backward(batch, loss=, count=), where loss(model, part) is a sum and count(batch) what it is over."
        )
    return cross_entropy(logits, _named(batch, "labels"))


def refuse_plain_count(what: str, counted: Any) -> Tensor:
    """Raises: PlanError for what a user's count returned that is no tensor."""
    if isinstance(counted, Tensor):
        return counted
    raise PlanError(
        f"{what}(count=): it returned a {type(counted).__name__}. Return a tensor, as torch.tensor(n) or "
        "(labels != -100).sum()."
    )


def model_inputs(model: nn.Module, batch: Mapping[str, Any], *, asked: str = "model_inputs") -> dict[str, Any]:
    """The entries of a batch that a model takes: input_ids, position_ids, attention_mask, mask; those that are there.

    With position_ids a model of transformers gets use_cache=False: it looks for packed documents in them only where it has no
    cache, which it would make by default, and nobody reads in training.
    asked: who asks. Raises: DataError for an attention_mask that the model does not take.
    """
    if "attention_mask" in batch and "attention_mask" not in inspect.signature(model.forward).parameters:
        raise DataError(
            f"{asked}: the batch has an attention_mask, but the model's forward takes none. Leave it away: padding that "
            f"comes last and has label {IGNORED} needs none; for other padding give forward_backward(mask=...)."
        )
    given = {name: batch[name] for name in _TAKEN if name in batch}
    own = getattr(model.forward, "__self__", model)  # on pp, what runs a stage stands for the model
    return given | (not_kept(model) if "position_ids" in given and is_transformers(own) else {})


def count_labels(batch: Batch) -> Tensor:
    """The number of labels that are not ignored."""
    return (_named(batch, "labels") != IGNORED).sum()


def _named(batch: Batch, name: str) -> Tensor:
    if name not in batch:
        raise DataError(
            f"forward_backward: the batch has {', '.join(sorted(batch)) or 'nothing'}, and no {name!r}. Give input_ids and "
            "labels, both [B, T], or a loss and a count of your own: forward_backward(batch, loss=, count=)."
        )
    return batch[name]


def additive(loss: AnyLoss) -> AnyLoss:
    """Vouch for a loss: a sum in which each token's share depends on nothing of other rows, and with cp of other tokens.

    For one that is refused since it cannot be tried: it writes to a file, sends messages, or wants values that random numbers
    are not. Nor may its next call return something else, as that of a running mean does; and on cp nothing may depend on how
    many rows there are, which may lie end to end, nor be added for tokens that fill a rank up (labels of -100, else 0).
    It is then tried on no values; that it is a mean already is still seen.

        run.forward_backward(batch, loss=mk.step.additive(loss))

    Also a decorator. Returns the function itself, or a partial of any other callable.
    """
    if isinstance(loss, FunctionType):
        setattr(loss, _VOUCHED, loss.__code__)  # not what wraps it, which may take the mean, with its attributes
        return loss
    vouched: Any = partial(loss)
    setattr(vouched, _VOUCHED, None)
    return vouched  # type: ignore[no-any-return]  # called as the loss is


def is_vouched(loss: Any) -> bool:
    """Whether `additive` was called on it, or on what it is a partial of."""
    while isinstance(loss, partial):
        if hasattr(loss, _VOUCHED):
            return True
        loss = loss.func
    return isinstance(loss, FunctionType) and getattr(loss, _VOUCHED, None) is loss.__code__
