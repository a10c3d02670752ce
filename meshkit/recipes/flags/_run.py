"""Flags of a run and its training steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from meshkit.data import BatchRamp
from meshkit.errors import PlanError
from meshkit.metrics import TrackerName
from meshkit.optim import lr_schedule
from meshkit.recipes.ranges import Count, CountOrNone, NotNegative, Ranged, Threshold
from meshkit.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class RunFlags(Ranged):
    """Files and clocks of a run: what `Session` reads."""

    out: Path = Path("runs/recipe")
    """checkpoints, logs, traces and the final model"""
    eval_every: CountOrNone = 50
    """evaluate in every so many steps, and after the last one; 0: after the last one alone"""
    save_every: CountOrNone = 50
    """save a checkpoint in every so many steps, and after the last one; 0: after the last one alone"""
    keep: Count = 2
    """number of checkpoints to keep; older ones are deleted"""
    alert: str = ""
    """who is told of stalls, errors, lost and slow ranks: "file.py:function", or an address for a POST of JSON"""
    status_page: bool = False
    """write status.html in --out every five seconds: where each rank is, and whether it works or waits"""
    call_files: bool = False
    """write the last calls of each rank (collectives, messages) into --out/calls, at a report and at the end"""
    track: tuple[TrackerName, ...] = ("tensorboard",)
    """where losses, flags, samples and pictures go besides the files in --out; --track alone: nowhere"""
    track_project: str = "meshkit"
    """the project of W&B, the experiment of MLflow"""
    track_name: str = ""
    """of this run there; without one, the last part of --out"""
    profile: bool = False
    """write a Chrome trace of three steps, and with pp one of the schedule beside its simulation"""
    gc_every: CountOrNone = 100
    """collect Python's garbage in every so many steps, in the same ones on all ranks, and never else; 0: when Python does"""
    fp32_precision: Literal["ieee", "tf32"] = "ieee"
    """of fp32 products on CUDA, such as a router's in backward: whole, or by TF32 with 10 bits of each factor"""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LearnFlags(RunFlags):
    """Size, learning rate and clipping of a training step."""

    seq_len: Count = 256
    """tokens of a row"""
    microbatches: Count = 1
    """gradient accumulation: the number of parts in which a rank runs its rows"""
    lr: NotNegative = 3e-3
    warmup_steps: CountOrNone = 15
    weight_decay: NotNegative = 0.1
    clip: Threshold = 1.0
    """gradient clipping: the largest norm of a step's gradients"""


@dataclass(frozen=True, kw_only=True)
class StepFlags(LearnFlags):
    """Number of training steps, and the learning rate schedule over them."""

    steps: Count = 160
    lr_kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    max_skips: CountOrNone = 0
    """how many steps in a row may be skipped because gradients are not finite"""
    memory_every: CountOrNone = 0
    """keep a checkpoint in the memory of the hosts in every so many steps: a restarted job goes on from there; 0: never"""
    memory_copies: CountOrNone = 1
    """of what --memory-every keeps of each rank: on how many other hosts, which may be lost; none on a single host"""
    corruption_every: CountOrNone = 0
    """silent data corruption: compare weights and optimizer state in every so many steps; 0: never"""
    replay_every: CountOrNone = 0
    """with --corruption-every: run one microbatch again in every so many steps, on a GPU with kernels that add in one order,
    which are slower; 0: never"""

    def lr_schedule(self, optimizer: Optimizer, *, after: int = 0) -> LambdaLR:
        """Warm-up, then --lr-kind, which ends at a tenth of --lr if it falls. after: steps before the optimizer's first."""
        total = max(1, self.steps - after)
        warmup = min(self.warmup_steps, total) if after else self.warmup_steps
        return lr_schedule(optimizer, kind=self.lr_kind, warmup_steps=warmup, total_steps=total, min_factor=0.1)


@dataclass(frozen=True, kw_only=True)
class TrainFlags(StepFlags):
    """Training steps on given data."""

    global_batch: Count = 16
    """sequences, or rows of packed examples, of one optimizer step, over all ranks"""
    move_at: CountOrNone = 0
    """go on with the strategy of --move-to after so many steps, also in a job that is started again there; 0: never"""
    move_to: Path | None = None
    """a TOML file with that Strategy; without a mesh the ranks keep theirs"""
    forecast: str = ""
    """say after some steps how long a forecast on this cluster says that they take: a datasheet's name, or a file"""
    replan: NotNegative = 0.0
    """with --forecast: where it is wrong by more than this share of the step, search for the best strategy on the cluster as
    it was measured, and go on with that if it is faster; 0: never"""

    def move_strategy(self) -> Strategy | None:
        """Of --move-to; None without. Raises: PlanError for one flag without the other, and for what the loop says itself."""
        if self.replan and (not self.forecast or self.move_at):
            what = f"--move-at {self.move_at}" if self.move_at else "no --forecast"
            raise PlanError(
                f"--replan {self.replan} with {what}. Give a cluster's --forecast, and leave --move-at out."
            )
        if self.move_to is None and not self.move_at:
            return None
        if self.move_to is None or not 0 < self.move_at < self.steps:
            to = "no --move-to" if self.move_to is None else f"--move-to {self.move_to}"
            raise PlanError(
                f"--move-at {self.move_at} with {to} and --steps {self.steps}. Give a step from 1 to {self.steps - 1}, and a "
                "file with the Strategy that follows."
            )
        strategy = Strategy.read(self.move_to)
        if strategy.microbatches not in (None, self.microbatches):
            raise PlanError(
                f"--move-to {self.move_to} has microbatches={strategy.microbatches}, and the loop runs "
                f"--microbatches {self.microbatches} in every step. Leave them out of the file."
            )
        return strategy


@dataclass(frozen=True, kw_only=True)
class RampFlags(TrainFlags):
    """Training whose batch may grow, by an optimizer of choice."""

    optimizer: str = "adamw"
    """adamw, muon, "package:Class" of an optimizer, or "file.py:function", called as function(run, lr=, weight_decay=)"""
    last_batch: CountOrNone = 0
    """grow --global-batch to so many sequences, linearly over --ramp-tokens, with as many microbatches more; 0: never"""
    ramp_tokens: Count = 1_000_000
    """with --last-batch"""

    def batch_ramp(self) -> BatchRamp:
        """Sequences of a step by the tokens before it. Raises: DataError for a batch that would shrink."""
        return BatchRamp(first=self.global_batch, last=self.last_batch or self.global_batch, tokens=self.ramp_tokens)

    def microbatches_of(self, sequences: int) -> int:
        """Of a step of so many sequences: they stay as large."""
        return self.microbatches * sequences // self.global_batch
