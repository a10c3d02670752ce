"""Distil teachers into a student on a mesh: by given answers or by the student's own. Read it top to bottom.

CPU, 2 ranks    torchrun --nproc-per-node 2 examples/distill.py --mesh "tp=2"
its own answers torchrun --nproc-per-node 2 examples/distill.py --on-policy --divergence reverse --lr 1e-4 \
                    --pretrained runs/distill/model-200 --teacher runs/distill/sft-model --out runs/distill-own
teacher apart   torchrun --nproc-per-node 4 examples/distill.py --mesh "dp_shard=2" --teacher-mesh "tp=2" --teacher-ranks 2
your models     torchrun --nproc-per-node 8 examples/distill.py --pretrained Qwen3-0.6B/ --teacher Qwen3-8B/ --data qa.jsonl \
                    --mesh "dp_shard=4" --teacher-mesh "tp=4" --teacher-ranks 4 --precision bf16 --lr 1e-5 ...

Without --teacher a small model learns the reference task first, and is the teacher; without --pretrained the student is half
as wide and begins from nothing. Both must have the same tokens. The teacher tells of each token the log-probabilities of its
--top likeliest tokens, the rest being one outcome; with a mesh or ranks of its own those travel, and nothing else. On given
answers (rows with `prompt` and `completion`) the student learns what the teacher thinks of them; with --on-policy it writes
the answers itself (on-policy distillation). A run that finds checkpoints in --out continues from them, on whatever meshes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import meshkit as mk
from meshkit.algos import dataflow, distill
from meshkit.data import PromptLoader, pack_step
from meshkit.recipes import (
    ParallelFlags,
    RolloutFlags,
    Session,
    StepFlags,
    engine_of,
    first_policy,
    greedy_score,
    meshes_beside,
    policy_tasks,
    print0,
    run_from,
    small_model,
)


@dataclass(frozen=True, kw_only=True)
class Config(StepFlags, RolloutFlags, ParallelFlags):
    teacher: Path | None = None
    """Hugging Face folder of the teacher; default: a small model, trained here first"""
    teacher_mesh: str | None = None
    """the teacher's mesh; default: the student's"""
    teacher_ranks: mk.recipes.CountOrNone = 0
    """number of ranks, the last ones, that only the teacher uses; 0: it shares all ranks"""
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    """forward KL covers what the teacher says, reverse KL keeps to what it says most, jsd is between"""
    top: mk.recipes.CountOrNone = 64
    """tokens that the teacher tells of; 0: the whole vocabulary"""
    divergence_temperature: mk.recipes.Positive = 1.0
    """divides the logits of both"""
    nll: mk.recipes.NotNegative = 0.0
    """weight of the cross-entropy of the answers beside the divergence"""
    on_policy: bool = False
    """the student writes the answers"""
    staleness: mk.recipes.CountOrNone = 0
    """number of steps that the teacher, and with --on-policy the student's answers, run ahead"""
    prompts: int = 64
    samples: int = 1
    out: Path = Path("runs/distill")
    seq_len: int = 64
    steps: int = 200
    lr: float = 2e-3
    eval_every: int = 50


def build(config: Config, mesh: mk.Mesh, shape: Any) -> mk.Run:
    """A sharded model, without values."""
    with mk.models.meta_parameters():
        model = mk.models.build_model(shape)
    plan = config.adapted(model, mk.models.model_plan(shape), seed=config.seed)
    return mk.parallelize(model, mesh, config.parallel(plan=plan))


