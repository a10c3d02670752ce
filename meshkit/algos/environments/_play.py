"""Multi-turn rollouts: policy and environment in turns, by groups: the environments of one step while another writes.

A rollout holds all turns as one context: `wrote` is False for what the environment said, which is read and never learnt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist

from meshkit.algos.environments._pool import EnvironmentPool, Stepped, reason_of
from meshkit.algos.environments._protocol import Action, Environment, Observation
from meshkit.algos.rewards import Scores, Unscored
from meshkit.algos.rollout import Engine, Prompt, Rollout, Sampling
from meshkit.core.rng import stream_of
from meshkit.errors import DataError
from meshkit.mesh import Mesh, gather_over_data

Outcome = Observation | str
"""what a step gave, or why it failed"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Player:
    """An `Engine` whose rollouts are episodes in an environment: player(prompts, sampling=, samples=, seed=, decode=).

    engine: writes the turns; `partial(generate, run, cache=KeptCache())` computes each token of an episode once. `Sampling`
    is of a turn: its stop_ids end it, and max_new_tokens bound it. environment: makes one for each episode, as its class
    does. encode: text of observations to ids, as `tokenizer.encode` or `chat_turns` of a chat.
    turns: the most of an episode. max_tokens: an episode whose next turn might be longer, with all before it, is cut off.
    groups: parts of the prompts that take turns: while one writes, the environments of the others step.
    In a rollout `ids` are all turns and what was observed between them, `wrote` says whose they are, and `reward` [N] has
    each turn's reward at its last token, NaN at the end of an episode that failed. `truncated`: turns, or tokens, ran out
    before the environment was done.
    `fields` are the row's, with `turns`, their number, and `failure`, why it has no reward.
    Environments run on the first rank of each data rank; the others of tp, cp and pp get what they observe. Every rank calls
    it.
    Wire: the engine's, for each group and turn; before each what environments said over tp, cp and pp, and whether any data
    rank goes on.
    Raises: DataError for numbers below 1.
    Source: groups in turns: RLinf 2025 (2509.15965).
    """

    mesh: Mesh
    engine: Engine
    environment: Callable[[], Environment]
    encode: Callable[[str], list[int]]
    turns: int
    pool: EnvironmentPool = field(default_factory=EnvironmentPool)
    groups: int = 1
    max_tokens: int | None = None
    seconds: dict[str, float] = field(default_factory=lambda: {"engine": 0.0, "wait": 0.0})
    """of all calls so far: in the engine, and waiting for environments"""

    def __post_init__(self) -> None:
        for name in ("turns", "groups"):
            if getattr(self, name) < 1:
                raise DataError(f"Player({name}={getattr(self, name)}): it must be at least 1.")

    def __call__(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling,
        samples: int = 1,
        seed: int = 0,
        decode: Callable[[list[int]], str] | None = None,
    ) -> list[Rollout]:
        """Episodes of each prompt, in the order of (prompt, sample), on every rank of the data rank. Collective."""
        episodes = [[_Episode(prompt, sample, self.environment()) for sample in range(samples)] for prompt in prompts]
        groups = [
            [each for of_prompt in episodes[index :: self.groups] for each in of_prompt] for index in range(self.groups)
        ]
        for of_prompt in episodes:
            for each in of_prompt:
                each.call(self, "reset", each.prompt.fields, stream_of("environment", seed, each.prompt.key))
        for turn in range(self.turns):
            for group in groups:
                self._hear(group, sampling)
                if turn == 0:
                    _refuse_other_beginnings(group, samples)
                playing = [each for each in group if not each.ended]
                # Every rank calls the engine as often as the others, which wait for it there.
                if not any(gather_over_data(self.mesh, bool(playing))):
                    continue
                write = self._first if turn == 0 else self._next
                before = time.perf_counter()
                answers = write(group, playing, turn, sampling=sampling, samples=samples, seed=seed, decode=decode)
                self.seconds["engine"] += time.perf_counter() - before
                for each, answer in zip(playing, answers, strict=True):
                    each.write(answer)
                    text, truncated = answer.text, answer.truncated
                    each.call(self, "step", Action(ids=answer.ids, text=text, truncated=truncated))
        for group in groups:
            self._hear(group, sampling)
        return [each.rollout() for of_prompt in episodes for each in of_prompt]

    @property
    def steps_here(self) -> bool:
        """Whether this rank is the one of its data rank that has the environments."""
        return all(self.mesh[axis].get_local_rank() == 0 for axis in ("tp", "cp", "pp"))

    def _hear(self, group: Sequence[_Episode], sampling: Sampling) -> None:
        """Wait for the environments of a group, and go on with what they said."""
        before = time.perf_counter()
        waiting = [each for each in group if not each.ended]
        outcomes: list[Outcome] = [each.outcome() for each in waiting] if self.steps_here else []
        for axis in ("tp", "cp", "pp"):
            if self.mesh[axis].size() > 1:
                parcel = [outcomes]
                dist.broadcast_object_list(parcel, group=self.mesh[axis].get_group(), group_src=0)
                outcomes = parcel[0]
        self.seconds["wait"] += time.perf_counter() - before
        for each, outcome in zip(waiting, outcomes, strict=True):
            each.hear(outcome, self, sampling)

    def _first(self, group: Sequence[_Episode], playing: Sequence[_Episode], turn: int, **call: Any) -> list[Rollout]:
        """Samples of a prompt begin alike: its engine computes that once."""
        samples = call["samples"]
        beginnings = [next((each for each in of if not each.ended), of[0]) for of in _by_prompt(group, samples)]
        prompts = [Prompt(ids=each.context, key=each.prompt.key, fields=each.prompt.fields) for each in beginnings]
        answers = self.engine(prompts, **call)
        return [answer for answer, each in zip(answers, group, strict=True) if not each.ended]

    def _next(self, group: Sequence[_Episode], playing: Sequence[_Episode], turn: int, **call: Any) -> list[Rollout]:
        # By conversation: in a seed and a key is all that their random numbers depend on.
        seed = stream_of("turn", call["seed"], turn) % 2**53
        prompts = [
            Prompt(ids=each.context, key=stream_of("conversation", each.prompt.key, each.sample) % 2**53)
            for each in playing
        ]
        return self.engine(prompts, **{**call, "seed": seed, "samples": 1})


