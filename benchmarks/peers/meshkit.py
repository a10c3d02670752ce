"""The side of meshkit: each kind of work as its recipes write it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

import meshkit as mk
from benchmarks.peers.turns import Turns
from benchmarks.peers.work import (
    BETAS,
    DPO_BETA,
    EPS,
    LEARNING_RATE,
    MAX_NORM,
    RL_LEARNING_RATE,
    WEIGHT_DECAY,
    Answers,
    PostTraining,
    Reading,
    Rollouts,
    Saving,
    Step,
    Training,
    checksum,
    config_of_sums,
    digest_of,
    ids_of_one_step,
    poison,
    repeat,
    reward,
    sums_to_add,
    tokenizer_of,
    transformers_decoder,
    transformers_model,
    units_of,
)
from meshkit.algos.policy import PRESETS, pack_rollouts, policy_count, policy_objective, step_advantages
from meshkit.algos.preference import PreferenceLoss, count_pairs, preference_objective
from meshkit.algos.rollout import REFERENCE, Prompt, Sampling, generate, token_values
from meshkit.data import ExampleLoader, Loader
from meshkit.data.text.tokens import TokenWriter, open_tokens
from meshkit.models import LLAMA_PLAN, build_model, config_from_pretrained, load_pretrained, moe_plan

# ------------------------------------------------------------------------------------------------------- training


def train(work: Training, turns: Turns) -> None:
    """meshkit's decoder with its own plan."""
    repeat(training_step(decoder(transformers_model(work), work.config), work, plan=LLAMA_PLAN), work, turns)


def moe(work: Training, turns: Turns) -> None:
    if dist.get_rank() == 0:
        transformers_model(work).save_pretrained(turns.folder / "model")
    dist.barrier()
    model = build_model(config_from_pretrained(turns.folder / "model"))
    load_pretrained(model, turns.folder / "model")
    repeat(training_step(model.train(), work, plan=moe_plan(work.config)), work, turns)


def training_step(model: nn.Module, work: Training, *, plan: mk.Plan | None = None) -> Step:
    pipeline = mk.strategy.PipelinePolicy(schedule=work.schedule, stages=work.stages)
    run = mk.parallelize(
        model,
        mk.init_mesh(work.mesh, device_type=work.device_type),
        plan=plan,
        memory=mk.MemoryPolicy(precision=mk.strategy.Precision() if work.bf16 else None),
        zero=work.zero if work.spec.pp == 1 else None,
        sequence=work.sequence,
        pipeline=pipeline if work.spec.pp > 1 else mk.strategy.PipelinePolicy(),
        compile=work.compile,
    )
    optimizer = adamw(run)

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        batch = {"input_ids": input_ids, "labels": labels}
        loss = run.forward_backward(batch, microbatches=work.microbatches)
        update(run, optimizer)
        return loss

    return step


def adamw(run: mk.Run, lr: float = LEARNING_RATE) -> Optimizer:
    return mk.adamw(run, lr=lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)


