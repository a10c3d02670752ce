"""Hand-written decoders that go through all of the model's parameters: for a dtype, to count them, for a penalty on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.step import Batch
from tests.zoo.decoders import Plain


def penalty(module: nn.Module) -> Any:
    return sum(param.square().sum() for param in module.parameters()) / 100


class DtypeOfFirst(Plain):
    """As transformers' models ask for their own."""

    def forward(self, input_ids: Tensor) -> Tensor:
        first = next(self.parameters())
        return super().forward(input_ids).to(first.device, first.dtype)


class CountsElements(Plain):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * (9000 / sum(param.numel() for param in self.parameters()))


class CountsTied(CountsElements):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = self.embed_tokens.weight


class CountsModules(Plain):
    def forward(self, input_ids: Tensor) -> Tensor:
        linears = sum(isinstance(module, nn.Linear) for module in self.modules())
        parts = sum(1 for layer in self.layers for _ in layer.children())
        return super().forward(input_ids) * (linears + parts) / len(self.layers.state_dict())


class CountsInLoss(Plain):
    @staticmethod
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["input_ids"])
        return mk.cross_entropy(logits, batch["labels"]) / len(list(model.parameters()))


class Penalised(Plain):
    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids) * penalty(self)


class PenalisedBlocks(Plain):
    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids) * penalty(self.layers)


class PenalisedHead(Plain):
    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids) * penalty(self.lm_head)


class PenalisedByName(Plain):
    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids) * self.get_parameter("layers.0.mlp.up.weight").norm()


class PenalisedByState(Plain):
    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids) / torch.stack([each.norm() for each in self.state_dict().values()]).norm()


class PenaltyKept(Plain):
    def forward(self, input_ids: Tensor) -> Any:
        self.penalty = penalty(self)
        return super().forward(input_ids)

    @staticmethod
    def loss(model: Any, batch: Batch) -> Tensor:
        return mk.cross_entropy(model(batch["input_ids"]), batch["labels"]) + model.penalty * count(batch)


class PenaltyInLoss(Plain):
    @staticmethod
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return mk.cross_entropy(model(batch["input_ids"]), batch["labels"]) + penalty(model) * count(batch)


def count(batch: Batch) -> Tensor:
    return (batch["labels"] != -100).sum()
