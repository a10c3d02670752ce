"""NaN guard: skip or refuse steps whose gradients are NaN or infinite, and name the module where the first one arises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshkit.core._torch import is_fake, tree_leaves
from meshkit.core.sharding import local_tensor
from meshkit.errors import StepError
from meshkit.parallel.data import after_inference
from meshkit.step import Run


@dataclass
class NonFiniteGuard:
    """Skips steps whose gradient norm is not finite, up to `max_skips` in a row, and then stops the run.

    explained: asked on every rank before the run stops; True if somebody else has found the cause: the step is skipped.
    """

    max_skips: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    explained: Callable[[int], bool] | None = None

    def allows(self, run: Run, norm: Tensor, *, step: int) -> bool:
        """True to take the step, False to skip it. Every rank sees the same norm, so every rank decides the same.

        Raises: StepError naming the step, the ranks whose loss is not finite, and the first module that returns a value
        that is not finite from inputs that are. To find it, the forwards of the step run again.
        """
        if torch.isfinite(norm):
            self.skipped_in_a_row = 0
            return True
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row <= self.max_skips:
            return False
        if self.explained is not None and self.explained(step):
            return False
        # Every rank takes this branch, since all have the same norm: the gather cannot hang.
        finite = [True] * run.mesh.spec.world_size
        dist.all_gather_object(finite, bool(torch.isfinite(torch.as_tensor(run.local_loss))), group=run.mesh.group)
        ranks = [rank for rank, is_finite in zip(run.mesh.ranks, finite, strict=True) if not is_finite]
        where = (
            f"the loss of rank {', '.join(map(str, ranks))} is not finite" if ranks else "every rank's loss is finite"
        )
        raise StepError(
            f"step {step}: the gradient norm is {norm.item()}; {where}. {_first_module(run)}{self.skipped_in_a_row - 1} such "
            f"steps in a row were skipped (at most {self.max_skips}). Look at that batch, lower the learning rate, or allow "
            "more skips."
        )


@torch.no_grad()
def _first_module(run: Run) -> str:
    """A sentence that names the first module with finite inputs and an output that is not."""
    if run.last_call is None:
        return ""
    bad_modules: list[tuple[int, str]] = []
    # Eagerly: a hook on a module inside of a compiled block would not run.
    with torch.compiler.set_stance("force_eager"), _watch_outputs(run.model, bad_modules):
        # The weights have not been stepped: the same forwards give the same numbers, apart from dropout.
        for batch, _ in run.parts(*run.last_call[:2], run.last_call[3]):
            run.infer(batch, run.last_call[2])
    after_inference(run.model)
    # By the number of the call: ranks run the same forwards, so the smallest is where it began.
    modules_of_ranks: list[list[tuple[int, str]]] = [[]] * run.mesh.spec.world_size
    dist.all_gather_object(modules_of_ranks, bad_modules, group=run.mesh.group)
    first = min((entry for entries in modules_of_ranks for entry in entries), default=None)
    if first is None:
        return (
            "Run again, all modules return finite values: it was the loss function, the backward, or a passing fault. "
        )
    of_ranks = zip(run.mesh.ranks, modules_of_ranks, strict=True)
    ranks = [str(rank) for rank, entries in of_ranks if first in entries]
    return f"Run again, the first value that is not finite is returned by {first[1]} on rank {', '.join(ranks)}. "


@contextmanager
def _watch_outputs(model: nn.Module, bad_modules: list[tuple[int, str]]) -> Iterator[None]:
    """Inside, appends the first (number of the call, module) whose inputs are finite and whose output is not."""
    calls = 0

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        nonlocal calls
        calls += 1
        if not bad_modules and not _finite(out) and _finite((args, kwargs)):
            bad_modules.append((calls, name or "the model"))

    handles = [
        module.register_forward_hook(partial(after, name), with_kwargs=True) for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _finite(tree: Any) -> bool:
    # On pp, what modules of other stages return has no values.
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not is_fake(leaf)]
    tensors = [local_tensor(leaf) for leaf in leaves]
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())
