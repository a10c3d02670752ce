"""How memory is spent, as data: what is kept for backward and where, which dtypes compute, how optimizer state is held."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch

from meshkit.errors import PlanError

RecomputeMode = Literal["none", "full", "selective"]
Kept = Literal["matmul", "attention", "collective"]
States = Literal["fp32", "8bit", "4bit", "fp8"]
Recipe = Literal["tensorwise", "rowwise"]
LossBackend = Literal["torch", "liger"]


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What blocks run again in backward.

    mode: "full" keeps a block's input; "selective" keeps also what `keep` names. every: of n blocks in a row, the first is
    treated so and the others keep everything. keep: with "selective", the operations whose results are kept.
    every_second_matmul: with "selective", keep every second matrix product of a block only.
    """

    mode: RecomputeMode = "full"
    every: int = 1
    keep: tuple[Kept, ...] = ("matmul", "attention", "collective")
    every_second_matmul: bool = False


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Choose for every block what is cheapest within `bytes` of activations a rank.

    rows, seq_len: a microbatch of one rank, as `forward_backward` will run it.
    """

    bytes: int
    rows: int
    seq_len: int


@dataclass(frozen=True, kw_only=True)
class ActivationOffload:
    """Move what blocks keep for backward off the device until backward needs it.

    to: "host" is (pinned) memory of the host, "disk" are files in `folder`. keep_last: this many blocks at the end keep
    theirs, since backward begins with them. min_bytes: smaller tensors stay. ahead: blocks fetched before they are needed.
    """

    to: Literal["host", "disk"] = "host"
    keep_last: int = 1
    min_bytes: int = 4096
    ahead: int = 1
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss:
    """The head and the cross-entropy over `tokens` tokens at a time, so that whole logits never exist.

    backend: "torch" is ours; "liger" is the kernel of liger-kernel, on GPUs without tp, which chooses its own chunks.
    Raises: PlanError for no tokens, or an unknown backend.
    """

    tokens: int = 1024
    backend: LossBackend = "torch"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise PlanError(f"ChunkedLoss(tokens={self.tokens}): a chunk has at least one token. 1024 is the default.")
        if self.backend not in get_args(LossBackend):
            choices = " or ".join(repr(choice) for choice in get_args(LossBackend))
            raise PlanError(f"ChunkedLoss(backend={self.backend!r}): choose {choices}.")


@dataclass(frozen=True, kw_only=True)
class OptimizerOffload:
    """Keep masters and optimizer state on the host, and update them there.

    resident: the share of them that stays on the device, 0 to 1. delayed: each update is applied one step late, while
    the next step runs.
    """

    resident: float = 0.0
    delayed: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerPolicy:
    """states: how Adam's moments are stored. stochastic_rounding: bf16 parameters without fp32 masters are rounded at
    random, so that small updates are not lost. offload: None keeps everything on the device.
    """

    states: States = "fp32"
    stochastic_rounding: bool = False
    offload: OptimizerOffload | None = None


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """Linear layers in fp8 by torchao. gather: parameters are all-gathered in fp8 too (tensorwise only)."""

    recipe: Recipe = "tensorwise"
    gather: bool = True


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Compute and reduction dtypes. Parameters and optimizer state keep the dtype they are built in (fp32 masters)."""

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32
    fp8: Fp8 | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("compute", self.compute), ("reduce", self.reduce)):
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise PlanError(
                    f"Precision({name}={dtype!r}) is not a floating-point dtype. Use torch.bfloat16, for example."
                )


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    """What a step may keep, where, and in which dtype; `estimate` says what it comes to.

    recompute: "none" keeps every activation; "full" keeps each block's input and runs its forward again in backward;
    "selective" keeps the results of matrix products, attention and collectives, and runs the cheap rest again; `Recompute`
    says more, `Budget` chooses. offload: where kept activations wait. regather: with sequence=True, keep the sharded input
    of a tensor-parallel region and gather it again in backward. tiles: feed-forwards run on so many parts of the tokens.
    loss: None makes whole logits. precision: None computes in the parameters' own dtype; `Precision()` is bf16 over fp32
    masters. optimizer: what `adamw` builds.
    """

    recompute: RecomputeMode | Recompute | Budget = "none"
    offload: ActivationOffload | None = None
    regather: bool = False
    tiles: int = 1
    loss: ChunkedLoss | None = None
    precision: Precision | None = None
    optimizer: OptimizerPolicy = field(default_factory=OptimizerPolicy)

    def __post_init__(self) -> None:
        if isinstance(self.recompute, str) and self.recompute not in get_args(RecomputeMode):
            choices = ", ".join(repr(choice) for choice in get_args(RecomputeMode))
            raise PlanError(f"MemoryPolicy(recompute={self.recompute!r}): choose one of {choices}.")
