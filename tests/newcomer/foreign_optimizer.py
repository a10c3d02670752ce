"""Another package's optimizer and an own learning-rate schedule: torchrun --nproc-per-node 2 foreign_optimizer.py"""

import pytorch_optimizer
import torch
from torch import nn

import meshkit as mk

mesh = mk.init_mesh("dp_shard=2")
ids = (torch.arange(4 * 9).reshape(4, 9) % 64).tensor_split(mesh.data_ranks)[mesh.data_rank]
batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def triangle(step):  # mine: up for 4 steps, down for 4
    return 0.25 * min(step + 1, 8 - step)


def start():
    torch.manual_seed(0)
    run = mk.parallelize(nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64)), mesh)
    optimizer = pytorch_optimizer.Lion(run.parameters(), lr=1e-2)
    return run, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, triangle)


def train(run, optimizer, scheduler, steps):
    losses, rates = [], []
    for _ in steps:
        losses.append(run.forward_backward(batch).item())
        rates.append(optimizer.param_groups[0]["lr"])
        mk.clip_grad_norm(run, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses, rates


losses, rates = train(*start(), range(8))
assert losses[-1] < losses[0] and rates == [1e-2 * triangle(step) for step in range(8)], (losses, rates)

run, optimizer, scheduler = start()  # stopped after 4 steps
train(run, optimizer, scheduler, range(4))
with mk.Checkpointer("checkpoints") as checkpoints:
    checkpoints.save(4, run, optimizer, scheduler=scheduler)
run, optimizer, scheduler = start()
with mk.Checkpointer("checkpoints") as checkpoints:
    step = checkpoints.resume(run, optimizer, scheduler=scheduler)
assert (losses[step:], rates[step:]) == train(run, optimizer, scheduler, range(step, 8))
if mesh.rank == 0:
    print(f"Lion: {losses[0]:.3f} to {losses[-1]:.3f}, resumed bit for bit after step {step}")
