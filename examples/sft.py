"""Supervised fine-tuning on a mesh: chats and instructions in, a Hugging Face folder or adapters out. Read it top to bottom.

CPU, 2 ranks    torchrun --nproc-per-node 2 examples/sft.py
one process     python examples/sft.py
adapters, then  python examples/sft.py --pretrained runs/sft/model-240 --lora-rank 8 --lr 1e-3 --steps 40 --out runs/sft_lora
experts         torchrun --nproc-per-node 2 examples/sft.py --model moe-demo --mesh "dp_shard=2 ep=2"
1 GPU           python examples/sft.py --pretrained Llama-3.2-1B-Instruct/ --data chats.jsonl --lr 1e-5 \
                    --precision bf16 --seq-len 4096 --global-batch 16 --microbatches 8
8 GPUs          torchrun --nproc-per-node 8 examples/sft.py --pretrained Qwen3-8B/ --data chats.jsonl \
                    --mesh "dp_shard=4 tp=2" --precision bf16 --recompute selective --lr 1e-5 ...
long chats      torchrun --nproc-per-node 8 examples/sft.py --mesh "cp=8" --seq-len 131072 --loss-chunk 2048 ...
will it fit?    python -m meshkit estimate examples/sft.py --model llama3-8b --mesh "dp_shard=8" --precision bf16 \
                    --seq-len 4096 --global-batch 16 --device-memory 80GiB

Rows hold `messages`, written with the template of the model's folder, or `prompt` and `completion`, plain text; only answers
are learnt. Without --data the rows are made of Python's own standard library: a signature and docstring ask for the body,
and chats ask what a function does. A run that finds a checkpoint in --out continues from it, on whatever mesh it is started.
On 2 ranks of a 2-core CPU: held-out loss 7.67 to 4.44 nats per token of an answer; 7 min of processor time in all,
1.2 GiB a rank. So small a model from nothing learns the form of answers, not what they say.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from torch import Tensor, nn

import meshkit as mk
from meshkit.algos.rollout import Prompt, Sampling, generate, label_log_probs
from meshkit.algos.sft import dft_losses
from meshkit.data import (
    Example,
    ExampleLoader,
    Record,
    TaskSplits,
    Truncation,
    check_examples,
    encode_instruction,
    encode_records,
    fit,
    instruction_tasks,
    load_chat,
    read_records,
    save_chat_tokenizer,
    split_records,
)
from meshkit.errors import PlanError
from meshkit.launch import run_main
from meshkit.memory.loss import IGNORED
from meshkit.metrics import Logger, Meter, ModelFlops, Progress, peak_flops_per_s
from meshkit.models import (
    LLAMA3_8B,
    LLAMA32_1B,
    QWEN3_30B_A3B,
    LlamaConfig,
    Qwen3MoeConfig,
    build_model,
    config_from_pretrained,
    load_pretrained,
    meta_parameters,
    model_plan,
)
from meshkit.recipes.evaluation import nats_per_token
from meshkit.recipes.export import export_model
from meshkit.schedule_lr import lr_schedule
from meshkit.step import next_token_loss

SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "qk_norm": True,
}
MODELS = {
    "demo": LlamaConfig(**SIZES),
    "moe-demo": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True
    ),
    "llama3.2-1b": LLAMA32_1B,
    "llama3-8b": LLAMA3_8B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    mesh: str = "dp_shard=-1"
    """axes and sizes, as "dp_shard=2 tp=2 cp=2 ep=4"; -1 is the ranks that are left"""
    pretrained: Path | None = None
    """start from the weights, shape, tokenizer and chat template of this Hugging Face folder"""
    model: Literal["demo", "moe-demo", "llama3.2-1b", "llama3-8b", "qwen3-30b-a3b"] = "demo"
    """without --pretrained: the shape of a model that begins from nothing; the large ones are there to be estimated"""
    tokenizer: Path | None = None
    """folder with a tokenizer.json and a chat template; default: that of --pretrained, or one trained on the data"""
    out: Path = Path("runs/sft")
    """checkpoints, logs and the final model"""

    data: tuple[str, ...] = ()
    """JSONL or Parquet files, or folders of `datasets`; empty: Python's standard library"""
    eval_data: tuple[str, ...] = ()
    """rows that are only evaluated on; empty: a part of --data"""
    held_out: float = 0.1
    """that part"""
    turns: Literal["all", "last"] = "all"
    """which answers of a chat are learnt"""
    end_of_turn: Literal["template", "learn", "ignore"] = "template"
    """whether the token that ends an answer is learnt; "template": as the chat template marks it"""
    truncate: Truncation = "drop"
    """what becomes of rows longer than seq_len"""
    packing: bool = True
    """several examples in a row, which do not see each other; without: one"""
    allow: tuple[str, ...] = ()
    """problems of the data that do not stop the run; an error names them"""

    seq_len: int = 256
    global_batch: int = 16
    """rows of one optimizer step, over all ranks"""
    microbatches: int = 1
    """parts a rank runs its rows in, one after the other"""
    steps: int = 240
    objective: Literal["nll", "dft"] = "nll"
    """dft: a token counts as much as the model believes in it; for a model that knows the language"""
    lr: float = 4e-3
    lr_kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 15
    weight_decay: float = 0.1
    clip: float = 1.0
    lora_rank: int | None = None
    """train adapters of this rank on a frozen model, and write them alone"""
    lora_alpha: float | None = None
    """default: twice the rank"""
    lora_dropout: float = 0.0
    """of the adapters' inputs"""
    lora_base: Literal["nf4", "int8"] | None = None
    """hold the frozen weights in so few bits (QLoRA)"""
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
    """with pp: a name of `python -m meshkit draw`"""

    eval_every: int = 60
    eval_examples: int = 256
    """held-out examples of an evaluation"""
    save_every: int = 60
    sample_tokens: int = 64
    """of the answers that the model writes at the end"""


