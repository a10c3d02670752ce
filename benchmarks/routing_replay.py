"""What does routing replay change of a policy with experts?

    python benchmarks/routing_replay.py                 # one rank, a Qwen3-MoE of random weights, bf16

Answers are written by decoding, and read again by the trainer's forward: in bf16 some tokens choose other experts there, and
so they do after updates. Printed and kept, without replay and with it: the share of (token, router) pairs that choose another
set of experts, and how far log-probabilities are apart: of generator and trainer ("rollout", R3), and of the policy before
and after updates on one batch ("old", R2); bytes of choices for each token, and seconds of a forward that records.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tyro
from rows import environment
from torch import Tensor

import meshkit as mk
from meshkit.algos import policy, rollout
from meshkit.models import Qwen3Moe, Qwen3MoeConfig
from meshkit.moe import ROUTING

RESULTS = Path(__file__).parent / "results" / "routing_replay.jsonl"
CONFIG = Qwen3MoeConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=64,
    norm_topk_prob=True,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    prompts: int = 8
    samples: int = 4
    new_tokens: int = 64
    updates: int = 4
    lr: float = 2e-5
    seed: int = 0
    record: bool = False
    """append a row to benchmarks/results/routing_replay.jsonl"""


def other_experts(batch: dict[str, Tensor], routing: Tensor, known: Tensor) -> float:
    """The share of (learnt token, router) pairs whose sets of experts differ."""
    learnt = rollout.learnt(batch)
    differ = (routing.sort(-1).values != known.sort(-1).values).any(-1)[learnt]
    return round(float(differ.double().mean()), 4)


def distance(batch: dict[str, Tensor], one: Tensor, other: Tensor) -> dict[str, float]:
    """Of log-probabilities, over learnt tokens."""
    gap = (one.cpu() - other.cpu()).abs()[rollout.learnt(batch)]
    return {"mean": round(float(gap.mean()), 5), "max": round(float(gap.max()), 4)}


def main(settings: Settings) -> None:
    mesh = mk.init_mesh()
    torch.manual_seed(settings.seed)
    model = Qwen3Moe(CONFIG)
    mk.init_weights(model, seed=settings.seed)
    plan = mk.models.model_plan(CONFIG)
    run = mk.parallelize(model, mesh, plan=plan, memory=mk.MemoryPolicy(precision=mk.strategy.Precision()))
    draw = np.random.default_rng(settings.seed)
    prompts = [rollout.Prompt(ids=draw.integers(0, 512, 24), key=key) for key in range(settings.prompts)]
    sampling = rollout.Sampling(max_new_tokens=settings.new_tokens)
    written = rollout.generate(run, prompts, sampling=sampling, samples=settings.samples, routing=True)
    written = [replace(each, reward=float(draw.integers(0, 2))) for each in written]
    loss = replace(policy.GRPO, kl=replace(policy.GRPO.kl, coefficient=0.0))
    batch_of = partial(policy.policy_batch, run, written, loss, tokens_per_microbatch=2048, snapshot=True)

    # ------------------------------------------------------------------------------------ generator and trainer
    step = batch_of(routing="rollout")
    batch, count = step.batch, step.microbatches
    seconds = {}
    for name, forward in (("plain", rollout.token_values), ("recorded", rollout.routed_values)):
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            found = forward(run, batch, microbatches=count)
            times.append(time.perf_counter() - begin)
        seconds[name] = round(sorted(times)[2], 4)
    own, routing = found
    row = {
        "rollout": {
            "other_experts": other_experts(batch, routing, batch[ROUTING]),
            "without": distance(batch, own, batch["rollout_log_probs"]),
            "with": distance(batch, batch["old_log_probs"], batch["rollout_log_probs"]),
        },
        "bytes_per_token": batch[ROUTING][0, 0].numel() * 2,
        "forward_s": seconds,
    }

    # ------------------------------------------------------------------------------------ before and after updates
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for kind in ("none", "old"):
        model.load_state_dict(before)
        step = batch_of(routing=kind)
        batch, optimizer, sums = step.batch, mk.adamw(run, lr=settings.lr), policy.policy_sums(mesh)
        old = rollout.routed_values(run, batch, microbatches=count).routing
        for _ in range(settings.updates):
            objective = policy.policy_objective(mesh, batch, loss, metrics=sums)
            run.forward_backward(batch, loss=objective, count=policy.policy_count(loss), microbatches=count)
            optimizer.step()
            optimizer.zero_grad()
        metrics = policy.policy_metrics(sums)
        values = partial(rollout.label_log_probs, replay=True)
        row[f"updates_{kind}"] = {
            "other_experts": other_experts(batch, rollout.routed_values(run, batch, microbatches=count).routing, old),
            "log_ratio": distance(
                batch, rollout.token_values(run, batch, values, microbatches=count), batch["old_log_probs"]
            ),
            "ratio_max": round(metrics["ratio_max"], 4),
            "clipped": round(metrics["clipped_low"] + metrics["clipped_high"], 4),
        }
    print(json.dumps(row, indent=1))
    if settings.record:
        with RESULTS.open("a") as file:
            file.write(json.dumps({**environment(), **asdict(settings), **row}) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings))
