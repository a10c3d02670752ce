"""Supervised fine-tuning (SFT): losses, training steps on examples, and SFT as the first phase of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshkit.algos.preference import masked_logps
from meshkit.algos.rollout import label_log_probs
from meshkit.checkpoint import Checkpointer, SaveOnSignal
from meshkit.data import Example, ExampleLoader
from meshkit.loss import IGNORED
from meshkit.metrics import Logger, Progress
from meshkit.optim import lr_schedule
from meshkit.step import Run, clip_grad_norm


def sft_losses(logps_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """-log pi(y_t), 0 where masked; [N, T]. The objective is their sum over the unmasked tokens of the step (token-level).

    This is cross-entropy: `next_token_loss` computes the same from logits in less memory.
    """
    return -masked_logps(logps_NT, mask_NT)


def dft_losses(logps_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """-sg(pi(y_t)) log pi(y_t), 0 where masked; [N, T], where sg passes no gradient. Divided by tokens, as `sft_losses`.

    Source: Wu et al. 2025 (2508.05629).
    """
    logps_NT = masked_logps(logps_NT, mask_NT)
    return -logps_NT.detach().exp() * logps_NT


def dft_loss(model: nn.Module, part: dict[str, Any]) -> Tensor:
    """`dft_losses` summed over the learnt tokens, for `Run.forward_backward`."""
    return dft_losses(label_log_probs(model, part), part["labels"] != IGNORED).sum()


def sft_steps(
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
    checkpoints: Checkpointer | None = None,
    save_every: int = 50,
    leave: Callable[[], bool] = lambda: False,
) -> bool:
    """Take `steps` training steps on the learnt tokens of `global_batch` examples each, packed, in a shuffled order.

    examples: the same on every rank. lr_kind: see `lr_factor`; schedules that fall end at a tenth of the peak.
    microbatches: gradient accumulation. each: called after every step with its scalars, on every rank.
    checkpoints: continue from the newest, and save one every `save_every` steps, after the last, and on leaving.
    leave: called after every step, on every rank; True ends the steps there.
    Returns: whether all steps are done. Every rank must call it. Wire: that of the steps, and of checkpoints.
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


def sft_phase(
    run: Run, optimizer: Optimizer, examples: Sequence[Example], out: Path, *, steps: int, **options: Any
) -> bool:
    """Run `sft_steps` with checkpoints, signals, progress and logs, continuing from a checkpoint in `out` of any mesh.

    out: gets `checkpoints`, also when SIGTERM or SIGUSR1 ends the phase, and the files of `Logger`.
    options: more arguments of `sft_steps`: global_batch, seq_len, seed, and others that differ from their defaults.
    Returns: whether all steps are done; False where a signal ended it. Every rank must call it.
    """
    mesh, is_main = run.mesh, run.mesh.rank == 0
    checkpoints = Checkpointer(out / "checkpoints", keep=1)
    start = checkpoints.latest() or 0  # for the displays of rank 0; in `sft_steps` all ranks agree on it
    with (
        checkpoints,
        SaveOnSignal() as signals,
        Progress(total_steps=steps, start_step=start, enabled=is_main) as progress,
        Logger(out, start_step=start, enabled=is_main, also=[progress.update]) as logger,
    ):
        done = sft_steps(
            run,
            optimizer,
            examples,
            steps=steps,
            each=logger.log,
            checkpoints=checkpoints,
            leave=lambda: signals.should_stop(mesh),
            **options,
        )
    if not done and is_main:
        print(f"{signals.received or 'a signal on another rank'}: saved in {out}; start again to go on")
    return done
