"""Train on long sequences with context parallelism, and see what the length is worth. Read it top to bottom.

CPU, 4 ranks    torchrun --nproc-per-node 4 examples/long_context.py
go on, on 2     torchrun --nproc-per-node 2 examples/long_context.py --steps 180
... or other 4  torchrun --nproc-per-node 4 examples/long_context.py --steps 180 --mesh "dp_shard=2 cp=2"
1 GPU           python examples/long_context.py --pretrained Llama-3.2-1B/ --seq-len 16384 --lr 2e-5 \
                    --precision bf16 --recompute full --data "corpus/*.jsonl"
8 GPUs          torchrun --nproc-per-node 8 examples/long_context.py --seq-len 131072 ...

The corpus is Python's own standard library unless --data names another; every file is a document, attention does not leave
it, and the tokens of a sequence are split so that every rank of `cp` has the same work. A run that finds a checkpoint in
--out continues from it, on whatever mesh it is started. It ends with the held-out loss by position: the further into a
document, the more there is to look back on; beside it the loss of the same labels when only the last tokens can be seen.
On 4 ranks of a busy 2-core CPU: 3 min 42 s, 1 GiB a rank, loss 6.26 to about 4.1, held out 3.28 bits per byte. So short a
run has only begun to use what is far away: to see 64 tokens costs it up to 0.02 of loss. Train longer, or go on from a
model that has learned to.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor

import meshkit as mk
from meshkit.data import (
    Loader,
    Tokenizer,
    Tokens,
    evaluation_batches,
    find_corpus,
    load_tokenizer,
    prepare,
    prepare_tokenizer,
    standard_library,
    token_bytes,
)
from meshkit.explain import explain
from meshkit.launch import run_main
from meshkit.memory.loss import IGNORED
from meshkit.metrics import Logger, Meter, ModelFlops, Progress, peak_flops_per_s
from meshkit.models import (
    LLAMA_PLAN,
    Llama,
    LlamaConfig,
    config_from_pretrained,
    load_pretrained,
    save_pretrained,
)
from meshkit.schedule_lr import lr_schedule

DEMO = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    qk_norm=True,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    mesh: str = "cp=-1"
    """axes and sizes, as "dp_shard=2 cp=2"; -1 is the ranks that are left"""
    pretrained: Path | None = None
    """start from the weights, shape and tokenizer of this Hugging Face folder; default: a small model, from nothing"""
    data: tuple[str, ...] = ()
    """text, JSONL or Parquet files, folders or patterns; empty: Python's standard library"""
    tokenizer: Path | None = None
    """folder with a tokenizer.json; default: that of --pretrained, or one trained on the data, once"""
    out: Path = Path("runs/long_context")
    """checkpoints, logs and the final model"""
    cache: Path = Path("~/.cache/meshkit")
    """tokenizers and tokens made from the data"""

    seq_len: int = 4096
    rope_theta: float | None = None
    """base wavelength of the rotary positions; more for longer texts than a pretrained model has seen"""
    global_batch: int = 2
    """sequences of one optimizer step, over all ranks"""
    microbatches: int = 1
    steps: int = 140
    lr: float = 6e-3
    lr_kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 10
    seed: int = 0

    scheme: Literal["auto", "ring", "all_gather", "group_cast", "ulysses"] = "auto"
    """how attention reaches the tokens of other ranks"""
    balance: Literal["auto", "contiguous", "zigzag", "per_document", "locality"] = "auto"
    """which rank holds which tokens"""
    ulysses: int | None = None
    """with ring or group_cast: so many consecutive ranks trade tokens for heads"""
    slack: float = 0.0
    """how much more than the mean the busiest rank may work, in order to send less"""

    sequence: bool = True
    """with tp: shard activations along the sequence between regions"""
    recompute: Literal["none", "activation", "selective", "full"] = "none"
    loss_chunk: int | None = None
    """tokens whose logits exist at a time; default: all of them"""
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False

    window: int = 64
    """the tokens that the comparison at the end can look back on"""
    eval_every: int = 70
    eval_batches: int = 8
    save_every: int = 35


