"""Flags of the model: what it begins with, and adapters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from meshkit.errors import PlanError
from meshkit.lora import attach
from meshkit.models import config_from_pretrained
from meshkit.plan import Plan
from meshkit.recipes.ranges import Count, Positive, Ranged, Share


@dataclass(frozen=True, kw_only=True)
class ModelFlags(Ranged):
    """The weights and the shape that a model begins with."""

    pretrained: Path | None = None
    """start from the weights, shape and tokenizer of this Hugging Face folder; default: a small model, from nothing"""

    def shape(self, default: Any, vocab_size: int | None = None) -> Any:
        """The configuration of the model: of --pretrained as it is, of the default with the tokenizer's vocabulary."""
        # A folder's vocabulary is not changed: its embedding may be padded beyond the tokenizer's.
        if self.pretrained is not None:
            return config_from_pretrained(self.pretrained)
        return dataclasses.replace(default, vocab_size=vocab_size or default.vocab_size)


@dataclass(frozen=True, kw_only=True)
class LoraFlags(ModelFlags):
    """Adapters (LoRA, QLoRA) instead of all weights."""

    lora_rank: Count | None = None
    """train adapters of this rank on a frozen model, and write them alone, as a folder of PEFT's"""
    lora_alpha: Positive | None = None
    """default: twice the rank"""
    lora_dropout: Share = 0.0
    """of the adapters' inputs"""
    lora_base: Literal["nf4", "int8"] | None = None
    """QLoRA: hold the frozen weights in 4 or 8 bits"""

    def adapted(self, model: nn.Module, plan: Plan, *, seed: int) -> Plan:
        """Give the model its adapters, in place, and return the plan of both; without --lora-rank nothing changes."""
        if self.lora_rank is None:
            return plan
        options: dict[str, Any] = {"dropout": self.lora_dropout, "base": self.lora_base, "seed": seed}
        # alpha / rank scales the update: twice the rank makes it 2 at any rank.
        return attach(model, plan, rank=self.lora_rank, alpha=self.lora_alpha or 2.0 * self.lora_rank, **options)

    def refuse_lora_without_rank(self) -> None:
        """Raises: PlanError for flags of adapters without --lora-rank."""
        if self.lora_rank is None and (self.lora_base or self.lora_dropout):
            raise PlanError("lora_base and lora_dropout are of adapters, and there are none without lora_rank.")

    def refuse_lora_of_nothing(self) -> None:
        """Raises: PlanError for adapters without --pretrained, and for flags of adapters without --lora-rank."""
        self.refuse_lora_without_rank()
        if self.lora_rank is not None and self.pretrained is None:
            raise PlanError(
                f"lora_rank={self.lora_rank} without pretrained: adapters change a model that has learnt something, and "
                "this one begins from nothing. Give --pretrained FOLDER, or leave --lora-rank away."
            )

    def export_name(self, step: int) -> str:
        """Of the folder with the trained model, or its adapters alone."""
        return f"{'model' if self.lora_rank is None else 'adapter'}-{step}"
