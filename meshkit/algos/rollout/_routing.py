"""Recording of router choices (routing replay): a forward without gradients that keeps which experts each token chose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshkit.algos.rollout._token_values import label_log_probs, values_of_parts
from meshkit.moe.replay import RouterPlace, open_routers, recording
from meshkit.step import Batch, Run


class RoutedValues(NamedTuple):
    """values: as of `token_values`. routing: [B, T, R, K] int16 on the host, for the entry `ROUTING` of a batch.

    R: routers of the whole model, in its order. K: experts that a token chooses.
    """

    values: Tensor
    routing: Tensor


@torch.no_grad()
def routed_values(
    run: Run,
    batch: Batch,
    function: Callable[[nn.Module, dict[str, Any]], Tensor] = label_log_probs,
    *,
    microbatches: int = 1,
) -> RoutedValues:
    """`token_values`, and in the same forwards the experts that the routers used (R2 of routing replay).

    The choices are the same on all ranks of a data rank, also those of other stages, and of every token, prompts too.
    Every rank must call it. Wire: that of `token_values`; with sequence parallelism for each microbatch an all-gather over tp
    of 2 bytes for each choice, and over cp and pp an all-reduce of them.
    Raises: as `token_values`; PlanError for a model whose routers cannot be recorded, see `open_routers`.
    """
    choices = Choices(open_routers(run.model), batch["input_ids"].numel(), run)
    values = values_of_parts(run, batch, function, microbatches=microbatches, around=choices.around)
    rows, tokens = batch["input_ids"].shape
    return RoutedValues(values, rearrange(choices.of_all(), "(b t) r k -> b t r k", b=rows, t=tokens).cpu())


class Choices:
    """Experts of numbered tokens, from all forwards of a recording; number 0 is for padding."""

    def __init__(self, place: RouterPlace, tokens: int, run: Run) -> None:
        self._run = run
        shape = tokens + 1, place.routers, place.chosen
        self._of_token = torch.zeros(shape, dtype=torch.int16, device=run.mesh.device)

    @contextmanager
    def around(self, numbers_BT: Tensor, weight: float) -> Iterator[None]:
        """Around the forward of these tokens. weight: 0 of a stand-in for an empty microbatch, which has no tokens."""
        with recording() as recorded:
            yield
        if recorded and weight:
            routers, choices_BTrK = stacked(self._run, recorded)
            self._of_token[numbers_BT.reshape(-1, 1), routers] = choices_BTrK.flatten(0, 1)

    def of_all(self) -> Tensor:
        """[tokens, R, K] int16, in the order of the numbers. Every rank must call it."""
        return summed(self._of_token[1:].contiguous(), self._run.mesh["cp"], self._run.mesh["pp"])


def stacked(run: Run, recorded: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
    """([r]: numbers of this rank's routers; [B, T, r, K] int16: their choices), of all tokens of the rows of this rank of cp.

    Wire: with sequence parallelism an all-gather of them over tp.
    """
    choices_BtrK = torch.stack(list(recorded.values()), dim=2)
    if run.resolved.sequence:  # each rank of tp has a part of each row
        choices_BtrK = _gathered(choices_BtrK, run.mesh["tp"])
    return torch.tensor(list(recorded), device=choices_BtrK.device), choices_BtrK


def summed(choices: Tensor, *axes: DeviceMesh) -> Tensor:
    """Choices of which each rank of the axes has some, and 0 for the others, in place."""
    for axis in axes:
        if axis.size() > 1:
            # As bytes, for backends add no int16: each choice is 0 on all ranks but one, so that nothing is carried.
            dist.all_reduce(choices.view(torch.uint8), group=axis.get_group())
    return choices


def _gathered(choices_BtrK: Tensor, tp: DeviceMesh) -> Tensor:
    """[B, T, r, K], of the parts [B, t, r, K] of the ranks of tp."""
    parts = [torch.empty_like(choices_BtrK).view(torch.uint8) for _ in range(tp.size())]
    dist.all_gather(parts, choices_BtrK.view(torch.uint8), group=tp.get_group())
    return torch.cat([part.view(torch.int16) for part in parts], dim=1)
