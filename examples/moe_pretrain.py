"""Pretrain a mixture of experts (MoE) on a mesh, and watch the load balance of its experts. Read it top to bottom.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import meshkit as mk
from meshkit.data import Loader
from meshkit.metrics import ModelFlops, load_picture, load_scalars
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

DEMO = mk.models.Qwen3MoeConfig(
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
MODELS = {"demo": DEMO, "qwen3-30b-a3b": mk.models.QWEN3_30B_A3B, "mixtral-8x7b": mk.models.MIXTRAL_8X7B}


@dataclass(frozen=True, kw_only=True)
class Config(RampFlags, ParallelFlags, PretrainFlags):
    model: Literal["demo", "qwen3-30b-a3b", "mixtral-8x7b"] = "demo"
    """the shape of the model; its vocabulary is the tokenizer's"""
    out: Path = Path("runs/moe")
    steps: int = 200

    bias_speed: mk.recipes.NotNegative = 1e-2
    """load balancing without a loss: how far a router's biases move after a step; 0: no biases"""
    balance_loss: Literal["none", "sequence", "batch", "global"] = "none"
    """load balancing by a loss: over which tokens it is computed"""
    balance_coefficient: mk.recipes.NotNegative = 1e-2
    """of that loss"""
    z_loss: mk.recipes.NotNegative = 0.0
    """coefficient of the loss that keeps the routers' logits small"""
    capacity: mk.recipes.Positive | None = None
    """the most tokens an expert takes of a rank, as a multiple of its even share; default: all that choose it"""
    picture_every: mk.recipes.Count = 20
    """the load of every layer and expert for TensorBoard"""


def build(config: Config, mesh: mk.Mesh, vocab_size: int | None = None) -> mk.Run:
    """The sharded model, without values; `python -m meshkit estimate` runs it too, before there is a tokenizer."""
    shape = config.shape(MODELS[config.model], vocab_size)
    if not isinstance(shape, mk.models.Qwen3MoeConfig | mk.models.MixtralConfig):
        raise mk.errors.PlanError(
            f"{config.pretrained} is a {type(shape).__name__}; this recipe trains Qwen3-MoE and Mixtral."
        )
    losses = mk.moe.AuxiliaryLosses(z=config.z_loss)
    if config.balance_loss != "none":
        losses = dataclasses.replace(losses, balance=config.balance_coefficient, per=config.balance_loss)
    shape = dataclasses.replace(shape, router_bias=config.bias_speed != 0, router_losses=losses)
    with mk.models.meta_parameters():
        model = mk.models.build_model(shape)
    experts = mk.strategy.ExpertPolicy(
        capacity=None if config.capacity is None else mk.strategy.Capacity(factor=config.capacity)
    )
    return mk.parallelize(model, mesh, config.parallel(plan=mk.models.moe_plan(shape), experts=experts))


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
    active = ModelFlops.from_config(run.full_model.config)
    print0(
        f"model {sum(p.numel() for p in run.full_model.parameters()):,} parameters; a token visits {active.matmul_params:,}"
    )
    if config.explain:
        sizes = {"rows": rows, "seq_len": config.seq_len, "microbatches": config.microbatches}
        print0(mk.explain(run, **sizes))

    # ---------------------------------------------------------------------------------------------- the loop
    flops = active.per_token(config.seq_len)  # an upper bound, as in llama_pretrain.py
    with Session(run, config, optimizer=optimizer, scheduler=scheduler, loader=loader) as session:
        for step in session.steps():
            sequences, batch = loader.global_batch, next(loader)
            with session.trace_pipeline(run):
                loss = run.forward_backward(batch, microbatches=config.microbatches_of(sequences))
            norm = mk.clip_grad_norm(run, config.clip)
            if session.guard.allows(run, norm, step=step):
                optimizer.step()
                if config.bias_speed:
                    run.balance_experts(speed=config.bias_speed)
            optimizer.zero_grad()
            scheduler.step()
            counts, losses = run.routing_of_stages()
            session.log(loss=loss, grad_norm=norm, **load_scalars(counts))
            session.log(**{f"auxiliary/{kind}": value for kind, value in losses.items()})
            if run.dropped_share is not None:
                session.log(**{"load/dropped_share": run.dropped_share})
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
            if step % config.picture_every == 0:
                session.logger.image(step, "load/layers_by_experts", load_picture(counts))
    if not session.finished:
        return

    # ---------------------------------------------------------------------------------------------- export
    model_at = config.out / ("checkpoints" if config.bias_speed else f"model-{config.steps}")
    if not config.bias_speed:  # the Hugging Face formats of these families have no key for router biases
        run.export(model_at, tokenizer)
    ids = tokenizer.encode(config.prompt)
    written = write_sample(run, ids, tokens=config.sample_tokens, seed=config.seed)
    print0(f"\nheld out: {held_out['held_out_bits_per_byte']:.3f} bits per byte; model in {model_at}")
    print0(f"{'─' * 20} a sample {'─' * 20}\n{tokenizer.decode([*ids, *written])}\n{'─' * 50}")


if __name__ == "__main__":
    mk.run_main(main)
