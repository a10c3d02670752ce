"""Process rewards: completions in steps with a reward for each, as one number per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshkit.data.chat.mask import encode_with_text, tokens_of
from meshkit.data.chat.template import Chat, Message
from meshkit.data.examples import Example, encode_completion
from meshkit.data.text.tokenizer import Tokenizer
from meshkit.errors import DataError


def encode_steps(
    encoder: Chat | Tokenizer,
    prompt: str | Sequence[Message],
    steps: Sequence[str],
    rewards: Mapping[str, Sequence[float]],
    *,
    source: str = "an example",
) -> Example:
    """The completion that the steps are in one, with a token value [L] per name: a step's reward is at its last token.

    encoder: a `Tokenizer` for a prompt of text, a `Chat` for one of messages. rewards: name -> one number per step, several
    names for several reward models. Other tokens have reward 0. The text is encoded as a whole, so a token may hold the end
    of one step and the beginning of the next: it is the last of the first.
    Raises: DataError for rewards that are not one per step, a step without text, two steps that end in the same token, and
    a template that changes the text of an answer.
    Source: Wu et al. 2023 (fine-grained rewards: several models, a reward per segment).
    """
    for name, values in rewards.items():
        if len(values) != len(steps):
            raise DataError(f"{source}: {name!r} has {len(values)} rewards for {len(steps)} steps. Give one per step.")
    if not steps or not all(steps):
        raise DataError(f"{source}: has {'a step' if steps else 'a completion'} without text. Drop it.")
    completion, stops = "".join(steps), np.cumsum([len(step) for step in steps])
    if isinstance(encoder, Tokenizer) and isinstance(prompt, str):
        example = encode_completion(encoder, prompt, completion, source=source)
        # The ids of `example` once more, for their offsets; prompt and completion are encoded apart, so places are
        # counted from the prompt's end.
        encoding = encoder.backend.encode(completion, add_special_tokens=False)
        before, start = example.prompt_length, 0
    elif isinstance(encoder, Chat) and not isinstance(prompt, str):
        messages = [*prompt, {"role": "assistant", "content": completion}]
        example, text, encoding = encode_with_text(
            encoder, messages, tools=None, turns="last", first=0, end_of_turn="template", roles="strict", source=source
        )
        # From the right: an earlier turn may hold the same text.
        before, start = 0, text.rfind(completion)
        if start < 0:
            raise DataError(f"{source}: {encoder.template.where} does not write the answer as it is. Give plain text.")
    else:
        raise DataError(f"{source}: give a Tokenizer with a prompt of text, or a Chat with one of messages.")
    ends = [before + tokens_of(encoding, start + int(stop) - 1, start + int(stop))[1] - 1 for stop in stops]
    if len(set(ends)) < len(ends):
        number = next(i for i in range(1, len(ends)) if ends[i] == ends[i - 1])
        raise DataError(f"{source}: steps {number - 1} and {number} end in the same token. Join them.")
    vectors = {name: np.zeros(len(example)) for name in rewards}
    for name, values in rewards.items():
        vectors[name][ends] = np.asarray(values, dtype=np.float64)
    return replace(example, token_values=vectors)
