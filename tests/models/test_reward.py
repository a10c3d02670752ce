"""Reward models are transformers' sequence classification with one label, in folders both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForSequenceClassification

import meshkit as mk
from meshkit.errors import CheckpointError
from meshkit.models import Llama, LlamaConfig, RewardModel, load_pretrained, save_pretrained

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
)
TOL_FP32 = 1e-5


def test_scores_of_last_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    model = RewardModel(CONFIG)
    mk.init_weights(model, seed=0)
    torch.nn.init.normal_(model.score.weight)
    save_pretrained(model, CONFIG, tmp_path / "ours")
    theirs = LlamaForSequenceClassification.from_pretrained(tmp_path / "ours", pad_token_id=0)
    ids = torch.randint(1, 32, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        assert expected.shape == (3, 1)
        assert (model(ids)[:, -1:] - expected).abs().max() < TOL_FP32
    theirs.save_pretrained(tmp_path / "theirs")
    again = RewardModel(CONFIG)
    load_pretrained(again, tmp_path / "theirs")
    with torch.no_grad():
        assert torch.equal(again(ids), model(ids))


def test_a_reward_model_may_begin_as_a_language_model(tmp_path: Path) -> None:
    language = Llama(CONFIG)
    save_pretrained(language, CONFIG, tmp_path / "language")
    model = RewardModel(CONFIG)
    score = model.score.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        load_pretrained(model, tmp_path / "language")
    load_pretrained(model, tmp_path / "language", fresh=["score.weight"])
    assert torch.equal(model.norm.weight, language.norm.weight)
    assert torch.equal(model.layers[1].mlp.up_proj.weight, language.layers[1].mlp.up_proj.weight)
    assert torch.equal(model.score.weight, score)