def main() -> None:
    config = Config.parse()

    # ---------------------------------------------------------------------------------------------- the meshes
    world = mk.init_mesh()
    student_mesh, beside = meshes_beside(config.mesh, {"teacher": (config.teacher_mesh, config.teacher_ranks)})
    meshes, teacher_mesh = {"student": student_mesh} | beside, beside["teacher"]
    for name, mesh in meshes.items():
        print0(f"{name}  {mesh.describe()}")

    # ---------------------------------------------------------------------------------------------- prompts
    config.refuse_adapters()
    of_models = dataclasses.replace(config, pretrained=config.pretrained or config.teacher)
    fitted, tasks, tokenizer, sampling = policy_tasks(of_models)
    config = dataclasses.replace(config, seq_len=fitted.seq_len)
    prompts = PromptLoader(tasks.train, global_batch=config.prompts, seed=config.seed)
    print0(f"data  {tasks}")

    # ---------------------------------------------------------------------------------------------- teacher and student
    student = teacher = optimizer = scheduler = None  # on ranks that have none
    build_student = partial(build, config, student_mesh)
    of_teacher = dataclasses.replace(config, pretrained=config.teacher, lora_rank=None)
    if (
        student_mesh.here and config.pretrained is not None
    ):  # before a teacher is trained: a bad folder is refused at once
        student = run_from(config.pretrained, build_student, seed=config.seed)
    taught = first_policy(of_teacher, student_mesh, partial(build, of_teacher, student_mesh), tasks, tokenizer)
    if teacher_mesh.here:
        teacher = run_from(taught, partial(build, of_teacher, teacher_mesh))
    if student_mesh.here:
        if student is None:
            half = {"hidden_size": 48, "intermediate_size": 128, "head_dim": 12}
            student = build_student(dataclasses.replace(small_model(tokenizer.vocab_size), **half))
            mk.init_weights(student.model, seed=config.seed, plan=student.plan)
        optimizer = mk.adamw(student, lr=config.lr, weight_decay=config.weight_decay)
        scheduler = config.lr_schedule(optimizer)
        sums = mk.metrics.MetricSums(student_mesh, ("divergence", "tokens"))
    engine = engine_of(config, student) if student is not None else None

    # ---------------------------------------------------------------------------------------------- calls of the dataflow
    divergence = mk.loss.Divergence(kind=config.divergence, temperature=config.divergence_temperature)
    what = distill.Distillation(divergence=divergence, top=config.top or None, nll=config.nll)

    def learn(samples: list[dataflow.Sample]) -> None:
        """A step on what the teacher says of these answers."""
        examples = [dataflow.rollout_of(sample, ["teacher"]).example() for sample in samples]
        plain = [dataclasses.replace(each, token_values={"teacher": each.token_values["teacher"]}) for each in examples]
        batch = pack_step(plain, seq_len=config.seq_len, names=["teacher"], pad_multiple=student_mesh.row_multiple)
        objective = distill.distill_objective(what, metrics=sums)
        with session.trace_pipeline(student):
            loss = student.forward_backward(batch, loss=objective, microbatches=config.microbatches)
        norm = mk.clip_grad_norm(student, config.clip)
        if session.guard.allows(student, norm, step=flow.iteration + 1):
            optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        totals = sums.means(1.0)
        session.log(loss=loss, grad_norm=norm, lr=scheduler.get_last_lr()[0], tokens=totals["tokens"])
        session.log(divergence=totals["divergence"] / max(totals["tokens"], 1.0))

    options = {"sampling": sampling, "samples": config.samples, "seed": config.seed}
    answers = (
        dataflow.rollout_call(engine, tokenizer, on="student", **options)
        if config.on_policy
        else dataflow.completion_call(tokenizer, on="teacher")
    )
    tell = distill.teacher_call(
        "teacher", teacher, what, on="teacher", tokens_per_microbatch=config.seq_len, microbatches=config.microbatches
    )
    needs = (*dataflow.ROLLOUT, "teacher")
    flow = dataflow.Flow(
        meshes,
        [answers, tell, dataflow.Call(name="learn", on="student", function=learn, needs=needs, stage="train")],
        source=lambda step: [{"key": key, "fields": row.fields} for key, row in prompts.of_step(step)],
        fields=dataflow.PROMPTED,
        total=config.steps,
        staleness=config.staleness,
    )
    print0(flow.describe())

    def held_out_score() -> float:
        options = {"sampling": sampling, "engine": engine, "mesh": student_mesh}
        return greedy_score(student, tasks.held_out, tokenizer, tasks.score, **options)

    # ---------------------------------------------------------------------------------------------- the loop
    with Session(world, config, parts={"student": (student, optimizer, scheduler)}, loader=flow) as session:
        if session.start == 0:
            print0(f"held out before the first step: {held_out_score():.3f}")
        for step in session.steps():
            flow.step()
            session.log(**{f"seconds/{name}": seconds for name, seconds in flow.seconds.items()})
            session.stop_clock(tokens=int(session.scalars.get("tokens", 0)))  # ranks that do not learn have none
            if session.evaluates(step):
                session.log(held_out=held_out_score())
                print0(f"step {step}: held out {session.scalars['held_out']:.3f}")
    if not session.finished:
        return

    # ---------------------------------------------------------------------------------------------- export
    export = config.out / config.export_name(config.steps)
    if student_mesh.here:
        student.export(export, tokenizer, base=config.pretrained)
    print0(f"\nheld out, {len(tasks.held_out)} prompts: {session.scalars['held_out']:.3f}; model in {export}")


if __name__ == "__main__":
    mk.run_main(main)
