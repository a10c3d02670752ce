"""Evaluation (validation): scores of a model on held-out text, pairs and prompts, and samples for people to read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.algos.preference import count_pairs
from meshkit.algos.rewards import Scorer, score_on_mesh
from meshkit.algos.rollout import Engine, Prompt, Rollout, Sampling, encode_prompts, generate
from meshkit.data import Example, Pair, Record, Tokenizer, Tokens, evaluation_batches, example_batches, token_bytes
from meshkit.loss import IGNORED
from meshkit.mesh import Mesh
from meshkit.metrics import Logger, MetricSums, show_samples
from meshkit.step import Batch, Loss, Run

SAMPLE_NAMES = ("prompt", "answer", "", "score")


def bits_per_byte(
    run: Run, tokens: Tokens, tokenizer: Tokenizer, *, seq_len: int, rows: int, batches: int, documents: bool = True
) -> float:
    """Bits per byte of the first `batches` batches of `rows` sequences a rank. Runs with other tokenizers compare by it.

    documents: attention and positions stop at the end of a document. Every rank must call it.
    """
    sizes = token_bytes(tokenizer).to(run.mesh.device)

    def count_bytes(batch: Batch) -> Tensor:
        labels = batch["labels"]
        return sizes[labels.clamp(min=0)].masked_fill(labels == IGNORED, 0).sum()

    held_out = evaluation_batches(
        tokens,
        seq_len=seq_len,
        batch=rows,
        rank=run.mesh.data_rank,
        ranks=run.mesh.data_ranks,
        documents=documents,
    )
    nats = total = 0.0
    for _, batch in zip(range(batches), held_out, strict=False):
        loss, size = run.evaluate(batch, count=count_bytes)
        nats, total = nats + loss.item(), total + size.item()
    return nats / math.log(2) / max(total, 1)


def nats_per_token(run: Run, examples: Sequence[Example], *, seq_len: int, rows: int) -> float:
    """Cross-entropy of a learnt token, over all the examples, packed into batches of `rows` rows a rank.

    Every rank must call it.
    """
    batches = example_batches(examples, seq_len=seq_len, rows=rows, rank=run.mesh.data_rank, ranks=run.mesh.data_ranks)
    nats, tokens = torch.stack([torch.stack(run.evaluate(batch)) for batch in batches]).sum(0).tolist()
    return float(nats / max(tokens, 1))


def pair_means(
    run: Run,
    pairs: Sequence[Pair],
    objective: Callable[[Batch, MetricSums], Loss],
    names: tuple[str, ...],
    *,
    seq_len: int,
    rows: int = 4,
) -> dict[str, float]:
    """Means over all the pairs: `loss`, and `names` of the objective's metrics.

    objective: of a batch and sums to add to, as `preference_objective`; it may add to the batch, such as a reference.
    rows: of a batch, on each rank. Every rank must call it.
    """
    mesh, metrics, total = run.mesh, MetricSums(run.mesh, names), 0.0
    for batch in example_batches(pairs, seq_len=seq_len, rows=rows, rank=mesh.data_rank, ranks=mesh.data_ranks):
        loss, _ = run.evaluate(batch, loss=objective(batch, metrics), count=count_pairs)
        total += loss.item()
    return {"loss": total / max(len(pairs), 1), **metrics.means(len(pairs))}


def greedy_score(
    run: Run | None,
    rows: Sequence[Record],
    tokenizer: Tokenizer,
    scorer: Scorer,
    *,
    sampling: Sampling,
    engine: Engine | None = None,
    mesh: Mesh | None = None,
) -> float:
    """The mean score of greedy answers to all the rows, which the data ranks share.

    sampling: of any temperature. engine: default `generate`. Every rank of the run must call it; with `mesh`, that of the
    run, every rank of the world must, and ranks without the run get the score too. Wire: the engine's, `score_on_mesh`.
    """
    score = [math.nan]
    if run is not None:
        own_rows = list(enumerate(rows))[run.mesh.data_rank :: run.mesh.data_ranks]
        write = engine or partial(generate, run)
        greedy = replace(sampling, temperature=0.0)
        rollouts = write(encode_prompts(own_rows, tokenizer), sampling=greedy, decode=tokenizer.decode)
        score = [score_on_mesh(run.mesh, rollouts, scorer).mean]
    if mesh is not None:
        dist.broadcast_object_list(score, src=mesh.ranks[0])
    return score[0]


def sample_rows(rollouts: Iterable[Rollout]) -> list[tuple[str, str, str, str]]:
    """Columns SAMPLE_NAMES of each rollout, for `show_samples`."""
    return [
        (each.fields["prompt"], each.text, "cut" if each.truncated else "", f"{float(each.reward):.2f}")
        for each in rollouts
    ]


def show_rollouts(step: int, rollouts: Iterable[Rollout], logger: Logger) -> None:
    """A table of them, on rank 0's terminal and in TensorBoard. The other ranks need not call it."""
    if dist.get_rank() == 0:
        show_samples(step, SAMPLE_NAMES, sample_rows(rollouts), logger)


def write_sample(run: Run, prompt_ids: Any, *, tokens: int, seed: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """Up to `tokens` tokens that the model writes after the prompt, at temperature 0.8. Every rank must call it."""
    sampling = Sampling(max_new_tokens=tokens, temperature=0.8, stop_ids=stop_ids)
    (sample,) = generate(run, [Prompt(ids=prompt_ids, key=0)], sampling=sampling, seed=seed)
    written: list[int] = sample.ids.tolist()
    return written
