"""Encoders, encoder-decoders and classifiers of transformers, tiny, each with a batch and a loss of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.zoo.causal import fill
from tests.zoo.shrink import DATA_IDS, tiny, without_randomness

Batch = dict[str, Tensor]
ROWS, TOKENS, CLASSES = 4, 16, 5


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """kind: a class of transformers. inputs: names of the batch that the forward takes. changed: fields of its config."""

    kind: str
    inputs: tuple[str, ...]
    changed: dict[str, Any]
    loss: Callable[[Foreign, nn.Module, Batch], Tensor]

    def build(self) -> nn.Module:
        made = getattr(transformers, self.kind)
        model = made(tiny(made.config_class, **self.changed)).to(torch.get_default_dtype())
        without_randomness(model)
        return fill(model).train()

    def call(self, model: nn.Module, batch: Batch) -> Any:
        return model(**{name: batch[name] for name in self.inputs})


def of_tokens(self: Foreign, model: nn.Module, batch: Batch) -> Tensor:
    logits = self.call(model, batch).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def of_rows(self: Foreign, model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(self.call(model, batch).logits, batch["classes"], reduction="sum")


def of_pairs(self: Foreign, model: nn.Module, batch: Batch) -> Tensor:
    """Each text against its own image: no other row."""
    out = self.call(model, batch)
    return -(out.text_embeds * out.image_embeds).sum()


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(300 + seed)
    ids = torch.randint(*DATA_IDS, (ROWS, TOKENS), generator=generator)
    labels = torch.randint(*DATA_IDS, (ROWS, TOKENS), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    return {
        "input_ids": ids,
        "decoder_input_ids": torch.randint(*DATA_IDS, (ROWS, TOKENS), generator=generator),
        "labels": labels,
        "classes": torch.randint(0, CLASSES, (ROWS,), generator=generator),
        "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator),
        "input_features": torch.randn(ROWS, 8, 2 * TOKENS, generator=generator),
    }


def rows_or_labels(of: Foreign, batch: Batch) -> Tensor:
    return (batch["labels"] != -100).sum() if of.loss is of_tokens else torch.tensor(batch["labels"].shape[0])


ENCODER: dict[str, Any] = {"is_decoder": False, "num_labels": CLASSES}
IMAGE: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_labels": CLASSES}
ids, both = ("input_ids",), ("input_ids", "decoder_input_ids")
FOREIGN = {
    "Bert": Foreign(kind="BertForMaskedLM", inputs=ids, changed=ENCODER, loss=of_tokens),
    "BertClassifier": Foreign(kind="BertForSequenceClassification", inputs=ids, changed=ENCODER, loss=of_rows),
    "DistilBert": Foreign(kind="DistilBertForMaskedLM", inputs=ids, changed={"dim": 32, "hidden_dim": 48}, loss=of_tokens),
    "ModernBert": Foreign(kind="ModernBertForMaskedLM", inputs=ids, changed={}, loss=of_tokens),
    "LlamaClassifier": Foreign(
        kind="LlamaForSequenceClassification", inputs=ids, changed={"num_labels": CLASSES, "pad_token_id": 0}, loss=of_rows
    ),
    "Vit": Foreign(kind="ViTForImageClassification", inputs=("pixel_values",), changed=IMAGE, loss=of_rows),
    "T5": Foreign(
        kind="T5ForConditionalGeneration", inputs=both, changed={"d_kv": 8, "d_ff": 48, "is_decoder": False}, loss=of_tokens
    ),
    "Bart": Foreign(kind="BartForConditionalGeneration", inputs=both, changed={"is_decoder": False}, loss=of_tokens),
    "Whisper": Foreign(
        kind="WhisperForConditionalGeneration",
        inputs=("input_features", "decoder_input_ids"),
        changed={"num_mel_bins": 8, "max_source_positions": TOKENS, "is_decoder": False},
        loss=of_tokens,
    ),
    "Clip": Foreign(
        kind="CLIPModel",
        inputs=("input_ids", "pixel_values"),
        changed={"vision_config": {**IMAGE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                                   "num_attention_heads": 4}, "projection_dim": 20},
        loss=of_pairs,
    ),
}  # fmt: skip


def loss_of(name: str) -> Callable[[nn.Module, Batch], Tensor]:
    return partial(FOREIGN[name].loss, FOREIGN[name])
