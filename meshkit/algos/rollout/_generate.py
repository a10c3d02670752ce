"""Generation (rollout, inference): forwards of the model in training, on its mesh, until every answer has ended.

Dims: T tokens of a step's row, N draws, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshkit.algos.rollout._answers import draw_tokens, rollouts_of
from meshkit.algos.rollout._batch import row_of
from meshkit.algos.rollout._batches import RowsGeneration
from meshkit.algos.rollout._cache import CachePolicy, KeyValueCache
from meshkit.algos.rollout._engine import Reason, Sampling, Stopping, refuse_odd_calls
from meshkit.algos.rollout._kept import KeptCache
from meshkit.algos.rollout._rollout import Prompt, Rollout
from meshkit.algos.rollout._rows import takes_of
from meshkit.algos.rollout._scheduler import Growing, Scheduler
from meshkit.algos.rollout._trial import refuted, rows_of
from meshkit.core.rng import stream_of
from meshkit.errors import PlanError
from meshkit.loss.linear_logits import LinearLogits, head_of
from meshkit.parallel.data import after_inference, kept_gathered
from meshkit.step import Run

STEPS_BETWEEN_QUESTIONS = 8  # a rank without work takes empty steps along with the others; every 8 they ask who is done


@torch.no_grad()
def generate(
    run: Run,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    samples: int = 1,
    seed: int = 0,
    decode: Callable[[list[int]], str] | None = None,
    cache: CachePolicy | KeptCache | None = None,
) -> list[Rollout]:
    """`samples` rollouts of each prompt, in the order of (prompt, sample).

    prompts: of this data rank, which may have none; the same on its ranks of tp, cp and pp, which all get the answers.
    decode: ids to text, for `Rollout.text` and stop_strings. cache: the memory to take, and how much to do at a time; a
    `KeptCache` stays between calls.
    Answers depend on the weights, the seed, and a prompt's ids and key. They do not depend on other prompts or on the mesh,
    except through the last bits of logits, and with experts of limited capacity. Ranks of cp compute the same tokens; stages
    of pp take turns.
    A model that attends by a `mask`, as those of meshkit.models do, has a paged cache. Any other causal one, as those of
    transformers, uses its own cache where a trial shows that it gives training's log-probabilities; else whole rows are
    computed for each token, which `generate` warns of. See `rows_of`.
    Every rank must call it. Wire: an all-reduce in which ranks agree on the call. For each step, what a forward of the model
    sends for its tokens, what `choose` sends, and two numbers per draw over tp, cp and pp. Where forwards of ranks with
    different prompts wait for each other, one number every few steps over those ranks. The parameters once, or in each step.
    With a KeptCache a number over the mesh. Without a `mask`, forwards of a trial and of a check, and a number over the mesh
    for each.
    Raises: AgreementError where ranks differ in these choices, or ranks of one data rank in prompts; DataError for prompts
    outside of the vocabulary, and for stop_strings without decode; PlanError for a model that is not causal, for a cache
    without room for a prompt, and for a KeptCache of a model without a `mask`.
    Source: paged cache Kwon et al. 2023; continuous batching Yu et al. 2022.
    """
    kept = cache if isinstance(cache, KeptCache) else None
    cache = (cache or CachePolicy()) if not isinstance(cache, KeptCache) else cache.policy
    choices = {"seed": seed, "samples": samples, "sampling": sampling, "cache": cache}
    run.mesh.agreement.meet(
        "generate", facts=choices, rows={"prompts": [(each.key, each.ids.tolist()) for each in prompts]}
    )
    vocabulary = _vocabulary(run)
    refuse_odd_calls("generate", prompts, samples, vocabulary)
    stopping = Stopping(sampling, decode)
    if kept is not None and not has_paged_cache(run):
        raise PlanError(
            f"generate(cache=KeptCache()): {type(run.full_model).__name__} does not attend by a `mask`, and its own cache "
            "does not stay between calls. Give a CachePolicy, which computes prompts whole in each call."
        )
    # See [Note: ranks in lockstep].
    lockstep = _forwards_wait(run, cache)
    training = run.model.training
    run.model.eval()
    with ExitStack() as stack:
        if kept is not None:
            stack.enter_context(kept.used_by(run))  # before parameters are gathered, which writes into others
        # Callbacks run in reverse: hooks are removed first, then the mode is restored, at last gathered parameters are freed.
        stack.callback(after_inference, run.model)
        stack.callback(run.model.train, training)
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # shapes change every step: it would compile each
        if cache.keep_parameters:
            stack.enter_context(kept_gathered(run.model))
        if has_paged_cache(run):
            paged = _Generation(run, prompts, sampling, samples, seed, stopping, cache, kept)
            stack.enter_context(paged.few_logits())
            return _to_the_end(run, paged, lockstep=lockstep)
        rows = rows_of(run, prompts, vocabulary)
        by_rows = partial(RowsGeneration, run, prompts, sampling, samples, seed, stopping, cache)
        rollouts = _to_the_end(run, by_rows(rows), lockstep=lockstep)
        right_rows = refuted(run, rows, rollouts, sampling.temperature)
        return rollouts if right_rows is None else _to_the_end(run, by_rows(right_rows), lockstep=lockstep)


def _to_the_end(run: Run, generation: _Generation | RowsGeneration, *, lockstep: bool) -> list[Rollout]:
    steps = 0
    while lockstep or not generation.done:
        if lockstep and steps % STEPS_BETWEEN_QUESTIONS == 0 and not _any_works(run, not generation.done):
            break
        generation.step()
        steps += 1
    return generation.rollouts()


class _Generation:
    """One call of `generate`."""

    def __init__(
        self,
        run: Run,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        samples: int,
        seed: int,
        stopping: Stopping,
        policy: CachePolicy,
        kept: KeptCache | None = None,
    ) -> None:
        self.run, self.prompts, self.sampling, self.stopping = run, prompts, sampling, stopping
        self.kept = kept
        self.cache = KeyValueCache(policy.page_tokens) if kept is None else kept.store
        answer_streams = [
            [stream_of("generate", seed, prompt.key, sample) for sample in range(samples)] for prompt in prompts
        ]
        self.scheduler = Scheduler(
            prompts,
            samples,
            np.array(answer_streams, np.int64),
            sampling,
            policy,
            self.cache.pages,
            None if kept is None else kept.prefixes,
        )
        self._ended: list[tuple[Growing, Reason]] = []
        self._logit_tokens = torch.empty(0, dtype=torch.int64)

    @property
    def done(self) -> bool:
        return self.scheduler.done

    def step(self) -> None:
        """One forward, and a token for each sequence in it."""
        run, step = self.run, self.scheduler.next_step()
        # With sequence parallelism tp splits the row of tokens evenly.
        multiple = run.mesh.spec.tp if run.resolved.sequence else 1
        row = row_of(step, self.prompts, self.cache, multiple=multiple, device=run.mesh.device)
        self._logit_tokens = row.logit_tokens
        self.cache.copy(*step.copies_before)
        logits = run.infer(row.inputs, _logits)
        # Only now: the copied pages hold the prompt that this forward computed.
        self.cache.copy(*step.copies)
        if self.kept is not None:
            self.kept.count(step)
        if not step.draws:
            return
        draw_tokens(run, logits, row.rows, step.draws, self.sampling)
        ended = []
        for sequence in step.draws:
            reason = self.stopping.reason(sequence.ids)
            if reason is not None:
                ended.append(sequence)
                self._ended.append((sequence, reason))
        self.scheduler.end(ended)

    @contextmanager
    def few_logits(self) -> Iterator[None]:
        """Within it, the head computes logits only of the tokens that are read, by a hook before its forward."""
        head = head_of(self.run.resolved.program.model, self.run.plan, asked="generate")
        module = self.run.model.get_submodule(head)
        if not isinstance(module, nn.Linear):  # the head is on another stage of pp
            yield
            return
        handle = module.register_forward_pre_hook(
            lambda module, args: (args[0].index_select(1, self._logit_tokens), *args[1:])
        )
        try:
            yield
        finally:
            handle.remove()

    def rollouts(self) -> list[Rollout]:
        """In the order of (prompt, sample)."""
        return rollouts_of(self.run, self.prompts, self._ended, self.stopping)


def _logits(model: Any, inputs: dict[str, Any]) -> Tensor:
    """[rows, V] of the tokens that `few_logits` leaves."""
    output = model(**inputs)
    of_row = getattr(output, "logits", output)[0]
    logits: Tensor = of_row.to_logits() if isinstance(of_row, LinearLogits) else of_row
    return logits


def _forwards_wait(run: Run, cache: CachePolicy) -> bool:
    """Do forwards of ranks with different prompts wait for each other?"""
    # [Note: ranks in lockstep]
    # ZeRO-3 gathers the parameters of each block, and experts exchange tokens, over ranks that have different prompts. A
    # rank whose answers have all ended must then take part in the forwards of the others, with an empty row, or they hang.
    # Where parameters are gathered once for the whole call and there are no experts, each rank runs on its own and may leave.
    experts = any(style.kind == "experts" for style in run.plan.tensor.values())
    return run.mesh.tokens.size() > 1 and (experts or not cache.keep_parameters)


def _any_works(run: Run, works: bool) -> bool:
    """Has any rank still work to do? Wire: an all-reduce of one number over the ranks with different prompts."""
    any_works = torch.tensor(int(works), device=run.mesh.device)
    dist.all_reduce(any_works, dist.ReduceOp.MAX, group=run.mesh.tokens.get_group())
    return bool(any_works)


def has_paged_cache(run: Run) -> bool:
    """Does the model attend by a `mask`'s `attend`, as those of meshkit.models do? `generate` then has a paged cache."""
    return not run.plan.attention and "mask" in takes_of(run.model)


def _vocabulary(run: Run) -> int:
    """The number of ids that the model takes, or has logits of."""
    model = run.resolved.program.model
    if isinstance(embedding := _input_embedding(model), nn.Embedding):
        return embedding.num_embeddings
    head = model.get_submodule(head_of(model, run.plan, asked="generate"))
    assert isinstance(head, nn.Linear)
    return head.out_features


def _input_embedding(model: nn.Module) -> object:
    asked = getattr(model, "get_input_embeddings", None)  # transformers' models have it
    try:
        return asked() if callable(asked) else None
    except (NotImplementedError, AttributeError):
        return None
