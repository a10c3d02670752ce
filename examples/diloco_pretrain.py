"""Pretrain on slow links: replicas step alone and meet every so many steps (DiLoCo, Streaming DiLoCo, CO2, local SGD).

CPU, 4 ranks    torchrun --nproc-per-node 4 examples/diloco_pretrain.py --mesh "dp_replicate=4" --every 25
inside a node   torchrun --nproc-per-node 4 examples/diloco_pretrain.py --mesh "dp_replicate=2 tp=2"
streaming       ... --every 24 --fragments 4 --delay 2 --mixing 0.5 --wire int4
CO2             ... --algorithm co2 --every 10
two sites       torchrun --nnodes 2 --nproc-per-node 8 ... examples/diloco_pretrain.py --model llama3.2-1b \
                    --mesh "dp_replicate=2 dp_shard=8" --precision bf16 --seq-len 4096 --global-batch 32 --every 100
come and go     python -m meshkit meeting-place --port 29600 --replicas 4 --quorum 2 --grace 30, and up to four jobs as
                torchrun --standalone --nproc-per-node 2 examples/diloco_pretrain.py --mesh "dp_shard=2" \
                    --meeting-place HOST:29600 --out runs/diloco-0    # the next one with --out runs/diloco-1

dp_replicate is the slow link: on it nothing is sent but at meetings, and once in --every steps a few bytes that ask whether
a signal came. All other axes are inside a replica. --explain prints the bytes of a period. Each replica saves in a folder of
its own, all after the same steps, and a run that finds them in --out goes on from there, also within a period. With
--meeting-place each replica is a job of its own, without dp_replicate in its --mesh, and may be lost, and come, at any time:
one that comes, for the first time or again, gets the state of the others at their next meeting. The data, the
model and what to expect of it are those of llama_pretrain.py; docs/slow_links.md says what the algorithms cost and lose.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import meshkit as mk
from meshkit.data import Loader
from meshkit.mesh import replica_mesh
from meshkit.optim.outer import CO2, DiLoCo, LocalSGD, MeetingPlace, OuterOptimizer, Policy
from meshkit.recipes import (
    Count,
    CountOrNone,
    NotNegative,
    ParallelFlags,
    PretrainFlags,
    Session,
    StepFlags,
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
MODELS = {"demo": DEMO, "llama3.2-1b": mk.models.LLAMA32_1B, "llama3-8b": mk.models.LLAMA3_8B}


@dataclass(frozen=True, kw_only=True)
class Config(StepFlags, ParallelFlags, PretrainFlags):
    model: Literal["demo", "llama3.2-1b", "llama3-8b"] = "demo"
    """the shape of the model; its vocabulary is the tokenizer's"""
    mesh: str = "dp_replicate=-1"
    global_batch: Count = 16
    """sequences of one step, over all replicas"""
    algorithm: Literal["diloco", "co2", "local-sgd"] = "diloco"
    every: Count = 25
    """the period: steps between meetings"""
    outer_lr: NotNegative | None = None
    """of the outer optimizer; default: the policy's"""
    outer_momentum: NotNegative | None = None
    fragments: Count = 1
    """diloco: parts of the model that meet in turn"""
    delay: CountOrNone = 0
    """diloco: steps in which a fragment travels"""
    mixing: NotNegative = 0.0
    """diloco: the share of its own values that a replica keeps at an update"""
    wire: Literal["full", "int8", "int4"] = "full"
    """how changes travel"""
    meeting_place: str = ""
    """host:port of `python -m meshkit meeting-place`: this job is one of the replicas that meet there"""
    out: Path = Path("runs/diloco")

    def policy(self) -> Policy:
        given = {"lr": self.outer_lr, "momentum": self.outer_momentum}
        outer = {name: value for name, value in given.items() if value is not None}
        if self.algorithm == "local-sgd":
            return LocalSGD(every=self.every)
        if self.algorithm == "co2":
            return CO2(every=self.every, wire=self.wire, **outer)
        streaming = {"fragments": self.fragments, "delay": self.delay, "mixing": self.mixing}
        return DiLoCo(every=self.every, wire=self.wire, **streaming, **outer)


