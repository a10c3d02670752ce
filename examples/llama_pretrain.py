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

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

import meshkit as mk
from meshkit.algos.rollout import Prompt, Sampling, generate
from meshkit.data import (
    Loader,
    find_corpus,
    load_tokenizer,
    prepare,
    prepare_tokenizer,
    standard_library,
)
from meshkit.explain import explain
from meshkit.launch import run_main
from meshkit.metrics import Logger, Meter, ModelFlops, Progress, Stragglers, peak_flops_per_s, profile
from meshkit.models import (
    LLAMA3_8B,
    LLAMA32_1B,
    LLAMA_PLAN,
    Llama,
    LlamaConfig,
    config_from_pretrained,
    load_pretrained,
    save_pretrained,
)
from meshkit.parallel.pipeline import record_trace
from meshkit.recipes.evaluation import bits_per_byte
from meshkit.schedule_lr import lr_schedule

DEMO = LlamaConfig(
    vocab_size=4096,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
)
MODELS = {"demo": DEMO, "llama3.2-1b": LLAMA32_1B, "llama3-8b": LLAMA3_8B}


@dataclass(frozen=True, kw_only=True)
class Config:
    mesh: str = "dp_shard=-1"
    """axes and sizes, as "dp_replicate=2 dp_shard=2 tp=2"; -1 is the ranks that are left"""
    model: Literal["demo", "llama3.2-1b", "llama3-8b"] = "demo"
    """the shape of the model; its vocabulary is the tokenizer's"""
    pretrained: Path | None = None
    """start from the weights, shape and tokenizer of this Hugging Face folder"""
    data: tuple[str, ...] = ()
    """text, JSONL or Parquet files, folders or patterns; empty: Python's standard library"""
    tokenizer: Path | None = None
    """folder with a tokenizer.json; default: train one on the data, once"""
    out: Path = Path("runs/llama")
    """checkpoints, logs, traces and the final model"""
    cache: Path = Path("~/.cache/meshkit")
    """tokenizers and tokens made from the data"""

    seq_len: int = 256
    global_batch: int = 16
    """sequences of one optimizer step, over all ranks"""
    microbatches: int = 1
    """parts a rank runs its sequences in, one after the other"""
    steps: int = 160
    lr: float = 3e-3
    lr_kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 15
    weight_decay: float = 0.1
    clip: float = 1.0
    max_skips: int = 0
    """steps in a row whose gradients may be not finite; they are skipped"""
    documents: bool = True
    """attention and positions stop at the end of a document"""
    seed: int = 0

    zero: Literal[1, 2, 3] | None = None
    """sharding over dp_shard; default 3, with pp 1"""
    sequence: bool = True
    """with tp: shard activations along the sequence between regions"""
    recompute: Literal["none", "activation", "selective", "full"] = "none"
    loss_chunk: int | None = None
    """tokens whose logits exist at a time; default: all of them"""
    offload: Literal["none", "host", "disk"] = "none"
    """where what blocks keep for backward waits"""
    precision: Literal["fp32", "bf16"] = "fp32"
    optimizer_offload: bool = False
    """masters and optimizer state live on the host, and are updated there"""
    adam_states: Literal["fp32", "8bit", "4bit", "fp8"] = "fp32"
    """how Adam's moments are stored"""
    compile: bool = False
    schedule: str = "1f1b"
    """with pp: a name of `python -m meshkit draw`, or a CSV file with a table of yours"""

    eval_every: int = 50
    eval_batches: int = 8
    save_every: int = 50
    keep: int = 2
    profile: bool = False
    """write a Chrome trace of three steps, and with pp one of the schedule beside its simulation"""
    explain: bool = False
    """print what each rank holds and sends"""
    prompt: str = "import os\n\n\ndef "
    sample_tokens: int = 80


