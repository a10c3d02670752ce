"""A mixture of the hub's data and own jsonl, resumed, with trackers: torchrun --nproc-per-node 2 own_data.py"""

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch

import meshkit as mk
from meshkit.data import ExampleLoader, encode_completion, encode_records, fit, read_records, train_tokenizer
from meshkit.metrics import Logger

os.environ["WANDB_MODE"] = "offline"
mesh = mk.init_mesh("dp_shard=2")
if mesh.rank == 0:  # a folder as the hub has it, and a file of mine
    Path("hub").mkdir()
    rows = [{"prompt": f"{i} plus one is ", "completion": f"{i + 1}"} for i in range(40)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "hub/train-00000-of-00001.parquet")
    rows = [{"question": f"is {i} a number? ", "answer": "yes"} for i in range(20)]
    Path("mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
torch.distributed.barrier()

tokenizer = train_tokenizer(["0123456789 plus one is a number? yes"], vocab_size=300)
hub = encode_records(
    read_records("hub"), lambda row: encode_completion(tokenizer, row.fields["prompt"], row.fields["completion"])
)
mine = encode_records(
    read_records("mine.jsonl"), lambda row: encode_completion(tokenizer, row.fields["question"], row.fields["answer"])
)
examples = fit(hub + 2 * mine, seq_len=64, truncate="drop")  # mine are seen twice as often
config = mk.models.LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8,
)  # fmt: skip


def load():
    ranks = {"rank": mesh.data_rank, "ranks": mesh.data_ranks}
    return ExampleLoader(examples, seq_len=64, global_batch=8, seed=0, packing="step", **ranks)


def train(steps):
    """From where the folder stands to `steps`; the ids that this rank saw."""
    loader = load()
    with torch.device("meta"):
        model = mk.models.Llama(config)
    run = mk.parallelize(model, mesh, plan=mk.models.LLAMA_PLAN)
    mk.init_weights(run.model, seed=0)
    optimizer, seen = mk.adamw(run, lr=1e-2), []
    with mk.Checkpointer("runs/checkpoints") as checkpoints:
        start = checkpoints.resume(run, optimizer, loader=loader)
        with Logger("runs", start_step=start, enabled=mesh.rank == 0, trackers=("tensorboard", "wandb")) as logger:
            for step in range(start + 1, steps + 1):
                batch = next(loader)
                seen.append(batch["input_ids"].tolist())
                loss = run.forward_backward(batch)
                optimizer.step()
                optimizer.zero_grad()
                logger.log(step, {"loss": loss.item()})
        checkpoints.save(steps, run, optimizer, loader=loader)
    return seen


train(4)
resumed = train(8)
straight = load()
assert resumed == [next(straight)["input_ids"].tolist() for _ in range(8)][4:]
if mesh.rank == 0:
    lines = [json.loads(line) for line in Path("runs/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9)) and lines[-1]["loss"] < lines[0]["loss"] - 1, lines
    assert list(Path("runs/tensorboard").rglob("events.*")) and list(Path(".").rglob("*.wandb"))
    print(f"loss {lines[0]['loss']:.3f} to {lines[-1]['loss']:.3f}")
