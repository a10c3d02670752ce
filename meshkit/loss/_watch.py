"""Losses that are no sums over rows: means (reduction='mean'), which the graph shows and the step would divide again, and
those that mix rows, on which the ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core.sharding import plain_value
from meshkit.errors import PlanError
from meshkit.loss.vocab_parallel import IGNORED

_UNTRIED = float(1 << 40)  # more than there are parts
_CARRIES = float(1 << 80)  # and than all ranks add up to of those
_MIXES = float(1 << 120)
_MIXES_TOKENS = float(1 << 160)
_MISREADS = {"filled up": float(1 << 200), "end to end": float(1 << 240)}
_REFUSALS = (  # the largest first
    (
        _MISREADS["end to end"],
        "reads how many rows there are, and on cp rows with documents or padding of their own are laid end to end as one: on "
        "random values, its loss of those is another. Return the sum, and let count divide it "
        "(count=lambda batch: torch.tensor(len(batch['input_ids']))).",
    ),
    (
        _MISREADS["filled up"],
        "adds something for tokens that fill a rank of cp up, to a multiple of its ranks of tp or to one token. Those have "
        f"{IGNORED} in tensors whose name begins with labels, and 0 in all others: leave them out, as by ignore_index or a "
        "weight of each token in the batch; or use sequence=False, and a token for each rank.",
    ),
    (
        _MIXES_TOKENS,
        "mixes the tokens of a row, of which each rank of cp has a part: on random values, its loss of a row is not the sum "
        "of those of one half of its tokens and the other. Add up a loss of each token, with labels and weights that were "
        "shifted in the batch (a mean over a row, a loss of its last token, or of its sum, is another for each split), or "
        "use cp=1.",
    ),
    (
        _MIXES,
        "mixes the rows of a batch, of which each data rank and each microbatch has a part: on random values, its loss of "
        "eight rows, with the model that it calls, is not the sum of those of four and four. Add up a loss of each row (an "
        "auxiliary loss of means over rows, or one that compares rows, is another for each split), or use one data rank and "
        "microbatches=1. If that is only since the trial's rows repeat what yours never share, as the number of an answer, "
        "say so by loss=mk.step.additive(loss).",
    ),
    (
        _CARRIES,
        "keeps something that changes what its next call returns, and each microbatch is a call. Give it what changes from "
        "step to step (functools.partial(loss, step=step)), or use microbatches=1.",
    ),
    (
        _UNTRIED,
        "gets a part of the rows or tokens here, and it cannot be tried whether it is the sum of its parts: {why}. Take that "
        "out of the loss; or, if what it returns is a sum in which each token's share depends on nothing of other rows, with "
        "cp of other tokens, and of other calls, say so by loss=mk.step.additive(loss).",
    ),
)
LOOKED_AT = 256  # nodes of a graph: a loss that needs more is not judged
_UNCHANGED = ("Alias", "Clone", "Neg", "Reshape", "Squeeze", "ToCopy", "UnsafeView", "Unsqueeze", "View")
_PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "Convolution", "Embedding")  # below them lies the model


# [Note: which losses are means]
# A loss is refused where it cannot be a sum: it is a mean of items, or such a mean times less than one (0.5 * mean, label
# smoothing), or something divided by just the number that `count` gives for its part. A mean times 2 is not judged: it may be
# a sum of two parts' means. Nor is a sum of equal means, one for each row, or a mean of sums, one for each of several heads.
# And it is refused only if all parts of the step say so, and there is more to count than parts: a mean of equal parts, each
# counted as one, is right.


class LossWatch:
    """A loss that looks at what it returns, for the first step of a loss function.

    `func`, as of a partial: what a pipeline has read with a loss is known by its code. `means`: how many results were means,
    on the device, so that no host waits for it. `excluded`: one was not, as far as can be known. rows, tokens: what this rank
    has seen the loss of a batch to be of those of parts of its rows, and of parts of a row's tokens: "sum", "between" as a
    mean is, or "neither". misread: how a rank of cp may get the batch that it is not a sum of. untried: why that could not be
    told, and the error of that. carries: what the loss keeps makes its next call another. `verdict` is a number of these,
    that ranks add up before the call does anything. what: the call that errors speak of.
    """

    def __init__(
        self,
        func: Callable[..., Tensor],
        count: Callable[..., Tensor],
        device: torch.device,
        *,
        what: str = "forward_backward",
        rows: str | None = None,
        tokens: str | None = None,
        misread: str | None = None,
        untried: str = "",
        error: Exception | None = None,
        carries: bool = False,
    ) -> None:
        self.func, self.count, self.what, self.untried, self._error = func, count, what, untried, error
        self._between = "between" in (rows, tokens)
        seen = _MIXES_TOKENS if tokens == "neither" else _MIXES if rows == "neither" else _CARRIES if carries else 0.0
        self.verdict = _MISREADS.get(misread or "") or seen or (_UNTRIED if untried else 0.0)
        self.means = torch.zeros((), dtype=torch.float64, device=device)
        self._of_no_mean = _MIXES_TOKENS if tokens == "between" else 0.0
        self.excluded = False
        self._leaves: dict[int, ref[Tensor]] = {}

    def __call__(self, model: Any, part: Any) -> Tensor:
        loss: Tensor = plain_value(self.func(model, part))
        with torch.no_grad():
            self._look(loss, part)
        return loss

    def look_without_graph(self) -> None:
        """In place of a call, where there are no gradients: whether it is a mean was tried alone."""
        self.excluded = not self._between
        self.means += float(self._between)

    def _look(self, loss: Any, part: Any) -> None:
        node = _torch.graph_node(loss) if isinstance(loss, Tensor) and not _torch.is_fake(loss) else None
        self._leaves |= {} if node is None else {id(leaf): ref(leaf) for leaf in _torch.leaves_of(loss)}
        if node is not None and _is_mean(node):
            self.means += 1
        elif node is not None and (divisors := _divisors(node)):
            is_mean = prod(divisors[1:], start=divisors[0]).double() == self.count(part).double().clamp(min=1)
            self.means += torch.where(is_mean, 1.0, self._of_no_mean)
        else:
            self.excluded = True
            self.means += self._of_no_mean

    def trained_beside(self, model: nn.Module, batch: Mapping[str, object], *, parameters: bool) -> str:
        """Why the step is not that of one device, if the loss trains a tensor that the model has not; else empty.

        That is one with a gradient after the step, which outlives it. Gradients of what FSDP has gathered are reduced by now,
        and are no more. parameters: look at those alone, where a stage's inputs have gradients too.
        """
        known = {id(each) for each in (*model.parameters(), *batch.values())}
        for leaf in (leaf for each in self._leaves.values() if (leaf := each()) is not None):
            if id(leaf) not in known and leaf.grad is not None and (isinstance(leaf, nn.Parameter) or not parameters):
                return (
                    f"the loss {_name(self.func)!r} trains a tensor of shape {list(leaf.shape)} beside the model: no data "
                    "rank sums its gradient with the others. Make it a parameter of the model before parallelize; or detach "
                    "it."
                )
        return ""

    def refuse(self, verdict: Tensor | float) -> None:
        """As `refuse_of`."""
        self.refuse_of(self.what, self.func, verdict, untried=self.untried, error=self._error)

    @staticmethod
    def refuse_of(
        what: str, loss: Any, verdict: Tensor | float, *, untried: str = "", error: Exception | None = None
    ) -> None:
        """For ranks too that watch nothing. verdict: the sum of all ranks'.

        Raises: PlanError if the loss mixes rows or tokens, or a rank could not tell.
        """
        if isinstance(verdict, Tensor) and _torch.is_fake(verdict):  # of an estimate
            return
        verdict = float(verdict)
        said = next((words for least, words in _REFUSALS if verdict >= least), None)
        if said is not None:
            why = untried or "another rank could not"
            raise PlanError(f"{what}: the loss {_name(loss)!r} {said.replace('{why}', why)}") from error

    def settle(self, means: Tensor, counted: Tensor, *, microbatches: int, ranks: int, data_ranks: int) -> None:
        """means: of all microbatches of all ranks with other tokens. Raises: PlanError if all are, and more is counted; or if
        the loss mixes tokens."""
        parts = microbatches * ranks
        self.refuse(means)
        if not self.excluded and bool(((means == parts) & (counted > parts)).any()):
            raise PlanError(
                f"{self.what}: the loss {_name(self.func)!r} is a mean already, and would be divided again by count, which "
                f"is {counted.item():g} for {parts} parts (microbatches x ranks). Return the sum over what count counts "
                "(reduction='sum'); or, if the parts are of one size, count each as one "
                f"(count=lambda batch: torch.tensor({parts // data_ranks}))."
            )


def _name(loss: Any) -> str:
    while isinstance(loss, partial):
        loss = loss.func
    return getattr(loss, "__name__", type(loss).__name__)


def _is_mean(root: Any) -> bool:
    """Whether it is a mean times at most one, or a sum of means of which one outweighs the others."""
    means: list[float] = []  # their weights
    perhaps: list[float] = []  # of what is divided by a whole number: label smoothing adds such a term to a mean
    rest: list[tuple[Any, float, bool]] = [(root, 1.0, False)]
    for _ in range(LOOKED_AT):
        if not rest:
            return bool(means) and 2 * max(means) > sum(means) + sum(perhaps)
        node, weight, divided = rest.pop()
        kind, inputs = _kind(node), _inputs(node)
        if _torch.reduction_of(node) == "mean" or (kind == "Mean" and not _is_of_sums(node)):
            means.append(weight)
        elif inputs and kind in ("Add", "Sub"):
            rest += [(each, weight, divided) for each in inputs]
        elif len(inputs) == 1 and _divides_by_a_whole_number(node):
            rest.append((inputs[0], weight, True))
        elif len(inputs) == 1 and (factor := _factor(node)) is not None and factor <= 1:
            rest.append((inputs[0], weight * factor, divided))
        elif divided:
            perhaps.append(weight)
        else:
            return False
    return False


def _divides_by_a_whole_number(node: Any) -> bool:
    other = _torch.saved_factor(node) if _kind(node) == "Div" else None
    return other is not None and not other.ndim and not other.is_floating_point()


def _is_of_sums(mean: Any) -> bool:
    """Whether what is averaged may be a sum over rows: sums of several heads, or of each feature."""
    rest, known = _inputs(mean), set[Any]()
    while rest:
        node = rest.pop()
        if _torch.sums_rows(node) or _torch.reduction_of(node) == "sum" or len(known) == LOOKED_AT:
            return True
        if node not in known and _kind(node) not in _PRODUCTS:
            known.add(node)
            rest += _inputs(node)
    return False


def _divisors(root: Any) -> list[Tensor]:
    """The scalars that it is divided by at last."""
    divisors: list[Tensor] = []
    node = root
    while len(inputs := _inputs(node)) == 1 and len(divisors) < LOOKED_AT:
        if _kind(node) == "Div":
            other = _torch.saved_factor(node)
            if other is None or other.ndim:
                break
            divisors.append(other)
        elif _kind(node) not in _UNCHANGED:
            break
        (node,) = inputs
    return divisors


def _factor(node: Any) -> float | None:
    """The size of the number that a node multiplies its input by; None if it does something else, or the device has it."""
    kind = _kind(node)
    if kind in _UNCHANGED:
        return 1.0
    other = _torch.saved_factor(node) if kind in ("Mul", "Div") else None
    if other is None or other.ndim or other.device.type != "cpu":
        return None
    size = abs(float(other))
    return size if kind == "Mul" else 1 / size if size else None


def _kind(node: Any) -> str:
    """'Mul' of MulBackward0."""
    name: str = node.name()
    return name.partition("Backward")[0]


def _inputs(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]
