"""meshkit's blocks in a loop of one's own, without parallelize: torchrun --nproc-per-node 4 blocks_alone.py"""

import torch
import torch.nn.functional as F
from torch import nn

import meshkit as mk


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)))


def train(model, x, y):
    """The loop is mine. x, y: this rank's rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        loss = F.mse_loss(model(x), y, reduction="sum") / 8  # the rows of all ranks
        loss.backward()
        norm = mk.clip_grad_norm(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return norm


mesh = mk.init_mesh("dp_shard=2 tp=2")
x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))
whole = build()
expected = train(whole, x, y)

model = build()
for mlp in model:
    mk.tensor_parallel(mlp, mesh["tp"], plan={"0": mk.plan.column(), "2": mk.plan.row()})
mk.recompute(model, blocks=["1"])
mk.fully_shard(model, mesh.data, units=["0", "1"])
rows = slice(4 * mesh.data_rank, 4 * mesh.data_rank + 4)
norm = train(model, x[rows], y[rows])
assert torch.allclose(norm, expected, atol=1e-5), (norm, expected)
for name, parameter in model.named_parameters():
    assert torch.allclose(parameter.full_tensor(), whole.get_parameter(name), atol=1e-5), name
if mesh.rank == 0:
    print("as on one device")
