"""Errors of torch about sharded tensors in a step, told in the words of what the user wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

from torch import nn

from meshkit.errors import PlanError
from meshkit.program import FUNCTIONAL, is_functional, model_line

SHARDS_MEET_OTHERS = (
    "mixed torch.Tensor and DTensor",
    "inputs with different meshes",  # a gathered parameter, which is split over tp alone, and a shard; before 2.15:
    "does not support cross-mesh operation",
)


@contextmanager
def explained(model: nn.Module, full: nn.Module, tp: int) -> Iterator[None]:
    """Inside, torch's errors about shards say what was done with them, and what to change.

    model: the one that runs. full: the user's own. tp: ranks of the axis. Raises: PlanError.
    """
    try:
        yield
    except RuntimeError as error:
        kind = type(full).__name__
        if is_functional(error):
            raise PlanError(f"{kind} at {model_line(error)}: {FUNCTIONAL}") from error
        if not any(said in str(error) for said in SHARDS_MEET_OTHERS):
            raise
        if _runs_backward(error):
            raise PlanError(_of_backward(error, kind)) from error
        if not any(module is model for module in _called_modules(error)):
            logits = f"logits that are split over the vocabulary on tp={tp}, or " if tp > 1 else ""
            remedy = "Use mk.cross_entropy(logits, labels), or logits.full_tensor(). " if tp > 1 else ""
            raise PlanError(
                f"{model_line(error)}: the loss meets {logits}a parameter, which outside of its module's forward is a shard, "
                f"a DTensor, with a plain tensor, or one that is split otherwise. {remedy}What it needs of parameters the "
                "model returns beside its output."
            ) from error
        raise PlanError(
            f"{kind} at {model_line(error)}: a parameter is used outside of the forward of the module that holds it (by "
            "a parent, or in another method), and there it is a shard. "
            + (
                f"Use tp=1 instead of tp={tp}, or call the module. Logits are split too: your own loss gathers them by "
                "`full_tensor()`, or is one of mk.loss."
                if tp > 1
                else "Leave that module out of the plan's blocks and units (Plan(blocks=...)), or call its forward; for "
                "a method of the model or of a unit, torch.distributed.fsdp.register_fsdp_forward_method(module, name)."
            )
        ) from error


def _of_backward(error: BaseException, kind: str) -> str:
    if _called_modules(error):
        return (
            f"{kind} at {model_line(error)}: a backward that the model writes itself runs modules again (reversible "
            "layers), whose parameters are shards by then: nothing gathers them there. Leave these layers out of the "
            "plan's blocks and units (Plan(blocks=...)), or let autograd run them, under recompute to keep as little."
        )
    return (
        f"{kind}: the loss computes with shards of parameters (a penalty on weights), or with logits that are split "
        "over the vocabulary, and in backward they meet a plain tensor. A penalty on weights is the optimizer's "
        "weight_decay; logits are for mk.cross_entropy(logits, labels), or logits.full_tensor()."
    )


def _called_modules(error: BaseException) -> list[Any]:
    """Those whose call raised, outermost first."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return [frame.f_locals.get("self") for frame in frames if frame.f_code.co_name == "_call_impl"]


def _runs_backward(error: BaseException) -> bool:
    """Whether autograd raised it, or what it ran."""
    return any(frame.f_code.co_name == "_engine_run_backward" for frame, _ in walk_tb(error.__traceback__))
