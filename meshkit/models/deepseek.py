"""DeepSeek-V3: multi-head latent attention (MLA), grouped experts with a shared one, multi-token prediction (MTP).

Names are those of transformers without the leading `model.`, except for stacked experts and for `mtp`, the modules that
predict further ahead, which transformers does not train and DeepSeek's folders keep after the last layer.
Dims: B batch, T tokens, C hidden_size, H heads, D head size of q and k, V vocabulary, A modules that predict further ahead.
See [Note: what parallelism from outside relies on] in llama.py, which holds here too, but for the routers' buffer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from meshkit.errors import DataError, PlanError
from meshkit.loss import IGNORED, cross_entropy
from meshkit.mask import Mask
from meshkit.models.experts import MoE
from meshkit.models.layers import (
    GatedMLP,
    KernelMask,
    Rope,
    SplitAttention,
    YarnScaling,
    apply_rope,
    attention,
    attention_mask,
    rope_tables,
)
from meshkit.models.llama import DecoderLayer, refuse_odd_sizes
from meshkit.models.router import RouterConfig
from meshkit.moe.aux_loss import AuxiliaryLosses

LATENT_NORM_EPS = (
    1e-6  # of the norms inside attention, whatever rms_norm_eps is, as in transformers and DeepSeek's code
)


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config:
    """The shape of a DeepSeek-V3, under the field names of config.json.

    q_lora_rank: None is a plain q_proj. mscale_all_dim: with yarn, scores are multiplied by (0.1 m ln(factor) + 1)^2.
    rope_interleave: q and k hold rotated pairs next to each other. num_nextn_predict_layers: modules in `mtp`.
    router_losses: what training adds, which config.json does not say.
    Raises: PlanError for sizes that do not fit together.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    num_experts_per_tok: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_shared_experts: int = field(default=1, metadata={"least": 0})
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = field(default=0, metadata={"least": 0})
    num_nextn_predict_layers: int = field(default=0, metadata={"least": 0})
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    attention_bias: bool = False
    rope: Rope = field(default_factory=Rope)
    rope_interleave: bool = True
    mscale_all_dim: float = 0.0
    router_losses: AuxiliaryLosses = field(default_factory=AuxiliaryLosses)

    def __post_init__(self) -> None:
        refuse_odd_sizes(self)
        if self.qk_rope_head_dim % 2:
            raise PlanError(
                f"DeepseekV3Config: qk_rope_head_dim={self.qk_rope_head_dim} is odd, but rope rotates pairs."
            )
        if self.v_head_dim > self.head_dim:
            raise PlanError(
                f"DeepseekV3Config: v_head_dim={self.v_head_dim} is more than the {self.head_dim} of q and k "
                "(qk_nope_head_dim + qk_rope_head_dim)."
            )
        self.router()

    @property
    def head_dim(self) -> int:
        """Head size of q and k."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_key_value_heads(self) -> int:
        """As many as query heads: the latent is expanded before `attention`."""
        # Attention and its masks, caches and traffic count these heads, and see keys and values only after kv_b_proj.
        return self.num_attention_heads

    def router(self) -> RouterConfig:
        """Raises: PlanError for numbers of experts that do not fit."""
        return RouterConfig(
            experts=self.n_routed_experts,
            chosen=self.num_experts_per_tok,
            score="sigmoid",
            normalise=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            top_groups=self.topk_group,
            bias=True,
            losses=self.router_losses,
        )


# ----------------------------------------------------------------------------------------------------------- model


class DeepseekV3(nn.Module):
    """Decoder with latent attention; dense feed-forwards in the first layers, then experts (DeepSeek-V3 2024)."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            _layer(config, experts=index >= config.first_k_dense_replace) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            # One Parameter under two names, and no copy: gradients add up, and a checkpoint holds it once.
            self.lm_head.weight = self.embed_tokens.weight
        self.mtp = nn.ModuleList(MultiTokenPrediction(config) for _ in range(config.num_nextn_predict_layers))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        mask: Mask | SplitAttention | None = None,
        ids_ahead: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """input_ids: [B, T]. Returns logits [B, T, V]; position_ids and mask as for `Llama`.

        ids_ahead: [B, T, A], at [:, t, a] the token 1 + a after token t: see `look_ahead`. Returns 1 + A logits, the first
        for the next token and each for the one after.
        """
        hidden_BTC = self.embed_tokens(input_ids)
        positions = position_ids
        if positions is None:
            # position_ids stays None for the mask below: without positions of documents it is plain causal, which has
            # faster kernels.
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        cos, sin = rope_tables(self.config.rope, positions, self.config.qk_rope_head_dim, dtype=hidden_BTC.dtype)
        shown = attention_mask(input_ids, position_ids, window=None, mask=mask)
        for layer in self.layers:
            hidden_BTC = layer(hidden_BTC, cos, sin, shown)
        hidden_BTC = self.norm(hidden_BTC)
        logits_BTV: Tensor = self.lm_head(hidden_BTC)
        if ids_ahead is None:
            return logits_BTV
        logits = [logits_BTV]
        for module, ids_BT in zip(self.mtp, ids_ahead.unbind(-1), strict=True):
            # RoPE depends on distances only, so the tokens ahead may keep the positions of the tokens they are joined to.
            hidden_BTC = module(hidden_BTC, self.embed_tokens(ids_BT), cos, sin, shown)
            logits.append(self.lm_head(hidden_BTC))
        return tuple(logits)