def episode_scores(rollouts: Sequence[Rollout]) -> Scores:
    """What their environments gave them, as the scores of a reward: `score_on_mesh(mesh, rollouts, episode_scores)`."""
    return Scores(values=tuple(_score(each) for each in rollouts))


def _score(rollout: Rollout) -> float | np.ndarray | Unscored:
    if failure := rollout.fields.get("failure"):
        kind, _, text = failure.partition(": ")
        return Unscored(kind=kind, text=text)
    return np.asarray(rollout.reward, np.float64)


@dataclass(eq=False)
class _Episode:
    prompt: Prompt
    sample: int
    environment: Environment
    ended: bool = False
    truncated: bool = False
    failure: str = ""
    turns: int = 0
    beginning: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # what reset said
    ids: list[np.ndarray] = field(default_factory=list)
    log_probs: list[np.ndarray] = field(default_factory=list)
    wrote: list[np.ndarray] = field(default_factory=list)
    fingerprints: list[np.ndarray] = field(default_factory=list)  # of each turn, if the engine gives them
    rewards: list[np.ndarray] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    future: Future[Stepped] | None = None

    @property
    def context(self) -> np.ndarray:
        return np.concatenate([self.prompt.ids, self.beginning, *self.ids])

    def call(self, player: Player, method: str, *arguments: object) -> None:
        if player.steps_here:
            self.future = player.pool.call(self.environment, method, *arguments)

    def outcome(self) -> Outcome:
        assert self.future is not None
        try:
            self.environment, observation = self.future.result()
        except Exception as error:
            return reason_of(error, self.environment)
        return observation

    def write(self, answer: Rollout) -> None:
        assert answer.log_probs is not None
        self.turns += 1
        self._append(answer.ids, answer.log_probs, wrote=True)
        self.fingerprints += [] if answer.fingerprint is None else [answer.fingerprint]
        self.texts.append(answer.text)

    def hear(self, outcome: Outcome, player: Player, sampling: Sampling) -> None:
        if isinstance(outcome, str):
            self.ended, self.failure = True, outcome
            return
        if self.turns:
            self.rewards[-1][-1] = outcome.reward
        said = player.encode(outcome.text) if outcome.ids is None else outcome.ids
        ids = np.array(said, np.int64)
        if outcome.done:
            self.ended = True
            return
        if not self.turns:
            self.beginning = ids
        if self.turns == player.turns:
            self.ended = self.truncated = True
            return
        if self.turns and not len(ids):
            # Two turns without a token between them would be learnt as one.
            name = type(self.environment).__name__
            self.ended, self.failure = True, f"raised: {name}: neither done nor anything to read. Return text, or ids"
            return
        most = len(self.context) + sampling.max_new_tokens + (len(ids) if self.turns else 0)
        if player.max_tokens is not None and most > player.max_tokens:
            self.ended = self.truncated = True
            return
        if self.turns:
            self._append(ids, np.zeros(len(ids), self.log_probs[-1].dtype), wrote=False)
            self.texts.append(outcome.text)

    def _append(self, ids: np.ndarray, log_probs: np.ndarray, *, wrote: bool) -> None:
        self.ids.append(ids)
        self.log_probs.append(log_probs)
        self.wrote.append(np.full(len(ids), wrote))
        self.rewards.append(np.zeros(len(ids)))

    def rollout(self) -> Rollout:
        if self.failure and self.rewards:
            self.rewards[-1][-1] = np.nan
        return Rollout(
            prompt_ids=np.concatenate([self.prompt.ids, self.beginning]),
            ids=np.concatenate([np.zeros(0, np.int64), *self.ids]),
            log_probs=np.concatenate(self.log_probs) if self.log_probs else np.zeros(0),
            wrote=np.concatenate([np.zeros(0, bool), *self.wrote]),
            # Something is read between two turns, so chunks of one do not go on in the next.
            fingerprint=np.concatenate(self.fingerprints) if self.fingerprints else None,
            reward=np.concatenate([np.zeros(0), *self.rewards]),
            text="".join(self.texts),
            key=self.prompt.key,
            fields={**self.prompt.fields, "turns": self.turns, "failure": self.failure},
            truncated=self.truncated,
        )


def _by_prompt(group: Sequence[_Episode], samples: int) -> list[Sequence[_Episode]]:
    return [group[first : first + samples] for first in range(0, len(group), samples)]


def _refuse_other_beginnings(group: Sequence[_Episode], samples: int) -> None:
    """Episodes fail whose reset said something else than that of another sample of their prompt."""
    for of_prompt in _by_prompt(group, samples):
        playing = [each for each in of_prompt if not each.ended]
        for each in playing[1:]:
            if not np.array_equal(each.beginning, playing[0].beginning):
                name = type(each.environment).__name__
                each.ended, each.failure = (
                    True,
                    f"raised: {name}.reset: other text for another sample. Draw by the seed",
                )
