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
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import meshkit as mk
from meshkit.data import Loader, Tokenizer, Tokens, evaluation_batches, token_bytes
from meshkit.loss import IGNORED
from meshkit.metrics import ModelFlops
from meshkit.recipes import ParallelFlags, Session, TextFlags, TrainFlags, print0, text_tokens

DEMO = mk.models.LlamaConfig(
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
class Config(TrainFlags, ParallelFlags, TextFlags):
    mesh: str = "cp=-1"
    out: Path = Path("runs/long_context")
    seq_len: int = 4096
    global_batch: int = 2
    steps: int = 140
    lr: float = 6e-3
    warmup_steps: int = 10
    eval_every: int = 70
    save_every: int = 35

    rope_theta: mk.recipes.Positive | None = None
    """base wavelength of the rotary positions; more for longer texts than a pretrained model has seen"""
    scheme: Literal["auto", "ring", "all_gather", "group_cast", "ulysses"] = "auto"
    """how attention reaches the tokens of other ranks"""
    balance: Literal["auto", "contiguous", "zigzag", "per_document", "locality"] = "auto"
    """which rank holds which tokens"""
    ulysses: mk.recipes.Count | None = None
    """with ring or group_cast: the number of consecutive ranks that trade tokens for heads"""
    slack: mk.recipes.NotNegative = 0.0
    """how much more than the mean the busiest rank may work, in order to send less"""
    window: mk.recipes.Count = 64
    """tokens that the comparison at the end can look back on"""


def build(config: Config, mesh: mk.Mesh, vocab_size: int | None = None) -> mk.Run:
    """The sharded model, without values; `python -m meshkit estimate` runs it too, before there is a tokenizer."""
    shape = config.shape(DEMO, vocab_size)
    rope = dataclasses.replace(shape.rope, theta=config.rope_theta or shape.rope.theta)
    longest = max(shape.max_position_embeddings, config.seq_len)
    with torch.device("meta"):
        model = mk.models.Llama(dataclasses.replace(shape, rope=rope, max_position_embeddings=longest))
    context = mk.strategy.ContextPolicy(
        scheme=config.scheme, balance=config.balance, ulysses=config.ulysses, slack=config.slack
    )
    return mk.parallelize(model, mesh, config.parallel(plan=mk.models.LLAMA_PLAN, context=context))


def main() -> None:
    config = Config.parse()

    # ---------------------------------------------------------------------------------------------- the mesh
    mesh = mk.init_mesh(config.mesh)
    print0(f"mesh  {mesh.describe()}")

    # ---------------------------------------------------------------------------------------------- text to tokens
    tokenizer, splits = text_tokens(config, vocab_size=DEMO.vocab_size)
    loader = Loader(
        splits.train,
        seq_len=config.seq_len,
        global_batch=config.global_batch,
        seed=config.seed,
        rank=mesh.data_rank,  # ranks that differ only in cp read the same sequences, and split them
        ranks=mesh.data_ranks,
        vocab_size=tokenizer.vocab_size,
    )
    print0(f"data  {splits.train.path.parent}: {loader.samples_per_epoch:,} samples of {config.seq_len} tokens")

    # ---------------------------------------------------------------------------------------------- the sharded model
    run = build(config, mesh, vocab_size=tokenizer.vocab_size)
    mk.init_weights(run.model, seed=config.seed, plan=run.plan)
    if config.pretrained is not None:
        mk.models.load_pretrained(run.model, config.pretrained)
    optimizer = mk.adamw(run, lr=config.lr, weight_decay=config.weight_decay)
    scheduler = config.lr_schedule(optimizer)
    print0(f"model {sum(p.numel() for p in run.parameters()):,} parameters")

    # ---------------------------------------------------------------------------------------------- load balance over cp
    rows = -(-config.global_batch // mesh.data_ranks)
    masks = document_masks(next(evaluation_batches(splits.held_out, seq_len=config.seq_len, batch=rows)))
    lengths = sorted(after - first for mask in masks for first, after in mask.components)
    print0(f"the first {rows} held-out rows: {len(lengths)} documents of {lengths[0]:,} to {lengths[-1]:,} tokens")
    chosen = run.strategy.context
    for policy in dict.fromkeys((chosen, dataclasses.replace(chosen, balance="contiguous"))):
        other = dataclasses.replace(run.strategy, context=policy)
        explained = mk.explain(run.full_model, mesh.spec, other, rows=rows, seq_len=config.seq_len, mask=masks)
        print0("\n".join(f"balance {policy.balance:11} {note}" for note in explained.notes))

    # ---------------------------------------------------------------------------------------------- the loop
    # An upper bound: attention that stops at the end of a packed document needs less.
    flops = ModelFlops.from_config(run.full_model.config).per_token(config.seq_len)
    with Session(run, config, optimizer=optimizer, scheduler=scheduler, loader=loader) as session:
        for step in session.steps():
            batch = next(loader)
            with session.trace_pipeline(run):
                loss = run.forward_backward(batch, microbatches=config.microbatches)
            norm = mk.clip_grad_norm(run, config.clip)
            if session.guard.allows(run, norm, step=step):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            session.log(loss=loss, grad_norm=norm)
            session.stop_clock(tokens=config.global_batch * config.seq_len, flops_per_token=flops)
            if session.evaluates(step):
                table = by_position(run, splits.held_out, tokenizer, config)
                session.log(held_out_bits_per_byte=bits_per_byte(table))
    if not session.finished:
        return

    # ---------------------------------------------------------------------------------------------- export
    export = config.out / f"model-{config.steps}"
    run.export(export, tokenizer)
    print0(f"\nheld out: {bits_per_byte(table):.3f} bits per byte; model in {export}")
    cut = by_position(run, splits.held_out, tokenizer, config, window=config.window)
    print0(f"\n{'position':>15} {'labels':>8} {'loss':>8}   if only the last {config.window} tokens are seen")
    for (first, after), (nats, labels, _), (near_nats, _, _) in zip(buckets(config.seq_len), table, cut, strict=True):
        loss, near = nats / labels, near_nats / labels
        print0(f"{f'{first:,}-{after:,}':>15} {labels:8,.0f} {loss:8.3f}   {near:.3f} ({near - loss:+.3f})")


# ---------------------------------------------------------------------------------------------- held-out loss by position
def buckets(seq_len: int) -> list[tuple[int, int]]:
    return list(pairwise([0, *(edge for edge in (16, 64, 256, 1024, 4096, 16_384, 65_536) if edge < seq_len), seq_len]))


def by_position(run: mk.Run, tokens: Tokens, tokenizer: Tokenizer, config: Config, window: int | None = None) -> Tensor:
    """[buckets, 3]: nats, labels and bytes of held-out tokens, by how many tokens of its document a token looks back on.

    window: look back on that many tokens only.
    """
    sizes = token_bytes(tokenizer)  # where batches lie when they are counted: on the host

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
        # Vouched for: a label counts in its bucket alone, whatever else there is.
        loss, counted = run.evaluate(batch, loss=mk.step.additive(nats), count=labels_and_bytes, mask=seen)
        total += torch.cat([loss[:, None], counted], dim=1)
    return total


def document_masks(batch: dict[str, Tensor], window: int | None = None) -> list[mk.Mask]:
    """One for each row: causal, inside its documents."""
    return [mk.Mask.from_positions(row_T[None], window=window) for row_T in batch["position_ids"]]


def bits_per_byte(table: Tensor) -> float:
    nats, _, size = table.sum(0).tolist()
    return nats / math.log(2) / max(size, 1)


if __name__ == "__main__":
    mk.run_main(main)
