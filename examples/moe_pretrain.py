"""Pretrain a mixture of experts on a mesh, and watch how evenly its experts are used. Read it top to bottom.

CPU, 4 ranks    torchrun --nproc-per-node 4 examples/moe_pretrain.py --mesh "dp_shard=4 ep=4"
one process     python examples/moe_pretrain.py
go on, on 2     torchrun --nproc-per-node 2 examples/moe_pretrain.py --mesh "tp=2 etp=2" --steps 300
8 GPUs          torchrun --nproc-per-node 8 examples/moe_pretrain.py --model qwen3-30b-a3b --mesh "dp_shard=8 ep=8" \
                    --precision bf16 --recompute selective --seq-len 4096 --bias-speed 1e-3 ...

Without --data the corpus is the source of Python's own standard library. The same loop as llama_pretrain.py; what experts
add is between them: the balance of the choices by a bias (--bias-speed, no loss) or by a loss (--balance-loss), limits
(--capacity), and the load of every layer and expert in the logs. TensorBoard has it as a picture too.
On one rank of a busy 2-core CPU: 5 to 8 min, 1.5 GiB, loss 8.37 to about 4.8, held out 2.32 bits per byte. The fullest expert
of a layer has up to 4 times the mean at step 40, and 1.2 to 1.3 times at the end; 2.0 to 3.6 times with --bias-speed 0.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

import meshkit as mk
from meshkit.algos.rollout import Prompt, Sampling, generate
from meshkit.auxiliary import AuxiliaryLosses
from meshkit.data import (
    Loader,
    find_corpus,
    load_tokenizer,
    prepare,
    prepare_tokenizer,
    standard_library,
)
from meshkit.errors import PlanError
from meshkit.explain import explain
from meshkit.launch import run_main
from meshkit.metrics import (
    Logger,
    Meter,
    ModelFlops,
    Progress,
    load_picture,
    load_scalars,
    peak_flops_per_s,
    profile,
)
from meshkit.models import (
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    MixtralConfig,
    Qwen3MoeConfig,
    build_model,
    config_from_pretrained,
    load_pretrained,
    meta_parameters,
    moe_plan,
    save_pretrained,
)
from meshkit.parallel.pipeline import record_trace
from meshkit.recipes.evaluation import bits_per_byte
from meshkit.schedule_lr import lr_schedule
from meshkit.strategy import Capacity, ExpertPolicy

DEMO = Qwen3MoeConfig(
    vocab_size=4096,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    norm_topk_prob=True,
)
MODELS = {"demo": DEMO, "qwen3-30b-a3b": QWEN3_30B_A3B, "mixtral-8x7b": MIXTRAL_8X7B}


@dataclass(frozen=True, kw_only=True)
class Config:
    mesh: str = "dp_shard=-1"
    """axes and sizes, as "dp_shard=4 tp=2 ep=4 etp=2"; -1 is the ranks that are left"""
    model: Literal["demo", "qwen3-30b-a3b", "mixtral-8x7b"] = "demo"
    """the shape of the model; its vocabulary is the tokenizer's"""
    pretrained: Path | None = None
    """start from the weights, shape and tokenizer of this Hugging Face folder"""
    data: tuple[str, ...] = ()
    """text, JSONL or Parquet files, folders or patterns; empty: Python's standard library"""
    tokenizer: Path | None = None
    """folder with a tokenizer.json; default: train one on the data, once"""
    out: Path = Path("runs/moe")
    """checkpoints, logs, traces and the final model"""
    cache: Path = Path("~/.cache/meshkit")
    """tokenizers and tokens made from the data"""

    seq_len: int = 256
    global_batch: int = 16
    """sequences of one optimizer step, over all ranks"""
    microbatches: int = 1
    """parts a rank runs its sequences in, one after the other"""
    steps: int = 200
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

    bias_speed: float = 1e-2
    """balance without a loss: so much a router's biases move after a step; 0: no biases"""
    balance_loss: Literal["none", "sequence", "batch", "global"] = "none"
    """balance by a loss: whose tokens are to be spread evenly"""
    balance_coefficient: float = 1e-2
    """of that loss"""
    z_loss: float = 0.0
    """coefficient of the loss that keeps the routers' logits small"""
    capacity: float | None = None
    """an expert takes at most so many times its even share of a rank's tokens; default: all that choose it"""

    zero: Literal[1, 2, 3] | None = None
    """sharding over dp_shard; default 3, with pp 1"""
    sequence: bool = True
    """with tp: shard activations along the sequence between regions"""
    recompute: Literal["none", "full", "selective"] = "none"
    loss_chunk: int | None = None
    """tokens whose logits exist at a time; default: all of them"""
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    schedule: str = "1f1b"
    """with pp: a name of `python -m meshkit draw`, or a CSV file with a table of yours"""

    picture_every: int = 20
    """the load of every layer and expert for TensorBoard"""
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
    if not isinstance(shape, Qwen3MoeConfig | MixtralConfig):
        raise PlanError(f"{config.pretrained} is a {type(shape).__name__}; this recipe trains Qwen3-MoE and Mixtral.")
    losses = AuxiliaryLosses(z=config.z_loss)
    if config.balance_loss != "none":
        losses = dataclasses.replace(losses, balance=config.balance_coefficient, per=config.balance_loss)
    words = shape.vocab_size if config.pretrained or vocab_size is None else vocab_size
    shape = dataclasses.replace(shape, vocab_size=words, router_bias=config.bias_speed != 0, router_losses=losses)
    with meta_parameters():
        model = build_model(shape)
    return mk.parallelize(
        model,
        mesh,
        plan=moe_plan(shape),
        memory=mk.MemoryPolicy(
            recompute=config.recompute,
            precision=mk.Precision() if config.precision == "bf16" else None,
            loss=mk.ChunkedLoss(tokens=config.loss_chunk) if config.loss_chunk is not None else None,
        ),
        zero=config.zero,
        sequence=config.sequence,
        pipeline=mk.strategy.PipelinePolicy(schedule=config.schedule),
        compile=config.compile,
        experts=ExpertPolicy(capacity=None if config.capacity is None else Capacity(factor=config.capacity)),
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
    active = ModelFlops.from_config(shape)
    say(
        f"model {sum(p.numel() for p in run.full_model.parameters()):,} parameters; a token visits {active.matmul_params:,}"
    )
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
    flops = active.per_token(config.seq_len)  # documents packed into it would make it less
    guard = mk.NonFiniteGuard(max_skips=config.max_skips)
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
            batch = next(loader)
            with record_trace(run.pipeline, config.out / "pipeline.json", enabled=config.profile and step == start + 2):
                loss = run.forward_backward(batch, microbatches=config.microbatches)
            norm = mk.clip_grad_norm(run, config.clip)
            lr = scheduler.get_last_lr()[0]
            if guard.allows(run, norm, step=step):
                optimizer.step()
                if config.bias_speed:
                    run.balance_experts(speed=config.bias_speed)
            optimizer.zero_grad()
            scheduler.step()
            scalars = {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr, "skipped_steps": guard.skipped}
            counts, losses = run.routing_of_stages()
            scalars |= {f"auxiliary/{kind}": value.item() for kind, value in losses.items()} | load_scalars(counts)
            if run.dropped_share is not None:
                scalars["load/dropped_share"] = run.dropped_share.item()
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
                if step % config.picture_every == 0:
                    logger.image(step, "load/layers_by_experts", load_picture(counts))
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
    model_at = config.out / ("checkpoints" if config.bias_speed else f"model-{config.steps}")
    if not config.bias_speed:  # transformers' families have no place for these biases
        save_pretrained(run.model, shape, model_at)
    ids = tokenizer.encode(config.prompt)
    sampling = Sampling(max_new_tokens=config.sample_tokens, temperature=0.8)
    (sample,) = generate(run, [Prompt(ids=ids, key=0)], sampling=sampling, seed=config.seed)
    say(f"\nheld out: {held_out:.3f} bits per byte; model in {model_at}")
    say(f"{'─' * 20} a sample {'─' * 20}\n{tokenizer.decode([*ids, *sample.ids.tolist()])}\n{'─' * 50}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_main(main)
