"""Reward models are transformers' sequence classification with one label, in folders both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaForSequenceClassification,
    MixtralForSequenceClassification,
    Qwen3MoeForSequenceClassification,
)

import meshkit as mk
from meshkit.errors import CheckpointError, PlanError
from meshkit.models import (
    DEEPSEEK_V3,
    Llama,
    MixtralConfig,
    Qwen3MoeConfig,
    RewardModel,
    load_pretrained,
    save_pretrained,
)
from tests.tiny import tiny_config

CONFIG = tiny_config()
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


EXPERTS = {
    "mixtral": (MixtralConfig(**vars(CONFIG), num_local_experts=3), MixtralForSequenceClassification),
    "qwen3_moe": (
        Qwen3MoeConfig(
            **{**vars(CONFIG), "qk_norm": True}, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8
        ),
        Qwen3MoeForSequenceClassification,
    ),
}


@pytest.mark.parametrize("family", EXPERTS)
def test_scores_of_experts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    config, kind = EXPERTS[family]
    model = RewardModel(config)
    mk.init_weights(model, seed=0)
    torch.nn.init.normal_(model.score.weight)
    save_pretrained(model, config, tmp_path / "ours")
    theirs = kind.from_pretrained(tmp_path / "ours", pad_token_id=0)
    ids = torch.randint(1, 32, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (model(ids)[:, -1:] - theirs(input_ids=ids).logits).abs().max() < TOL_FP32
    again = RewardModel(config)
    load_pretrained(again, tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(again(ids), model(ids))


def test_a_family_without_a_reward_model_is_refused() -> None:
    with pytest.raises(PlanError, match="DeepseekV3Config has no reward model here"):
        RewardModel(DEEPSEEK_V3)
