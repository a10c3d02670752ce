"""Custom models: an MLP, a hand-written transformer and one of Hugging Face transformers, through the same calls.

torchrun --nproc-per-node 4 examples/bring_your_own_model.py --kind mlp --mesh "dp_shard=2 tp=2"
torchrun --nproc-per-node 4 examples/bring_your_own_model.py --kind transformer --mesh "dp_shard=2 tp=2" --sequence
torchrun --nproc-per-node 4 examples/bring_your_own_model.py --kind transformers --mesh "tp=4"   # needs transformers

Each prints its plan, written or derived, the memory and messages of a rank, and a falling loss that is the same on any mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import meshkit as mk


@dataclass(frozen=True, kw_only=True)
class Config:
    kind: Literal["mlp", "transformer", "transformers"] = "mlp"
    mesh: str = "dp_shard=-1"
    sequence: bool = False
    """with tp: shard activations along the sequence (the transformers)"""
    steps: int = 20


# ------------------------------------------------------------------------------------------------ an MLP, and its own loss
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 1))


def squared_error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Summed, not averaged: meshkit divides by the examples of the whole step."""
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum")


def count_examples(batch: dict[str, Tensor]) -> Tensor:
    return torch.tensor(len(batch["x"]), device=batch["x"].device)


# ------------------------------------------------------------------------------------------------ a transformer, and its plan
class Block(nn.Module):
    """Attention whose projections sit in the block itself; it counts heads by the width it gets, which tp divides."""

    def __init__(self, width: int = 64, head: int = 16) -> None:
        super().__init__()
        self.head = head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (proj(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 97, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


TRANSFORMER_PLAN = mk.Plan(
    tensor={
        "embed": mk.plan.vocab(),
        "blocks.*.norm{1,2}": mk.plan.sequence(),
        "blocks.*.{q,k,v}": mk.plan.column(),
        "blocks.*.o": mk.plan.row(),
        "blocks.*.fc1": mk.plan.column(),
        "blocks.*.fc2": mk.plan.row(),
        "norm": mk.plan.sequence(),
        "head": mk.plan.vocab(),
    },
    blocks=("blocks.*",),
)


# ------------------------------------------------------------------------------------------------ a model of transformers
def transformers_model() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_cache=False,
    )
    with mk.models.meta_parameters():  # init_weights makes each shard on its rank; no rank ever holds the full model
        return Qwen3ForCausalLM(config)


def main() -> None:
    config = tyro.cli(Config)
    mesh = mk.init_mesh(config.mesh)
    torch.manual_seed(0)  # the same values on every rank, where a model is built with values
    model = {"mlp": mlp, "transformer": Transformer, "transformers": transformers_model}[config.kind]()
    plan = TRANSFORMER_PLAN if config.kind == "transformer" else mk.plan.auto_plan(model)
    run = mk.parallelize(model, mesh, plan=plan, sequence=config.sequence)
    if config.kind == "transformers":
        mk.init_weights(run.model, seed=0)
    optimizer = mk.adamw(run, lr=3e-3)

    if mesh.rank == 0:
        print(plan)
        print(
            mk.explain(
                run,
                rows=8 // mesh.data_ranks,
                seq_len=1 if config.kind == "mlp" else 32,
            )
        )
    generator = torch.Generator().manual_seed(1)
    for step in range(config.steps):
        if config.kind == "mlp":
            x = torch.randn(8, 16, generator=generator)
            rows = {"x": x, "y": x.square().mean(-1, keepdim=True)}
            losses = {"loss": squared_error, "count": count_examples}
        else:
            ids = (torch.arange(33) * torch.randint(1, 5, (8, 1), generator=generator)) % 97
            rows, losses = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, {}
        batch = {name: tensor.tensor_split(mesh.data_ranks)[mesh.data_rank] for name, tensor in rows.items()}
        loss = run.forward_backward(batch, **losses)
        mk.clip_grad_norm(run, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if mesh.rank == 0:
            print(f"step {step + 1:3}  loss {loss.item():.6f}")


if __name__ == "__main__":
    mk.run_main(main)
