"""Pretrain a Llama on a mesh, from text to a Hugging Face folder. Read it top to bottom; copy what you need.

CPU, 4 ranks    torchrun --nproc-per-node 4 examples/llama_pretrain.py --mesh "dp_shard=2 tp=2"
one process     python examples/llama_pretrain.py
1 GPU           torchrun --nproc-per-node 1 examples/llama_pretrain.py --model llama3.2-1b --precision bf16 --compile \
                    --seq-len 4096 --global-batch 8 --data "corpus/*.jsonl" --tokenizer tokenizer/
8 GPUs          torchrun --nproc-per-node 8 examples/llama_pretrain.py --model llama3-8b --mesh "dp_shard=-1" \
                    --precision bf16 --compile --recompute selective ...
several nodes   examples/slurm.sh
will it fit?    python -m meshkit estimate examples/llama_pretrain.py --model llama3-8b --mesh "dp_shard=8" \
                    --precision bf16 --seq-len 8192 --global-batch 8 --device-memory 80GiB

Without --data the corpus is the source of Python's own standard library. A run that finds a checkpoint in --out
continues from it, on whatever mesh it is started; SIGTERM and SIGUSR1 save one and leave. README.md says what loss and
time to expect.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import meshkit as mk
from meshkit.data import Loader
from meshkit.metrics import ModelFlops
from meshkit.recipes import (
    ParallelFlags,
    PretrainFlags,
    RampFlags,
    Session,
    build_optimizer,
    held_out_scores,
    pretraining_data,
    print0,
    write_sample,
)

DEMO = mk.models.LlamaConfig(
    vocab_size=4096,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
)
MODELS = {
    "demo": DEMO,
    "llama3.2-1b": mk.models.LLAMA32_1B,
    "llama3-8b": mk.models.LLAMA3_8B,
    "llama3-70b": mk.models.LLAMA3_70B,
    "llama3.1-405b": mk.models.LLAMA31_405B,
}


@dataclass(frozen=True, kw_only=True)
class Config(RampFlags, ParallelFlags, PretrainFlags):
    model: Literal["demo", "llama3.2-1b", "llama3-8b", "llama3-70b", "llama3.1-405b"] = "demo"
    """the shape of the model; its vocabulary is the tokenizer's"""
    out: Path = Path("runs/llama")


def build(config: Config, mesh: mk.Mesh, vocab_size: int | None = None) -> mk.Run:
    """The sharded model, without values; `python -m meshkit estimate` runs it too, before there is a tokenizer."""
    with torch.device("meta"):
        model = mk.models.Llama(config.shape(MODELS[config.model], vocab_size))
    return mk.parallelize(model, mesh, config.parallel(plan=mk.models.LLAMA_PLAN))


def main() -> None:
    config = Config.parse()

    # ---------------------------------------------------------------------------------------------- the mesh
    mesh = mk.init_mesh(config.mesh)
    print0(f"mesh  {mesh.describe()}")

    # ---------------------------------------------------------------------------------------------- text to tokens
    tokenizer, data = pretraining_data(config, vocab_size=MODELS[config.model].vocab_size)
    loader = Loader(
        data.train,
        seq_len=config.seq_len,
        global_batch=config.batch_ramp(),
        seed=config.seed,
        rank=mesh.data_rank,
        ranks=mesh.data_ranks,
        documents=config.documents,
        vocab_size=tokenizer.vocab_size,
    )
    print0(f"data  {data}: {loader.samples_per_epoch:,} samples of {config.seq_len} tokens")

    # ---------------------------------------------------------------------------------------------- the sharded model
    run = build(config, mesh, vocab_size=tokenizer.vocab_size)
    mk.init_weights(run.model, seed=config.seed, plan=run.plan)
    if config.pretrained is not None:
        mk.models.load_pretrained(run.model, config.pretrained)
    optimizer = build_optimizer(config, run)
    scheduler = config.lr_schedule(optimizer)
    rows = -(-config.global_batch // mesh.data_ranks)
    print0(f"model {sum(p.numel() for p in run.full_model.parameters()):,} parameters")
    if config.explain:
        sizes = {"rows": rows, "seq_len": config.seq_len, "microbatches": config.microbatches}
        print0(mk.explain(run, **sizes))

    # ---------------------------------------------------------------------------------------------- the loop
    # An upper bound: attention that stops at the end of a packed document needs less.
    flops = ModelFlops.from_config(run.full_model.config).per_token(config.seq_len)
    with Session(run, config, optimizer=optimizer, scheduler=scheduler, loader=loader) as session:
        for step in session.steps():
            sequences, batch = loader.global_batch, next(loader)
            with session.trace_pipeline(run):
                loss = run.forward_backward(batch, microbatches=config.microbatches_of(sequences))
            norm = mk.clip_grad_norm(run, config.clip)
            if session.guard.allows(run, norm, step=step):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            session.log(loss=loss, grad_norm=norm, **({"sequences": sequences} if config.last_batch else {}))
            session.stop_clock(tokens=sequences * config.seq_len, flops_per_token=flops)
            if session.evaluates(step):
                held_out = held_out_scores(
                    run,
                    data,
                    tokenizer,
                    seq_len=config.seq_len,
                    rows=rows,
                    batches=config.eval_batches,
                    documents=config.documents,
                )
                session.log(**held_out)
    if not session.finished:
        return

    # ---------------------------------------------------------------------------------------------- export
    export = config.out / f"model-{config.steps}"
    run.export(export, tokenizer)
    ids = tokenizer.encode(config.prompt)
    written = write_sample(run, ids, tokens=config.sample_tokens, seed=config.seed)
    print0(f"\nheld out: {held_out['held_out_bits_per_byte']:.3f} bits per byte; model in {export}")
    print0(f"{'─' * 20} a sample {'─' * 20}\n{tokenizer.decode([*ids, *written])}\n{'─' * 50}")


if __name__ == "__main__":
    mk.run_main(main)