def _layer(config: DeepseekV3Config, *, experts: bool) -> DecoderLayer:
    attention = LatentAttention(config)
    if experts:
        # n shared experts that every token visits are one feed-forward n times as wide, since their outputs are
        # added.
        shared = config.n_shared_experts * config.moe_intermediate_size
        mlp: nn.Module = MoE(config.hidden_size, config.moe_intermediate_size, config.router(), shared_size=shared)
    else:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size)
    return DecoderLayer(attention, mlp, hidden_size=config.hidden_size, eps=config.rms_norm_eps)


class LatentAttention(nn.Module):
    """MLA: keys and values of all heads are computed from one small latent per token; all heads share one rotated key.

    Source: DeepSeek-V2 2024, section 2.1.
    """

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.head_dims = [config.qk_nope_head_dim, config.qk_rope_head_dim]
        self.kv_dims = [config.qk_nope_head_dim, config.v_head_dim]
        # One product makes the latent and the rotated key, as in DeepSeek's files (MQA: the key is one for all
        # heads). The key is rotated outside of the latent, since a rotation between kv_b_proj and the scores could
        # not be absorbed into a weight at inference: DeepSeek-V2, section 2.1.3.
        self.latent_dims = [config.kv_lora_rank, config.qk_rope_head_dim]
        self.interleaved = config.rope_interleave
        self.q_scale = _score_scale(config)
        hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        query_size, rank = heads * config.head_dim, config.q_lora_rank
        self.q_proj = nn.Linear(hidden, query_size, bias=False) if rank is None else None
        self.q_a_proj = nn.Linear(hidden, rank, bias=bias) if rank is not None else None
        self.q_a_layernorm = nn.RMSNorm(rank, eps=LATENT_NORM_EPS) if rank is not None else None
        self.q_b_proj = nn.Linear(rank, query_size, bias=False) if rank is not None else None
        self.kv_a_proj_with_mqa = nn.Linear(hidden, sum(self.latent_dims), bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, eps=LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * sum(self.kv_dims), bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=bias)

    def forward(self, x_BTC: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, mask: KernelMask) -> Tensor:
        q_BTHD = rearrange(self._queries(x_BTC), "b t (h d) -> b t h d", d=sum(self.head_dims))
        q_plain, q_rotated = q_BTHD.split(self.head_dims, dim=-1)
        latent, k_rotated = self.kv_a_proj_with_mqa(x_BTC).split(self.latent_dims, dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = rearrange(kv, "b t (h d) -> b t h d", d=sum(self.kv_dims))
        k_plain, v = kv.split(self.kv_dims, dim=-1)
        q_rotated = apply_rope(q_rotated, cos_BTR, sin_BTR, interleaved=self.interleaved)
        k_rotated = rearrange(k_rotated, "b t d -> b t 1 d")  # one key for all heads
        k_rotated = apply_rope(k_rotated, cos_BTR, sin_BTR, interleaved=self.interleaved)
        # The scale is put into q, so that every attention kernel can keep its 1 / sqrt(D).
        q_BTHD = torch.cat((q_plain, q_rotated), dim=-1) * self.q_scale
        k_BTHD = torch.cat((k_plain, k_rotated.expand(-1, -1, k_plain.shape[-2], -1)), dim=-1)
        out_BTHD = attention(q_BTHD, k_BTHD, v, mask)
        out: Tensor = self.o_proj(rearrange(out_BTHD, "b t h d -> b t (h d)"))
        return out

    def _queries(self, x_BTC: Tensor) -> Tensor:
        if self.q_a_proj is not None and self.q_a_layernorm is not None and self.q_b_proj is not None:
            queries: Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTC)))
            return queries
        assert self.q_proj is not None
        queries = self.q_proj(x_BTC)
        return queries


