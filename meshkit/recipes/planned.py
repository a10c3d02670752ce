"""The iteration of a policy recipe as data, for `python -m meshkit plan-rl`: its calls with their works, and its models."""

from __future__ import annotations

import statistics
from typing import Any

from torch import nn

from meshkit.algos.dataflow import PROMPTED, ROLLOUT, Call, Sample, Work
from meshkit.algos.plan_rl import PlannedModel, PlannedRun, score_loss
from meshkit.algos.rollout import REFERENCE, encode_prompts
from meshkit.models import RewardModel, build_model, config_from_pretrained, meta_parameters, model_plan, reward_plan

from .flags import PolicyFlags, SamplerFlags
from .policy import policy_tasks
from .tasks import small_model

WRITTEN = tuple(name for name in ROLLOUT if name not in PROMPTED)
PROMPTS_READ = 256  # of whose lengths the mean is a prompt's


class PPOFlags(PolicyFlags, SamplerFlags):
    """What `planned_ppo` reads of the flags of examples/ppo.py."""

    epochs: int
    minibatches: int
    reward_model: Any


def planned_ppo(config: PPOFlags) -> PlannedRun:
    """The calls of examples/ppo.py, on the meshes "actor" and "sampler": answers as long as they may be, prompts as long as
    they are on average. The model is --pretrained's, else the small one that the recipe trains first.

    Raises: MeshkitError, as the recipe does for its tasks.
    """
    fitted, tasks, tokenizer, sampling = policy_tasks(config)
    rows = list(enumerate(tasks.train[:PROMPTS_READ]))
    prompt = max(1, round(statistics.mean(len(each.ids) for each in encode_prompts(rows, tokenizer))))
    sizes: dict[str, Any] = {"rows": config.prompts * config.samples, "prompt": prompt, "new": sampling.max_new_tokens}
    learns = {"minibatches": config.minibatches, "passes": config.epochs}

    def value(name: str, model: str) -> Call:
        works = [Work(model=model, kind="infer", **sizes)]
        return Call(name=name, on="actor", function=_not_run, needs=ROLLOUT, gives=[name], stage="train", works=works)

    values = [value("old_log_probs", "actor"), value("old_values", "critic")]
    values += [value(REFERENCE, REFERENCE)] if config.kl else []
    judged = [Work(model="reward", kind="infer", **sizes)] if config.reward_model else []
    trained = [Work(model=name, kind="train", **sizes, **learns) for name in ("critic", "actor")]
    calls = [
        Call(
            name="write",
            on="sampler",
            function=_not_run,
            needs=PROMPTED,
            gives=WRITTEN,
            works=[Work(model="actor", kind="generate", **sizes)],
        ),
        Call(
            name="judge",
            on="actor" if config.reward_model else "sampler",
            function=_not_run,
            needs=ROLLOUT,
            gives=["reward", "unscored"],
            works=judged,
        ),
        *values,
        Call(
            name="learn",
            on="actor",
            function=_not_run,
            needs=(*ROLLOUT, "reward", "unscored", *(call.name for call in values)),
            stage="train",
            works=trained,
        ),
    ]
    shape = config_from_pretrained(config.pretrained) if config.pretrained else small_model(tokenizer.vocab_size)
    actor = _decoder(shape)
    models = {"actor": actor, "critic": _scorer(shape)}
    models |= {REFERENCE: actor} if config.kl else {}  # the same shape: what was traced of one is known of the other
    models |= {"reward": _scorer(config_from_pretrained(config.reward_model))} if config.reward_model else {}
    return PlannedRun(
        calls=calls,
        models=models,
        strategy=config.parallel(),
        tokens_per_microbatch=fitted.tokens_per_microbatch,
        staleness=config.staleness,
        beside=("actor", "sampler"),
    )


def _not_run(samples: list[Sample]) -> None:
    """In place of the functions of calls that are planned alone."""


def _decoder(shape: Any) -> PlannedModel:
    with meta_parameters():
        module: nn.Module = build_model(shape)
    return PlannedModel(module=module, plan=model_plan(shape))


def _scorer(shape: Any) -> PlannedModel:
    with meta_parameters():
        module = RewardModel(shape)
    return PlannedModel(module=module, plan=reward_plan(shape), loss=score_loss)
