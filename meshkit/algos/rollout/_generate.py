"""Generation (rollout, inference): forwards of the model in training, on its mesh, until every answer has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshkit.algos.rollout._cache import CachePolicy
from meshkit.algos.rollout._engine import Sampling
from meshkit.algos.rollout._generation import Generation
from meshkit.algos.rollout._kept import KeptCache
from meshkit.algos.rollout._rollout import Prompt, Rollout
from meshkit.step import Run


def generate(
    run: Run,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    samples: int = 1,
    seed: int = 0,
    decode: Callable[[list[int]], str] | None = None,
    cache: CachePolicy | KeptCache | None = None,
    routing: bool = False,
    fingerprints: bool = False,
) -> list[Rollout]:
    """`samples` rollouts of each prompt, in the order of (prompt, sample).

    prompts: of this data rank, which may have none; the same on its ranks of tp, cp and pp, which all get the answers.
    decode: ids to text, for `Rollout.text` and stop_strings. cache: the memory to take, and how much to do at a time; a
    `KeptCache` stays between calls. routing: record the experts that routers chose (R3), in `Rollout.routing`. fingerprints:
    each rollout gets one, of the forwards that wrote it, for `verify_rollouts`.
    Answers depend on the weights, the seed, and a prompt's ids and key. They do not depend on other prompts or on the mesh,
    except through the last bits of logits, and with experts of limited capacity. Ranks of cp compute the same tokens; stages
    of pp take turns.
    A model that attends by a `mask`, as those of meshkit.models do, has a paged cache. Any other causal one, as those of
    transformers, uses its own cache where a trial shows that it gives training's log-probabilities; else whole rows are
    computed for each token, which `generate` warns of. See `rows_of`.
    Every rank must call it. Wire: an all-reduce in which ranks agree on the call. For each step, what a forward of the model
    sends for its tokens, what `choose` sends, and two numbers per draw over tp, cp and pp, with fingerprints up to 128 more.
    Where forwards of ranks with different prompts wait for each other, one number every few steps over those ranks. The
    parameters once, or in each step. With a KeptCache a number over the mesh. Without a `mask`, forwards of a trial and of a
    check, and a number over the mesh for each. With routing 2 bytes for each choice: in each step over tp with sequence
    parallelism, of each answer over pp.
    Raises: AgreementError where ranks differ in these choices, or ranks of one data rank in prompts; DataError for prompts
    outside of the vocabulary, and for stop_strings without decode; PlanError for a model that is not causal, for a cache
    without room for a prompt, and for a KeptCache, routing or fingerprints of a model without a `mask`.
    Source: paged cache Kwon et al. 2023; continuous batching Yu et al. 2022.
    """
    generation = Generation(
        run, sampling=sampling, decode=decode, cache=cache, routing=routing, fingerprints=fingerprints
    )
    generation.add(prompts, samples=samples, seed=seed)
    return generation.advance()
