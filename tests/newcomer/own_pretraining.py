"""An own GPT, pretrained on own bytes: torchrun --nproc-per-node 2 own_pretraining.py "dp_shard=2"; then "tp=2"."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import meshkit as mk

WIDTH, HEADS, LENGTH = 32, 4, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, input_ids):
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


mesh = mk.init_mesh(sys.argv[1])
torch.manual_seed(0)  # the same values on every rank
run = mk.parallelize(GPT(), mesh, microbatches=2)
optimizer = mk.adamw(run, lr=1e-2)
text = torch.tensor(list(b"Whatever you have, one byte is one token of it. " * 20))
losses = []
for step in range(10):
    starts = torch.randint(0, len(text) - LENGTH - 1, (8,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
    rows = rows.tensor_split(mesh.data_ranks)[mesh.data_rank]
    losses.append(run.forward_backward({"input_ids": rows[:, :-1], "labels": rows[:, 1:]}).item())
    mk.clip_grad_norm(run, 1.0)
    optimizer.step()
    optimizer.zero_grad()
assert losses[-1] < losses[0] - 1, losses
if mesh.rank == 0:
    print(f"{sys.argv[1]}: loss {losses[0]:.4f} to {losses[-1]:.4f}")
