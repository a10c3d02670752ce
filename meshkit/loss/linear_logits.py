"""Logits as a product not yet computed: the head's input and weight, which a chunked loss multiplies a few tokens at a time.

Dims: B batch, T tokens, C features, V vocabulary.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshkit.core import _torch
from meshkit.core.code import is_ours
from meshkit.core.noting import noted
from meshkit.core.patch_class import patch_class
from meshkit.core.sharding import chunk
from meshkit.errors import PlanError, StepError
from meshkit.plan import Plan, match_table
from meshkit.strategy import ChunkedLoss


class Head:
    """The output head on this rank: weight [V, C] and bias [V], of `vocabulary` tokens over all ranks.

    axis: the mesh axis that shards the vocabulary, or None; first: this rank's first token.
    """

    # Not a dataclass: on torch 2.15 FSDP2 looks for a module's outputs inside of dataclasses, and would hook the weight as
    # one.

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        loss: ChunkedLoss,
        vocabulary: int,
        axis: DeviceMesh | None = None,
    ) -> None:
        self.weight, self.bias, self.loss, self.vocabulary, self.axis = weight, bias, loss, vocabulary, axis
        self.first = 0 if axis is None else chunk(vocabulary, axis.size(), axis.get_local_rank()).start

    def over(self, axis: DeviceMesh) -> Head:
        """The same head, whose weight is this rank's shard of the vocabulary over `axis`."""
        return Head(self.weight, self.bias, loss=self.loss, vocabulary=self.vocabulary, axis=axis)


@dataclass(frozen=True, eq=False)
class LinearLogits:
    """Logits [..., V] that are not computed yet: `hidden` [..., C], to be multiplied with the head.

    `mk.cross_entropy` and `mk.loss.token_log_probs` take it; an index selects tokens of it; `to_logits` computes the logits.
    The head's weight must be gathered until the loss has run: FSDP keeps it between forward and backward, but frees it if an
    evaluation comes between.
    """

    hidden: Tensor
    head: Head

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self.hidden.shape[:-1], self.head.vocabulary])

    def __getitem__(self, index: Any) -> LinearLogits:
        """Select tokens; the vocabulary cannot be indexed."""
        dims = sum(item is not None for item in index) if isinstance(index, tuple) else 1
        if dims > self.hidden.ndim - 1 or (isinstance(index, tuple) and Ellipsis in index):
            raise IndexError(
                f"LinearLogits {tuple(self.shape)}: an index takes tokens, of its first {self.hidden.ndim - 1} dims. For "
                "single logits use to_logits()."
            )
        return LinearLogits(self.hidden[index], self.head)

    def __getattr__(self, name: str) -> Any:
        raise NoLogits(
            f"LinearLogits has no {name!r}: MemoryPolicy(loss=ChunkedLoss()) makes no logits. Give it to mk.cross_entropy or "
            "mk.loss.token_log_probs, or make them by to_logits(). A model or a hook that changes its logits needs loss=None."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise StepError(_changed(getattr(func, "__name__", str(func))))

    __add__ = __radd__ = __sub__ = __rsub__ = lambda self, other: _refuse_change("+ or -")
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = lambda self, other: _refuse_change("* or /")
    __pow__ = __matmul__ = lambda self, other: _refuse_change("** or @")
    __neg__ = lambda self: _refuse_change("-")  # noqa: E731  # as those above

    def to_logits(self) -> Tensor:
        """The logits, as a head without a chunked loss returns them: with tp a DTensor sharded on its last dim."""
        head = self.head
        local = F.linear(self.hidden, gathered_weight(head.weight), head.bias)
        return local if head.axis is None else sharded_logits(local, head.axis, head.vocabulary)


class NoLogits(StepError, AttributeError):
    """An attribute of logits that are not there, for `hasattr` too."""


def _refuse_change(operation: str) -> NoReturn:
    raise StepError(_changed(operation))


def _changed(operation: str) -> str:
    """Of the line that is nearest, of neither torch nor this library."""
    ours = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}")
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    module = frame.f_locals.get("self")
    where = f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"
    who = f"{type(module).__name__} at {where}" if isinstance(module, nn.Module) else where
    return (
        f"MemoryPolicy(loss=ChunkedLoss()): {who} computes with the logits ({operation}), and a chunked loss makes none. "
        "A model or a hook that changes its logits (a scale, a soft cap, a softmax) needs loss=None; a loss of "
        "your own computes with logits.to_logits(), or by mk.cross_entropy."
    )


_torch.register_pytree(
    LinearLogits, lambda x: ([x.hidden], x.head), lambda children, head: LinearLogits(children[0], head)
)


def _wide_logits(local: Tensor, axis: DeviceMesh, vocabulary: int) -> Tensor:
    return F.pad(local, (0, vocabulary - local.shape[-1]))


@noted(reading=_wide_logits)
def sharded_logits(local: Tensor, axis: DeviceMesh, vocabulary: int) -> DTensor:
    """Local logits [..., V/tp] as one DTensor [..., V] sharded on its last dim."""
    shape = torch.Size([*local.shape[:-1], vocabulary])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, axis, [Shard(local.ndim - 1)], run_check=False, shape=shape, stride=stride)


