"""Instruction data for supervised fine-tuning (SFT): chats, and prompts with completions as plain text."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from meshkit.data.chat.mask import EndOfTurn, Turns, encode_chat
from meshkit.data.chat.template import CHATML_TOKENS, Chat, chatml, save_chat_template
from meshkit.data.examples import Example, encode_completion
from meshkit.data.records import Record
from meshkit.data.tasks.standard_library import TaskSplits, function_tasks, question_tasks
from meshkit.data.text.tokenizer import save_tokenizer, train_tokenizer


def encode_instruction(
    record: Record, chat: Chat, *, turns: Turns = "all", end_of_turn: EndOfTurn = "template"
) -> Example:
    """A row with `messages` as the chat's template writes it, and one with `prompt` and `completion` as plain text.

    turns, end_of_turn: of chats, see `encode_chat`. Raises: KeyError for other fields, which `encode_records` explains;
    DataError as `encode_chat` does.
    """
    row = record.fields
    if "messages" not in row and "prompt" in row:
        return encode_completion(chat.tokenizer, row["prompt"], row["completion"], source=record.source)
    return encode_chat(
        chat, row["messages"], tools=row.get("tools"), turns=turns, end_of_turn=end_of_turn, source=record.source
    )


def instruction_tasks(*, held_out: float = 0.1) -> TaskSplits:
    """`function_tasks`, and after them `question_tasks`: a file is held out of both."""
    tasks = [function_tasks(held_out=held_out), question_tasks(held_out=held_out)]
    return TaskSplits(
        train=[row for task in tasks for row in task.train], held_out=[row for task in tasks for row in task.held_out]
    )


def save_chat_tokenizer(records: Iterable[Record], folder: str | os.PathLike[str], *, vocab_size: int) -> None:
    """Train a tokenizer on the text of the rows, and write it with `CHATML`, the default template, for `load_chat`."""
    folder = Path(folder)
    texts = (text for record in records for text in _texts(record))
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size, extra_special_tokens=CHATML_TOKENS)
    save_chat_template(chatml(tokenizer).template, folder)
    save_tokenizer(tokenizer, folder)  # last: a folder with tokenizer.json is complete


def _texts(record: Record) -> Iterable[str]:
    contents = [message.get("content") for message in record.fields.get("messages", [])]
    contents += [record.fields.get(name) for name in ("prompt", "completion")]
    # Content may be a list of parts, or missing beside a call of a tool.
    return (text for text in contents if isinstance(text, str))
