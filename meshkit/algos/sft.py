"""Supervised fine-tuning (SFT): losses, and training steps on examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshkit.algos.preference import masked_logps
from meshkit.algos.rollout import label_log_probs
from meshkit.data import Example, ExampleLoader
from meshkit.loss import IGNORED
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
    # The probability is a weight: with its gradient the objective would be -p log p, which is another one.
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
) -> None:
    """Take `steps` training steps on the learnt tokens of `global_batch` examples each, balanced, in a shuffled order.

    examples: the same on every rank. lr_kind: see `lr_factor`; schedules that fall end at a tenth of the peak.
    microbatches: gradient accumulation. each: called after every step with its scalars, on every rank.
    Every rank must call it. Wire: that of the steps. With checkpoints and logs: `meshkit.recipes.sft_phase`.
    """
    mesh = run.mesh
    loader = ExampleLoader(
        examples,
        seq_len=seq_len,
        global_batch=global_batch,
        seed=seed,
        rank=mesh.data_rank,
        ranks=mesh.data_ranks,
        packing="balanced",
        pad_multiple=mesh.row_multiple,
    )
    # A call may be shorter than the warm-up, as a round of rejection sampling is.
    scheduler = lr_schedule(
        optimizer, kind=lr_kind, warmup_steps=min(warmup_steps, steps), total_steps=max(1, steps), min_factor=0.1
    )
    for step in range(1, steps + 1):
        loss = run.forward_backward(next(loader), microbatches=microbatches, step=step)
        norm = clip_grad_norm(run, clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        each(step, {"loss": loss.item(), "grad_norm": norm.item()})