def gathered_weight(weight: Tensor) -> Tensor:
    """The weight. Raises: StepError if FSDP has freed it: then it has a shape and no memory."""
    if weight.numel() and not weight.untyped_storage().nbytes():
        raise StepError(
            "loss: the head's weight has been freed since the forward that made these logits. Compute the loss before the "
            "next evaluation or generation of the same model, and call each backward before the next step."
        )
    return weight


# ---------------------------------------------------------------------------------------------- the head of a model


def head_of(model: nn.Module, plan: Plan, *, asked: str = "MemoryPolicy(loss=ChunkedLoss())") -> str:
    """The name of the linear layer that computes logits (the output head, language-model head).

    It is the one with vocab() in the plan; else what the model's get_output_embeddings() returns; else the one called
    lm_head. asked: the setting that needs it, for the error.
    Raises: PlanError if there is none, or several.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    styles = match_table(plan.tensor, modules, what="module")
    heads = [name for name in linear if name in styles and styles[name].kind == "vocab"]
    if not heads:
        get_output = getattr(model, "get_output_embeddings", None)  # transformers' models have it
        output = get_output() if callable(get_output) else None
        heads = [name for name in linear if modules[name] is output]
    heads = heads or [name for name in linear if name.rpartition(".")[2] == "lm_head"]
    if len(heads) != 1:
        raise PlanError(
            f"{asked}: {f'several heads, {heads}' if heads else 'no head'} in "
            f"{type(model).__name__}. Give the one linear layer that makes its logits the style vocab() in the plan's tensor "
            "table."
        )
    (name,) = heads
    return str(name)


def plan_head(model: nn.Module, plan: Plan, loss: ChunkedLoss, *, tp: int, sequence: bool, device_type: str) -> str:
    """The name of the head that is to return `LinearLogits`. Changes nothing.

    Raises: PlanError for a head, or a backend, for which there is no chunked loss.
    """
    name = head_of(model, plan)
    head = model.get_submodule(name)
    if type(head).forward is not nn.Linear.forward:
        raise PlanError(
            f"MemoryPolicy(loss=ChunkedLoss()): {name!r} is a {type(head).__name__} with a forward of its own, which a "
            "chunked loss would leave out. Use nn.Linear as the head, or loss=None."
        )
    if hooks := [each for each in head._forward_hooks.values() if not is_ours(each)]:
        hook = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
        raise PlanError(
            f"MemoryPolicy(loss=ChunkedLoss()): the hook {hook} sees what {name!r} returns, and a chunked loss "
            "makes no logits that it could read or change. Remove it, or use loss=None."
        )
    styles = match_table(plan.tensor, dict(model.named_modules(remove_duplicate=False)), what="module")
    kind = styles[name].kind if name in styles else "vocab"  # what no style covers, tensor_parallel refuses
    if tp > 1 and kind != "vocab" and (sequence or kind != "replicate"):
        raise PlanError(
            f"MemoryPolicy(loss=ChunkedLoss()): with tp={tp} the head {name!r} is {kind}() in the plan, whose output is no "
            "whole logits. Make it vocab(), or use loss=None."
        )
    if loss.backend == "liger":
        _refuse_liger(tp, device_type)
    return name


def chunk_head(head: nn.Module, loss: ChunkedLoss) -> None:
    """Let the head return `LinearLogits`, in place. Before tensor parallelism and `split_linears`, which wrap its forward."""
    patch_class(head, forward=_forward(loss))


def _refuse_liger(tp: int, device_type: str) -> None:
    asked = "ChunkedLoss(backend='liger')"
    if device_type != "cuda":
        raise PlanError(f"{asked} has kernels for GPUs, but the mesh is on {device_type}. Use backend='torch'.")
    if tp > 1:
        raise PlanError(f"{asked} needs the whole vocabulary on each rank, but tp={tp}. Use backend='torch', or tp=1.")
    if find_spec("liger_kernel") is None:
        raise PlanError(
            f"{asked}: liger-kernel is not installed. `pip install 'meshkit[liger]'`, or use backend='torch'."
        )


def _forward(loss: ChunkedLoss) -> Any:
    def forward(self: nn.Linear, input: Tensor) -> LinearLogits:
        hidden, weight, bias = _OneNode.apply(input, self.weight, self.bias)
        return LinearLogits(hidden, Head(weight, bias, loss=loss, vocabulary=self.out_features))

    return forward


class _OneNode(torch.autograd.Function):
    """The identity on the head's input, weight and bias, as one node of the autograd graph."""

    # [Note: the head's gradients come through one node]
    # FSDP2 prepares a unit for gradients in a hook on the module's output, which here is `hidden`: that must happen before
    # the gradient of the weight arrives. As outputs of one node all gradients arrive together, after the hooks on its
    # outputs. Outputs are detached, so that they are no views: FSDP2 warns of a view, and does not hook it.

    @staticmethod
    def forward(ctx: Any, *values: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        out = tuple(None if value is None else value.detach() for value in values)
        frozen = [value for value, needed in zip(out[1:], ctx.needs_input_grad[1:], strict=True) if not needed]
        ctx.mark_non_differentiable(*[value for value in frozen if value is not None])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads
