"""Prompts of an instruct model: chats by its own template, the ids that end its answers, and whether all fits into rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from meshkit.algos.rollout import Sampling, encode_prompts
from meshkit.core.read_file import read_json_object
from meshkit.data import Chat, Record, Tokenizer, load_chat_template
from meshkit.errors import DataError
from meshkit.models import config_from_pretrained

from .flags import PolicyFlags, RolloutFlags

Config = TypeVar("Config", bound=RolloutFlags)

ROW = 64  # of whose multiples rows are made that were not asked for
PICTURES = ("image", "image_url", "input_image", "video", "audio", "input_audio")


def encode_chats(rows: Sequence[Record], tokenizer: Tokenizer, folder: Path | None) -> list[Record]:
    """Rows whose `prompt` is a list of messages: as the template of the folder writes them, up to the answer's beginning.

    `prompt` is then that text, for people and rewards, `prompt_ids` its ids, which no other token is put before, and
    `messages` what was given. Rows with a text stay as they are.
    Raises: DataError, naming the row, for a chat that the template refuses or that has pictures or sound; for no template.
    """
    if not any(isinstance(row.fields.get("prompt"), list) for row in rows):
        return list(rows)
    if folder is None:
        raise DataError("prompts are chats, whose template comes with a model. Give its folder: --pretrained.")
    chat = Chat(tokenizer=tokenizer, template=load_chat_template(folder))
    return [_encoded(row, chat) if isinstance(row.fields.get("prompt"), list) else row for row in rows]


def _encoded(row: Record, chat: Chat) -> Record:
    messages = row.fields["prompt"]
    try:
        _refuse_pictures(messages)
        chat.check_text(messages)
        text = chat.template.render(messages, tools=row.fields.get("tools"), add_generation_prompt=True)
        ids = list(chat.encode_rendered(text).ids)
    except DataError as error:
        raise DataError(f"{row.source}: {error}") from None
    return Record(fields={**row.fields, "prompt": text, "prompt_ids": ids, "messages": messages}, source=row.source)


def _refuse_pictures(messages: Sequence[Any]) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"message {number} is {str(message)[:40]!r}. Write {{'role': ..., 'content': ...}}.")
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in PICTURES:
                raise DataError(
                    f"message {number} has a part of type {kind!r}, and policies here read text. Drop the row."
                )


def stop_ids(tokenizer: Tokenizer, folder: Path | None) -> tuple[int, ...]:
    """The tokenizer's eos, and what generation_config.json of the folder ends answers with: instruct models have several."""
    path = folder / "generation_config.json" if folder is not None else None
    said = read_json_object(path, DataError).get("eos_token_id") if path is not None and path.exists() else None
    ids = [] if said is None else said if isinstance(said, list) else [said]
    if not all(isinstance(id, int) and 0 <= id < tokenizer.vocab_size for id in ids):
        raise DataError(
            f"{path}: eos_token_id is {said}, and ids go from 0 to {tokenizer.vocab_size - 1}. Mend the file."
        )
    return tuple(dict.fromkeys((tokenizer.eos_id, *ids)))


def fit_rows(config: Config, rows: Sequence[Record], tokenizer: Tokenizer, sampling: Sampling) -> Config:
    """The flags with rows that hold the longest prompt and its answer: as they say, or longer where nobody said it.

    Rows are of --tokens-per-microbatch in policy gradients, else of --seq-len.
    Raises: DataError for rows that are too short, and for a model that reads no such rows.
    """
    name = "tokens_per_microbatch" if isinstance(config, PolicyFlags) else "seq_len"
    flag, row = "--" + name.replace("_", "-"), getattr(config, name)
    longest = max((len(prompt.ids) for prompt in encode_prompts(list(enumerate(rows)), tokenizer)), default=0)
    needed = longest + sampling.max_new_tokens
    what = f"the longest prompt has {longest} tokens and an answer up to {sampling.max_new_tokens}, together {needed}"
    if config.pretrained is not None:
        most = getattr(config_from_pretrained(config.pretrained), "max_position_embeddings", None)
        if most is not None and needed > most:
            raise DataError(
                f"--pretrained {config.pretrained} reads {most} tokens at most: {what}. Give fewer --max-new-tokens, or "
                "leave out long prompts."
            )
    if needed <= row:
        return config
    fitting = -(-needed // ROW) * ROW
    default = next(field.default for field in dataclasses.fields(config) if field.name == name)
    if row != default:
        raise DataError(f"{flag} {row}: {what}. Give {flag} {fitting}, fewer --max-new-tokens, or shorter prompts.")
    return dataclasses.replace(config, **{name: fitting})  # type: ignore[arg-type]
