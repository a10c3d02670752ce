"""A model of the zoo with its batches and loss, and a cell: the model on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.step import Batch, Count, Loss
from tests.zoo.shrink import DATA_IDS

ROWS, TOKENS = 4, 16


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model on a mesh. padded: batches have an `attention_mask`, by which some rows begin later. replicate: what is
    unproved is left whole. generate: it answers prompts, and takes no step."""

    model: str
    mesh: str
    sequence: bool = False
    padded: bool = False
    replicate: bool = False
    generate: bool = False

    @property
    def ranks(self) -> int:
        return mk.MeshSpec.parse(self.mesh).world_size

    @property
    def column(self) -> str:
        """The cell's mesh and variant in one text, which the table has a line for."""
        return self.mesh + "".join(f", {name}" for name in _VARIANTS if getattr(self, name))

    @staticmethod
    def of(model: str, column: str) -> Cell:
        mesh, *variants = column.split(", ")
        return Cell(model=model, mesh=mesh, **{name: name in variants for name in _VARIANTS})


_VARIANTS = ("sequence", "padded", "replicate", "generate")

COLUMNS = (
    "dp_shard=2",
    "tp=2",
    "tp=2, sequence",
    "pp=2",
    "cp=2",
    "cp=2, replicate",
    "dp_shard=2 ep=2",
    "dp_shard=2 etp=2",
    "dp_shard=2, padded",
    "tp=2, padded",
    "pp=2, padded",
    "cp=2, padded",
    "dp_shard=2 tp=2",
    "pp=2 tp=2",
    "dp_shard=1, generate",
    "dp_shard=2, generate",
    "tp=2, generate",
    "tp=2, sequence, generate",
    "pp=2, generate",
    "cp=2, generate",
    "dp_shard=2 ep=2, generate",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """build: the same values in every call. batch: of a step. loss, count: None are meshkit's own, for next tokens.
    example: of a batch, where the forward takes more than token ids."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Loss | None = None
    count: Count | None = None
    example: Callable[[Batch], mk.Example] | None = None


def tokens(seed: int, *, padded: bool = False) -> Batch:
    """Every row different, a fifth of the labels ignored; padded: the first rows begin with what is no token."""
    generator = torch.Generator().manual_seed(100 + seed)
    ids = torch.randint(*DATA_IDS, (ROWS, TOKENS + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    batch = {"input_ids": ids[:, :-1].clone(), "labels": labels}
    if padded:
        begin = torch.tensor([3, 0, 0, 5])[:, None]
        is_token = torch.arange(TOKENS) >= begin
        batch["attention_mask"] = is_token.long()
        batch["input_ids"][~is_token] = 0
        labels[~is_token] = -100
    return batch


def mean_loss(case: Case, model: nn.Module, batch: Batch) -> Tensor:
    """The oracle's loss of the whole batch."""
    if case.loss is not None:
        count = case.count(batch) if case.count is not None else (batch["labels"] != -100).sum()
        return case.loss(model, batch) / count
    extra = {"attention_mask": batch["attention_mask"]} if "attention_mask" in batch else {}
    output = model(batch["input_ids"], **extra)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
