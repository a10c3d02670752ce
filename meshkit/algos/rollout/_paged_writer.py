"""Writer over the paged KV cache, of models that attend by a `mask`: the forwards of the scheduler's steps.

Dims: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshkit.algos.rollout._answers import Answer, add_entries, draw_tokens, noise_of
from meshkit.algos.rollout._batch import RowOfTokens, row_of
from meshkit.algos.rollout._blocks import Growing
from meshkit.algos.rollout._cache import Places
from meshkit.algos.rollout._engine import Sampling, Stopping
from meshkit.algos.rollout._fingerprints import features_of, top_entries
from meshkit.algos.rollout._kept import KeptCache
from meshkit.algos.rollout._routing import stacked, summed
from meshkit.algos.rollout._scheduler import Scheduler
from meshkit.loss.linear_logits import LinearLogits, head_of
from meshkit.moe.replay import open_routers, recording
from meshkit.step import Run


class PagedWriter:
    """Writes answers a token at a time; see `Writer`. kept: finds what is in `cache` by its tokens.

    routing: record the experts that tokens chose, for answers that end. fingerprints: of the hidden states that the head
    reads in these forwards. Raises: PlanError, as `open_routers`, with routing.
    """

    def __init__(
        self,
        run: Run,
        sampling: Sampling,
        stopping: Stopping,
        cache: KeptCache,
        *,
        kept: bool,
        routing: bool = False,
        fingerprints: bool = False,
    ) -> None:
        self._run, self._sampling, self._stopping = run, sampling, stopping
        self._kept, self._cache = cache, cache.store
        self._scheduler = Scheduler(sampling, cache.policy, self._cache.pages, cache.prefixes if kept else None)
        self._row: RowOfTokens | None = None
        self._drawn = torch.empty(0, dtype=torch.int64)
        self._noise = noise_of([], run.mesh.device)
        self._routing = routing
        if routing and self._cache.choices is None:
            place = open_routers(run.model)
            shape = 0, place.routers, place.chosen
            self._cache.choices = torch.zeros(shape, dtype=torch.int16, device=run.mesh.device)
        elif not routing:
            self._cache.choices = None  # of slots that others are written to now
        self._features = features_of(run, asked="generate(fingerprints=True)") if fingerprints else None
        self._codes: Tensor | None = None

    @property
    def done(self) -> bool:
        return self._scheduler.done

    def add(self, answers: Sequence[Answer], *, first: bool = False) -> None:
        self._scheduler.add(answers, first=first)

    def drop(self) -> list[Answer]:
        return self._scheduler.drop()

    def step(self, version: int) -> list[Answer]:
        run, step = self._run, self._scheduler.next_step()
        if step.goes_on and self._row is not None and self._row.logit_tokens is None:
            row = self._row.go_on(self._drawn)
        else:
            # With sequence parallelism tp splits the row of tokens evenly.
            multiple = run.mesh.spec.tp if run.resolved.sequence else 1
            row = row_of(step, self._cache, multiple=multiple, device=run.mesh.device)
        self._row = row
        self._cache.copy(*step.copies_before)
        with ExitStack() as stack:
            recorded = stack.enter_context(recording()) if self._routing else {}
            logits = run.infer(row.inputs, _logits)
        if recorded:
            routers, choices_1TrK = stacked(run, recorded)
            self._cache.write_choices(row.mask.places.slots, routers, choices_1TrK[0, : row.mask.tokens])
        # Only now: the copied pages hold the prompt that this forward computed.
        self._cache.copy(*step.copies)
        self._kept.count(step)
        draws = step.draws
        if not draws:
            return []
        answers = [sequence.answer for sequence in draws]
        if not step.goes_on:
            self._noise = noise_of(answers, run.mesh.device)
        self._drawn = draw_tokens(run, logits, row.rows, answers, self._noise, self._sampling, version=version)
        if self._features is not None:
            add_entries(run, self._codes, row.rows, answers, features=self._features)
        for answer in answers:
            answer.reason = self._stopping.reason(answer.ids)
        ended = [sequence for sequence in draws if sequence.answer.reason is not None]
        if self._routing and ended:
            self._read_choices(ended)
        self._scheduler.end(ended)
        return [answer for answer in answers if answer.reason is not None]

    def _read_choices(self, ended: Sequence[Growing]) -> None:
        """Wire: with pp an all-reduce of them over it."""
        assert self._cache.choices is not None
        size, device = self._cache.page_tokens, self._cache.choices.device
        slots = Places.of([span for each in ended for span in each.spans(0, each.cached, size)], device).slots
        choices = summed(self._cache.choices.index_select(0, slots), self._run.mesh["pp"]).cpu().numpy()
        parts = np.split(choices, np.cumsum([each.cached for each in ended])[:-1])
        for sequence, part in zip(ended, parts, strict=True):
            # The last token is never put into the cache: no router has seen it.
            sequence.answer.routing = np.pad(part, ((0, 1), (0, 0), (0, 0)))

    @contextmanager
    def few_logits(self) -> Iterator[None]:
        """Within it, the head computes logits only of the tokens that are read, by a hook before its forward."""
        head = head_of(self._run.resolved.program.model, self._run.plan, asked="generate")
        module = self._run.model.get_submodule(head)
        if not isinstance(module, nn.Linear):  # the head is on another stage of pp
            yield
            return

        def select(module: nn.Module, args: Any) -> Any:
            hidden = args[0]
            if self._row is not None and self._row.logit_tokens is not None:
                hidden = hidden.index_select(1, self._row.logit_tokens)
            if self._features is not None:
                self._codes = top_entries(hidden[0])
            return hidden, *args[1:]

        handle = module.register_forward_pre_hook(select)
        try:
            yield
        finally:
            handle.remove()


def _logits(model: Any, inputs: dict[str, Any]) -> Tensor:
    """[rows, V] of the tokens that `few_logits` leaves."""
    output = model(**inputs)
    of_row = getattr(output, "logits", output)[0]
    logits: Tensor = of_row.to_logits() if isinstance(of_row, LinearLogits) else of_row
    return logits
