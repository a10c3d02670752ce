"""Example: token ids, loss mask (which are learnt), and numbers of tokens or of the example; truncation to a length.

Legend: L = tokens of the example.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from meshkit.data.text.tokenizer import Tokenizer
from meshkit.errors import DataError

Truncation = Literal["error", "drop", "left", "right"]


# eq=False: a dataclass would compare tuples of fields, and == of two arrays is an array, which has no truth value.
@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One sequence of tokens to learn from.

    Raises: DataError for arrays of unequal lengths and for an example without tokens.
    """

    ids: np.ndarray
    """[L] int64"""
    learn: np.ndarray
    """[L] bool: which tokens the model is to write; the others are only read"""
    source: str = "an example"
    """names it in errors, like chats.jsonl:17"""
    token_values: Mapping[str, np.ndarray] = field(default_factory=dict)
    """name -> [L] float64, or [L, ...], also int16, each the value of that token: rewards, weights, old log-probabilities"""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """name -> a number of the whole example: margin, label, reference log-probability"""
    truncated: bool = False
    """whether tokens were cut off its right end, so that it may lack its end of turn"""

    def __post_init__(self) -> None:
        lengths = {"ids": len(self.ids), "learn": len(self.learn)}
        lengths |= {name: len(values) for name, values in self.token_values.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{self.source}: its vectors have different lengths: {lengths}. Give one entry per token.")
        if not len(self.ids):
            raise DataError(f"{self.source}: has no tokens. Drop it.")

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def prompt_length(self) -> int:
        """Tokens before the first that is learnt; all of them if none is."""
        return int(self.learn.argmax()) if self.learn.any() else len(self)

    def cut(self, start: int, stop: int) -> Example:
        """The tokens from `start` up to `stop`, with what belongs to them."""
        kept = slice(start, stop)
        return replace(
            self,
            ids=self.ids[kept],
            learn=self.learn[kept],
            token_values={name: values[kept] for name, values in self.token_values.items()},
            truncated=self.truncated or stop < len(self),
        )


class Pair(NamedTuple):
    """Two answers to one prompt, of which the first is better. They stay together: one row, one rank."""

    chosen: Example
    rejected: Example


Unit = Example | tuple[Example, ...]
"""what stays in one row: an example, or several that a loss compares, like a `Pair`"""


def members(unit: Unit) -> tuple[Example, ...]:
    """The examples of a unit."""
    return (unit,) if isinstance(unit, Example) else unit


def unit_length(unit: Unit) -> int:
    """Its tokens, all members together."""
    return sum(len(example) for example in members(unit))


def encode_completion(
    tokenizer: Tokenizer,
    prompt: str,
    completion: str,
    *,
    bos: bool = True,
    eos: bool = True,
    source: str = "an example",
) -> Example:
    """`[bos] prompt completion [eos]` as plain text, of which completion and eos are learnt.

    The two are encoded apart, as they are when the model is used: the prompt's ids do not depend on the completion.
    """
    head = [tokenizer.bos_id] if bos and tokenizer.bos_id is not None else []
    head += tokenizer.encode(prompt)
    tail = tokenizer.encode(completion) + ([tokenizer.eos_id] if eos else [])
    ids = np.array(head + tail, dtype=np.int64)
    return Example(ids=ids, learn=np.arange(len(ids)) >= len(head), source=source)


def fit(units: Iterable[Unit], *, seq_len: int, truncate: Truncation) -> list[Unit]:
    """Units that each take at most `seq_len` tokens, in order.

    truncate: what is done with a longer unit. "error" refuses it and "drop" leaves it out. "left" cuts the beginning, from
    each member of the unit the same number of tokens, and never a learnt token. "right" cuts the end of the longest
    member, again and again. A unit with a member that has nothing left to learn is dropped.
    Raises: DataError for seq_len < 1 and, with "error", for a unit that is too long.
    """
    if seq_len < 1:
        raise DataError(f"seq_len={seq_len}: a row needs at least 1 token. Give seq_len >= 1.")
    if truncate not in ("error", "drop", "left", "right"):
        raise DataError(f"truncate={truncate!r}: no such way. Give error, drop, left or right.")
    fitting = (_fit(unit, seq_len, truncate) for unit in units)
    return [unit for unit in fitting if unit is not None]


def _fit(unit: Unit, seq_len: int, truncate: Truncation) -> Unit | None:
    examples = members(unit)
    excess = unit_length(unit) - seq_len
    if excess <= 0:
        return unit
    if truncate == "error":
        raise DataError(
            f"{examples[0].source}: takes {unit_length(unit)} tokens, but a row holds seq_len={seq_len}. "
            "Give a larger seq_len, or truncate='drop', 'left' or 'right'."
        )
    if truncate == "drop":
        return None
    if truncate == "left":
        # As much of each member, rounded up: members share their prompt, and a loss that compares them must not see
        # two different beginnings. It may cut len(examples) - 1 tokens more than needed.
        each = -(-excess // len(examples))
        if any(example.prompt_length < each or example.prompt_length == len(example) for example in examples):
            return None
        shortened = [example.cut(each, len(example)) for example in examples]
    else:
        lengths = [len(example) for example in examples]
        # A token at a time off the longest: the longer answer comes down to the shorter one before both are cut
        # alike.
        for _ in range(excess):
            lengths[lengths.index(max(lengths))] -= 1
        if any(not example.learn[:length].any() for example, length in zip(examples, lengths, strict=True)):
            return None
        shortened = [example.cut(0, length) for example, length in zip(examples, lengths, strict=True)]
    return like(unit, shortened)


def like(unit: Unit, parts: Sequence[Example]) -> Unit:
    """`parts` in the form of `unit`: an example, a pair or a tuple."""
    if isinstance(unit, Example):
        return parts[0]
    return Pair(*parts) if isinstance(unit, Pair) else tuple(parts)


def units_fingerprint(units: Iterable[Unit]) -> str:
    """The content: equal for equal ids, learnt tokens, values and order, whatever they were read from."""
    digest = hashlib.sha256(b"examples 1")
    for unit in units:
        # A mark for each unit and a length for each example: without them a pair would have the fingerprint of two
        # examples, and two short examples that of one long. The byte order is fixed (<), so a checkpoint's
        # fingerprint holds on any machine.
        digest.update(b"unit")
        for example in members(unit):
            digest.update(f"{len(example)} {sorted(example.scalars.items())}".encode())
            digest.update(example.ids.astype("<i8").tobytes())
            digest.update(example.learn.astype("?").tobytes())
            for name in sorted(example.token_values):
                digest.update(name.encode() + example.token_values[name].astype("<f8").tobytes())
    return digest.hexdigest()
