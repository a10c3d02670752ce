"""estimate: other people's modules that once ended in errors which said nothing. One process, no ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import meshkit as mk
from meshkit.errors import PlanError


def latent() -> nn.Module:
    """With values, and with buffers that are computed: the bias of its router, frequencies of positions."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8}
    parts = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **parts, **experts, topk_group=1))


def test_a_latent_model_of_transformers_is_that_of_a_function_that_builds_it() -> None:
    model, mesh = latent(), "dp_shard=2"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = mk.estimate(model, mesh, rows=2, seq_len=8)
    built = mk.estimate(lambda made: mk.parallelize(latent(), made), mesh, rows=2, seq_len=8)
    assert found.peak.totals == built.peak.totals
    assert found.peak_bytes > 0
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


class Positions(nn.Module):
    """A decoder whose table of positions is read by its weight, or called."""

    def __init__(self, *, sliced: bool) -> None:
        super().__init__()
        self.sliced = sliced
        self.tok, self.pos = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        tokens = input_ids.shape[1]
        pos = self.pos.weight[:tokens] if self.sliced else self.pos(torch.arange(tokens, device=input_ids.device))
        hidden = self.tok(input_ids) + pos
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def test_positions_that_are_read_by_their_weight_are_refused_on_pp_by_their_place() -> None:
    strategy = mk.Strategy(mesh="pp=2", microbatches=2)
    with pytest.raises(
        PlanError, match=r"reads 'pos\.weight' outside of the module that has it, so no stage can compute"
    ):
        mk.estimate(Positions(sliced=True), strategy=strategy, rows=2, seq_len=8)
    called = mk.estimate(Positions(sliced=False), strategy=strategy, rows=2, seq_len=8)
    assert called.peak_bytes > 0
    sliced, plain = (mk.estimate(Positions(sliced=each), "dp_shard=2", rows=2, seq_len=8) for each in (True, False))
    for group in ("parameters", "optimizer state"):
        assert sliced.at_peak[group] == plain.at_peak[group] > 0
