"""Rollout (trajectory, completion, sample): one answer to a prompt, from the engine that writes it to the policy loss.

It is token ids throughout: text is never encoded again. Dims: P tokens of the prompt, N of the answer, L = P + N.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshkit.data import Example, Record, Tokenizer
from meshkit.errors import DataError
from meshkit.moe import ROUTING


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """A prompt in tokens.

    ids: int64 [P]. key: names its group of answers; sampling depends on it, on the sample's number and the call's seed.
    fields: of the row it comes from, for the reward.
    """

    ids: np.ndarray
    key: int
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = np.asarray(self.ids)
        if not ids.size:
            raise DataError(
                f"Prompt(key={self.key}): no ids. Begin with at least one, for example the tokenizer's bos."
            )
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise DataError(f"Prompt(key={self.key}): ids are {ids.dtype} {list(ids.shape)}. Give whole numbers [P].")
        # The dataclass is frozen; this is its own constructor.
        object.__setattr__(self, "ids", ids.astype(np.int64))


def encode_prompts(rows: Sequence[tuple[int, Record]], tokenizer: Tokenizer) -> list[Prompt]:
    """Tokenize the field `prompt` of each row of a `PromptLoader`, after the tokenizer's bos if it has one.

    A row with the field `prompt_ids`, as of a chat whose template wrote them, has those as they are.
    Raises: DataError, naming the row, for a prompt that is no text, and for ids that are no list or not the tokenizer's.
    """
    return [Prompt(ids=np.array(_prompt_ids(row, tokenizer)), key=key, fields=row.fields) for key, row in rows]


def _prompt_ids(row: Record, tokenizer: Tokenizer) -> list[int]:
    name = "prompt_ids" if "prompt_ids" in row.fields else "prompt"
    value = row.fields[name]
    try:
        if name == "prompt_ids":
            return _known(list(value), tokenizer, row)
        bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        return bos + tokenizer.encode(value)
    except TypeError:  # half of a UTF-16 pair is a text for Python alone
        wanted = "a list of ids" if name == "prompt_ids" else "a text in Unicode"
        raise DataError(f"{row.source}: {name} is {value!r:.60}. Give {wanted}.") from None


def _known(ids: list[int], tokenizer: Tokenizer, row: Record) -> list[int]:
    # What is no whole number is told of by `Prompt`.
    for each in ids:
        if isinstance(each, int) and not 0 <= each < tokenizer.vocab_size:
            raise DataError(
                f"{row.source}: prompt_ids holds {each}, and the tokenizer has ids below {tokenizer.vocab_size}. Give ids of "
                "this tokenizer."
            )
    return ids


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """An engine writes it, a reward reads it, a policy loss learns its `example()`; `dataclasses.replace` adds to it."""

    ids: np.ndarray
    """[N] int64 as they were sampled, with the id that ended it"""
    prompt_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[P] int64"""
    log_probs: np.ndarray | None = None
    """[N] by the engine, fp32 or as wide as the model: log_softmax(logits / temperature) over the whole vocabulary, as
    training computes it; for temperature 0, that of temperature 1"""
    versions: np.ndarray | None = None
    """[N] int64, of the weights that wrote each token: how many updates they had"""
    fingerprint: np.ndarray | None = None
    """uint8, of the hidden states that wrote it, for `verify_rollouts`; its bytes are in `_fingerprints`"""
    text: str = ""
    """without the id that ended it"""
    key: int = 0
    """of its prompt, below 2^53: rollouts of one key are a group, also on several ranks"""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """the row its prompt comes from: `completion`, `numbers`, `tests`"""
    truncated: bool = False
    """stopped by its length"""
    reward: float | np.ndarray = math.nan
    """a number, NaN where there is no score, or [N], one for each token"""
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    """name -> [L], numbers that models compute for its tokens, by `example_values`"""
    wrote: np.ndarray | None = None
    """[N] bool, False for tokens that the policy did not write, such as a tool's output; None: it wrote all of them"""
    routing: np.ndarray | None = None
    """[L, R, K] int16, 1 + the experts that the generator's routers chose at each token, as in `meshkit.moe.ROUTING`; 0 at
    the last one, which they have not seen"""
    greedy_reward: float | None = None
    """of the prompt's greedy answer, for ReMax"""
    source: str = "an answer"
    """names it in errors"""

    @property
    def tokens(self) -> np.ndarray:
        """[L], prompt and answer, as a reward model sees them."""
        return np.concatenate([np.asarray(self.prompt_ids, np.int64), np.asarray(self.ids, np.int64)])

    def example(self, *, mask_truncated: bool = False) -> Example:
        """The example that a policy loss learns, for `pack_step`; `pack_rollouts` does both. The key becomes `groups`.

        mask_truncated: do not learn a truncated rollout, so that it counts in no mean (DAPO's overlong filtering).
        All rollouts of a step must have the same optional fields. Raises: DataError for vectors that are not [N].
        """
        prompt, answer = np.asarray(self.prompt_ids, np.int64), np.asarray(self.ids, np.int64)
        # Tokens of a tool stand between those of the policy; they are read, and never learnt.
        learn = np.ones(len(answer), dtype=bool) if self.wrote is None else np.asarray(self.wrote, dtype=bool)
        if self.truncated and mask_truncated:
            learn = np.zeros_like(learn)
        scalars = {"groups": float(self.key), "truncated": float(self.truncated)}
        vectors: dict[str, np.ndarray] = {}
        if np.ndim(self.reward):
            vectors["rewards"] = np.asarray(self.reward, dtype=np.float64)
        else:
            # A scalar stands at the last token of the example, 0 elsewhere: `step_advantages` reads sums over answers, of
            # either kind.
            scalars["rewards"] = float(self.reward)
        if self.greedy_reward is not None:
            scalars["greedy_rewards"] = float(self.greedy_reward)
        if self.log_probs is not None:
            vectors["rollout_log_probs"] = np.asarray(self.log_probs, dtype=np.float64)
        for name, vector in {"wrote": learn, **vectors}.items():
            if len(vector) != len(answer):
                raise DataError(
                    f"{self.source}: {name} has {len(vector)} entries for a completion of {len(answer)} tokens."
                )
        # A value belongs to the label's token itself; the packer moves it to where the token is predicted.
        token_values = {name: np.concatenate([np.zeros(len(prompt)), vector]) for name, vector in vectors.items()}
        if self.routing is not None:
            if len(self.routing) != len(prompt) + len(answer):
                raise DataError(
                    f"{self.source}: routing has {len(self.routing)} entries for {len(prompt) + len(answer)} tokens."
                )
            # The choice at a token, where the next one is predicted: it goes with the next one, as log-probabilities do.
            token_values[ROUTING] = np.concatenate([np.zeros_like(self.routing[:1]), self.routing[:-1]])
        return Example(
            ids=np.concatenate([prompt, answer]),
            learn=np.concatenate([np.zeros(len(prompt), dtype=bool), learn]),
            token_values={**token_values, **self.values},
            scalars=scalars,
            source=self.source,
            truncated=self.truncated,
        )
