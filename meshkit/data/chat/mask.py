"""Loss mask of chats: the tokens of a rendered chat that are learnt, which are those of the assistant.

A template with {% generation %} blocks says so. For one without them, an answer is what its message adds to the text: from
the end of the rendering of all before it, header of the answer included, to the end of the rendering with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tokenizers

from meshkit.data.chat.template import Chat, Message, check_roles
from meshkit.data.examples import Example
from meshkit.errors import DataError

Turns = Literal["all", "last"]
EndOfTurn = Literal["template", "learn", "ignore"]


def encode_chat(
    chat: Chat,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    turns: Turns = "all",
    first: int = 0,
    end_of_turn: EndOfTurn = "template",
    roles: Literal["strict", "any"] = "strict",
    source: str = "an example",
    **variables: Any,
) -> Example:
    """The ids of a chat; learnt are the assistant's messages from number `first` on, or the last of them.

    end_of_turn: a special token that ends an answer is learnt or not as the template's {% generation %} blocks have it, and
    learnt where it has none ("template"); always learnt, also where the block ends just before it ("learn"); never
    learnt ("ignore"). White space that a template writes after the token is never learnt where there are no blocks.
    roles: "strict" refuses roles out of order, see `check_roles`.
    Raises: DataError naming `source`, for a chat without an answer, a template that refuses the chat, or one whose answers
    cannot be told apart by renderings.
    """
    example, _, _ = encode_with_text(
        chat,
        messages,
        tools=tools,
        turns=turns,
        first=first,
        end_of_turn=end_of_turn,
        roles=roles,
        source=source,
        **variables,
    )
    return example


def encode_with_text(
    chat: Chat,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    turns: Turns,
    first: int,
    end_of_turn: EndOfTurn,
    roles: Literal["strict", "any"],
    source: str,
    **variables: Any,
) -> tuple[Example, str, tokenizers.Encoding]:
    """`encode_chat`, with the rendered text and its encoding."""
    try:
        if roles == "strict":
            check_roles(messages)
        chat.check_text(messages)
        earlier = turns == "last" or first > 0  # whether there may be answers that are only read
        first = _first(messages, turns, first)
        values = {**chat.variables, **variables}
        text, spans = chat.template.render_spans(messages, tools=tools, **values)
        if not chat.template.marks_answers:
            spans = _spans_by_difference(chat, messages, text, first, tools, values)
        elif earlier:
            # How many blocks the earlier messages have is asked of the template: it may mark no block for some
            # answers.
            _, before = chat.template.render_spans(messages[:first], tools=tools, **values)
            spans = spans[len(before) :]
    except DataError as error:
        raise DataError(f"{source}: {error}") from None
    encoding = chat.encode_rendered(text)
    ids = np.array(encoding.ids, dtype=np.int64)
    learn = np.zeros(len(ids), dtype=np.bool_)
    for start, end in spans:
        begin, after = tokens_of(encoding, start, end)
        if not chat.template.marks_answers:
            after = _without_trailing_space(chat, text, encoding, begin, after)
        learn[begin:after] = True
    if end_of_turn != "template":
        _set_ends(learn, ids, chat.special_ids, end_of_turn == "learn")
    return Example(ids=ids, learn=learn, source=source), text, encoding


def tokens_of(encoding: tokenizers.Encoding, start: int, end: int) -> tuple[int, int]:
    """(first, after) of the tokens that hold a character of text[start:end]; a character's later bytes count too."""
    # left < right: a token that a post-processor added holds no character and has an empty range.
    touching = [
        index for index, (left, right) in enumerate(encoding.offsets) if left < end and right > start and left < right
    ]
    return (touching[0], touching[-1] + 1) if touching and start < end else (0, 0)


def _first(messages: Sequence[Message], turns: Turns, first: int) -> int:
    """The number of the first message that may be learnt."""
    if turns not in ("all", "last"):
        raise DataError(f"turns={turns!r}: no such choice. Give 'all' or 'last'.")
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant" and i >= first]
    if not answers:
        raise DataError("the chat has no message from 'assistant' to learn. Drop it, or call that role 'assistant'.")
    return answers[-1] if turns == "last" else answers[0]


def _spans_by_difference(
    chat: Chat,
    messages: Sequence[Message],
    text: str,
    first: int,
    tools: Sequence[Mapping[str, Any]] | None,
    values: dict[str, Any],
) -> list[tuple[int, int]]:
    """(start, end) in characters of each answer from message `first` on."""
    spans = []
    for number in range(first, len(messages)):
        if messages[number].get("role") != "assistant":
            continue
        if number == 0:
            raise DataError("message 0 is from 'assistant': there is nothing that it answers. Start with another role.")
        # With the answer's header, which generation gets as a part of its prompt: it is not learnt.
        before = chat.template.render(messages[:number], tools=tools, add_generation_prompt=True, **values)
        done = number + 1 == len(messages)
        with_answer = text if done else chat.template.render(messages[: number + 1], tools=tools, **values)
        for prefix in (before, with_answer):
            if not text.startswith(prefix):
                raise DataError(_unstable(chat, text, prefix, number))
        spans.append((len(before), len(with_answer)))
    return spans


def _unstable(chat: Chat, text: str, prefix: str, number: int) -> str:
    index = next((i for i, (a, b) in enumerate(zip(text, prefix, strict=False)) if a != b), min(len(text), len(prefix)))
    return (
        f"{chat.template.where} is not prefix-stable at message {number}: up to it, it writes {prefix[index : index + 30]!r} "
        f"where the whole chat has {text[index : index + 30]!r}, so that the answer cannot be found. "
        "Learn turns='last' only, mark answers with {% generation %}, or give the chat as one example per answer."
    )


def _without_trailing_space(chat: Chat, text: str, encoding: tokenizers.Encoding, begin: int, after: int) -> int:
    """Where the answer ends: after its last special token, if only white space follows that."""
    for index in range(after - 1, begin - 1, -1):
        if encoding.ids[index] in chat.special_ids:
            return index + 1
        left, right = encoding.offsets[index]
        if text[left:right].strip():
            break
    return after


def _set_ends(learn: np.ndarray, ids: np.ndarray, special: frozenset[int], learnt: bool) -> None:
    """Learn the special token that follows each answer, or do not learn the one that ends it."""
    # With False at both ends every run of learnt tokens has two edges: its first, and the one after its last.
    edges = np.flatnonzero(np.diff(learn, prepend=False, append=False))
    for _, after in edges.reshape(-1, 2):
        if learnt and int(ids[after - 1]) not in special and after < len(ids) and int(ids[after]) in special:
            learn[after] = True
        if not learnt and int(ids[after - 1]) in special:
            learn[after - 1] = False