def build(config: Config, mesh: mk.Mesh, vocab_size: int | None = None) -> mk.Run:
    """The model in parts, without values; `python -m meshkit estimate` runs it too, before there is a tokenizer."""
    if config.pretrained is not None:
        shape = config_from_pretrained(config.pretrained)
    else:
        shape = MODELS[config.model]
        shape = dataclasses.replace(shape, vocab_size=vocab_size or shape.vocab_size)
    with meta_parameters():
        model = build_model(shape)
    plan = model_plan(shape)
    if config.lora_rank is not None:
        few = {"dropout": config.lora_dropout, "base": config.lora_base, "seed": config.seed}
        plan = mk.lora(model, plan, rank=config.lora_rank, alpha=config.lora_alpha or 2.0 * config.lora_rank, **few)
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
    if config.lora_rank is not None and config.pretrained is None:
        raise PlanError(
            f"lora_rank={config.lora_rank} without pretrained: adapters change a model that has learnt something, and this "
            "one begins from nothing. Give --pretrained FOLDER, or leave --lora-rank away."
        )
    if config.lora_rank is None and (config.lora_base or config.lora_dropout):
        raise PlanError("lora_base and lora_dropout are of adapters, and there are none without lora_rank.")

    # ---------------------------------------------------------------------------------------------- who: the mesh
    mesh = mk.init_mesh(config.mesh)
    speaks = mesh.rank == 0
    say = print if speaks else lambda *_: None
    say(f"mesh  {mesh.describe()}")

    # ---------------------------------------------------------------------------------------------- rows to examples
    if not config.data:
        rows = instruction_tasks(held_out=config.held_out)
    elif config.eval_data:
        rows = TaskSplits(train=list(read_records(config.data)), held_out=list(read_records(config.eval_data)))
    else:
        rows = split_records(read_records(config.data), held_out=config.held_out)
    folder = config.tokenizer or config.pretrained or config.out / "tokenizer"
    with mk.main_rank_first():
        if folder == config.out / "tokenizer" and not (folder / "tokenizer.json").exists():
            save_chat_tokenizer(rows.train, folder, vocab_size=MODELS[config.model].vocab_size)
    chat = load_chat(folder)

    def encode(record: Record) -> Example:
        return encode_instruction(record, chat, turns=config.turns, end_of_turn=config.end_of_turn)

    train, held_out = (
        fit(encode_records(half, encode), seq_len=config.seq_len, truncate=config.truncate)
        for half in (rows.train, rows.held_out)
    )
    left_out = len(rows.train) + len(rows.held_out) - len(train) - len(held_out)
    say(
        f"data  {len(train):,} examples, {len(held_out):,} held out; {left_out:,} are longer than {config.seq_len} tokens"
    )

    # ---------------------------------------------------------------------------------------------- the model, in parts
    run = build(config, mesh, vocab_size=chat.tokenizer.vocab_size)
    shape = run.full_model.config
    say(f"      {check_examples(train + held_out, chat.tokenizer, vocab_size=shape.vocab_size, allow=config.allow)}")
    if config.pretrained is None:
        mk.init_weights(run.model, seed=config.seed, plan=run.plan)
    else:
        load_pretrained(run.model, config.pretrained)
        mk.init_lora(run.model, seed=config.seed)
    optimizer = mk.adamw(run, lr=config.lr, weight_decay=config.weight_decay)
    scheduler = lr_schedule(
        optimizer, kind=config.lr_kind, warmup_steps=config.warmup_steps, total_steps=config.steps, min_factor=0.1
    )
    sizes = {"seq_len": config.seq_len, "global_batch": config.global_batch, "seed": config.seed}
    where = {"rank": mesh.data_rank, "ranks": mesh.data_ranks, "pad_multiple": mesh.row_multiple}
    loader = ExampleLoader(train, **sizes, **where, packing="rows" if config.packing else "none")
    trained = sum(p.numel() for p in run.full_model.parameters() if p.requires_grad)
    say(f"model {sum(p.numel() for p in run.full_model.parameters()):,} parameters, of which {trained:,} train")
    # ---------------------------------------------------------------------------------------------- where we stopped
    checkpoints = mk.Checkpointer(config.out / "checkpoints", keep=2)
    start = checkpoints.resume(run, optimizer, scheduler=scheduler, loader=loader, config=config)
    if start >= config.steps:
        say(f"{config.out} has its {start} steps; give more --steps to go on, or another --out to begin anew")
        return
    looked_at = held_out[:: max(1, len(held_out) // config.eval_examples)]
    look = {"seq_len": config.seq_len, "rows": max(1, config.global_batch // mesh.data_ranks)}
    first = (
        "" if start else f"held out before the first step: {nats_per_token(run, looked_at, **look):.3f} nats per token"
    )
    say(first or f"resume from step {start}")

    # ---------------------------------------------------------------------------------------------- the loop
    flops = ModelFlops.from_config(shape).per_token(config.seq_len)  # of training all weights on one example a row
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
            batch = next(loader)
            objective = next_token_loss if config.objective == "nll" else dft_loss
            loss = run.forward_backward(batch, microbatches=config.microbatches, loss=objective, step=step)
            norm = mk.clip_grad_norm(run, config.clip)
            lr = scheduler.get_last_lr()[0]
            if guard.allows(run, norm, step=step):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            scalars = {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr, "epoch": loader.epoch}
            reading = meter.step(config.global_batch * batch["input_ids"].shape[1], flops_per_token=flops)
            with meter.paused():
                if step % config.eval_every == 0 or step == config.steps:
                    scalars["held_out_loss"] = nats_per_token(run, looked_at, **look)
                logger.log(step, {**scalars, **reading.scalars()})
                leaving = signals.should_stop(mesh)
                if step % config.save_every == 0 or step == config.steps or leaving:
                    checkpoints.save(step, run, optimizer, scheduler=scheduler, loader=loader, config=config)
            if leaving and step < config.steps:
                say(f"{signals.received or 'a signal on another rank'}: saved step {step}; start again to go on")
                return

    # ---------------------------------------------------------------------------------------------- what came of it
    kind = "model" if config.lora_rank is None else "adapter"
    export = config.out / f"{kind}-{config.steps}"
    export_model(run, export, chat, came_from=folder, base=config.pretrained)
    say(f"\nheld out: {scalars['held_out_loss']:.3f} nats per token of an answer; {kind} in {export}")
    decode = chat.tokenizer.decode
    for example in (held_out[0], held_out[-1]):
        asked, answer = example.ids[: example.prompt_length], example.ids[example.prompt_length :].tolist()
        ends = (int(example.ids[example.learn][-1]),)
        sampling = Sampling(max_new_tokens=config.sample_tokens, temperature=0.8, stop_ids=ends)
        (sample,) = generate(run, [Prompt(ids=asked, key=0)], sampling=sampling, seed=config.seed)
        say(f"{'─' * 20} {example.source} {'─' * 20}\n{decode(asked.tolist())}")
        say(f"{'─' * 8} the model\n{decode(sample.ids.tolist())}\n{'─' * 8} the data\n{decode(answer)}")


# ---------------------------------------------------------------------------------------------- loss
def dft_loss(model: nn.Module, part: dict[str, Any]) -> Tensor:
    """Dynamic fine-tuning, summed over the tokens of answers. Source: Wu et al. 2025 (2508.05629)."""
    return dft_losses(label_log_probs(model, part), part["labels"] != IGNORED).sum()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_main(main)
