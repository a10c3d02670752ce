"""Inputs of recipes from their flags: tokens, tokenizers, chats and preference pairs. Every rank must call these."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from meshkit.data import (
    Chat,
    Example,
    Record,
    Splits,
    TaskSplits,
    Tokenizer,
    encode_instruction,
    encode_records,
    find_corpus,
    fit,
    instruction_tasks,
    load_chat,
    load_encoder,
    load_tokenizer,
    preference_tasks,
    prepare,
    prepare_tokenizer,
    read_records,
    save_chat_tokenizer,
    split_records,
    standard_library,
)
from meshkit.mesh.world import main_rank_first
from meshkit.models import LlamaConfig, check_pretrained

from .flags import InstructionFlags, PairFlags, TextFlags
from .folders import make_folder

SMALL_PREFERENCE_MODEL = LlamaConfig(
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
)
"""of recipes that learn preferences without --pretrained"""


def text_tokens(config: TextFlags, *, vocab_size: int) -> tuple[Tokenizer, Splits]:
    """The tokenizer and the tokens of --data. Rank 0 makes what is not in the cache, while the others wait.

    vocab_size: of a tokenizer that is trained here.
    """
    is_main, cache = dist.get_rank() == 0, make_folder("cache", config.cache)
    corpus = find_corpus(config.data) if config.data else standard_library()
    if config.pretrained is not None:
        check_pretrained(config.pretrained)  # before the corpus is read
    # A pretrained model knows only its own tokens, so its tokenizer comes before any that is trained here.
    folder = config.tokenizer or config.pretrained
    # The others find the files of rank 0 in the cache, and read them.
    with main_rank_first():
        if folder is not None:
            tokenizer = load_tokenizer(folder)
        else:
            tokenizer = prepare_tokenizer(corpus, cache, vocab_size=vocab_size, progress=is_main)
        return tokenizer, prepare(corpus, tokenizer, cache, verify=is_main, progress=is_main)


def instruction_rows(config: InstructionFlags) -> TaskSplits:
    """Chats and instructions of --data and --eval-data, or those made of Python's standard library."""
    if not config.data:
        return instruction_tasks(held_out=config.held_out)
    if config.eval_data:
        # Given rows to evaluate on: none is held out of the training data.
        return TaskSplits(train=list(read_records(config.data)), held_out=list(read_records(config.eval_data)))
    return split_records(read_records(config.data), held_out=config.held_out)


def chat_encoder(
    config: InstructionFlags, rows: list[Record], folder: str | os.PathLike[str], *, vocab_size: int
) -> Chat:
    """The tokenizer with its chat template.

    folder: where one is trained on the rows, once, if neither --tokenizer nor --pretrained names another.
    """
    folder = Path(folder)
    source = config.tokenizer or config.pretrained
    with main_rank_first():
        # Trained once and kept in the run's folder: a run that continues must not get another vocabulary.
        if source is None and not (folder / "tokenizer.json").exists():
            save_chat_tokenizer(rows, folder, vocab_size=vocab_size)
    return load_chat(source or folder)


def instruction_examples(config: InstructionFlags, rows: list[Record], chat: Chat, *, seq_len: int) -> list[Example]:
    """The rows in tokens, with what is learnt of each; --truncate says how long ones are cut or dropped."""

    def encode(row: Record) -> Example:
        return encode_instruction(row, chat, turns=config.turns, end_of_turn=config.end_of_turn)

    examples: list[Example] = fit(encode_records(rows, encode), seq_len=seq_len, truncate=config.truncate)  # type: ignore[assignment]
    return examples


def preference_rows(config: PairFlags, *, seed: int, every: bool = False) -> TaskSplits:
    """Rows with a chosen and a rejected answer, of --data or of Python's standard library.

    every: without --data, each function with all its wrong bodies.
    """
    if config.data:
        return split_records(read_records(config.data, split=config.split), held_out=config.held_out)
    # Every rank makes the rows itself, from the seed: nothing is sent.
    return preference_tasks(
        kinds=config.kinds, every=every, held_out=config.held_out, limit_bytes=config.limit_bytes, seed=seed
    )


def text_encoder(config: PairFlags, rows: list[Record]) -> tuple[Chat | Tokenizer, Tokenizer]:
    """(what encodes the rows, its tokenizer); without a folder the tokenizer is trained here."""
    folder = config.tokenizer or config.pretrained
    with main_rank_first():
        if folder is not None:
            encoder = load_encoder(folder, rows)
        else:
            is_main, cache = dist.get_rank() == 0, make_folder("cache", config.cache)
            encoder = prepare_tokenizer(
                standard_library(),
                cache,
                vocab_size=SMALL_PREFERENCE_MODEL.vocab_size,
                progress=is_main,
            )
    return encoder, encoder.tokenizer if isinstance(encoder, Chat) else encoder
