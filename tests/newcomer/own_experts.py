"""An own mixture of experts under expert parallelism: torchrun --nproc-per-node 2 own_experts.py"""

import torch
import torch.nn.functional as F
from torch import nn

import meshkit as mk

WIDTH, HIDDEN, EXPERTS, CHOSEN = 16, 24, 4, 2


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)

    def forward(self, x, index, weights):  # [N, C], [N, K], [N, K]
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, choice = torch.where(index == expert)
            made = F.silu(x[token] @ self.up[expert].T) @ self.down[expert].T
            out.index_add_(0, token, made * weights[token, choice, None])
        return out


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(CHOSEN, dim=-1)
        return x + self.experts(tokens, index, weights).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


plan = mk.Plan(
    tensor={"blocks.*.experts": mk.plan.experts(columns=("up",), rows=("down",), takes="indices")}, blocks=("blocks.*",)
)
losses = {}
for axes in ("dp_shard=2", "dp_shard=2 ep=2"):
    mesh = mk.init_mesh(axes)
    torch.manual_seed(0)
    run = mk.parallelize(Model(), mesh, plan=plan)
    optimizer = mk.adamw(run, lr=1e-2)
    rows = (torch.arange(4 * 9).reshape(4, 9) % 64).tensor_split(mesh.data_ranks)[mesh.data_rank]
    losses[axes] = []
    for _ in range(4):
        losses[axes].append(run.forward_backward({"input_ids": rows[:, :-1], "labels": rows[:, 1:]}).item())
        optimizer.step()
        optimizer.zero_grad()
sharded, shared = losses.values()
assert torch.allclose(torch.tensor(sharded), torch.tensor(shared), atol=1e-5) and shared[-1] < shared[0], losses
assert run.model.blocks[0].experts.up.to_local().shape[0] == EXPERTS // 2
if mesh.rank == 0:
    print(f"{EXPERTS // 2} experts a rank, the same losses: {shared[0]:.4f} to {shared[-1]:.4f}")
