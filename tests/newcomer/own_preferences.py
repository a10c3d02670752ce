"""DPO on own pairs from a jsonl: torchrun --nproc-per-node 2 own_preferences.py"""

import json
from pathlib import Path

import torch

import meshkit as mk
from meshkit.algos.preference import PreferenceLoss, count_pairs, preference_objective
from meshkit.algos.rollout import REFERENCE, token_values
from meshkit.data import ExampleLoader, encode_pair, encode_records, fit, read_records, train_tokenizer
from meshkit.metrics import MetricSums

mesh = mk.init_mesh("dp_shard=2")
if mesh.rank == 0:
    rows = [{"prompt": f"{i} is ", "chosen": "even" if i % 2 == 0 else "odd", "rejected": "neither"} for i in range(64)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
torch.distributed.barrier()
tokenizer = train_tokenizer(Path("pairs.jsonl").read_text().splitlines(), vocab_size=300)
pairs = encode_records(read_records("pairs.jsonl"), lambda record: encode_pair(record.fields, tokenizer))
loader = ExampleLoader(
    fit(pairs, seq_len=64, truncate="drop"), seq_len=64, global_batch=16, seed=0,
    rank=mesh.data_rank, ranks=mesh.data_ranks, packing="step",
)  # fmt: skip
config = mk.models.LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8,
)  # fmt: skip


def start():
    with torch.device("meta"):
        model = mk.models.Llama(config)
    run = mk.parallelize(model, mesh, plan=mk.models.LLAMA_PLAN)
    mk.init_weights(run.model, seed=0)
    return run


policy, reference = start(), start()
optimizer = mk.adamw(policy, lr=3e-3)
sums = MetricSums(mesh, ("accuracy", "margin"))
for _ in range(10):
    batch = next(loader)
    batch[REFERENCE] = token_values(reference, batch)
    loss = preference_objective(mesh, batch, PreferenceLoss(kind="sigmoid", beta=0.1), metrics=sums)
    value = policy.forward_backward(batch, loss=loss, count=count_pairs)
    optimizer.step()
    optimizer.zero_grad()
    metrics = sums.means(16)  # pairs of the step
assert metrics["accuracy"] == 1 and metrics["margin"] > 0, metrics
if mesh.rank == 0:
    print(f"loss {value:.3f}, accuracy {metrics['accuracy']:.2f}, margin {metrics['margin']:.2f}")
