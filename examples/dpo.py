"""Train a language model on preferences, by DPO and its family, from pairs to a Hugging Face folder. Read it top to bottom.

CPU, 2 ranks    torchrun --nproc-per-node 2 examples/dpo.py
go on, on 4     torchrun --nproc-per-node 4 examples/dpo.py --steps 200 --mesh "dp_shard=2 tp=2"
1 GPU           python examples/dpo.py --pretrained Llama-3.2-1B-Instruct/ --data pairs.jsonl --lr 1e-6 --precision bf16 \
                    --seq-len 4096 --global-batch 64 --reference stored
8 GPUs, LoRA    torchrun --nproc-per-node 8 examples/dpo.py --lora-rank 32 --lr 1e-5 --mesh "dp_shard=4 cp=2" ...
will it fit?    python -m meshkit estimate examples/dpo.py --pretrained ... --mesh "dp_shard=8" --device-memory 80GiB

A row of --data has prompt, chosen and rejected, as text or as messages. Without --data the pairs are functions of Python's
standard library, the body as it is against a body made wrong. Without --pretrained a small model learns the chosen answers
first (--sft-steps), so that there is something to prefer with. --loss names one or several losses (docs/objectives.md), as
"ipo_mean beta=0.2" or "sigmoid weight=0.8, bco weight=0.2, sft". --reference says what they compare with: a frozen copy, its
log-probabilities stored in a file, a copy that follows, or nothing. A run that finds a checkpoint in --out continues from
it, on whatever mesh it is started; SIGTERM and SIGUSR1 save one and leave.
On 2 ranks: 3 min 10 s of processor time in all, 0.9 GiB a rank. The chosen answers' loss goes from 6.95 to 3.35; then DPO's
from 0.693 to about 0.12, and of 190 held-out pairs 0.94 are right after 20 steps, margin 1.7, and 0.96 after 100, margin 3.0.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

import meshkit as mk
from meshkit.algos.preference import (
    PreferenceLoss,
    count_pairs,
    folder_fingerprint,
    parse_losses,
    preference_objective,
    stored_reference,
    update_reference,
)
from meshkit.algos.rollout import REFERENCE, token_values
from meshkit.algos.sft import sft_phase
from meshkit.data import (
    Chat,
    ExampleLoader,
    Truncation,
    WrongBody,
    check_examples,
    encode_pairs,
    load_encoder,
    preference_tasks,
    prepare_tokenizer,
    read_records,
    split_records,
    standard_library,
)
from meshkit.errors import PlanError
from meshkit.launch import run_main
from meshkit.metrics import Logger, Meter, MetricSums, Progress
from meshkit.models import (
    LlamaConfig,
    build_model,
    config_from_pretrained,
    load_pretrained,
    meta_parameters,
    model_plan,
    save_pretrained,
)
from meshkit.recipes.evaluation import nats_per_token, pair_means
from meshkit.recipes.export import export_model
from meshkit.schedule_lr import lr_schedule
from meshkit.step import Batch, Loss

DEMO = LlamaConfig(
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
)
SEEN = ("accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_log_prob", "rejected_log_prob")


@dataclass(frozen=True, kw_only=True)
class Config:
    mesh: str = "dp_shard=-1"
    """axes and sizes, as "dp_shard=2 cp=2"; -1 is the ranks that are left"""
    pretrained: Path | None = None
    """start from the weights, shape and tokenizer of this Hugging Face folder; default: a small model, trained here first"""
    data: tuple[Path, ...] = ()
    """JSONL, Parquet or Arrow files, or folders of them; empty: functions of Python's standard library"""
    split: str | None = None
    """which one, of a saved data set with several"""
    held_out: float = 0.1
    """part of the rows that is only evaluated on"""
    tokenizer: Path | None = None
    """folder with a tokenizer and, for messages, its chat template; default: --pretrained's, or one trained here, once"""
    kinds: tuple[WrongBody, ...] = ("scrambled", "reversed", "repeated")
    """without --data: how bodies are made wrong, one of them for each function"""
    limit_bytes: int = 400
    """without --data: longer functions are left out"""
    out: Path = Path("runs/dpo")
    """checkpoints, logs and the final model"""
    cache: Path = Path("~/.cache/meshkit")
    """the tokenizer made from the data"""

    loss: str = "sigmoid beta=0.1"
    """losses between commas, each a kind and its constants; rewards have the beta of the first"""
    wpo: bool = False
    """weigh each pair by how likely the model is to write it (WPO)"""
    reference: Literal["live", "stored", "moving", "none"] = "live"
    """live: a frozen copy, with LoRA the model without adapters. stored: computed once, into --reference-file. moving: a copy
    that is drawn towards the model (TR-DPO). none: for losses without one"""
    reference_file: Path | None = None
    """of stored; default: in --out. One of another model, template or truncation is refused"""
    reference_every: int = 32
    """of moving: steps between its moves"""
    reference_alpha: float = 0.6
    """of moving: the model's share in a move; 1 is a copy"""
    lora_rank: int | None = None
    """train adapters of this rank only, and write them as a folder of PEFT's"""
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    """of the adapters' inputs"""
    lora_base: Literal["nf4", "int8"] | None = None
    """hold the frozen weights in so few bits (QLoRA)"""

    seq_len: int = 1024
    """tokens of a row; a pair lies in one row"""
    truncate: Truncation = "drop"
    """what becomes of a longer pair"""
    global_batch: int = 24
    """pairs of one optimizer step, over all ranks, packed into as few rows as they need"""
    microbatches: int = 1
    """parts a rank runs its rows in, one after the other"""
    sft_steps: int = 200
    """without --pretrained: steps on the chosen answers, of as many of them each"""
    sft_lr: float = 5e-3
    steps: int = 100
    lr: float = 1e-3
    lr_kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 10
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0

    zero: Literal[1, 2, 3] | None = None
    """sharding over dp_shard; default 3, with pp 1"""
    sequence: bool = True
    """with tp: shard activations along the sequence between regions"""
    recompute: Literal["none", "activation", "selective", "full"] = "none"
    loss_chunk: int | None = None
    """tokens whose logits exist at a time; default: all of them"""
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    schedule: str = "1f1b"
    """with pp: a name of `python -m meshkit draw`, or a CSV file with a table of yours"""

    eval_every: int = 20
    save_every: int = 50
    keep: int = 2


