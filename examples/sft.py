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

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import meshkit as mk
from meshkit.algos.sft import dft_loss
from meshkit.data import ExampleLoader, check_examples
from meshkit.metrics import ModelFlops
from meshkit.recipes import (
    InstructionFlags,
    LoraFlags,
    ParallelFlags,
    Session,
    TrainFlags,
    chat_encoder,
    instruction_examples,
    instruction_rows,
    nats_per_token,
    print0,
    write_sample,
)
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
    "demo": mk.models.LlamaConfig(**SIZES),
    "moe-demo": mk.models.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True
    ),
    "llama3.2-1b": mk.models.LLAMA32_1B,
    "llama3-8b": mk.models.LLAMA3_8B,
    "qwen3-30b-a3b": mk.models.QWEN3_30B_A3B,
}


@dataclass(frozen=True, kw_only=True)
class Config(TrainFlags, ParallelFlags, LoraFlags, InstructionFlags):
    model: Literal["demo", "moe-demo", "llama3.2-1b", "llama3-8b", "qwen3-30b-a3b"] = "demo"
    """without --pretrained: the shape of a model that begins from nothing; the large ones are there to be estimated"""
    objective: Literal["nll", "dft"] = "nll"
    """dft: a token counts as much as the model believes in it; for a model that knows the language"""
    packing: bool = True
    """several examples in a row, which do not see each other; without: one"""
    out: Path = Path("runs/sft")
    steps: int = 240
    lr: float = 4e-3
    eval_every: int = 60
    save_every: int = 60
    eval_examples: mk.recipes.Count = 256
    """held-out examples of an evaluation"""
    sample_tokens: mk.recipes.Count = 64
    """of the answers that the model writes at the end"""


def build(config: Config, mesh: mk.Mesh, vocab_size: int | None = None) -> mk.Run:
    """The sharded model, without values; `python -m meshkit estimate` runs it too, before there is a tokenizer."""
    shape = config.shape(MODELS[config.model], vocab_size)
    with mk.models.meta_parameters():
        model = mk.models.build_model(shape)
    plan = config.adapted(model, mk.models.model_plan(shape), seed=config.seed)
    return mk.parallelize(model, mesh, config.parallel(plan=plan))


def main() -> None:
    config = Config.parse()
    config.refuse_lora_of_nothing()

    # ---------------------------------------------------------------------------------------------- the mesh
    mesh = mk.init_mesh(config.mesh)
    print0(f"mesh  {mesh.describe()}")

    # ---------------------------------------------------------------------------------------------- rows to examples
    rows = instruction_rows(config)
    vocab_size = MODELS[config.model].vocab_size
    chat = chat_encoder(config, rows.train, config.out / "tokenizer", vocab_size=vocab_size)
    train, held_out = (
        instruction_examples(config, half, chat, seq_len=config.seq_len) for half in (rows.train, rows.held_out)
    )
    left_out = len(rows.train) + len(rows.held_out) - len(train) - len(held_out)
    print0(
        f"data  {len(train):,} examples, {len(held_out):,} held out; {left_out:,} are longer than {config.seq_len} tokens"
    )

    # ---------------------------------------------------------------------------------------------- the sharded model
    run = build(config, mesh, vocab_size=chat.tokenizer.vocab_size)
    shape = run.full_model.config
    report = check_examples(train + held_out, chat.tokenizer, vocab_size=shape.vocab_size, allow=config.allow)
    print0(f"      {report}")
    if config.pretrained is None:
        mk.init_weights(run.model, seed=config.seed, plan=run.plan)
    else:
        mk.models.load_pretrained(run.model, config.pretrained)
        mk.lora.init(run.model, seed=config.seed)
    optimizer = mk.adamw(run, lr=config.lr, weight_decay=config.weight_decay)
    scheduler = config.lr_schedule(optimizer)
    loader = ExampleLoader(
        train,
        seq_len=config.seq_len,
        global_batch=config.global_batch,
        seed=config.seed,
        rank=mesh.data_rank,
        ranks=mesh.data_ranks,
        pad_multiple=mesh.row_multiple,
        packing="rows" if config.packing else "none",
    )
    trained = sum(p.numel() for p in run.full_model.parameters() if p.requires_grad)
    print0(f"model {sum(p.numel() for p in run.full_model.parameters()):,} parameters, of which {trained:,} train")

    # ---------------------------------------------------------------------------------------------- the loop
    def evaluate() -> float:
        examples = held_out[:: max(1, len(held_out) // config.eval_examples)]
        rows = max(1, config.global_batch // mesh.data_ranks)
        return nats_per_token(run, examples, seq_len=config.seq_len, rows=rows)

    flops = ModelFlops.from_config(shape).per_token(config.seq_len)  # of training all weights, one example a row
    objective = next_token_loss if config.objective == "nll" else dft_loss
    with Session(run, config, optimizer=optimizer, scheduler=scheduler, loader=loader) as session:
        if session.start == 0:
            print0(f"held out before the first step: {evaluate():.3f} nats per token")
        for step in session.steps():
            batch = next(loader)
            with session.trace_pipeline(run):
                loss = run.forward_backward(batch, microbatches=config.microbatches, loss=objective, step=step)
            norm = mk.clip_grad_norm(run, config.clip)
            if session.guard.allows(run, norm, step=step):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            session.log(loss=loss, grad_norm=norm, epoch=loader.epoch)
            session.stop_clock(tokens=config.global_batch * batch["input_ids"].shape[1], flops_per_token=flops)
            if session.evaluates(step):
                session.log(held_out_loss=(nats := evaluate()))
    if not session.finished:
        return

    # ---------------------------------------------------------------------------------------------- export
    export = config.out / config.export_name(config.steps)
    run.export(export, chat, base=config.pretrained)
    print0(f"\nheld out: {nats:.3f} nats per token of an answer; model in {export}")
    decode = chat.tokenizer.decode
    for example in (held_out[0], held_out[-1]):
        prompt, answer = example.ids[: example.prompt_length], example.ids[example.prompt_length :].tolist()
        ends = (int(example.ids[example.learn][-1]),)
        written = write_sample(run, prompt, tokens=config.sample_tokens, seed=config.seed, stop_ids=ends)
        print0(f"{'─' * 20} {example.source} {'─' * 20}\n{decode(prompt.tolist())}")
        print0(f"{'─' * 8} the model\n{decode(written)}\n{'─' * 8} the data\n{decode(answer)}")


if __name__ == "__main__":
    mk.run_main(main)