def main() -> None:
    config = Config.parse()
    policy = config.policy()  # what does not fit together is refused before there is a world

    # ---------------------------------------------------------------------------------------------- the two meshes
    mesh = mk.init_mesh(config.mesh)
    replica = replica_mesh(mesh)  # of this rank: what is inside sends nothing over dp_replicate
    number, replicas = mesh["dp_replicate"].get_local_rank(), mesh.spec.dp_replicate
    place = MeetingPlace(config.meeting_place, mesh, steps=config.steps) if config.meeting_place else None
    if place is not None:
        number, replicas = place.slot, place.most
    print0(f"mesh  {mesh.describe()}, replica {number} of {replicas}")

    # ---------------------------------------------------------------------------------------------- text to tokens
    tokenizer, data = pretraining_data(config, vocab_size=MODELS[config.model].vocab_size)
    loader = Loader(
        data.train,
        seq_len=config.seq_len,
        global_batch=config.global_batch,
        seed=config.seed,
        rank=(place or mesh).data_rank,  # of all replicas: each has other rows
        ranks=(place or mesh).data_ranks,
        documents=config.documents,
        vocab_size=tokenizer.vocab_size,
    )

    # ---------------------------------------------------------------------------------------------- a replica, and the outer
    with torch.device("meta"):
        model = mk.models.Llama(config.shape(MODELS[config.model], tokenizer.vocab_size))
    strategy = dataclasses.replace(config.parallel(plan=mk.models.LLAMA_PLAN), mesh=None)
    run = mk.parallelize(model, replica, strategy)
    mk.init_weights(run.model, seed=config.seed, plan=run.plan)
    if config.pretrained is not None:
        mk.models.load_pretrained(run.model, config.pretrained)
    optimizer = mk.adamw(run, lr=config.lr, weight_decay=config.weight_decay)
    scheduler = config.lr_schedule(optimizer)
    outer = OuterOptimizer(run, optimizer, place or mesh, policy, follow=[scheduler, loader])
    rows = -(-config.global_batch // (place or mesh).data_ranks)
    if config.explain:
        sizes = {"rows": rows, "seq_len": config.seq_len, "microbatches": config.microbatches}
        print0(mk.explain(run, outer=outer, **sizes))

    # ---------------------------------------------------------------------------------------------- the loop
    if place is None:
        # A part is saved by the ranks that have it: each replica with its own values, and the outer state that all have.
        parts = {f"replica-{index}": (None, None, None) for index in range(replicas)}
        parts[f"replica-{number}"] = (run, outer, scheduler)
        session = Session(mesh, config, parts=parts, loader=loader, signals_every=config.every)
    else:
        session = Session(run, config, optimizer=outer, scheduler=scheduler, loader=loader)
    with session:
        if session.start < config.steps:
            session.go_on_from(outer.join())
        for step in session.steps():
            loss = run.forward_backward(
                next(loader), microbatches=config.microbatches
            )  # the mean of this replica's tokens
            norm = mk.clip_grad_norm(run, config.clip)
            if session.guard.allows(run, norm, step=step):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            outer.step()  # also where the guard skipped: replicas count alike
            step = session.go_on_from(outer.steps)  # further on, where it came late and got the others' state
            session.log(loss=loss, grad_norm=norm, **outer.scalars)
            session.stop_clock(tokens=config.global_batch * config.seq_len)
            if step == config.steps:
                outer.meet()
            if session.evaluates(step):
                held_out = held_out_scores(
                    run,
                    data,
                    tokenizer,
                    seq_len=config.seq_len,
                    rows=rows,
                    batches=config.eval_batches * replicas,  # each replica scores what all do in llama_pretrain.py
                    documents=config.documents,
                )
                session.log(**held_out)
    if not session.finished:
        return

    # ---------------------------------------------------------------------------------------------- export, of one replica
    if place is not None:
        place.leave()
    if number == 0 or place is not None:
        export = config.out / f"model-{config.steps}"
        run.export(export, tokenizer)
        written = write_sample(
            run, ids := tokenizer.encode(config.prompt), tokens=config.sample_tokens, seed=config.seed
        )
        print0(f"\nheld out: {held_out['held_out_bits_per_byte']:.3f} bits per byte; model in {export}")
        print0(f"{'─' * 20} a sample {'─' * 20}\n{tokenizer.decode([*ids, *written])}\n{'─' * 50}")


if __name__ == "__main__":
    mk.run_main(main)