def update(run: mk.Run, optimizer: Optimizer) -> None:
    mk.clip_grad_norm(run, MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def decoder(source: PreTrainedModel, config: mk.models.LlamaConfig) -> nn.Module:
    """meshkit's decoder around the parameters of `source` themselves: nothing is held twice and a tied one stays tied."""
    with torch.device("meta"):
        model = mk.models.Llama(config)
    values = source.state_dict(keep_vars=True)
    model.load_state_dict({name.removeprefix("model."): values.pop(name) for name in list(values)}, assign=True)
    return model


# -------------------------------------------------------------------------------------------------- post-training


def sft(work: PostTraining, turns: Turns) -> None:
    run, optimizer, batches = _post_training(work, pairs=False)
    for batch in batches:
        loss = run.forward_backward(batch)
        update(run, optimizer)
        turns.end_step(loss)


def dpo(work: PostTraining, turns: Turns) -> None:
    """With a reference model that runs in every step."""
    run, optimizer, batches = _post_training(work, pairs=True)
    reference = _llama(work.config, run.mesh)
    for batch in batches:
        batch[REFERENCE] = token_values(reference, batch)
        loss = preference_objective(run.mesh, batch, PreferenceLoss(kind="sigmoid", beta=DPO_BETA))
        mean = run.forward_backward(batch, loss=loss, count=count_pairs)
        update(run, optimizer)
        turns.end_step(mean)


def _post_training(work: PostTraining, *, pairs: bool) -> tuple[mk.Run, Optimizer, Iterator[dict[str, Tensor]]]:
    """Examples of a step are packed into few rows."""
    mesh = mk.init_mesh(work.mesh, device_type="cpu")
    run = _llama(work.config, mesh)
    loader = ExampleLoader(
        units_of(work, pairs=pairs),
        seq_len=2 * work.longest,
        global_batch=work.samples,
        seed=0,
        rank=mesh.data_rank,
        ranks=mesh.data_ranks,
        packing="step",
        max_steps=work.all_steps,
    )
    return run, adamw(run), iter(loader)


def _llama(config: mk.models.LlamaConfig, mesh: mk.Mesh) -> mk.Run:
    return mk.parallelize(decoder(transformers_decoder(config), config), mesh, plan=LLAMA_PLAN)


def grpo(work: Rollouts, turns: Turns) -> None:
    mesh, tokenizer, records = mk.init_mesh(work.mesh, device_type="cpu"), tokenizer_of(work), sums_to_add(work)
    loss = dataclasses.replace(PRESETS["GRPO"], kl=dataclasses.replace(PRESETS["GRPO"].kl, coefficient=0.0))
    run = _llama(config_of_sums(tokenizer), mesh)
    optimizer = adamw(run, RL_LEARNING_RATE)
    sampling = Sampling(max_new_tokens=work.new_tokens)  # nothing ends an answer
    share = work.prompts // mesh.data_ranks
    for step in count():
        first = step * work.prompts + mesh.data_rank * share
        prompts = [
            Prompt(ids=tokenizer.encode(record.fields["prompt"]), key=first + index, fields=record.fields)
            for index, record in enumerate(records[first : first + share])
        ]
        written = generate(run, prompts, sampling=sampling, samples=work.samples)
        scored = [
            dataclasses.replace(each, reward=reward(tokenizer.decode(each.ids.tolist()), each.fields["completion"]))
            for each in written
        ]
        batch = pack_rollouts(scored, seq_len=512)
        batch |= step_advantages(mesh, batch, loss).values
        run.forward_backward(batch, loss=policy_objective(mesh, batch, loss), count=policy_count(loss))
        update(run, optimizer)
        tokens = torch.tensor(float(sum(len(each.ids) for each in written)))
        dist.all_reduce(tokens)
        turns.end_step(tokens)


# ------------------------------------------------------------------------------------- answers, files of a run, data


def answer(work: Answers, turns: Turns) -> None:
    model = decoder(transformers_decoder(work.config, spread=0.05), work.config)
    run = mk.parallelize(model, mk.init_mesh(work.mesh, device_type="cpu"), plan=LLAMA_PLAN)
    sampling = Sampling(max_new_tokens=work.new_tokens, temperature=0, stop_ids=work.end_ids)
    for step in count():
        prompts = [Prompt(ids=ids, key=index) for index, ids in enumerate(work.prompts_of(step))]
        turns.end_step(digest_of([written.ids for written in generate(run, prompts, sampling=sampling)]))


def save(work: Saving, turns: Turns) -> None:
    """Each into the same folder, which keeps the newest."""
    run, optimizer = _half_a_gigabyte(work)
    with mk.Checkpointer(turns.folder / "saved", keep=1, asynchronous=False) as checkpointer:
        for step in count(1):
            checkpointer.save(step, run, optimizer)
            turns.end_step(checksum(_state(run, optimizer)))


def load(work: Saving, turns: Turns) -> None:
    run, optimizer = _half_a_gigabyte(work)
    with mk.Checkpointer(turns.folder / "saved", keep=1, asynchronous=False) as checkpointer:
        checkpointer.save(1, run, optimizer)
        while True:
            poison(_state(run, optimizer))
            checkpointer.load(run, optimizer)
            turns.end_step(checksum(_state(run, optimizer)))


def _half_a_gigabyte(work: Saving) -> tuple[mk.Run, Optimizer]:
    """After one step, which has made the moments."""
    mesh = mk.init_mesh(work.mesh, device_type="cpu")
    run = mk.parallelize(decoder(transformers_decoder(work.config), work.config), mesh, plan=LLAMA_PLAN)
    optimizer, ids = adamw(run), ids_of_one_step(work)
    run.forward_backward({"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()})
    update(run, optimizer)
    return run, optimizer


def _state(run: mk.Run, optimizer: Optimizer) -> list[Tensor]:
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [*run.parameters(), *moments]


def read(work: Reading, turns: Turns) -> None:
    path = turns.folder / "tokens.bin"
    with TokenWriter(path, vocab_size=2048, tokenizer="none") as writer:
        writer.add(work.ids)
    loader = Loader(open_tokens(path), seq_len=work.tokens, global_batch=work.rows, seed=0, documents=False)
    while True:
        total = torch.zeros((), dtype=torch.int64)
        for _ in range(work.file_tokens // (work.tokens * work.rows)):
            batch = next(loader)
            total += batch["input_ids"].sum() + batch["labels"].sum()
        turns.end_step(total.double())
