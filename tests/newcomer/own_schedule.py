"""A pipeline schedule of one's own: torchrun --nproc-per-node 2 own_schedule.py"""

import torch
from torch import nn

import meshkit as mk
from meshkit.parallel.pipeline import Row, Schedule, check, simulate, text


def last_in_first_out(ranks, microbatches):
    """All forwards, then the backward of the newest microbatch first."""
    rows = tuple(
        (
            *(Row(rank, rank, "F", microbatch) for microbatch in range(microbatches)),
            *(Row(rank, rank, "B", microbatch) for microbatch in reversed(range(microbatches))),
        )
        for rank in range(ranks)
    )
    return Schedule("lifo", microbatches, placement=tuple(range(ranks)), ranks=rows)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(4))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


mesh = mk.init_mesh("pp=2")
ids = torch.arange(4 * 9).reshape(4, 9) % 64
batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
losses = {}
for schedule in ("1f1b", last_in_first_out):
    torch.manual_seed(0)
    run = mk.parallelize(Model(), mesh, pipeline=mk.strategy.PipelinePolicy(schedule=schedule))
    optimizer = mk.adamw(run, lr=1e-2)
    losses[schedule] = []
    for _ in range(3):
        losses[schedule].append(run.forward_backward(batch, microbatches=4).item())
        optimizer.step()
        optimizer.zero_grad()
theirs, mine = losses.values()
assert torch.allclose(torch.tensor(theirs), torch.tensor(mine), atol=1e-5) and mine[-1] < mine[0], losses
if mesh.rank == 0:
    check(last_in_first_out(2, 4))
    print(text(simulate(last_in_first_out(2, 4))))
