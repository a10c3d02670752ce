"""Plain steps on examples: where a policy comes from before it is rewarded, and what rejection sampling ends in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer

from meshkit.data import Example, ExampleLoader
from meshkit.schedule_lr import lr_schedule
from meshkit.step import Run, clip_grad_norm


class Checkpoints(Protocol):
    """What `teach` needs of a `Checkpointer`."""

    def resume(self, run: Run, optimizer: Optimizer, *, scheduler: Any, loader: Any) -> int: ...

    def save(self, step: int, run: Run, optimizer: Optimizer, *, scheduler: Any, loader: Any) -> None: ...


def teach(
    run: Run,
    optimizer: Optimizer,
    examples: Sequence[Example],
    *,
    steps: int,
    global_batch: int,
    seq_len: int,
    seed: int,
    microbatches: int = 1,
    clip: float = 1.0,
    lr_kind: str = "constant",
    warmup_steps: int = 20,
    each: Callable[[int, dict[str, float]], None] = lambda step, scalars: None,
    checkpoints: Checkpoints | None = None,
    save_every: int = 50,
    leave: Callable[[], bool] = lambda: False,
) -> bool:
    """`steps` optimizer steps on the learnt tokens of `global_batch` examples each, packed, in a shuffled order.

    examples: the same on every rank. lr_kind: see `lr_factor`; those that fall end at a tenth of the peak.
    each: is called after every step with its scalars, on every rank.
    checkpoints: a `Checkpointer`; its newest checkpoint is continued, and one is saved every `save_every` steps, after the
    last, and on leaving. leave: is asked after every step, on every rank; True ends it there.
    Returns: whether all steps are made. Every rank must call it. Wire: that of the steps, and of checkpoints.
    """
    mesh = run.mesh
    loader = ExampleLoader(
        examples,
        seq_len=seq_len,
        global_batch=global_batch,
        seed=seed,
        rank=mesh.data_rank,
        ranks=mesh.data_ranks,
        packing="step",
        pad_multiple=mesh.row_multiple,
    )
    scheduler = lr_schedule(
        optimizer, kind=lr_kind, warmup_steps=min(warmup_steps, steps), total_steps=max(1, steps), min_factor=0.1
    )
    start = 0 if checkpoints is None else checkpoints.resume(run, optimizer, scheduler=scheduler, loader=loader)
    for step in range(start + 1, steps + 1):
        loss = run.forward_backward(next(loader), microbatches=microbatches, step=step)
        norm = clip_grad_norm(run, clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        each(step, {"loss": loss.item(), "grad_norm": norm.item()})
        leaving = leave()
        if checkpoints is not None and (step % save_every == 0 or step == steps or leaving):
            checkpoints.save(step, run, optimizer, scheduler=scheduler, loader=loader)
        if leaving and step < steps:
            return False
    return True
