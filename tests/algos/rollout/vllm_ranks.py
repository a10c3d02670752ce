"""What ranks of the test of vLLM run: it asserts, and prints "equal" at its end. Run as a file with MESH."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import meshkit as mk
from meshkit.algos.policy import pack_rollouts
from meshkit.algos.rollout import Prompt, Rollout, Sampling, VllmEngine, generate, label_log_probs, token_values
from meshkit.errors import PlanError
from meshkit.faults import run_main
from meshkit.models import LLAMA_PLAN, Llama, LlamaConfig

TOL_FP32 = 1e-4  # of log-probabilities: other kernels
CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # vLLM has no kernel for fewer
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
DRAWN = Sampling(max_new_tokens=10, top_k=20, stop_ids=(7,))


def main() -> None:
    mesh = mk.init_mesh(sys.argv[1], device_type="cpu")
    with torch.device("meta"):
        model = Llama(CONFIG)
    run = mk.parallelize(model, mesh, plan=LLAMA_PLAN)
    mk.init_weights(run.model, seed=0)
    engine = VllmEngine(run, enforce_eager=True)
    # Uneven on data ranks, and none on the last of several.
    count = 3 if mesh.data_ranks == 1 else 3 * (mesh.data_rank < mesh.data_ranks - 1)
    prompts = [Prompt(ids=np.array([1, 2, 3 + key]), key=key) for key in range(count)]
    before: list[list[int]] = []
    for life in range(2):
        _scale(run, 3.0 if life == 0 else -1.0)  # other weights, which the second time are loaded over the first
        greedy = Sampling(max_new_tokens=10, temperature=0.0, stop_ids=(7, 12, 40))
        found = engine(prompts, sampling=greedy, samples=2)
        _same(found, generate(run, prompts, sampling=greedy, samples=2))
        assert any(life or not each.truncated for each in found) or not found
        ids = [each.ids.tolist() for each in found]
        assert ids != before or not found  # or old weights would go unseen
        before = ids
        drawn, again = (engine(prompts, sampling=DRAWN, samples=3, seed=1) for _ in range(2))
        _same(drawn, again)
        assert not drawn or len({tuple(each.ids) for each in drawn}) > 3
        _check_log_probs(run, drawn)
    words = Sampling(max_new_tokens=10, temperature=0.0, stop_strings=("44 ", "16 "))
    found = engine(prompts, sampling=words, decode=_text)
    _same(found, generate(run, prompts, sampling=words, decode=_text))
    with pytest.raises(PlanError, match="Make another engine"):
        engine(prompts, sampling=Sampling(max_new_tokens=2, temperature=0.5))
    print("equal", flush=True)


def _text(ids: list[int]) -> str:
    return "".join(f"{id} " for id in ids)


def _scale(run: mk.Run, factor: float) -> None:
    with torch.no_grad():
        for param in run.parameters():
            param.mul_(factor)


def _same(found: Sequence[Rollout], expected: Sequence[Rollout]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.key, ours.truncated, ours.text) == (theirs.key, theirs.truncated, theirs.text)
        assert ours.ids.tolist() == theirs.ids.tolist()
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=TOL_FP32)


def _check_log_probs(run: mk.Run, written: Sequence[Rollout]) -> None:
    """Against those that training computes."""
    batch = pack_rollouts(written, seq_len=16)
    found = token_values(run, batch, label_log_probs).cpu()
    answered = batch["labels"] != -100
    torch.testing.assert_close(found[answered], batch["rollout_log_probs"][answered].to(found), atol=TOL_FP32, rtol=0)


if __name__ == "__main__":
    run_main(main)
