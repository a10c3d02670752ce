"""One cell of the parity suite: a model, a mesh and choices, trained three steps on the mesh and on one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.gradient import gradient_of
from meshkit.core.model_state import copies_of
from meshkit.models.experts import MoE
from meshkit.models.llama import LLAMA_PLAN, Attention, Decoder, DecoderLayer, Llama, LlamaConfig, dense_layer
from meshkit.models.mixers import GatedDeltaConfig, Hybrid, HybridConfig, Mamba2Config, hybrid_plan
from meshkit.models.moe import decoder_plan
from meshkit.models.router import RouterConfig
from meshkit.moe.aux_loss import AuxiliaryLosses, collect, update_bias
from meshkit.parallel.pipeline import Schedule
from meshkit.strategy import ExpertPolicy
from tests.compare_shards import computed_once, difference
from tests.parallel.context.sparse_oracle import SparseRows
from tests.tiny import draw_parameters, tiny_config

ROWS, TOKENS, STEPS, MAX_NORM = 5, 16, 3, 0.5
# The first update of a gradient g is g / (|g| + eps): a gradient of noise alone, 1e-16, must stay one after it.
ADAM = {"lr": 1e-2, "eps": 1e-6}


@dataclass(frozen=True, kw_only=True)
class Moe:
    """Experts instead of feed-forwards, in all layers but the first."""

    experts: int = 6
    chosen: int = 2
    hidden: int = 20
    shared: int | None = None
    score: str = "softmax"
    normalise: bool = True
    groups: int = 1
    bias: bool = False
    locality: float = 0.0
    balance: float = 0.0
    per: str = "sequence"
    z: float = 0.0
    skew: float = (
        0.0  # how much longer the router's first two vectors are: opposite, so that either is nearly always chosen
    )

    def router(self) -> RouterConfig:
        return RouterConfig(
            experts=self.experts,
            chosen=self.chosen,
            score=self.score,  # type: ignore[arg-type]  # the config checks it
            normalise=self.normalise,
            groups=self.groups,
            top_groups=max(1, self.groups - 1),
            bias=self.bias,
            locality=self.locality,
            losses=AuxiliaryLosses(balance=self.balance, per=self.per, z=self.z),  # type: ignore[arg-type]  # same
        )


@dataclass(frozen=True, kw_only=True)
class Cell:
    mesh: str
    sequence: bool = False
    tokens: int = TOKENS
    microbatches: int = 1
    zero: int = 3
    recompute: str = "none"
    layers: int = 2
    tied: bool = False
    vocab: int = 64
    hidden_mlp: int = 48
    heads: tuple[int, int] = (8, 2)
    qwen: bool = False  # biases and norms of q and k
    window: int | None = None
    documents: bool = False
    all_masked_microbatch: bool = False
    dtype: str = "float64"
    bf16: bool = False
    compile: str = ""
    schedule: str | Schedule = "1f1b"
    stages: tuple[int, ...] | None = None
    moe: Moe | None = None
    mixer: str = ""  # "delta" or "mamba2" in all layers but every second one
    copies: int = 0
    max_rows: int | None = None
    memory: mk.MemoryPolicy | None = None  # in place of recompute and bf16
    context: mk.strategy.ContextPolicy = field(default_factory=mk.strategy.ContextPolicy)
    data: mk.strategy.DataPolicy = field(default_factory=mk.strategy.DataPolicy)


@dataclass(frozen=True)
class Outcome:
    """Largest absolute difference from one device, and where."""

    loss: float
    norm: float
    gradient: float
    parameter: float
    worst: str = ""
    names: list[str] = field(default_factory=list)


@lru_cache(maxsize=64)
def mesh_for(spec: str) -> mk.Mesh:
    """Groups live as long as the rank, so examples share them."""
    return mk.init_mesh(spec)


def build(cell: Cell) -> Decoder:
    config = tiny_config(
        vocab_size=cell.vocab,
        hidden_size=32,
        intermediate_size=cell.hidden_mlp,
        num_hidden_layers=cell.layers,
        num_attention_heads=cell.heads[0],
        num_key_value_heads=cell.heads[1],
        tie_word_embeddings=cell.tied,
        attention_bias=cell.qwen,
        qk_norm=cell.qwen,
        sliding_window=cell.window,
    )
    torch.manual_seed(3)
    if cell.mixer:
        model: Decoder = Hybrid(_hybrid(cell, config))
    else:
        model = Llama(config) if cell.moe is None else Decoder(config, _layers(config, cell.moe))
    model = model.double()  # drawn in fp64 whatever the dtype: torch draws other numbers in fp32
    draw_parameters(model)
    for name, param in model.named_parameters():
        if name.endswith("gate.weight") and cell.moe is not None and cell.moe.skew:
            with torch.no_grad():
                param[0] *= cell.moe.skew
                param[1] = -param[0]
        if name.endswith("A_log"):
            nn.init.uniform_(param, -4, -2)  # states that last over many tokens
    return model.to(getattr(torch, cell.dtype))


def _layers(config: LlamaConfig, moe: Moe) -> Iterator[DecoderLayer]:
    yield dense_layer(config)
    for _ in range(config.num_hidden_layers - 1):
        experts = MoE(config.hidden_size, moe.hidden, moe.router(), shared_size=moe.shared)
        yield DecoderLayer(Attention(config), experts, hidden_size=config.hidden_size, eps=config.rms_norm_eps)


def _hybrid(cell: Cell, config: LlamaConfig) -> HybridConfig:
    mixer: GatedDeltaConfig | Mamba2Config = Mamba2Config(heads=8, head_size=3, state_size=5, groups=4)
    if cell.mixer == "delta":
        mixer = GatedDeltaConfig(key_heads=4, value_heads=8, key_size=5, value_size=3)
    return HybridConfig(decoder=config, mixer=mixer, attention_every=2)


def plan_of(cell: Cell) -> mk.Plan:
    if cell.mixer:
        return hybrid_plan(_hybrid(cell, build(cell).config))
    if cell.moe is None:
        return LLAMA_PLAN
    return decoder_plan(cell.layers, dense=[0], shared=cell.moe.shared is not None)


def batches(cell: Cell) -> list[dict[str, Tensor]]:
    """The global batch of each step: every row different, some labels ignored, documents of uneven length."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for _ in range(STEPS):
        ids = torch.randint(0, cell.vocab, (ROWS, cell.tokens + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
        batch = {"input_ids": ids[:, :-1], "labels": labels}
        if cell.documents:
            starts = torch.rand(ROWS, cell.tokens, generator=generator) < 0.2
            starts[:, 0] = True
            index = torch.arange(cell.tokens).expand(ROWS, cell.tokens)
            batch["position_ids"] = index - torch.where(starts, index, 0).cummax(-1).values
        if cell.all_masked_microbatch:
            labels[: ROWS // 2] = -100
        made.append(batch)
    return made


def reference(cell: Cell) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, norms, first-step gradients and final parameters of a plain loop on one device."""
    model = build(cell)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95), **ADAM
    )
    losses, norms, gradients = [], [], {}
    for batch in batches(cell):
        positions = batch.get("position_ids")
        with collect() as found:
            logits = model(batch["input_ids"], positions, _sparse_mask(cell, batch))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        (loss + found.total() / (batch["labels"] != -100).sum()).backward()
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        for router, counts in found.counts.items():
            if router.last_counts is not None:
                router.last_counts.copy_(counts)
            if router.e_score_correction_bias is not None:
                update_bias(router.e_score_correction_bias, counts, speed=0.05)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return losses, norms, gradients, {name: tensor.detach() for name, tensor in state.items()}


def _sparse_mask(cell: Cell, batch: dict[str, Tensor]) -> SparseRows | None:
    if cell.context.sparse is None:
        return None
    positions = batch.get("position_ids", torch.arange(cell.tokens).expand(ROWS, -1))
    return SparseRows(tuple(mk.Mask.from_positions(row.unsqueeze(0)) for row in positions), cell.context.sparse)


def start(cell: Cell, **options: Any) -> mk.Run:
    """The cell's model on the cell's mesh."""
    return mk.parallelize(
        build(cell),
        mesh_for(cell.mesh),
        plan=plan_of(cell),
        memory=memory_of(cell),
        zero=None if mesh_for(cell.mesh).spec.pp > 1 or cell.data.shards else cell.zero,
        sequence=cell.sequence,
        compile=cell.compile or False,
        context=cell.context,
        pipeline=mk.strategy.PipelinePolicy(schedule=cell.schedule, stages=cell.stages),
        **{"experts": ExpertPolicy(copies=cell.copies, max_rows=cell.max_rows), "data": cell.data, **options},
    )


def memory_of(cell: Cell) -> mk.MemoryPolicy:
    if cell.memory is not None:
        return cell.memory
    return mk.MemoryPolicy(recompute=cell.recompute, precision=mk.strategy.Precision() if cell.bf16 else None)  # type: ignore[arg-type]


def own_rows(batch: dict[str, Tensor], mesh: mk.Mesh) -> dict[str, Tensor]:
    return {name: tensor.tensor_split(mesh.data_ranks)[mesh.data_rank] for name, tensor in batch.items()}


def run_cell(cell: Cell) -> Outcome:
    """On every rank: train on the mesh and compare with one device."""
    run = start(cell)
    optimizer = mk.adamw(run, **ADAM)
    losses, norms, gradients, parameters = computed_once(reference, cell)
    copies = copies_of(run.model)
    worst: dict[str, float] = {}
    loss_error = norm_error = 0.0
    for step, batch in enumerate(batches(cell)):
        loss = run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches)
        if step == 0:
            worst = {
                name: difference(gradient_of(p), gradients[copies.get(name, name)])
                for name, p in run.named_parameters()
            }
        norm = mk.clip_grad_norm(run, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        run.balance_experts(speed=0.05)
        loss_error = max(loss_error, abs(float(loss) - losses[step]))
        norm_error = max(norm_error, abs(float(norm) - norms[step]))
    state = {**dict(run.named_parameters()), **dict(run.model.named_buffers())}
    parameter_error = max(difference(p, parameters[copies.get(name, name)]) for name, p in state.items())
    where = max(worst, key=worst.__getitem__)
    return Outcome(
        loss_error, norm_error, worst[where], parameter_error, where, [name for name, _ in run.named_parameters()]
    )
