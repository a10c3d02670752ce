"""GRPO on a reward of one's own, in Python: torchrun --nproc-per-node 2 own_reward.py

From the command line, with what it exports:
    meshkit train --nproc-per-node 2 grpo --pretrained policy --data prompts.jsonl --reward own_reward.py:vowels
"""

from dataclasses import replace

import torch

import meshkit as mk
from meshkit.algos.policy import DAPO, policy_batch, policy_count, policy_objective
from meshkit.algos.rollout import Prompt, Sampling, generate


def vowels(answer):
    """The share of vowels in what the policy wrote."""
    return sum(letter in "aeiou" for letter in answer.text) / max(1, len(answer.text))


def main():
    mesh, tokenizer = mk.init_mesh("dp_shard=2"), mk.data.character_tokenizer("abcdefghijklmnopqrstuvwxyz")
    config = mk.models.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = mk.models.Llama(config)
    run = mk.parallelize(model, mesh, plan=mk.models.LLAMA_PLAN)
    mk.init_weights(run.model, seed=0)
    means = []
    # The ten lines.
    optimizer, sampling = mk.adamw(run, lr=1e-2), Sampling(max_new_tokens=8, stop_ids=(tokenizer.eos_id,))
    for step in range(12):
        prompts = [Prompt(ids=tokenizer.encode("say"), key=2 * step + mesh.data_rank)]
        answers = generate(run, prompts, sampling=sampling, samples=16, decode=tokenizer.decode)
        answers = [replace(answer, reward=vowels(answer)) for answer in answers]
        learnt = policy_batch(run, answers, DAPO, tokens_per_microbatch=1024)
        objective = policy_objective(mesh, learnt.batch, DAPO)
        run.forward_backward(learnt.batch, loss=objective, count=policy_count(DAPO), microbatches=learnt.microbatches)
        optimizer.step()
        optimizer.zero_grad()
        means.append(learnt.advantages.reward)
    assert sum(means[-3:]) > sum(means[:3]) + 0.3, means
    run.export("policy", tokenizer)
    if mesh.rank == 0:
        print(f"share of vowels {means[0]:.2f} to {means[-1]:.2f}")


if __name__ == "__main__":
    main()
