"""What an own model would take on a cluster that I describe, before there is one: python planning.py"""

from pathlib import Path

import torch
from torch import nn

import meshkit as mk

Path("mine.toml").write_text("""
name = "mine"
[device]
name = "a card of 24 GB"
memory_bytes = 24e9
memory_bytes_per_s = 1e12
[device.flops_per_s]
bfloat16 = 120e12
[[tiers]]
name = "pcie"
ranks = 4
bytes_per_s = 25e9
latency_s = 5e-6
[[tiers]]
name = "ethernet"
ranks = 16
bytes_per_s = 3e9
latency_s = 2e-5
per = "group"
""")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=1024, layers=4):
        super().__init__()
        self.embed, self.head = nn.Embedding(8192, width), nn.Linear(width, 8192)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


with torch.device("meta"):
    model = Model()
cluster, batch = mk.Cluster.read("mine.toml"), mk.Batch(sequences=64, seq_len=512)
bf16 = mk.MemoryPolicy(precision=mk.strategy.Precision())
by_hand = mk.Strategy(mesh="dp_shard=16", memory=bf16)
told = mk.forecast(model, by_hand, cluster, batch)
space = mk.Space(pp=(1,), tp=(1, 2), recompute=("none",))
found = mk.search(model, cluster, batch, world=16, device_memory=int(24e9), space=space, fixed=mk.Strategy(memory=bf16))
found.best.write("strategy.toml")
best = mk.Strategy.read("strategy.toml")
print(told)
print(found)
assert found.winner.seconds <= told.seconds
spec = mk.MeshSpec.parse(best.mesh) if isinstance(best.mesh, str) else best.mesh
rows = 64 // (spec.dp_replicate * spec.dp_shard)
fits = mk.estimate(model, strategy=best, rows=rows, seq_len=512)
print(fits)
assert fits.fits(24e9)
