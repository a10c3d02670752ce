"""Direct preference optimization (DPO) and its family on a mesh, from pairs to a Hugging Face folder. Read it top to bottom.

CPU, 2 ranks    torchrun --nproc-per-node 2 examples/dpo.py
go on, on 4     torchrun --nproc-per-node 4 examples/dpo.py --steps 200 --mesh "dp_shard=2 tp=2"
1 GPU           python examples/dpo.py --pretrained Llama-3.2-1B-Instruct/ --data pairs.jsonl --lr 1e-6 --precision bf16 \
                    --seq-len 4096 --global-batch 64 --reference stored
8 GPUs, LoRA    torchrun --nproc-per-node 8 examples/dpo.py --lora-rank 32 --lr 1e-5 --mesh "dp_shard=4 cp=2" ...
will it fit?    python -m meshkit estimate examples/dpo.py --pretrained ... --mesh "dp_shard=8" --device-memory 80GiB

A row of --data has prompt, chosen and rejected, as text or as messages. Without --data the pairs are functions of Python's
standard library, the body as it is against a body made wrong. Without --pretrained a small model learns the chosen answers
first (--sft-steps), so that there is something to prefer with. --loss names one or several losses (docs/objectives.md), as
"ipo_mean beta=0.2" or "sigmoid weight=0.8, bco weight=0.2, sft". --reference says what they compare with. A run that finds a
checkpoint in --out continues from it, on whatever mesh it is started; SIGTERM and SIGUSR1 save one and leave.
On 2 ranks: 3 min 10 s of processor time in all, 0.9 GiB a rank. The chosen answers' loss goes from 6.95 to 3.35; then DPO's
from 0.693 to about 0.12, and of 190 held-out pairs 0.94 are right after 20 steps, margin 1.7, and 0.96 after 100, margin 3.0.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import meshkit as mk
from meshkit.algos import preference, rollout
from meshkit.data import Chat, ExampleLoader, check_examples, encode_pairs
from meshkit.recipes import (
    SMALL_PREFERENCE_MODEL,
    LoraFlags,
    PairFlags,
    ParallelFlags,
    Session,
    TrainFlags,
    nats_per_token,
    pair_means,
    preference_rows,
    print0,
    sft_phase,
    text_encoder,
)

SEEN = ("accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_log_prob", "rejected_log_prob")


@dataclass(frozen=True, kw_only=True)
class Config(TrainFlags, ParallelFlags, LoraFlags, PairFlags):
    loss: str = "sigmoid beta=0.1"
    """losses between commas, each a kind and its constants; rewards have the beta of the first"""
    wpo: bool = False
    """weigh each pair by how likely the model is to write it (WPO)"""
    reference: Literal["live", "stored", "moving", "none"] = "live"
    """live: a frozen copy, with LoRA the model without adapters. stored: computed once, into --reference-file. moving: a copy
    that is drawn towards the model (TR-DPO). none: for losses without one"""
    reference_file: Path | None = None
    """of stored; default: in --out. One of another model, template or truncation is refused"""
    reference_every: mk.recipes.Count = 32
    """of moving: steps between its moves"""
    reference_alpha: mk.recipes.Share = 0.6
    """of moving: the model's share in a move; 1 is a copy"""
    lora_alpha: float | None = 32.0
    out: Path = Path("runs/dpo")
    seq_len: int = 1024
    global_batch: int = 24
    """pairs of one optimizer step, over all ranks, packed into as few rows as they need"""
    sft_steps: mk.recipes.Count = 200
    """without --pretrained: steps on the chosen answers, of as many of them each"""
    sft_lr: mk.recipes.NotNegative = 5e-3
    steps: int = 100
    lr: float = 1e-3
    warmup_steps: int = 10
    weight_decay: float = 0.0
    eval_every: int = 20


def build(config: Config, mesh: mk.Mesh, vocab_size: int | None = None) -> mk.Run:
    """The sharded model, without values; `python -m meshkit estimate` runs it too, before there is a tokenizer."""
    shape = config.shape(SMALL_PREFERENCE_MODEL, vocab_size)
    with mk.models.meta_parameters():
        model = mk.models.build_model(shape)
    plan = config.adapted(model, mk.models.model_plan(shape), seed=config.seed)
    return mk.parallelize(model, mesh, config.parallel(plan=plan))