def build(config: Config, mesh: mk.Mesh, vocab_size: int | None = None) -> mk.Run:
    """The model in parts, without values; `python -m meshkit estimate` runs it too, before there is a tokenizer."""
    shape = MODELS[config.model] if config.pretrained is None else config_from_pretrained(config.pretrained)
    if config.pretrained is None and vocab_size is not None:
        shape = dataclasses.replace(shape, vocab_size=vocab_size)
    with torch.device("meta"):
        model = Llama(shape)
    return mk.parallelize(
        model,
        mesh,
        plan=LLAMA_PLAN,
        memory=mk.MemoryPolicy(
            recompute=config.recompute,
            precision=mk.Precision() if config.precision == "bf16" else None,
            offload=mk.ActivationOffload(to=config.offload) if config.offload != "none" else None,
            loss=mk.ChunkedLoss(tokens=config.loss_chunk) if config.loss_chunk is not None else None,
            optimizer=mk.OptimizerPolicy(
                states=config.adam_states, offload=mk.OptimizerOffload() if config.optimizer_offload else None
            ),
        ),
        zero=config.zero,
        sequence=config.sequence,
        pipeline=mk.strategy.PipelinePolicy(schedule=config.schedule),
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
        folder = config.tokenizer or config.pretrained
        if folder is not None:
            tokenizer = load_tokenizer(folder)
        else:
            tokenizer = prepare_tokenizer(corpus, cache, vocab_size=MODELS[config.model].vocab_size, progress=speaks)
        splits = prepare(corpus, tokenizer, cache, progress=speaks)
    loader = Loader(
        splits.train,
        seq_len=config.seq_len,
        global_batch=config.global_batch,
        seed=config.seed,
        rank=mesh.data_rank,
        ranks=mesh.data_ranks,
        documents=config.documents,
        vocab_size=tokenizer.vocab_size,
    )
    say(f"data  {splits.train.path.parent}: {loader.samples_per_epoch:,} samples of {config.seq_len} tokens")

    # ---------------------------------------------------------------------------------------------- the model, in parts
    run = build(config, mesh, vocab_size=tokenizer.vocab_size)
    shape = run.full_model.config
    mk.init_weights(run.model, seed=config.seed, plan=run.plan)
    if config.pretrained is not None:
        load_pretrained(run.model, config.pretrained)
    optimizer = mk.adamw(run, lr=config.lr, weight_decay=config.weight_decay)
    scheduler = lr_schedule(
        optimizer, kind=config.lr_kind, warmup_steps=config.warmup_steps, total_steps=config.steps, min_factor=0.1
    )
    rows = -(-config.global_batch // mesh.data_ranks)
    say(f"model {sum(p.numel() for p in run.full_model.parameters()):,} parameters")
    if config.explain:
        say(explain(run, rows=rows, seq_len=config.seq_len, microbatches=config.microbatches))

    # ---------------------------------------------------------------------------------------------- where we stopped
    checkpoints = mk.Checkpointer(config.out / "checkpoints", keep=config.keep)
    start = checkpoints.resume(run, optimizer, scheduler=scheduler, loader=loader, config=config)
    if start >= config.steps:
        say(f"{config.out} has its {start} steps; give more --steps to go on, or another --out to begin anew")
        return
    if start:
        say(f"resume from step {start}")

    # ---------------------------------------------------------------------------------------------- the loop
    flops = ModelFlops.from_config(shape).per_token(config.seq_len)  # documents packed into it would make it less
    guard, stragglers = mk.NonFiniteGuard(max_skips=config.max_skips), Stragglers(mesh)
    with (
        checkpoints,
        mk.SaveOnSignal() as signals,
        Progress(total_steps=config.steps, start_step=start, enabled=speaks) as progress,
        Logger(config.out, start_step=start, enabled=speaks, also=[progress.update]) as logger,
        profile(config.out / "profile", rank=mesh.rank, device=mesh.device, enabled=config.profile) as profiled_step,
    ):
        meter = Meter(
            total_steps=config.steps,
            start_step=start,
            devices=mesh.spec.world_size,
            peak_flops_per_s=peak_flops_per_s(mesh.device),
            device=mesh.device,
        )
        step = start
        for step in range(start + 1, config.steps + 1):
            with stragglers.measure(step):
                batch = next(loader)
                with record_trace(
                    run.pipeline, config.out / "pipeline.json", enabled=config.profile and step == start + 2
                ):
                    loss = run.forward_backward(batch, microbatches=config.microbatches)
                norm = mk.clip_grad_norm(run, config.clip)
                lr = scheduler.get_last_lr()[0]
                if guard.allows(run, norm, step=step):
                    optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            scalars = {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr, "skipped_steps": guard.skipped}
            if stragglers.last is not None and stragglers.last.step == step:
                scalars |= stragglers.last.scalars()
                if stragglers.slow is not None:
                    say(stragglers.slow)
            if run.offload is not None:
                scalars |= run.offload.last_step.scalars()
            reading = meter.step(config.global_batch * config.seq_len, flops_per_token=flops)
            with meter.paused():
                if step % config.eval_every == 0 or step == config.steps:
                    held_out = bits_per_byte(
                        run,
                        splits.held_out,
                        tokenizer,
                        seq_len=config.seq_len,
                        rows=rows,
                        batches=config.eval_batches,
                        documents=config.documents,
                    )
                    scalars["held_out_bits_per_byte"] = held_out
                logger.log(step, {**scalars, **reading.scalars()})
                leaving = signals.should_stop(mesh)
                if step % config.save_every == 0 or step == config.steps or leaving:
                    checkpoints.save(step, run, optimizer, scheduler=scheduler, loader=loader, config=config)
            profiled_step()
            if leaving:
                break

    # ---------------------------------------------------------------------------------------------- what came of it
    if step < config.steps:
        say(f"{signals.received or 'a signal on another rank'}: saved step {step}; start again to go on")
        return
    export = config.out / f"model-{config.steps}"
    save_pretrained(run.model, shape, export)
    ids = tokenizer.encode(config.prompt)
    sampling = Sampling(max_new_tokens=config.sample_tokens, temperature=0.8)
    (sample,) = generate(run, [Prompt(ids=ids, key=0)], sampling=sampling, seed=config.seed)
    say(f"\nheld out: {held_out:.3f} bits per byte; model in {export}")
    say(f"{'─' * 20} a sample {'─' * 20}\n{tokenizer.decode([*ids, *sample.ids.tolist()])}\n{'─' * 50}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_main(main)
