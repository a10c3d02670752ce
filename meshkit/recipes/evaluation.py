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
from meshkit.errors import RewardError
from meshkit.loss import IGNORED
from meshkit.mesh import Mesh
from meshkit.metrics import Logger, MetricSums, show_samples
from meshkit.step import Batch, Loss, Run

from .inputs import PretrainData
from .session import print0

SAMPLE_NAMES = ("prompt", "answer", "", "score")


def bits_per_byte(
    run: Run, tokens: Tokens, tokenizer: Tokenizer, *, seq_len: int, rows: int, batches: int, documents: bool = True
) -> float:
    """Bits per byte of the first `batches` batches of `rows` sequences a rank. Runs with other tokenizers compare by it.

    documents: attention and positions stop at the end of a document. Every rank must call it.
    """
    # Bytes, not tokens: a tokenizer with longer tokens has fewer of them to predict, each with more nats.
    sizes = token_bytes(tokenizer)  # where batches lie when they are counted: on the host

    def count_bytes(batch: Batch) -> Tensor:
        labels = batch["labels"]
        # clamp: an ignored label is -100, and would index from the end.
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
    # The same first batches at each call, so that evaluations of a run compare. zip ends at the shorter one: a small
    # corpus has fewer batches.
    for _, batch in zip(range(batches), held_out, strict=False):
        loss, size = run.evaluate(batch, count=count_bytes)
        nats, total = nats + loss.item(), total + size.item()
    # `evaluate` sums over all ranks and divides nothing: both are of the whole batch.
    return nats / math.log(2) / max(total, 1)


def held_out_scores(
    run: Run, data: PretrainData, tokenizer: Tokenizer, *, seq_len: int, rows: int, batches: int, documents: bool = True
) -> dict[str, float]:
    """Metrics of the held-out text: `held_out_bits_per_byte`; of a mixture the mean by its shares, and each source's own.

    As `bits_per_byte`, of each source. Every rank must call it.
    """
    sizes = {"seq_len": seq_len, "rows": rows, "batches": batches}
    bits = {
        name: bits_per_byte(run, tokens, tokenizer, **sizes, documents=documents)
        for name, tokens in data.held_out.items()
    }
    own = {f"held_out_bits_per_byte/{name}": score for name, score in bits.items() if name}
    return {"held_out_bits_per_byte": sum(data.shares[name] * score for name, score in bits.items()), **own}


def nats_per_token(run: Run, examples: Sequence[Example], *, seq_len: int, rows: int) -> float:
    """Cross-entropy of a learnt token, over all the examples, packed into batches of `rows` rows a rank.

    Every rank must call it.
    """
    batches = example_batches(examples, seq_len=seq_len, rows=rows, rank=run.mesh.data_rank, ranks=run.mesh.data_ranks)
    # Sums first, one division at the end: batches have different numbers of learnt tokens. One wait for the device, too.
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
        # The objective's sum over all ranks; metrics add up in MetricSums, and are reduced once by `means`.
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
        # Every n-th row: prompts of one kind often stand together. The index in all the rows is the key, so that sampling
        # does not depend on the ranks.
        own_rows = list(enumerate(rows))[run.mesh.data_rank :: run.mesh.data_ranks]
        write = engine or partial(generate, run)
        greedy = replace(sampling, temperature=0.0)
        rollouts = write(encode_prompts(own_rows, tokenizer), sampling=greedy, decode=tokenizer.decode)
        score = [score_on_mesh(run.mesh, rollouts, scorer).mean]
    # A broadcast over the world: ranks without the sampler log the same line.
    if mesh is not None:
        dist.broadcast_object_list(score, src=mesh.ranks[0])
    return score[0]


def report_unscored(step: int, unscored: int, answers: int, first: str | None, *, unit: str = "step") -> None:
    """Say how many of a step's answers have no score, and why the first has none. The same on every rank.

    Raises: RewardError where no answer has one: the reward is at fault, and nothing would be learnt.
    """
    if not unscored:
        return
    said = f"{unit} {step}: {unscored} of {answers} answers have no score; {first}"
    if unscored == answers:
        raise RewardError(f"{said}. Mend the reward.")
    print0(said)


def sample_rows(rollouts: Iterable[Rollout]) -> list[tuple[str, str, str, str]]:
    """Columns SAMPLE_NAMES of each rollout, for `show_samples`."""
    return [
        (each.fields["prompt"], each.text, "cut" if each.truncated else "", f"{float(each.reward):.2f}")
        for each in rollouts
    ]


def show_rollouts(step: int, rollouts: Iterable[Rollout], logger: Logger) -> None:
    """A table of them, on rank 0's terminal and in TensorBoard. The other ranks need not call it."""
    # Rank 0 has answers to its own prompts; gathering all to show a few would be a waste.
    if dist.get_rank() == 0:
        show_samples(step, SAMPLE_NAMES, sample_rows(rollouts), logger)


def write_sample(run: Run, prompt_ids: Any, *, tokens: int, seed: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """Up to `tokens` tokens that the model writes after the prompt, at temperature 0.8. Every rank must call it."""
    # Below 1: a small model's rare tokens make a text that nobody can read.
    sampling = Sampling(max_new_tokens=tokens, temperature=0.8, stop_ids=stop_ids)
    (sample,) = generate(run, [Prompt(ids=prompt_ids, key=0)], sampling=sampling, seed=seed)
    written: list[int] = sample.ids.tolist()
    return written
