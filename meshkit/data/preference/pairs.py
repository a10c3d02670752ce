"""Preference data: rows to pairs (DPO, reward models) and labelled completions (KTO), and pairs across prompts.

A row holds a prompt and completions as plain text, or as messages. With messages the prompt may be left out: it is then the
messages that both chats begin with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, Literal, NamedTuple

import numpy as np

from meshkit.data.chat.mask import EndOfTurn, encode_chat
from meshkit.data.chat.template import Chat, Message, load_chat
from meshkit.data.examples import Example, Pair, Truncation, Unit, encode_completion, fit
from meshkit.data.records import Record, encode_records
from meshkit.data.text.tokenizer import Tokenizer, load_tokenizer
from meshkit.errors import DataError


def load_encoder(folder: str | os.PathLike[str], rows: Sequence[Record], *, chosen: str = "chosen") -> Chat | Tokenizer:
    """The encoder for `encode_pairs` from a Hugging Face folder: a chat for rows with messages, a tokenizer for text.

    Raises: DataError as `load_chat` and `load_tokenizer` do.
    """
    text = isinstance(rows[0].fields.get(chosen), str)
    return load_tokenizer(folder) if text else load_chat(folder)


def encode_pairs(
    rows: Sequence[Record],
    encoder: Chat | Tokenizer,
    *,
    seq_len: int,
    truncate: Truncation,
    scalars: Sequence[str] = (),
) -> list[Unit]:
    """`encode_pair` of every row, and `fit` of the pairs. Raises: DataError as both do."""
    pairs = encode_records(rows, lambda row: encode_pair(row.fields, encoder, scalars=scalars, source=row.source))
    return fit(pairs, seq_len=seq_len, truncate=truncate)


def encode_pair(
    row: Mapping[str, Any],
    encoder: Chat | Tokenizer,
    *,
    prompt: str = "prompt",
    chosen: str = "chosen",
    rejected: str = "rejected",
    scalars: Sequence[str] = (),
    end_of_turn: EndOfTurn = "template",
    source: str = "a pair",
) -> Pair:
    """Two answers to one prompt, encoded; only what comes after the prompt is learnt.

    prompt, chosen, rejected: names of the row's fields. encoder: a `Chat` for messages, a `Tokenizer` for text.
    scalars: numbers of the row that go with both sides, such as a margin.
    Raises: DataError naming `source` for a missing field, a kind that does not fit the encoder, or text without a prompt.
    """
    sides = [_field(row, name, source) for name in (chosen, rejected)]
    if prompt in row and row[prompt] is not None:
        head = row[prompt]
    elif all(isinstance(side, list) for side in sides):
        head, *sides = _split_common(*sides)
    else:
        raise DataError(
            f"{source}: has no field {prompt!r}, and {chosen!r} is text, of which nothing says where the prompt ends. "
            "Give the prompt, or messages."
        )
    numbers = {name: _number(row, name, source) for name in scalars}
    encoded = [
        _encode(encoder, head, side, row, end_of_turn, f"{source} {name}")
        for name, side in zip((chosen, rejected), sides, strict=True)
    ]
    return Pair(*(replace(example, scalars={**example.scalars, **numbers}) for example in encoded))


def encode_labelled(
    row: Mapping[str, Any],
    encoder: Chat | Tokenizer,
    *,
    prompt: str = "prompt",
    completion: str = "completion",
    label: str = "label",
    end_of_turn: EndOfTurn = "template",
    source: str = "an example",
) -> Example:
    """A completion and whether it is good, for KTO and its like: the scalar "desirable" is 1 or 0.

    With messages the prompt may be left out: it is then all but the last message.
    Raises: DataError as `encode_pair`, and for a label that is not true or false.
    """
    tail, good = _field(row, completion, source), _field(row, label, source)
    if not isinstance(good, bool) and good not in (0, 1):
        raise DataError(f"{source}: {label!r} is {good!r}, neither true nor false. Name the field with the label.")
    head = row.get(prompt)
    if head is None and isinstance(tail, list):
        head, tail = tail[:-1], tail[-1:]
    example = _encode(encoder, head, tail, row, end_of_turn, source)
    return replace(example, scalars={"desirable": float(good)})


def with_mismatches(examples: Sequence[Example]) -> list[tuple[Example, Example]]:
    """Each example with its mismatch: its prompt and the completion of the example before. KTO estimates its KL from those.

    In a batch the examples are odd segments and the mismatches even ones.
    Raises: DataError for fewer than 2 examples. Source: Ethayarajh et al. 2024, section 4.1.
    """
    if len(examples) < 2:
        raise DataError(f"{len(examples)} example: a mismatched completion needs another example. Give at least 2.")
    return [
        (example, _with_answer_of(example, previous))
        # Each with the one before it, the first with the last; the second list is one longer, hence strict=False.
        for example, previous in zip(examples, [examples[-1], *examples], strict=False)
    ]


def augment_across_prompts(pairs: Sequence[Pair], *, seed: int, ties: bool = True) -> list[Pair]:
    """Each pair and, after it, those that `cross_prompt_pairs` makes for its prompt: 8, and with `ties` 6 more.

    They tell a reward model that an answer has to fit its prompt. The scalar "preference" is the wanted probability that
    chosen is better: 1, and 0.5 for a tie. The loss must use it.
    Raises: DataError for fewer than 3 pairs.
    """
    pairs_of_prompts = [[_preferred(pair.chosen, pair.rejected, 1.0)] for pair in pairs]
    for crossed in cross_prompt_pairs(len(pairs), seed=seed):
        if crossed.tie and not ties:
            continue
        prompt = pairs[crossed.prompt].chosen
        better, worse = (getattr(pairs[answer.pair], answer.side) for answer in (crossed.better, crossed.worse))
        pairs_of_prompts[crossed.prompt].append(
            _preferred(_with_answer_of(prompt, better), _with_answer_of(prompt, worse), crossed.preference)
        )
    return [pair for of_prompt in pairs_of_prompts for pair in of_prompt]


def _preferred(chosen: Example, rejected: Example, preference: float) -> Pair:
    return Pair(*(replace(side, scalars={**side.scalars, "preference": preference}) for side in (chosen, rejected)))


def _with_answer_of(example: Example, donor: Example) -> Example:
    """The prompt of `example` with the answer of `donor`, which may be the same example."""
    cut, tail = example.prompt_length, slice(donor.prompt_length, None)
    return replace(
        example,
        ids=np.concatenate([example.ids[:cut], donor.ids[tail]]),
        learn=np.concatenate([example.learn[:cut], donor.learn[tail]]),
        token_values={
            name: np.concatenate([values[:cut], donor.token_values[name][tail]])
            for name, values in example.token_values.items()
        },
        # Whether the end is missing: the end is the donor's.
        truncated=donor.truncated,
        source=f"{example.source} with the answer of {donor.source}",
    )


def _encode(
    encoder: Chat | Tokenizer, prompt: Any, completion: Any, row: Mapping[str, Any], end_of_turn: EndOfTurn, source: str
) -> Example:
    if isinstance(completion, Mapping):
        completion = [completion]
    if isinstance(prompt, str) and isinstance(completion, str):
        if isinstance(encoder, Chat):
            raise DataError(f"{source}: is text, not messages. Give a Tokenizer to encode it, or write messages.")
        return encode_completion(encoder, prompt, completion, source=source)
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
        raise DataError(f"{source}: prompt and completion are {kinds}. Give two texts, or two lists of messages.")
    if not isinstance(encoder, Chat):
        raise DataError(f"{source}: is messages, and a tokenizer alone cannot write them. Give a Chat with a template.")
    return encode_chat(
        encoder,
        [*prompt, *completion],
        tools=row.get("tools"),
        first=len(prompt),
        end_of_turn=end_of_turn,
        source=source,
    )


def _split_common(chosen: list[Message], rejected: list[Message]) -> tuple[list[Message], list[Message], list[Message]]:
    """The messages both begin with, and the rest of each; each rest keeps at least one message."""
    most = max(0, min(len(chosen), len(rejected)) - 1)
    common = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    return chosen[:common], chosen[common:], rejected[common:]


def _field(row: Mapping[str, Any], name: str, source: str) -> Any:
    if name not in row or row[name] is None:
        raise DataError(f"{source}: has no field {name!r}, only {sorted(row)}. Name the field that holds it.")
    return row[name]


def _number(row: Mapping[str, Any], name: str, source: str) -> float:
    value = _field(row, name, source)
    if not isinstance(value, int | float):
        raise DataError(f"{source}: {name!r} is {type(value).__name__}, not a number. Name a field with a number.")
    return float(value)


# Preference pairs with answers to other prompts, so that a reward model must read the prompt (RRM).


class Answer(NamedTuple):
    """One of the answers of a pair of the data, by its index."""

    pair: int
    side: Literal["chosen", "rejected"]


@dataclass(frozen=True)
class CrossPromptPair:
    """To the prompt of pair `prompt`, `better` is better than `worse`; with `tie` neither is, for both are off the topic."""

    prompt: int
    better: Answer
    worse: Answer
    tie: bool

    @property
    def preference(self) -> float:
        """The probability that `better` is better, as `bradley_terry` takes it."""
        return 0.5 if self.tie else 1.0


def cross_prompt_pairs(pairs: int, *, seed: int) -> Iterator[CrossPromptPair]:
    """14 pairs for each of `pairs` prompts, besides the original one; two other prompts j and k lend their answers.

    8 where an answer to the prompt, chosen or rejected, is better than one of the four to j and k, and 6 ties: every two of
    those four. j and k follow the prompt on one random round through all prompts, so they always differ from it.
    Raises: DataError for fewer than 3 pairs.
    Source: Liu et al. 2024 (2409.13156), the list of augmented triplets; the paper then drops those that a first reward model
    already gets right.
    """
    if pairs < 3:
        raise DataError(
            f"cross_prompt_pairs: {pairs} pairs; a prompt borrows answers from two others. Give at least 3."
        )
    order = np.random.default_rng(seed).permutation(pairs).tolist()
    # Indices counted from the end: the round closes without a modulo.
    following = {prompt: (order[n + 1 - pairs], order[n + 2 - pairs]) for n, prompt in enumerate(order)}
    sides: tuple[Literal["chosen", "rejected"], ...] = ("chosen", "rejected")
    for prompt in range(pairs):
        own_answers = [Answer(prompt, side) for side in sides]
        foreign_answers = [Answer(neighbour, side) for neighbour in following[prompt] for side in sides]
        for better, worse in product(own_answers, foreign_answers):
            yield CrossPromptPair(prompt, better, worse, tie=False)
        for better, worse in combinations(foreign_answers, 2):
            yield CrossPromptPair(prompt, better, worse, tie=True)
