"""The table of cells: what is compared, on which ranks, with whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.peers.work import MOE, Answers, PostTraining, Reading, Rollouts, Saving, Training, Work


@dataclass(frozen=True, kw_only=True)
class Cell:
    """kind: the function of each library's file that does the work. tolerance: relative, of what steps are known by.

    warmup, steps: before the first block, and of a block.
    """

    kind: str
    work: Work
    peers: tuple[str, ...]
    tolerance: float = 2e-6  # only the order of sums differs
    warmup: int = 3
    steps: int = 2


# Peer, which is the name of its file -> the package whose version a row names.
PACKAGES = {
    "plain": "torch",
    "torchtitan": "torchtitan",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "megatron": "megatron-core",
    "trl": "trl",
    "transformers": "transformers",
}


def _train(mesh: str, *peers: str, **choices: Any) -> Cell:
    return Cell(kind="train", work=Training(mesh=mesh, **choices), peers=peers)


def _moe(mesh: str, *peers: str) -> Cell:
    return Cell(kind="moe", work=Training(mesh=mesh, config=MOE), peers=peers)


def _answer(prompts: int, **choices: Any) -> Cell:
    """Ids are the same or not."""
    work = Answers(prompts=prompts, **choices)
    return Cell(kind="answer", work=work, peers=("transformers",), tolerance=0.0, warmup=1, steps=1)


CELLS: dict[str, Cell] = {
    "1 rank": _train("dp_shard=1", "plain", "torchtitan", "accelerate", "megatron"),
    "replicas": _train("dp_replicate=2", "plain", "torchtitan", "accelerate", "megatron"),
    "ZeRO-1": _train("dp_shard=2", "plain", "deepspeed", zero=1),
    "ZeRO-2": _train("dp_shard=2", "plain", "deepspeed", zero=2),
    "FSDP": _train("dp_shard=2", "plain", "torchtitan", "accelerate", "deepspeed"),
    "tp": _train("tp=2", "plain", "megatron"),
    "tp, sequence": _train("tp=2", "plain", "torchtitan", sequence=True),
    "pp, 1F1B": _train("pp=2", "plain", "torchtitan", stages=(3, 3)),
    "pp, ZBV": _train("pp=2", "plain", schedule="zbv", stages=(1, 2, 2, 1)),
    "cp": _train("cp=2", "plain"),
    "FSDP, tp, sequence": _train("dp_shard=2 tp=2", "plain", "torchtitan", sequence=True),
    "replicas, tp": _train("dp_replicate=2 tp=2", "megatron"),
    "tp, sequence, pp": _train("pp=2 tp=2", "torchtitan", sequence=True, stages=(3, 3)),
    "MoE, 1 rank": _moe("dp_shard=1", "plain", "torchtitan"),
    "MoE, FSDP": _moe("dp_shard=2", "plain", "torchtitan"),
    "MoE, ep": _moe("dp_shard=2 ep=2", "torchtitan"),
    "SFT": Cell(kind="sft", work=PostTraining(), peers=("trl",)),
    # The loss is a small difference of sums of log-probabilities.
    "DPO": Cell(kind="dpo", work=PostTraining(), peers=("trl",), tolerance=1e-5),
    # Draws are not the same, so steps are known by their tokens; the loss is held against TRL's in tests/algos.
    "GRPO, short equal answers": Cell(kind="grpo", work=Rollouts(), peers=("trl",), tolerance=0.0),
    "1 answer": _answer(1),
    "8 equal answers": _answer(8),
    "64 equal answers": _answer(64),
    "8 unequal answers": _answer(8, new_tokens=256, ends=40),
    "64 unequal answers": _answer(64, new_tokens=256, ends=40),
    "checkpoint, save": Cell(kind="save", work=Saving(), peers=("plain",), warmup=1, steps=1),
    "checkpoint, load": Cell(kind="load", work=Saving(), peers=("plain",), warmup=1, steps=1),
    "data": Cell(kind="read", work=Reading(), peers=("plain",), warmup=1, steps=1),
}
