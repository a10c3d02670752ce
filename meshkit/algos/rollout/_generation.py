"""Resumable generation (partial rollouts, in-flight weight updates): answers in progress that are held between two tokens.

New weights may arrive there: answers go on with them, and each token says which weights wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from meshkit.algos.rollout._answers import Answer, rollouts_of
from meshkit.algos.rollout._batches import RowsWriter
from meshkit.algos.rollout._cache import CachePolicy
from meshkit.algos.rollout._engine import Sampling, Stopping, refuse_odd_calls
from meshkit.algos.rollout._fingerprints import GrowingFingerprint
from meshkit.algos.rollout._kept import KeptCache
from meshkit.algos.rollout._paged_writer import PagedWriter
from meshkit.algos.rollout._rollout import Prompt, Rollout
from meshkit.algos.rollout._rows import takes_of
from meshkit.algos.rollout._trial import refuted, rows_of
from meshkit.core.code import is_ours
from meshkit.core.evaluating import evaluating
from meshkit.core.rng import stream_of
from meshkit.errors import DataError, PlanError
from meshkit.loss.linear_logits import head_of
from meshkit.parallel.data import after_inference, kept_gathered
from meshkit.step import Run

STEPS_BETWEEN_QUESTIONS = 8  # a rank without work takes empty steps along with the others; every 8 they ask who is done


class Writer(Protocol):
    """`add`: answers to go on with, after those that wait or before them. `drop`: forget what is cached, of answers that are
    returned. `step`: one forward, and a token for each answer in it; returns those that have ended. `done`: nothing is left.
    """

    @property
    def done(self) -> bool: ...

    def add(self, answers: Sequence[Answer], *, first: bool = False) -> None: ...

    def drop(self) -> list[Answer]: ...

    def step(self, version: int) -> list[Answer]: ...


class Generation:
    """Answers that grow by some tokens at each `advance`, between which new weights and new prompts may come.

    version: of the weights; each token is tagged with it (`Rollout.versions`). decode, cache, routing, fingerprints: see
    `generate`, also for who has which prompts, for the wire, and for models without a paged cache, which check the answers of
    each call of `advance`.
    Every rank of the mesh makes it, and makes the same calls. What is held between calls is on the host, but for the caches.
    Source: partial rollouts as of Kimi k1.5 2025 (2501.12599); weights that arrive between tokens as of AReaL 2025
    (2505.24298), which computes caches again as this does, and PipelineRL 2025 (2509.19128), which keeps them.
    """

    def __init__(
        self,
        run: Run,
        *,
        sampling: Sampling,
        decode: Callable[[list[int]], str] | None = None,
        cache: CachePolicy | KeptCache | None = None,
        version: int = 0,
        routing: bool = False,
        fingerprints: bool = False,
    ) -> None:
        self.version, self._fingerprints = version, fingerprints
        self._kept = cache if isinstance(cache, KeptCache) else None
        own = cache if isinstance(cache, KeptCache) else KeptCache(cache)
        self._run, self._sampling, self._policy = run, sampling, own.policy
        self._stopping = Stopping(sampling, decode)
        self._lockstep = _forwards_wait(run, self._policy)  # See [Note: ranks in lockstep].
        self._open: list[Answer] = []
        self._numbers = 0
        self._any_open = False
        self._failed = ""  # of a call that raised: the error's class
        self._writer: PagedWriter | RowsWriter | None = None
        if (sparse := run.strategy.context.sparse) is not None:
            raise PlanError(
                f"generate: context sparse={type(sparse).__name__} chooses keys for blocks of queries, and a step of "
                "generation has one query a row. Load the weights into a run without sparse."
            )
        if has_paged_cache(run):
            self._writer = PagedWriter(
                run,
                sampling,
                self._stopping,
                own,
                kept=self._kept is not None,
                routing=routing,
                fingerprints=fingerprints,
            )
        elif routing:
            raise PlanError(
                f"generate(routing=True): {type(run.full_model).__name__} does not attend by a `mask`, and the choices of "
                "routers are kept beside a paged cache. Leave it away (--routing-replay none)."
            )
        elif fingerprints:
            raise PlanError(
                f"generate(fingerprints=True): {type(run.full_model).__name__} does not attend by a `mask`, and no hidden "
                "states are read from forwards over its own cache. Give its rollouts theirs by fingerprint_rollouts()."
            )
        elif self._kept is not None:
            raise PlanError(
                f"generate(cache=KeptCache()): {type(run.full_model).__name__} does not attend by a `mask`, and its own "
                "cache does not stay between calls. Give a CachePolicy, which computes prompts whole in each call."
            )

    @property
    def done(self) -> bool:
        """Whether all answers have ended: of this data rank, or where forwards of ranks wait for each other, of all."""
        return not (self._any_open if self._lockstep else self._open)

    @property
    def growing(self) -> int:
        """The number of this data rank's answers that have not ended."""
        return len(self._open)

    def add(self, prompts: Sequence[Prompt], *, samples: int = 1, seed: int = 0) -> None:
        """Ask for `samples` answers to each prompt, after those that are there; `generate` says of what they depend.

        Every rank calls it, also one without prompts. Wire: an all-reduce in which ranks agree on the call.
        Raises: as `generate`.
        """
        choices = {"seed": seed, "samples": samples, "sampling": self._sampling, "cache": self._policy}
        choices["fingerprints"] = self._fingerprints
        self._run.mesh.agreement.meet(
            "generate", facts=choices, rows={"prompts": [(each.key, each.ids.tolist()) for each in prompts]}
        )
        refuse_odd_calls("generate", prompts, samples, vocabulary_of(self._run))
        self._begin(
            prompts,
            [
                Answer(self._numbers + index * samples + sample, prompt, sample, stream)
                for index, prompt in enumerate(prompts)
                for sample in range(samples)
                for stream in [stream_of("generate", seed, prompt.key, sample)]
            ],
        )

    def advance(self, tokens: int | None = None) -> list[Rollout]:
        """Write so many tokens of each growing answer, or all; returns the answers that have ended, by (prompt, sample).

        An answer that waits for room in the cache begins when another has ended. Every rank calls it with the same number.
        Wire: as `generate`, of so many steps. Raises: DataError after a call that has raised, in the middle of a step.
        """
        if self._failed:
            raise DataError(
                f"Generation: an earlier call ended in the middle of a step, with {self._failed}; its cache may hold half "
                "of a token. Make a new one, and load what state_dict() said before."
            )
        try:
            with self._inference():
                ended = self._steps(tokens)
                while isinstance(self._writer, RowsWriter) and self._refuted(ended):
                    ended = self._steps(tokens)
        except BaseException as error:
            self._failed = type(error).__name__
            raise
        closed = set(map(id, ended))
        self._open = [answer for answer in self._open if id(answer) not in closed]
        if self._lockstep:
            self._any_open = tokens is not None and self._any_rank(bool(self._open))
        return rollouts_of(self._run, ended, self._stopping)

    def take_weights(self, version: int) -> None:
        """Go on with the weights that the model has now: call it between two `advance`s, after they were written in place.

        What is cached of growing answers is computed again from their tokens, so a token's log-probability is the one that
        the weights of its version give in training. Every rank calls it; nothing is sent.
        Raises: DataError for a version that is not above the present one.
        """
        if version <= self.version:
            raise DataError(f"take_weights(version={version}): there is {self.version} already. Count updates upwards.")
        self.version = version
        if self._writer is not None:
            self._writer.add(self._writer.drop(), first=True)
        if self._kept is not None:
            self._kept.forget()

    # -------------------------------------------------------------------------------------------------- resume

    def state_dict(self) -> dict[str, Any]:
        """The version, and the answers of this data rank that have not ended, as plain data and tensors, without caches.

        Any part of the `answers` loads on any data rank of any mesh, best all of one prompt on the same.
        """
        answers = [
            {
                "key": answer.prompt.key,
                "prompt_ids": torch.from_numpy(answer.prompt.ids),
                "fields": dict(answer.prompt.fields),
                "sample": answer.sample,
                "stream": answer.stream,
                "ids": torch.tensor(answer.ids, dtype=torch.int64),
                "log_probs": torch.tensor(answer.log_probs, dtype=torch.float64),
                "versions": torch.tensor(answer.versions, dtype=torch.int64),
                **({} if answer.fingerprint is None else answer.fingerprint.state_dict()),
            }
            for answer in self._open
        ]
        return {"version": self.version, "answers": answers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with answers of a `state_dict`, after those that are there. Every rank calls it, also without answers.

        Raises: DataError for answers without fingerprints, where they are asked for.
        """
        self.version = state["version"]
        prompts: dict[int, Prompt] = {}
        answers = []
        for number, each in enumerate(state["answers"], self._numbers):
            prompt = Prompt(ids=each["prompt_ids"].numpy(), key=each["key"], fields=each["fields"])
            prompt = prompts.setdefault(each["key"], prompt)
            written = (each["ids"].tolist(), each["log_probs"].tolist(), each["versions"].tolist())
            fingerprint = None
            if self._fingerprints and written[0]:
                fingerprint = GrowingFingerprint.of_state(each, written[2][-1])
            answers.append(Answer(number, prompt, each["sample"], each["stream"], *written, fingerprint=fingerprint))
        refuse_odd_calls("generate", list(prompts.values()), 1, vocabulary_of(self._run))
        self._begin(list(prompts.values()), answers)

    # -------------------------------------------------------------------------------------------------- steps

    def _begin(self, prompts: Sequence[Prompt], answers: list[Answer]) -> None:
        if self._writer is None:
            with self._inference():
                rows = rows_of(self._run, prompts, vocabulary_of(self._run))
            self._writer = RowsWriter(self._run, self._sampling, self._stopping, self._policy, rows)
        self._writer.add(answers)
        self._open += answers
        self._numbers += len(answers)
        self._any_open = True  # until ranks have asked each other

    def _steps(self, tokens: int | None) -> list[Answer]:
        if self._writer is None:
            return []
        steps, ended = 0, list[Answer]()
        while (tokens is None or steps < tokens) and (self._lockstep or not self._writer.done):
            asks = self._lockstep and steps % STEPS_BETWEEN_QUESTIONS == 0
            if asks and not self._any_rank(not self._writer.done):
                break
            ended += self._writer.step(self.version)
            steps += 1
        return ended

    def _refuted(self, ended: list[Answer]) -> bool:
        """Whether rows turn out to be wrong; then all answers begin again, by whole rows."""
        assert isinstance(self._writer, RowsWriter)
        rollouts = rollouts_of(self._run, ended, self._stopping)
        rows = refuted(self._run, self._writer.rows, rollouts, self._sampling.temperature, self.version)
        if rows is None:
            return False
        for answer in self._open:
            answer.forget()
        self._writer = RowsWriter(self._run, self._sampling, self._stopping, self._policy, rows)
        self._writer.add(self._open)
        return True

    def _any_rank(self, works: bool) -> bool:
        """Does any rank still work? Wire: an all-reduce of one number over the ranks with different prompts."""
        any_works = torch.tensor(int(works), device=self._run.mesh.device)
        dist.all_reduce(any_works, dist.ReduceOp.MAX, group=self._run.mesh.tokens.get_group())
        return bool(any_works)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """Without gradients and dropout, and with parameters gathered, if they are to be kept so; freed at the end, since
        the next weights are written into shards."""
        model = self._run.model
        with torch.no_grad(), ExitStack() as stack:
            if self._kept is not None:
                stack.enter_context(self._kept.used_by(self._run))  # before parameters are gathered, into others
            # Callbacks run in reverse: hooks are removed first, then the mode is restored, at last parameters are freed.
            stack.callback(after_inference, model)
            stack.enter_context(evaluating(model))
            # Shapes change every step: it would compile each.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            if self._policy.keep_parameters:
                stack.enter_context(kept_gathered(model))
            if isinstance(self._writer, PagedWriter):
                stack.enter_context(self._writer.few_logits())
                if _leaves_nothing(self._run):  # 6 % of the time of one answer
                    stack.enter_context(torch.inference_mode())
            yield


def has_paged_cache(run: Run) -> bool:
    """Does the model attend by a `mask`'s `attend`, as those of meshkit.models do? `generate` then has a paged cache."""
    return not run.plan.attention and "mask" in takes_of(run.model)


def _leaves_nothing(run: Run) -> bool:
    """Whether no tensor that a forward makes is kept by the model: autograd refuses those of inference mode ever after.

    Nothing of FSDP, and all modules and hooks known: those of others may keep what they have computed for the next step.
    """
    modules = list(run.model.modules())
    hooks = [hook for each in modules for hook in (*each._forward_pre_hooks.values(), *each._forward_hooks.values())]
    return (
        run.mesh.spec.world_size == 1
        and all(type(each).__module__.startswith(("meshkit.models.", "torch.nn.modules.")) for each in modules)
        and all(is_ours(hook) for hook in hooks)
        and all(type(each) is nn.Parameter for each in run.model.parameters())
    )


def _forwards_wait(run: Run, cache: CachePolicy) -> bool:
    """Do forwards of ranks with different prompts wait for each other?"""
    # [Note: ranks in lockstep]
    # ZeRO-3 gathers the parameters of each block, and experts exchange tokens, over ranks that have different prompts. A
    # rank whose answers have all ended must then take part in the forwards of the others, with an empty row, or they hang.
    # Where parameters are gathered once for the whole call and there are no experts, each rank runs on its own and may leave.
    experts = any(style.kind == "experts" for style in run.plan.tensor.values())
    return run.mesh.tokens.size() > 1 and (experts or not cache.keep_parameters)


def vocabulary_of(run: Run) -> int:
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
