"""Choices of memory: activation checkpointing (recompute), offload, mixed precision, chunked loss, optimizer state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from meshkit.errors import PlanError
from meshkit.plan.match import listed

RecomputeMode = Literal["none", "full", "selective", "activation"]
Kept = Literal["matmul", "attention", "collective", "product"]
States = Literal["fp32", "8bit", "4bit", "fp8"]
Recipe = Literal["tensorwise", "rowwise"]
LossBackend = Literal["torch", "liger"]

DEFAULT_KEEP: tuple[Kept, ...] = ("matmul", "attention", "collective")
DEFAULT_STAGING = 256 << 20
DEFAULT_LOSS_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Activation checkpointing: what blocks run again in backward.

    mode: "full" keeps a block's input only; "selective" also keeps the results of the operations in `keep`; "activation"
    keeps everything except what is between the matrix products of gated feed-forwards, silu(gate) and its product with up.
    every: the first of each n blocks is checkpointed, and the others keep everything. keep: with "selective", the operations
    whose results are kept; with "activation", "product" keeps the product. every_second_matmul: with "selective", keep only
    every second matrix product of a block.
    """

    mode: RecomputeMode = "full"
    every: int = 1
    keep: tuple[Kept, ...] = DEFAULT_KEEP
    every_second_matmul: bool = False

    def __post_init__(self) -> None:
        _refuse_other(f"Recompute(mode={self.mode!r})", self.mode, RecomputeMode)
        object.__setattr__(self, "keep", listed(self.keep, where="Recompute", argument="keep"))
        for kind in self.keep:
            _refuse_other(f"Recompute(keep={self.keep!r}): {kind!r}", kind, Kept)
        if not isinstance(self.every, int) or self.every < 1:
            raise PlanError(f"Recompute(every={self.every!r}): every n-th block is treated, n at least 1.")
        # Half of the matrix products is half of the memory that "selective" adds: a step between it and "full".
        if self.every_second_matmul and (self.mode != "selective" or "matmul" not in self.keep):
            raise PlanError(
                f"Recompute(every_second_matmul=True) halves what is kept of matrix products, but mode={self.mode!r} with "
                f"keep={self.keep!r} keeps none. Use mode='selective' with 'matmul' in keep."
            )
        self._refuse_idle()

    def _refuse_idle(self) -> None:
        """Raises: PlanError for what the mode does not look at: it would be passed over in silence."""
        asked = f"Recompute(mode={self.mode!r}, keep={self.keep!r})"
        if self.mode == "none" and self.every > 1:
            raise PlanError(
                f"Recompute(mode='none', every={self.every}): no block is treated, so not every {self.every}-th either. "
                "Choose another mode, or leave every away."
            )
        if self.mode == "selective" and "product" in self.keep:
            raise PlanError(
                f"{asked}: 'product' is what mode='activation' may keep. Leave it out, or use mode='activation'."
            )
        # The default is of "selective", and other modes pass it by: only what was given against it was asked for.
        if self.keep == DEFAULT_KEEP or self.mode == "selective":
            return
        if self.mode == "activation" and set(self.keep) - {"product"}:
            raise PlanError(
                f"{asked}: mode='activation' keeps matrix products anyway, attention and collectives too; only 'product' is "
                "a choice. Use keep=('product',), or leave keep away."
            )
        if self.mode in ("none", "full"):
            does = "keeps everything anyway" if self.mode == "none" else "runs all of a block again and keeps its input"
            raise PlanError(f"{asked}: mode={self.mode!r} {does}. Use mode='selective', or leave keep away.")

    @property
    def runs_block_again(self) -> bool:
        """Does backward run a block's forward again, with kept results put in? Otherwise at most a piece of it runs again."""
        return self.mode in ("full", "selective")

    def keeps(self, kind: Kept) -> bool:
        """Are the results of this kind of operation kept, so that none of them runs again?"""
        if kind == "product":
            return self.mode == "none" or (self.mode == "activation" and kind in self.keep)
        return self.mode in ("none", "activation") or (self.mode == "selective" and kind in self.keep)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a rank computes, reads and writes its memory, and sends: a `Budget` estimates the time of a choice from it,
    and so do the dynamic groups of a `ContextPolicy`.

    link_bytes_per_s: inside of a node; network_bytes_per_s: between nodes. host_bytes_per_s: one way between the device and
    the host, or the disk that activations are offloaded to. Only the ratios of the rates matter to the choice. The defaults
    are guesses for one H100, bf16: measure yours.
    """

    # To compare, stated of an H100 SXM: 989e12 dense bf16 FLOP/s, 3.35e12 B/s of HBM3, 450e9 B/s each way over NVLink, and
    # 63e9 B/s each way over PCIe 5.0 x16, 50e9 B/s over a network card of 400 Gb/s.
    flops_per_s: float = 4e14
    memory_bytes_per_s: float = 2.5e12
    link_bytes_per_s: float = 2e11
    host_bytes_per_s: float = 5e10
    network_bytes_per_s: float = 4e10

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise PlanError(f"Rates({name}={value!r}): a rate is more than 0.")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Automatic activation checkpointing: for every block the cheapest choice within `bytes` of activations per rank.

    The choices are to keep, to recompute, to gather again, and, with `MemoryPolicy(offload=...)`, to offload. rows, seq_len:
    of a microbatch of one rank, as `forward_backward` will run it; seq_len before cp splits it. microbatches: of a step; with
    pp a rank holds the activations of several at a time.
    """

    bytes: int
    rows: int
    seq_len: int
    microbatches: int = 1
    rates: Rates = field(default_factory=Rates)

    def __post_init__(self) -> None:
        for name, least in (("bytes", 0), ("rows", 1), ("seq_len", 1), ("microbatches", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise PlanError(f"Budget({name}={value!r}) must be a whole number of at least {least}.")


@dataclass(frozen=True, kw_only=True)
class ActivationOffload:
    """Activation offload: move what blocks keep for backward off the device until backward needs it.

    to: "host" is (pinned) memory of the host, "disk" are files in `folder`. keep_last: the number of blocks at the end that
    keep their activations, since backward begins with them. min_bytes: smaller storages are not moved. ahead: how many blocks
    before its use an activation is fetched. reserve: bytes of the host, or of the disk, allocated before the first step; more
    is allocated when needed. folder: None is the system's folder for temporary files. staging: with "disk", bytes of host
    memory for writes in flight.
    """

    to: Literal["host", "disk"] = "host"
    keep_last: int = 1
    min_bytes: int = 4096
    ahead: int = 1
    reserve: int = 0
    folder: str | os.PathLike[str] | Path | None = None  # a Path, once made
    staging: int = DEFAULT_STAGING

    def __post_init__(self) -> None:
        if self.to not in ("host", "disk"):
            raise PlanError(f"ActivationOffload(to={self.to!r}): activations can wait on the 'host' or on 'disk'.")
        for name, least in (("keep_last", 0), ("min_bytes", 1), ("ahead", 0), ("reserve", 0), ("staging", 1)):
            if getattr(self, name) < least:
                raise PlanError(f"ActivationOffload({name}={getattr(self, name)}): use at least {least}.")
        if self.folder is not None:
            object.__setattr__(self, "folder", Path(self.folder))
        if self.folder is not None and self.to == "host":
            raise PlanError(
                f'ActivationOffload(folder={str(self.folder)!r}) is where to="disk" writes. Give to="disk" too.'
            )
        if self.staging != DEFAULT_STAGING and self.to == "host":
            raise PlanError(
                f'ActivationOffload(staging={self.staging}) is host memory for writes of to="disk". Give to="disk" too, or '
                "leave staging away."
            )


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss:
    """The head and the cross-entropy over `tokens` tokens at a time, so that the logits of all tokens never exist at once.

    backend: "torch" is meshkit's; "liger" is liger-kernel's, on GPUs without tp, which chooses its own chunks.
    Raises: PlanError for no tokens, or an unknown backend.
    """

    tokens: int = DEFAULT_LOSS_TOKENS
    backend: LossBackend = "torch"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise PlanError(f"ChunkedLoss(tokens={self.tokens}): a chunk has at least one token. 1024 is the default.")
        if self.backend not in get_args(LossBackend):
            choices = " or ".join(repr(choice) for choice in get_args(LossBackend))
            raise PlanError(f"ChunkedLoss(backend={self.backend!r}): choose {choices}.")
        if self.backend == "liger" and self.tokens != DEFAULT_LOSS_TOKENS:
            raise PlanError(
                f"ChunkedLoss(tokens={self.tokens}, backend='liger'): liger chooses its own chunks. Leave tokens away, or "
                "use backend='torch'."
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerOffload:
    """Optimizer offload: keep fp32 masters and optimizer state on the host, and update them there.

    resident: the share of them that stays on the device, 0 to 1. delayed: each update is applied one step late, while
    the next step runs.
    """

    resident: float = 0.0
    delayed: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.resident <= 1:
            raise PlanError(f"OptimizerOffload(resident={self.resident!r}): a share of the states, from 0 to 1.")
        # A delayed update runs on the host beside the next forward (Ren et al. 2021, section 5.2): of one step's parameters
        # those on the device would be updated, those on the host not yet.
        if self.delayed and self.resident:
            raise PlanError(
                f"OptimizerOffload(resident={self.resident}, delayed=True): what stays on the device would be updated at "
                "once and the rest a step late. Choose one of them."
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerPolicy:
    """states: how Adam's moments are stored. stochastic_rounding: bf16 parameters without fp32 masters are rounded at
    random, so that small updates are not lost. offload: None keeps everything on the device.
    """

    states: States = "fp32"
    stochastic_rounding: bool = False
    offload: OptimizerOffload | None = None

    def __post_init__(self) -> None:
        if self.states not in get_args(States):
            choices = ", ".join(repr(choice) for choice in get_args(States))
            raise PlanError(f"OptimizerPolicy(states={self.states!r}): choose one of {choices}.")
        # Few bits and stochastic rounding save bytes of the device; what is on the host costs none there.
        if self.offload is not None and (self.states != "fp32" or self.stochastic_rounding):
            raise PlanError(
                f"OptimizerPolicy(states={self.states!r}, stochastic_rounding={self.stochastic_rounding}, offload=...): the "
                "host keeps fp32 masters and moments, so nothing is rounded or stored in few bits there. Use "
                "states='fp32' without stochastic_rounding, or offload=None."
            )

    def refuse_misfit(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """dtypes: of the parameters, by name. Raises: PlanError for stochastic rounding where no parameter is bf16."""
        # bf16 has 8 significant bits: an update below 2^-9 of the weight rounds to nothing, every time. Rounded at random it
        # is kept on average (Gupta et al. 2015). fp32 has 24.
        if self.stochastic_rounding and torch.bfloat16 not in dtypes.values():
            name, dtype = next(iter(dtypes.items()), ("no parameter", None))
            raise PlanError(
                f"stochastic_rounding=True rounds bf16 parameters, but {name!r} is {dtype}. Build the model in bf16 "
                "(model.to(torch.bfloat16)), or leave it away: wider parameters lose no small update."
            )


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """Linear layers of blocks in fp8, by torchao. gather: all-gather weights in fp8 too (tensorwise, without tp).

    emulate: round to fp8 and multiply in a wider dtype, on any device; for tests, since it is slower than no fp8.
    """

    recipe: Recipe = "tensorwise"
    gather: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        if self.recipe not in get_args(Recipe):
            raise PlanError(f"Fp8(recipe={self.recipe!r}): choose one of 'tensorwise', 'rowwise'.")
        # FSDP shards dim 0, the rows. Backward multiplies with the transpose, whose rows lie on all ranks. One scale of the
        # whole tensor is one all-reduced maximum.
        if self.gather and self.recipe == "rowwise":
            raise PlanError(
                "Fp8(recipe='rowwise', gather=True): a rank's shard does not hold the scales that rows of the transposed "
                "weight need. Use recipe='tensorwise', or gather=False."
            )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Mixed precision: compute and reduction dtypes. Parameters and optimizer state keep their own dtype (fp32 masters)."""

    # Gradients of many ranks are summed one after the other along a ring: in bf16 small ones would be lost in the sum.
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
    """What a step keeps, where, and in which dtype; `estimate` says how many bytes that is.

    recompute: activation checkpointing. "none" keeps every activation; "full" keeps each block's input and runs its forward
    again in backward; "selective" keeps the results of matrix products, attention and collectives, and runs the cheap rest
    again; "activation" runs only the elementwise middle of feed-forwards again. A `Recompute` says more, a `Budget` chooses.
    offload: where kept activations are moved; with a `Budget`, those of the blocks that it chooses. regather: with
    sequence=True, keep the sharded input of a tensor-parallel region and gather it again in backward. mlp_chunks: the number
    of parts of the tokens that feed-forwards run on, one after the other. loss: None computes the logits of all tokens at
    once. precision: None computes in the parameters' own dtype; `Precision()` is bf16 over fp32 masters. optimizer: what
    `adamw` builds.
    """

    recompute: RecomputeMode | Recompute | Budget = "none"
    offload: ActivationOffload | None = None
    regather: bool = False
    mlp_chunks: int = 1
    loss: ChunkedLoss | None = None
    precision: Precision | None = None
    optimizer: OptimizerPolicy = field(default_factory=OptimizerPolicy)

    def __post_init__(self) -> None:
        if isinstance(self.recompute, str):
            _refuse_other(f"MemoryPolicy(recompute={self.recompute!r})", self.recompute, RecomputeMode)
        if not isinstance(self.mlp_chunks, int) or self.mlp_chunks < 1:
            raise PlanError(
                f"MemoryPolicy(mlp_chunks={self.mlp_chunks!r}): feed-forwards run on 1 part of the tokens, or more."
            )


def _refuse_other(asked: str, value: str, allowed: Any) -> None:
    if value not in get_args(allowed):
        choices = ", ".join(repr(choice) for choice in get_args(allowed))
        raise PlanError(f"{asked}: choose one of {choices}.")