def build(config: Config, mesh: mk.Mesh, vocab_size: int | None = None) -> mk.Run:
    """The model in parts, without values; `python -m meshkit estimate` runs it too, before there is a tokenizer."""
    shape = dataclasses.replace(DEMO, vocab_size=vocab_size or DEMO.vocab_size)
    if config.pretrained is not None:
        shape = config_from_pretrained(config.pretrained)
    with meta_parameters():
        model = build_model(shape)
    plan = model_plan(shape)
    if config.lora_rank is not None:
        few = {"dropout": config.lora_dropout, "base": config.lora_base}
        plan = mk.lora(model, plan, rank=config.lora_rank, alpha=config.lora_alpha, seed=config.seed, **few)
    return mk.parallelize(
        model,
        mesh,
        plan=plan,
        memory=mk.MemoryPolicy(
            recompute=config.recompute,
            precision=mk.Precision() if config.precision == "bf16" else None,
            loss=mk.ChunkedLoss(tokens=config.loss_chunk) if config.loss_chunk is not None else None,
        ),
        zero=config.zero,
        sequence=config.sequence,
        pipeline=mk.strategy.PipelinePolicy(schedule=config.schedule),
        compile=config.compile,
    )


def main() -> None:
    config = tyro.cli(Config)
    losses = parse_losses(config.loss)
    refuse(config, losses)

    # ---------------------------------------------------------------------------------------------- who: the mesh
    mesh = mk.init_mesh(config.mesh)
    speaks = mesh.rank == 0
    say = print if speaks else lambda *_: None
    say(f"mesh  {mesh.describe()}")

    export = config.out / (f"model-{config.steps}" if config.lora_rank is None else f"adapter-{config.steps}")
    if export.exists():
        say(f"{export} is there already; give more --steps to go on, or another --out to begin anew")
        return

    # ---------------------------------------------------------------------------------------------- rows to pairs
    if config.data:
        rows = split_records(read_records(config.data, split=config.split), held_out=config.held_out)
    else:
        rows = preference_tasks(
            kinds=config.kinds, held_out=config.held_out, limit_bytes=config.limit_bytes, seed=config.seed
        )
    folder = config.tokenizer or config.pretrained
    with mk.main_rank_first():
        if folder is not None:
            encoder = load_encoder(folder, rows.train)
        else:
            cache = config.cache.expanduser()
            encoder = prepare_tokenizer(standard_library(), cache, vocab_size=DEMO.vocab_size, progress=speaks)
    tokenizer = encoder.tokenizer if isinstance(encoder, Chat) else encoder
    train, held_out = (
        encode_pairs(half, encoder, seq_len=config.seq_len, truncate=config.truncate)
        for half in (rows.train, rows.held_out)
    )
    say(f"train     {check_examples(train, tokenizer)}")
    say(f"held out  {check_examples(held_out, tokenizer)}")

    # ---------------------------------------------------------------------------------------------- something to begin with
    begin = config.pretrained or config.out / "sft-model"
    sizes = {"seq_len": config.seq_len, "global_batch": config.global_batch, "seed": config.seed}
    if config.pretrained is None and not begin.exists():
        say(f"the chosen answers first, {config.sft_steps} steps")
        run = build(dataclasses.replace(config, lora_rank=None), mesh, vocab_size=tokenizer.vocab_size)
        mk.init_weights(run.model, seed=config.seed, plan=run.plan)
        chosen, held_out_chosen = ([pair.chosen for pair in pairs] for pairs in (train, held_out))
        taught = {**sizes, "microbatches": config.microbatches, "clip": config.clip}
        taught |= {"lr_kind": config.lr_kind, "warmup_steps": config.warmup_steps}
        optimizer = mk.adamw(run, lr=config.sft_lr, weight_decay=config.weight_decay)
        if not sft_phase(run, optimizer, chosen, config.out / "sft", steps=config.sft_steps, **taught):
            return
        nats = nats_per_token(run, held_out_chosen, seq_len=config.seq_len, rows=4)
        say(f"held out: {nats:.3f} nats per token of a chosen answer")
        save_pretrained(run.model, run.full_model.config, begin)

    # ---------------------------------------------------------------------------------------------- the model, in parts
    config = dataclasses.replace(config, pretrained=begin)
    run = build(config, mesh)
    load_pretrained(run.model, begin)
    if config.lora_rank is not None:
        mk.init_lora(run.model, seed=config.seed)
    trained = [p for p in run.full_model.parameters() if p.requires_grad]
    say(
        f"model {sum(p.numel() for p in run.full_model.parameters()):,} parameters, {sum(p.numel() for p in trained):,} train"
    )

    # ---------------------------------------------------------------------------------------------- what it is compared with
    reference = None
    if config.reference == "stored":
        path = config.reference_file or config.out / "reference.safetensors"
        made_of = {
            "model": folder_fingerprint(begin),
            "template": encoder.template.source if isinstance(encoder, Chat) else "plain text",
            "truncation": f"{config.truncate} at {config.seq_len}",
        }
        pairs = stored_reference(run, [*train, *held_out], path, made_of=made_of, seq_len=config.seq_len)
        train, held_out = pairs[: len(train)], pairs[len(train) :]
        say(f"reference in {path}")
    elif config.reference != "none" and config.lora_rank is not None:
        reference = run  # without its adapters
    elif config.reference != "none":
        reference = build(config, mesh)
        load_pretrained(reference.model, begin)

    def preferring(batch: Batch, tally: MetricSums) -> Loss:
        """The loss of a batch, to which the reference's log-probabilities are added."""
        if reference is not None:
            with mk.lora_disabled(run.model) if reference is run else nullcontext():
                batch[REFERENCE] = token_values(reference, batch, microbatches=config.microbatches)
        return preference_objective(mesh, batch, *losses, wpo=config.wpo, metrics=tally)

    # ---------------------------------------------------------------------------------------------- where we stopped
    where = {"rank": mesh.data_rank, "ranks": mesh.data_ranks, "pad_multiple": mesh.row_multiple}
    loader = ExampleLoader(train, **sizes, **where, packing="step", vocab_size=run.full_model.config.vocab_size)
    optimizer = mk.adamw(run, lr=config.lr, weight_decay=config.weight_decay)
    scheduler = lr_schedule(
        optimizer, kind=config.lr_kind, warmup_steps=config.warmup_steps, total_steps=config.steps, min_factor=0.1
    )
    checkpoints = mk.Checkpointer(config.out / "checkpoints", keep=config.keep)
    references = mk.Checkpointer(config.out / "reference", keep=config.keep)  # of one that moves
    start = checkpoints.resume(run, optimizer, scheduler=scheduler, loader=loader, config=config)
    if start > config.steps:
        raise PlanError(f"{config.out} is at step {start}, beyond {config.steps}. Give more --steps, or another --out.")
    if start:
        say(f"resume from step {start}")
    if start and config.reference == "moving":
        references.load(reference, None, step=start)

    # ---------------------------------------------------------------------------------------------- the loop
    guard, tally = mk.NonFiniteGuard(), MetricSums(mesh, (*SEEN, "tokens"))
    with (
        checkpoints,
        references,
        mk.SaveOnSignal() as signals,
        Progress(total_steps=config.steps, start_step=start, enabled=speaks) as progress,
        Logger(config.out, start_step=start, enabled=speaks, also=[progress.update]) as logger,
    ):
        meter = Meter(total_steps=config.steps, start_step=start, device=mesh.device)
        for step in range(start + 1, config.steps + 1):
            batch = next(loader)
            objective = preferring(batch, tally)
            loss = run.forward_backward(
                batch, loss=objective, count=count_pairs, microbatches=config.microbatches, step=step
            )
            norm = mk.clip_grad_norm(run, config.clip)
            lr = scheduler.get_last_lr()[0]
            if guard.allows(run, norm, step=step):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if config.reference == "moving" and step % config.reference_every == 0:
                update_reference(reference.model, run.model, alpha=config.reference_alpha)
            seen = tally.means(config.global_batch)
            reading = meter.step(round(seen.pop("tokens") * config.global_batch))
            scalars = {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr}
            scalars |= {f"train/{name}": value for name, value in seen.items()}
            with meter.paused():
                if step % config.eval_every == 0 or step == config.steps:
                    found = pair_means(run, held_out, preferring, SEEN, seq_len=config.seq_len)
                    scalars |= {f"held_out/{name}": value for name, value in found.items()}
                    say(f"step {step}, held out: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
                logger.log(step, {**scalars, **reading.scalars()})
                leaving = signals.should_stop(mesh)
                if step % config.save_every == 0 or step == config.steps or leaving:
                    if config.reference == "moving":  # first: then every checkpoint has its reference
                        references.save(step, reference, None)
                    checkpoints.save(step, run, optimizer, scheduler=scheduler, loader=loader, config=config)
            if leaving and step < config.steps:
                say(f"{signals.received or 'a signal on another rank'}: saved step {step}; start again to go on")
                return

    # ---------------------------------------------------------------------------------------------- what came of it
    export_model(run, export, encoder, came_from=folder, base=begin)
    say(f"model in {export}")


# ---------------------------------------------------------------------------------------------- what cannot be
def refuse(config: Config, losses: tuple[PreferenceLoss, ...]) -> None:
    """Combinations that cannot be, before anything is read."""
    needing = [loss.kind for loss in losses if loss.needs_reference]
    sorting = [loss.kind for loss in losses if loss.kind.startswith("aot")]
    if sorting:
        raise PlanError(
            f"--loss {sorting[0]} sorts the pairs of a step in a pass of its own, which this recipe has not."
        )
    if needing and config.reference == "none":
        raise PlanError(
            f"--loss {needing[0]} compares with a reference, but --reference is none. Use live, stored or moving."
        )
    if config.lora_rank is None and (config.lora_base or config.lora_dropout):
        raise PlanError("lora_base and lora_dropout are of adapters, and there are none without lora_rank.")
    if config.reference == "moving" and config.lora_rank is not None:
        raise PlanError(
            "--reference moving needs two whole models, but --lora-rank trains adapters. Use live or stored."
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_main(main)
