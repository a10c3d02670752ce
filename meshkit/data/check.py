"""Data checks (lints): common mistakes in training examples, counted over all and refused before the first step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from meshkit.data.examples import Example, Pair, Unit, members
from meshkit.data.text.tokenizer import Tokenizer
from meshkit.errors import DataError

ADVICE = {
    "outside_vocabulary": "Encode them with the model's own tokenizer, or give the model a larger vocabulary.",
    "double_bos": "The template writes one and the prompt or the tokenizer another: drop one.",
    "nothing_learnt": "Their completions are empty, or all of their tokens are masked: drop them.",
    "end_masked": "The model would never learn to stop: pass end_of_turn='learn', or correct the template's blocks.",
    "end_missing": "The model would never learn to stop: end each answer with the end-of-turn token.",
    "identical_pair": "Chosen and rejected are the same tokens, so nothing can be learnt from them: drop them.",
    "other_prompt": "Chosen and rejected answer different prompts: check how the pairs were made.",
    "pad_is_end": "Whatever masks padding by its id masks the end of each answer too: use another id for padding.",
}
"""each problem and what to do about it, worst first"""

_TEXTS = {
    "outside_vocabulary": "have ids outside the vocabulary",
    "double_bos": "begin with two BOS",
    "nothing_learnt": "have nothing to learn",
    "end_masked": "have the end of their last answer masked",
    "end_missing": "have a last answer that does not end",
    "identical_pair": "are identical pairs",
    "other_prompt": "are pairs with different prompts",
    "pad_is_end": "are padded with an id that ends answers",
}


@dataclass(frozen=True, kw_only=True)
class ExampleReport:
    """What `check_examples` saw."""

    units: int
    examples: int
    tokens: int
    learnt: int
    longest: int
    """tokens of the longest unit"""
    truncated: int
    """examples whose right end was cut off, so that they may lack the end of an answer"""
    problems: dict[str, int] = field(default_factory=dict)
    """problem -> how many examples or pairs have it; see `ADVICE`"""

    def __str__(self) -> str:
        lines = [
            f"{self.units} units, {self.examples} examples, {self.tokens} tokens, {self.learnt} learnt, "
            f"longest unit {self.longest}, {self.truncated} truncated"
        ]
        return "\n".join(lines + [f"{count} {_TEXTS[name]}" for name, count in self.problems.items()])


def check_examples(
    units: Iterable[Unit],
    tokenizer: Tokenizer,
    *,
    vocab_size: int | None = None,
    end_ids: Collection[int] | None = None,
    pad_id: int | None = None,
    allow: Collection[str] = (),
) -> ExampleReport:
    """Count what is there and what is wrong.

    vocab_size: of the model; default: the tokenizer's. end_ids: tokens that end an answer; default: all special tokens, and
    eos. pad_id: of the model's folder, where one is named; batches here do not look at it, but other programs do.
    allow: problems that are only counted. Truncated examples need no end.
    Raises: DataError for the worst problem that is not allowed, with the first example that has it.
    """
    unknown = sorted(set(allow) - ADVICE.keys())
    if unknown:
        raise DataError(f"allow={unknown}: no such problem. Give some of {list(ADVICE)}.")
    size = tokenizer.vocab_size if vocab_size is None else vocab_size
    added = tokenizer.backend.get_added_tokens_decoder()
    # Any special token ends an answer by default: templates end turns by tokens of their own, such as <|im_end|>,
    # which are not eos.
    special = {token_id for token_id, token in added.items() if token.special} | {tokenizer.eos_id}
    ends = np.array(sorted(special if end_ids is None else end_ids), dtype=np.int64)
    sources: dict[str, list[str]] = {}
    count = examples = tokens = learnt = longest = truncated = 0
    for unit in units:
        count += 1
        lengths = [len(example) for example in members(unit)]
        examples, tokens, longest = examples + len(lengths), tokens + sum(lengths), max(longest, sum(lengths))
        for example in members(unit):
            learnt += int(example.learn.sum())
            truncated += example.truncated
            for problem in _problems(example, size, tokenizer.bos_id, ends):
                sources.setdefault(problem, []).append(example.source)
        if isinstance(unit, Pair):
            for problem in _pair_problems(unit):
                sources.setdefault(problem, []).append(unit.chosen.source)
    if pad_id is not None and pad_id in ends and examples:
        # The folder names its padding once, so all examples have the problem or none.
        sources["pad_is_end"] = [f"id {pad_id}"] * examples
    # All is counted before anything is refused: the text then says how many, and the worst problem comes first in
    # whatever order the data has them.
    problems = {name: len(sources[name]) for name in ADVICE if name in sources}
    for name, number in problems.items():
        if name not in allow:
            raise DataError(
                f"{number} of {count if 'pair' in _TEXTS[name] else examples} {_TEXTS[name]}, first {sources[name][0]}. "
                f"{ADVICE[name]} Pass allow=({name!r},) to go on."
            )
    return ExampleReport(
        units=count,
        examples=examples,
        tokens=tokens,
        learnt=learnt,
        longest=longest,
        truncated=truncated,
        problems=problems,
    )


def _problems(example: Example, vocab_size: int, bos_id: int | None, ends: np.ndarray) -> Iterable[str]:
    ids = example.ids
    if ids.min() < 0 or ids.max() >= vocab_size:
        yield "outside_vocabulary"
    if bos_id is not None and len(ids) > 1 and ids[0] == ids[1] == bos_id:
        yield "double_bos"
    learnt = np.flatnonzero(example.learn[1:]) + 1  # the first token of a sequence is no label
    # Where only end tokens are learnt, nothing is learnt but to stop at once.
    content = learnt[~np.isin(ids[learnt], ends)]
    if not len(content):
        yield "nothing_learnt"
    # One that `fit` cut on the right lost its end by the caller's choice.
    elif not example.truncated and ids[learnt[-1]] not in ends:
        after = learnt[-1] + 1
        yield "end_masked" if after < len(ids) and ids[after] in ends else "end_missing"


def _pair_problems(pair: Pair) -> Iterable[str]:
    chosen, rejected = pair
    if np.array_equal(chosen.ids, rejected.ids):
        yield "identical_pair"
    head = chosen.prompt_length
    if head != rejected.prompt_length or not np.array_equal(chosen.ids[:head], rejected.ids[:head]):
        yield "other_prompt"
