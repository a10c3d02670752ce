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

import meshkit as mk
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
        torch.manual_seed(3)
        model = made(tiny(made.config_class, **self.changed)).to(torch.get_default_dtype())
        without_randomness(model)
        return fill(model).train()

    def taken(self, batch: Batch) -> Batch:
        """What of a batch the forward takes."""
        return {name.replace("image_ids", "input_ids"): batch[name] for name in self.inputs}

    def example(self, batch: Batch) -> mk.Example:
        return mk.Example(kwargs=self.taken(batch))

    def call(self, model: nn.Module, batch: Batch) -> Any:
        return model(**self.taken(batch))


def of_tokens(self: Foreign, model: nn.Module, batch: Batch) -> Tensor:
    logits = self.call(model, batch).logits
    return mk.cross_entropy(logits, batch["labels"])  # logits may be a DTensor on tp


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
        "attention_mask": (torch.arange(TOKENS) < torch.tensor([16, 9, 16, 12])[:, None]).long(),
        # Those of the image token stand for the patches of an image.
        "image_ids": torch.where(torch.arange(TOKENS) < 4, torch.tensor(85), ids),
        "input_features": torch.randn(ROWS, 8, 2 * TOKENS, generator=generator),
    }


def rows_or_labels(of: Foreign, batch: Batch) -> Tensor:
    return (batch["labels"] != -100).sum() if of.loss is of_tokens else torch.tensor(batch["labels"].shape[0])


ENCODER: dict[str, Any] = {"is_decoder": False, "num_labels": CLASSES}
CLASSIFIER: dict[str, Any] = {"num_labels": CLASSES, "pad_token_id": 0}
IMAGE: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_labels": CLASSES}
ids, both = ("input_ids",), ("input_ids", "decoder_input_ids")
FOREIGN = {
    "Bert": Foreign(kind="BertForMaskedLM", inputs=ids, changed=ENCODER, loss=of_tokens),
    "BertClassifier": Foreign(kind="BertForSequenceClassification", inputs=ids, changed=ENCODER, loss=of_rows),
    "DistilBert": Foreign(kind="DistilBertForMaskedLM", inputs=ids, changed={"dim": 32, "hidden_dim": 48}, loss=of_tokens),
    "ModernBert": Foreign(kind="ModernBertForMaskedLM", inputs=ids, changed={}, loss=of_tokens),
    "LlamaClassifier": Foreign(
        kind="LlamaForSequenceClassification", inputs=ids, changed=CLASSIFIER, loss=of_rows
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


ids_and_mask = ("input_ids", "attention_mask")
FOREIGN |= {
    "Roberta": Foreign(kind="RobertaForMaskedLM", inputs=ids, changed=ENCODER, loss=of_tokens),
    "RobertaClassifier": Foreign(kind="RobertaForSequenceClassification", inputs=ids, changed=ENCODER, loss=of_rows),
    "Electra": Foreign(kind="ElectraForMaskedLM", inputs=ids, changed=ENCODER, loss=of_tokens),
    "Albert": Foreign(kind="AlbertForMaskedLM", inputs=ids, changed=ENCODER, loss=of_tokens),
    "Deberta": Foreign(kind="DebertaV2ForMaskedLM", inputs=ids, changed=ENCODER, loss=of_tokens),
    "MPNet": Foreign(
        kind="MPNetForMaskedLM", inputs=ids, changed=ENCODER | {"relative_attention_num_buckets": 32}, loss=of_tokens
    ),
    "BertTokens": Foreign(
        kind="BertForTokenClassification", inputs=ids, changed=ENCODER | {"num_labels": 92}, loss=of_tokens
    ),
    "BertPadded": Foreign(kind="BertForMaskedLM", inputs=ids_and_mask, changed=ENCODER, loss=of_tokens),
    "Qwen2Classifier": Foreign(
        kind="Qwen2ForSequenceClassification", inputs=ids, changed=CLASSIFIER, loss=of_rows
    ),
    "Gpt2Classifier": Foreign(
        kind="GPT2ForSequenceClassification", inputs=ids, changed=CLASSIFIER, loss=of_rows
    ),
    "Gemma3Classifier": Foreign(
        kind="Gemma3TextForSequenceClassification", inputs=ids, changed=CLASSIFIER, loss=of_rows
    ),
    "Deit": Foreign(kind="DeiTForImageClassification", inputs=("pixel_values",), changed=IMAGE, loss=of_rows),
    "Dinov2": Foreign(kind="Dinov2ForImageClassification", inputs=("pixel_values",), changed=IMAGE, loss=of_rows),
    "Swin": Foreign(
        kind="SwinForImageClassification", inputs=("pixel_values",), loss=of_rows,
        changed=IMAGE | {"patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "ConvNext": Foreign(
        kind="ConvNextForImageClassification", inputs=("pixel_values",), loss=of_rows,
        changed=IMAGE | {"patch_size": 2, "hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2},
    ),
    "Mt5": Foreign(
        kind="MT5ForConditionalGeneration", inputs=both, loss=of_tokens,
        changed={"d_kv": 8, "d_ff": 48, "is_decoder": False},
    ),
    "T5Padded": Foreign(
        kind="T5ForConditionalGeneration", inputs=(*both, "attention_mask"), loss=of_tokens,
        changed={"d_kv": 8, "d_ff": 48, "is_decoder": False},
    ),
    "Pegasus": Foreign(kind="PegasusForConditionalGeneration", inputs=both, changed={"is_decoder": False}, loss=of_tokens),
    "Marian": Foreign(
        kind="MarianMTModel", inputs=both, changed={"is_decoder": False, "decoder_vocab_size": 92}, loss=of_tokens
    ),
    "BartPadded": Foreign(
        kind="BartForConditionalGeneration", inputs=(*both, "attention_mask"), changed={"is_decoder": False}, loss=of_tokens
    ),
    "Siglip": Foreign(
        kind="SiglipModel",
        inputs=("input_ids", "pixel_values"),
        changed={"vision_config": {**IMAGE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                                   "num_attention_heads": 4},
                 "text_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 92,
                                 "num_attention_heads": 4, "max_position_embeddings": 64, "projection_size": 32}},
        loss=of_pairs,
    ),
    "Llava": Foreign(
        kind="LlavaForConditionalGeneration", inputs=("image_ids", "pixel_values"), loss=of_tokens,
        changed={"image_token_index": 85, "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
                 "vision_config": {"model_type": "clip_vision_model", **IMAGE, "patch_size": 8, "hidden_size": 24,
                                   "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                                   "projection_dim": 20},
                 "text_config": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                                 "vocab_size": 92, "num_attention_heads": 4, "num_key_value_heads": 2,
                                 "max_position_embeddings": 64}},
    ),
}  # fmt: skip


def loss_of(name: str) -> Callable[[nn.Module, Batch], Tensor]:
    return partial(FOREIGN[name].loss, FOREIGN[name])