def _score_scale(config: DeepseekV3Config) -> float:
    """What scores are multiplied by besides 1 / sqrt(D). Source: Peng et al. 2023; DeepSeek-V3's own code."""
    yarn = config.rope.scaling
    if not isinstance(yarn, YarnScaling) or not config.mscale_all_dim:
        return 1.0
    return (0.1 * config.mscale_all_dim * math.log(yarn.factor) + 1.0) ** 2


# --------------------------------------------------------------------------------------- multi-token prediction


class MultiTokenPrediction(nn.Module):
    """MTP module: one more layer on the hidden state of a token and the embedding of a token ahead of it.

    Embedding and head are shared with the model.

    Source: DeepSeek-V3 2024, section 2.2.
    """

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.enorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = _layer(config, experts=True)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden_BTC: Tensor, ahead_BTC: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, mask: KernelMask
    ) -> Tensor:
        """hidden: output of the norm before. ahead: embeddings of tokens ahead. Returns the input of head and next module."""
        # The embedding first, as in DeepSeek's weights; the paper's equation 21 has the hidden state first.
        joined = self.eh_proj(torch.cat((self.enorm(ahead_BTC), self.hnorm(hidden_BTC)), dim=-1))
        out: Tensor = self.norm(self.layer(joined, cos_BTR, sin_BTR, mask))
        return out


def look_ahead(batch: dict[str, Tensor], *, depth: int) -> dict[str, Tensor]:
    """The batch with ids_ahead and labels_ahead, both [B, T, depth]: inputs and labels 1 to `depth` tokens further on.

    A label is -100 where it, or an input on the way to it, is beyond the row or in another document: one begins wherever a
    position of position_ids is not the one before plus 1. Call it before the batch is split over ranks.
    """
    ids_BT, labels_BT = batch["input_ids"], batch["labels"]
    documents_BT = torch.zeros_like(ids_BT)
    if "position_ids" in batch:
        # A document's number is how many starts precede it in its row: equal numbers are one document.
        documents_BT[:, 1:] = (batch["position_ids"].expand_as(ids_BT).diff(dim=1) != 1).cumsum(dim=1)
    ids, labels = [], []
    for ahead in range(1, depth + 1):
        # The label of the input `ahead` tokens on is the token after it, which must be in the same document too. For the last
        # input that token is beyond the row, so its document cannot be checked, and the label is taken as it is.
        same = _shifted(documents_BT, ahead, -1) == documents_BT
        after = _shifted(documents_BT, ahead + 1, -1)
        same &= (after == documents_BT) | (after == -1)
        ids.append(_shifted(ids_BT, ahead, 0))
        labels.append(_shifted(labels_BT, ahead, IGNORED).masked_fill(~same, IGNORED))
    return {**batch, "ids_ahead": torch.stack(ids, dim=-1), "labels_ahead": torch.stack(labels, dim=-1)}


def _shifted(x_BT: Tensor, ahead: int, filler: int) -> Tensor:
    """x[:, t + ahead] at [:, t], and `filler` at the end."""
    # The filler is as long as what was cut off: at most the row, where `ahead` goes beyond it.
    return F.pad(x_BT[:, ahead:], (0, min(ahead, x_BT.shape[1])), value=filler)


def mtp_loss(model: nn.Module, batch: dict[str, Tensor], *, weight: float = 0.3) -> Tensor:
    """`next_token_loss` plus weight / A times the cross-entropies of the A modules of `mtp`, summed over tokens; a scalar.

    batch: as for `next_token_loss`, for a `DeepseekV3`; `look_ahead` is called on it, unless it has been already.
    Source: DeepSeek-V3 2024, equation 25; it has weight 0.3 and then 0.1.
    """
    depth = len(model.mtp)  # type: ignore[arg-type]  # a ModuleList; stubs: a Tensor or Module
    if not depth:
        raise PlanError(
            "mtp_loss: the model has no `mtp` modules. Build it with num_nextn_predict_layers of at least 1."
        )
    if "attention_mask" in batch:
        raise DataError(
            "mtp_loss: the batch has an attention_mask, and DeepseekV3 takes none. Leave it away: padding that comes last "
            "and has label -100 needs none; for other padding give forward_backward(mask=...)."
        )
    batch = batch if "ids_ahead" in batch else look_ahead(batch, depth=depth)
    extra = {name: batch[name] for name in ("position_ids", "mask", "ids_ahead") if name in batch}
    # One forward for all predictions: a pipeline runs its stages once, and the modules of `mtp` share the head with
    # them.
    logits, *further = model(batch["input_ids"], **extra)
    ahead = [cross_entropy(out, labels) for out, labels in zip(further, batch["labels_ahead"].unbind(-1), strict=True)]
    return cross_entropy(logits, batch["labels"]) + weight / depth * torch.stack(ahead).sum()