def main() -> None:
    config = Config.parse()
    losses = preference.parse_losses(config.loss)
    refuse(config, losses)

    # ---------------------------------------------------------------------------------------------- the mesh
    mesh = mk.init_mesh(config.mesh)
    print0(f"mesh  {mesh.describe()}")

    export = config.out / config.export_name(config.steps)
    if export.exists():
        print0(f"{export} is there already; give more --steps to go on, or another --out to begin anew")
        return

    # ---------------------------------------------------------------------------------------------- rows to pairs
    rows = preference_rows(config, seed=config.seed)
    encoder, tokenizer = text_encoder(config, rows.train)
    length = {"seq_len": config.seq_len, "truncate": config.truncate}
    train, held_out = (encode_pairs(half, encoder, **length) for half in (rows.train, rows.held_out))
    print0(f"train     {check_examples(train, tokenizer)}")
    print0(f"held out  {check_examples(held_out, tokenizer)}")

    # ---------------------------------------------------------------------------------------------- the first model
    begin = config.pretrained or config.out / "sft-model"
    sizes = {"seq_len": config.seq_len, "global_batch": config.global_batch, "seed": config.seed}
    if config.pretrained is None and not begin.exists():
        print0(f"the chosen answers first, {config.sft_steps} steps")
        run = build(dataclasses.replace(config, lora_rank=None), mesh, vocab_size=tokenizer.vocab_size)
        mk.init_weights(run.model, seed=config.seed, plan=run.plan)
        optimizer = mk.adamw(run, lr=config.sft_lr, weight_decay=config.weight_decay)
        first = dataclasses.replace(config, out=config.out / "sft", steps=config.sft_steps)
        if not sft_phase(run, optimizer, [pair.chosen for pair in train], first):
            return
        nats = nats_per_token(run, [pair.chosen for pair in held_out], seq_len=config.seq_len, rows=4)
        print0(f"held out: {nats:.3f} nats per token of a chosen answer")
        run.export(begin, encoder)

    # ---------------------------------------------------------------------------------------------- the sharded model
    config = dataclasses.replace(config, pretrained=begin)
    run = build(config, mesh)
    mk.models.load_pretrained(run.model, begin)
    mk.lora.init(run.model, seed=config.seed)
    every, trained = run.full_model.parameters(), [p for p in run.full_model.parameters() if p.requires_grad]
    print0(f"model {sum(p.numel() for p in every):,} parameters, {sum(p.numel() for p in trained):,} train")

    # ---------------------------------------------------------------------------------------------- the reference model
    reference = None
    if config.reference == "stored":
        path = config.reference_file or config.out / "reference.safetensors"
        made_of = {"model": preference.folder_fingerprint(begin)}
        made_of["template"] = encoder.template.source if isinstance(encoder, Chat) else "plain text"
        made_of["truncation"] = f"{config.truncate} at {config.seq_len}"
        pairs = preference.stored_reference(run, [*train, *held_out], path, made_of=made_of, seq_len=config.seq_len)
        train, held_out = pairs[: len(train)], pairs[len(train) :]
        print0(f"reference in {path}")
    elif config.reference != "none" and config.lora_rank is not None:
        reference = run  # without its adapters
    elif config.reference != "none":
        reference = build(config, mesh)
        mk.models.load_pretrained(reference.model, begin)

    def objective(batch: dict[str, Any], metrics: mk.metrics.MetricSums) -> Any:
        """The loss of a batch; adds the reference model's log-probabilities to the batch."""
        if reference is not None:
            with mk.lora.disabled(run.model) if reference is run else nullcontext():
                batch[rollout.REFERENCE] = rollout.token_values(reference, batch, microbatches=config.microbatches)
        return preference.preference_objective(mesh, batch, *losses, wpo=config.wpo, metrics=metrics)

    # ---------------------------------------------------------------------------------------------- the loop
    ranks = {"rank": mesh.data_rank, "ranks": mesh.data_ranks, "pad_multiple": mesh.row_multiple}
    loader = ExampleLoader(train, **sizes, **ranks, packing="step", vocab_size=run.full_model.config.vocab_size)
    optimizer = mk.adamw(run, lr=config.lr, weight_decay=config.weight_decay)
    scheduler = config.lr_schedule(optimizer)
    sums = mk.metrics.MetricSums(mesh, (*SEEN, "tokens"))
    references = mk.Checkpointer(config.out / "reference", keep=config.keep)  # of the moving reference model
    with references, Session(run, config, optimizer=optimizer, scheduler=scheduler, loader=loader) as session:
        if session.start and config.reference == "moving":
            references.load(reference, None, step=session.start)
        for step in session.steps():
            batch = next(loader)
            options = {
                "loss": objective(batch, sums),
                "count": preference.count_pairs,
                "microbatches": config.microbatches,
            }
            with session.trace_pipeline(run):
                loss = run.forward_backward(batch, **options, step=step)
            norm = mk.clip_grad_norm(run, config.clip)
            if session.guard.allows(run, norm, step=step):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if config.reference == "moving" and step % config.reference_every == 0:
                preference.update_reference(reference.model, run.model, alpha=config.reference_alpha)
            means = sums.means(config.global_batch)
            tokens = round(means.pop("tokens") * config.global_batch)
            session.log(loss=loss, grad_norm=norm, **{f"train/{name}": value for name, value in means.items()})
            session.stop_clock(tokens=tokens)
            if session.evaluates(step):
                means = pair_means(run, held_out, objective, SEEN, seq_len=config.seq_len)
                session.log(**{f"held_out/{name}": value for name, value in means.items()})
                print0(f"step {step}, held out: " + ", ".join(f"{name} {value:.3f}" for name, value in means.items()))
            if (
                session.saves(step) and config.reference == "moving"
            ):  # before the session's: every checkpoint has its reference
                references.save(step, reference, None)
    if session.stopped or session.start > config.steps:
        return

    # ---------------------------------------------------------------------------------------------- export
    run.export(export, encoder, base=begin)
    print0(f"model in {export}")


# ---------------------------------------------------------------------------------------------- refusals
def refuse(config: Config, losses: tuple[preference.PreferenceLoss, ...]) -> None:
    """Refuse combinations that cannot be, before anything is read."""
    for kind in (loss.kind for loss in losses if loss.kind.startswith("aot")):
        raise mk.errors.PlanError(
            f"--loss {kind} sorts the pairs of a step in a pass of its own, which this recipe has not."
        )
    for kind in (loss.kind for loss in losses if loss.needs_reference and config.reference == "none"):
        needs = "compares with a reference, but --reference is none"
        raise mk.errors.PlanError(f"--loss {kind} {needs}. Use live, stored or moving.")
    config.refuse_lora_without_rank()
    if config.reference == "moving" and config.lora_rank is not None:
        needs = "needs two whole models, but --lora-rank trains adapters"
        raise mk.errors.PlanError(f"--reference moving {needs}. Use live or stored.")


if __name__ == "__main__":
    mk.run_main(main)
