"""Functions of each token (of `token_values`) in their first call: one that mixes tokens or rows is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core.code import code_of, is_ours
from meshkit.core.to_device import HOST, to_device
from meshkit.errors import PlanError
from meshkit.step._loss import Batch, count_labels, is_vouched
from meshkit.step._new_losses import Judgement, NewLosses

OfTokens = Callable[[nn.Module, dict[str, Any]], Tensor]
_UNTRIED, _MIXES = 1.0, float(1 << 40)  # more than there are ranks


class Weighed:
    """What a function returns of each token, added up with a weight of its own: a sum of parts where none depends on another.

    index: the entry of a batch with each token's number, 0 for padding. Its code, name and room are those of the function.
    """

    def __init__(self, func: OfTokens, index: str) -> None:
        self.func, self._index = func, index
        self.__name__, self.__module__ = _name(func), getattr(func, "__module__", "")

    def __call__(self, model: nn.Module, part: dict[str, Any]) -> Tensor:
        numbers = part[self._index]
        values = self.func(model, {name: value for name, value in part.items() if name != self._index})
        values = values.reshape(*numbers.shape, -1)
        weights = torch.where(numbers > 0, 1 + 0.5 * numbers.double().sin(), 0.0)
        channels = 1 + 0.5 * torch.arange(values.shape[-1], device=values.device).double().sin()
        return (values.double() * weights.unsqueeze(-1) * channels).sum()


def refuse_mixing(
    losses: NewLosses, what: str, batch: Batch, microbatches: int, function: OfTokens, *, index: str
) -> None:
    """For a function that is not of this library. Raises: PlanError, on every rank, if what it returns of a token depends on
    others, of which another rank or microbatch may have some; or if that cannot be tried.

    Wire: an all-reduce of a few numbers over the mesh.
    """
    if is_ours(function) or is_vouched(function):
        return
    judged = losses.judge(what, batch, microbatches, Weighed(function, index), count_labels, None)
    verdict = torch.tensor(0.0 if judged is None else _verdict(judged), dtype=torch.float64)
    mesh = losses.mesh
    (summed,) = mesh.agreement.meet(what, to_device(verdict, mesh.device), facts={"function": _name(function)})
    if judged is None and summed.device != HOST:
        return  # the host would wait for the device in each call
    if (found := float(summed)) >= _MIXES:
        raise PlanError(
            f"{what}: the function {_name(function)!r} mixes tokens or rows, of which each rank and each microbatch has a "
            "part: on random values, what it returns of a part is not that part of what it returns of all. Return of each "
            f"token what depends on no other, and go on with what {what} returns, which has the whole rows of this rank."
        )
    if found >= _UNTRIED:
        untried = judged.untried if judged is not None else ""
        raise PlanError(
            f"{what}: the function {_name(function)!r} gets a part of the rows or tokens here, and it cannot be tried "
            f"whether it mixes them: {untried or 'another rank could not'}. Take that out of it; or, if what it returns of a "
            "token depends on no other token and no other call, say so by mk.step.additive(function)."
        ) from (None if judged is None else judged.error)
    if judged is not None:
        losses.settled()


def _verdict(judged: Judgement) -> float:
    """A number that ranks add up."""
    mixes = {judged.rows, judged.tokens} & {"neither", "between"} or judged.misread or judged.carries
    return _MIXES if mixes else _UNTRIED if judged.untried else 0.0


def _name(function: Any) -> str:
    return str(getattr(code_of(function), "co_name", type(function).__name__))
