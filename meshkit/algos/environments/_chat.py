"""Observations of an instruct model, as its chat template writes them between two of its answers (delta tokenisation)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshkit.data import Chat
from meshkit.errors import DataError

_ASKED = {"role": "user", "content": "a question"}
_ANSWERED = {"role": "assistant", "content": "an answer"}


def chat_turns(chat: Chat, *, role: str = "user", stop: str = "") -> Callable[[str], list[int]]:
    """`encode` of a `Player`: the ids between an answer and the next one in which a message of `role` says the text.

    What the template writes around the message is found from a rendered chat with and without it, so that what was said
    before is never encoded again. stop: the text of the id that ends answers, such as "<|im_end|>", which is part of them;
    default: the template's eos_token.
    The function raises: DataError for a template that writes earlier turns anew once a message follows, and for a text with
    control tokens.
    """
    stop = stop or str(chat.template.special_tokens.get("eos_token", ""))

    def encode(text: str) -> list[int]:
        said: list[Any] = [{"role": role, "content": text}]
        chat.check_text(said)
        before = chat.template.render([_ASKED, _ANSWERED], **chat.variables)
        after = chat.template.render([_ASKED, _ANSWERED, *said], add_generation_prompt=True, **chat.variables)
        if not after.startswith(before):
            raise DataError(
                f"{chat.template.where} writes an answer in another way once a message follows it. Give an encode= of your "
                "own."
            )
        # A template may write more after the end of an answer, as a line break, which the model did not.
        end = before.rfind(stop) + len(stop) if stop and stop in before else len(before)
        return list(chat.encode_rendered(after[end:]).ids)

    return encode
