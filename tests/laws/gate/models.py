"""The models of the gate: a few layers of each kind, in fp64, with values that every rank draws alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.models import DeepseekV3Config, Llama, LlamaConfig, build_model, moe_plan
from meshkit.models.experts import MoE
from meshkit.models.llama import LLAMA_PLAN, Attention, Decoder, DecoderLayer, dense_layer
from meshkit.models.mixers import GatedDeltaConfig, Hybrid, HybridConfig, Mamba2Config, hybrid_plan
from meshkit.models.moe import decoder_plan
from meshkit.models.router import RouterConfig
from tests.laws.gate.cell import MIXERS, Cell
from tests.tiny import tiny_config

EXPERTS = 8
AUXILIARY = mk.moe.AuxiliaryLosses(balance=0.1, per="global", z=0.01)


class Residual(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class OwnModel(nn.Module):
    """What somebody wrote who has never heard of meshkit: the next token from this one, through an MLP."""

    def __init__(self, vocabulary: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Residual(width, hidden) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(cell: Cell) -> tuple[nn.Module, mk.Plan]:
    """The model and its plan; the same values in every call."""
    torch.manual_seed(3)
    model, plan = _made(cell)
    model = model.double()  # drawn in fp64 whatever the dtype: torch draws other numbers in fp32
    for name, param in model.named_parameters():  # away from 0 and 1, or errors would not show
        if name.endswith("A_log"):
            nn.init.uniform_(param, -4, -2)  # states that last over many tokens
        elif "lora_B" in name:
            nn.init.normal_(param, std=0.1)
        elif "lora_" not in name:
            nn.init.normal_(param, std=0.2) if param.ndim > 1 else nn.init.uniform_(param, 0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    return model.to(torch.float64 if cell.precision == "fp64" else torch.float32), plan


def _made(cell: Cell) -> tuple[nn.Module, mk.Plan]:
    uneven = cell.sizes == "uneven"
    vocabulary, hidden = (61, 45) if uneven else (64, 48)
    config = tiny_config(
        vocab_size=vocabulary,
        hidden_size=36 if uneven else 32,
        intermediate_size=hidden,
        num_hidden_layers=cell.layers,
        num_attention_heads=9 if uneven else 8,
        num_key_value_heads=3 if uneven else 2,
        tie_word_embeddings=cell.model == "tied",
        attention_bias=cell.model == "qwen",
        qk_norm=cell.model == "qwen",
        sliding_window=5 if cell.model == "window" else None,
    )
    if cell.model == "mlp":
        own = OwnModel(vocabulary, 32, hidden, cell.layers)
        return own, mk.plan.auto_plan(own)
    if cell.model == "transformers":
        theirs = _of_transformers(config)
        return theirs, mk.plan.auto_plan(theirs)
    # In bf16 near ties would be broken differently: there every token goes to every expert.
    experts = EXPERTS + 3 if uneven else EXPERTS
    chosen = experts if cell.precision == "bf16" else 2
    if cell.model == "moe":
        router = RouterConfig(experts=experts, chosen=chosen, losses=AUXILIARY)
        mixture = Decoder(config, _layers(config, router))
        return mixture, decoder_plan(cell.layers, dense=[0], shared=True)
    if cell.model == "mla":
        latent = DeepseekV3Config(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=hidden,
            num_hidden_layers=cell.layers,
            num_attention_heads=9 if cell.spec.world_size == 3 else 8,  # tp must divide them
            moe_intermediate_size=24,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=EXPERTS if cell.precision == "bf16" else 2,
            n_group=1 if cell.precision == "bf16" else 4,
            topk_group=1 if cell.precision == "bf16" else 2,
            kv_lora_rank=10,
            qk_nope_head_dim=4,
            qk_rope_head_dim=4,
            v_head_dim=6,
            first_k_dense_replace=1,
            q_lora_rank=7,
            router_losses=AUXILIARY,
        )
        return build_model(latent), moe_plan(latent)
    if cell.model in MIXERS:
        delta = GatedDeltaConfig(key_heads=8, value_heads=8 if uneven else 16, key_size=5, value_size=3)
        space = Mamba2Config(heads=8 if uneven else 16, head_size=3, state_size=5, groups=8)
        hybrid = HybridConfig(decoder=config, mixer=delta if cell.model == "delta" else space, attention_every=2)
        return Hybrid(hybrid), hybrid_plan(hybrid)
    model: nn.Module = Llama(config)
    if cell.model == "lora":
        return model, mk.lora.attach(model, LLAMA_PLAN, rank=3, alpha=5.0, seed=4)
    return model, LLAMA_PLAN


def _layers(config: LlamaConfig, router: RouterConfig) -> Any:
    yield dense_layer(config)
    for _ in range(config.num_hidden_layers - 1):
        experts = MoE(config.hidden_size, 24, router, shared_size=28)
        yield DecoderLayer(Attention(config), experts, hidden_size=config.hidden_size, eps=config.rms_norm_eps)


def _of_transformers(config: LlamaConfig) -> nn.Module:
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(
        TheirConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            use_cache=False,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