def build(config: Config, mesh: mk.Mesh, vocab_size: int | None = None) -> mk.Run:
    """The model in parts, without values; `python -m meshkit estimate` runs it too, before there is a tokenizer."""
    shape = dataclasses.replace(DEMO, vocab_size=vocab_size or DEMO.vocab_size)
    if config.pretrained is not None:
        shape = config_from_pretrained(config.pretrained)
    rope = dataclasses.replace(shape.rope, theta=config.rope_theta or shape.rope.theta)
    longest = max(shape.max_position_embeddings, config.seq_len)
    shape = dataclasses.replace(shape, rope=rope, max_position_embeddings=longest)
    with torch.device("meta"):
        model = Llama(shape)
    return mk.parallelize(
        model,
        mesh,
        plan=LLAMA_PLAN,
        memory=mk.MemoryPolicy(
            recompute=config.recompute,
            precision=mk.Precision() if config.precision == "bf16" else None,
            loss=mk.ChunkedLoss(tokens=config.loss_chunk) if config.loss_chunk is not None else None,
        ),
        sequence=config.sequence,
        context=mk.ContextPolicy(
            scheme=config.scheme, balance=config.balance, ulysses=config.ulysses, slack=config.slack
        ),
        compile=config.compile,
    )


def main() -> None:
    config = tyro.cli(Config)

    # ---------------------------------------------------------------------------------------------- who: the mesh
    mesh = mk.init_mesh(config.mesh)
    speaks = mesh.rank == 0
    say = print if speaks else lambda *_: None
    say(f"mesh  {mesh.describe()}")

    # ---------------------------------------------------------------------------------------------- text to tokens
    cache = config.cache.expanduser()
    corpus = find_corpus(config.data) if config.data else standard_library()
    with mk.main_rank_first():
        if folder := config.tokenizer or config.pretrained:
            tokenizer = load_tokenizer(folder)
        else:
            tokenizer = prepare_tokenizer(corpus, cache, vocab_size=DEMO.vocab_size, progress=speaks)
        splits = prepare(corpus, tokenizer, cache, progress=speaks)
    loader = Loader(
        splits.train,
        seq_len=config.seq_len,
        global_batch=config.global_batch,
        seed=config.seed,
        rank=mesh.data_rank,  # ranks that differ only in cp read the same sequences, and split them
        ranks=mesh.data_ranks,
        vocab_size=tokenizer.vocab_size,
    )
    say(f"data  {splits.train.path.parent}: {loader.samples_per_epoch:,} samples of {config.seq_len} tokens")

    # ---------------------------------------------------------------------------------------------- the model, in parts
    run = build(config, mesh, vocab_size=tokenizer.vocab_size)
    shape = run.full_model.config
    mk.init_weights(run.model, seed=config.seed, plan=run.plan)
    if config.pretrained is not None:
        load_pretrained(run.model, config.pretrained)
    optimizer = mk.adamw(run, lr=config.lr)
    scheduler = lr_schedule(
        optimizer, kind=config.lr_kind, warmup_steps=config.warmup_steps, total_steps=config.steps, min_factor=0.1
    )
    say(f"model {sum(p.numel() for p in run.parameters()):,} parameters")

    # ---------------------------------------------------------------------------------------------- who holds which tokens
    rows = -(-config.global_batch // mesh.data_ranks)
    masks = document_masks(next(evaluation_batches(splits.held_out, seq_len=config.seq_len, batch=rows)))
    lengths = sorted(after - first for mask in masks for first, after in mask.components)
    say(f"the first {rows} held-out rows: {len(lengths)} documents of {lengths[0]:,} to {lengths[-1]:,} tokens")
    for policy in dict.fromkeys(
        (run.strategy.context, dataclasses.replace(run.strategy.context, balance="contiguous"))
    ):
        other = dataclasses.replace(run.strategy, context=policy)
        told = explain(run.full_model, mesh.spec, other, rows=rows, seq_len=config.seq_len, mask=masks)
        say("\n".join(f"balance {policy.balance:11} {note}" for note in told.notes))

    # ---------------------------------------------------------------------------------------------- where we stopped
    checkpoints = mk.Checkpointer(config.out / "checkpoints", keep=2)
    start = checkpoints.resume(run, optimizer, scheduler=scheduler, loader=loader, config=config)
    if start >= config.steps:
        say(f"{config.out} has its {start} steps; give more --steps to go on, or another --out to begin anew")
        return
    if start:
        say(f"resume from step {start}")

    # ---------------------------------------------------------------------------------------------- the loop
    flops = ModelFlops.from_config(shape).per_token(config.seq_len)  # documents packed into it would make it less
    guard = mk.NonFiniteGuard()
    with (
        checkpoints,
        mk.SaveOnSignal() as signals,
        Progress(total_steps=config.steps, start_step=start, enabled=speaks) as progress,
        Logger(config.out, start_step=start, enabled=speaks, also=[progress.update]) as logger,
    ):
        meter = Meter(
            total_steps=config.steps,
            start_step=start,
            devices=mesh.spec.world_size,
            peak_flops_per_s=peak_flops_per_s(mesh.device),
            device=mesh.device,
        )
        for step in range(start + 1, config.steps + 1):
            loss = run.forward_backward(next(loader), microbatches=config.microbatches)
            norm = mk.clip_grad_norm(run, 1.0)
            lr = scheduler.get_last_lr()[0]
            if guard.allows(run, norm, step=step):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            scalars = {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr}
            reading = meter.step(config.global_batch * config.seq_len, flops_per_token=flops)
            with meter.paused():
                if step % config.eval_every == 0 or step == config.steps:
                    whole = by_position(run, splits.held_out, tokenizer, config)
                    scalars["held_out_bits_per_byte"] = bits_per_byte(whole)
                logger.log(step, {**scalars, **reading.scalars()})
                leaving = signals.should_stop(mesh)
                if step % config.save_every == 0 or step == config.steps or leaving:
                    checkpoints.save(step, run, optimizer, scheduler=scheduler, loader=loader, config=config)
            if leaving and step < config.steps:
                say(f"{signals.received or 'a signal on another rank'}: saved step {step}; start again to go on")
                return

    # ---------------------------------------------------------------------------------------------- what came of it
    export = config.out / f"model-{config.steps}"
    save_pretrained(run.model, shape, export)
    say(f"\nheld out: {bits_per_byte(whole):.3f} bits per byte; model in {export}")
    cut = by_position(run, splits.held_out, tokenizer, config, window=config.window)
    say(f"\n{'position':>15} {'labels':>8} {'loss':>8}   if only the last {config.window} tokens are seen")
    for (first, after), (nats, labels, _), (near_nats, _, _) in zip(buckets(config.seq_len), whole, cut, strict=True):
        loss, near = nats / labels, near_nats / labels
        say(f"{f'{first:,}-{after:,}':>15} {labels:8,.0f} {loss:8.3f}   {near:.3f} ({near - loss:+.3f})")


# ---------------------------------------------------------------------------------------------- held-out loss by position
def buckets(seq_len: int) -> list[tuple[int, int]]:
    return list(pairwise([0, *(edge for edge in (16, 64, 256, 1024, 4096, 16_384, 65_536) if edge < seq_len), seq_len]))


def by_position(run: mk.Run, tokens: Tokens, tokenizer: Tokenizer, config: Config, window: int | None = None) -> Tensor:
    """[buckets, 3]: nats, labels and bytes of held-out tokens, by how many tokens of its document a token looks back on.

    window: look back on that many tokens only.
    """
    sizes = token_bytes(tokenizer).to(run.mesh.device)

    def in_bucket(batch: dict[str, Tensor]) -> Iterator[Tensor]:
        """The labels of each bucket, the others ignored. A rank of cp knows the positions of the tokens that it holds."""
        for first, after in buckets(config.seq_len):
            outside = (batch["position_ids"] < first) | (batch["position_ids"] >= after)
            yield batch["labels"].masked_fill(outside, IGNORED)

    def nats(model: torch.nn.Module, part: dict[str, Tensor]) -> Tensor:
        inputs = {name: value for name, value in part.items() if name != "labels"}
        logits_BTV = model(**inputs)
        return torch.stack([mk.cross_entropy(logits_BTV, labels) for labels in in_bucket(part)])

    def labels_and_bytes(batch: dict[str, Tensor]) -> Tensor:
        weights = [(sizes[labels.clamp(min=0)], labels != IGNORED) for labels in in_bucket(batch)]
        return torch.stack([torch.stack([valid.sum(), (size * valid).sum()]) for size, valid in weights])

    mesh, rows = run.mesh, max(1, config.global_batch // run.mesh.data_ranks)
    total = torch.zeros(len(buckets(config.seq_len)), 3, dtype=torch.float64, device=mesh.device)
    batches = evaluation_batches(tokens, seq_len=config.seq_len, batch=rows, rank=mesh.data_rank, ranks=mesh.data_ranks)
    for _, batch in zip(range(config.eval_batches), batches, strict=False):
        seen = None if window is None else document_masks(batch, window=window)
        loss, counted = run.evaluate(batch, loss=nats, count=labels_and_bytes, mask=seen)
        total += torch.cat([loss[:, None], counted], dim=1)
    return total


def document_masks(batch: dict[str, Tensor], window: int | None = None) -> list[mk.Mask]:
    """One for each row: causal, inside its documents."""
    return [mk.Mask.from_positions(row_T[None], window=window) for row_T in batch["position_ids"]]


def bits_per_byte(table: Tensor) -> float:
    nats, _, size = table.sum(0).tolist()
    return nats / math.log(2) / max(size, 1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_main(main)
