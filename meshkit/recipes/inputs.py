"""Inputs of recipes from their flags: tokens, tokenizers, chats and preference pairs. Every rank must call these."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from meshkit.data import (
    Chat,
    Corpus,
    Example,
    Mixture,
    Record,
    Splits,
    TaskSplits,
    Tokenizer,
    Tokens,
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
from meshkit.errors import DataError
from meshkit.mesh.world import main_rank_first
from meshkit.models import LlamaConfig, check_pretrained

from .flags import InstructionFlags, PairFlags, PretrainFlags, TextFlags
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


@dataclass(frozen=True)
class PretrainData:
    """What a model is pretrained on. train: what a `Loader` takes. held_out: of each source by name; of one, by the name "".
    shares: of each in the mixture. `str()` is where the tokens are."""

    train: Tokens | Mixture
    held_out: Mapping[str, Tokens]
    shares: Mapping[str, float]

    def __str__(self) -> str:
        folders = {name: tokens.path.parent for name, tokens in self.held_out.items()}
        return ", ".join(
            f"{self.shares[name]:.0%} {name} {folder}" if name else str(folder) for name, folder in folders.items()
        )


def text_tokens(config: TextFlags, *, vocab_size: int) -> tuple[Tokenizer, Splits]:
    """The tokenizer and the tokens of --data. Rank 0 makes what is not in the cache, while the others wait.

    vocab_size: of a tokenizer that is trained here.
    """
    corpus = _corpus(config.data)
    tokenizer, splits = _tokens(config, corpus, {"": corpus}, vocab_size)
    return tokenizer, splits[""]


def pretraining_data(config: PretrainFlags, *, vocab_size: int) -> tuple[Tokenizer, PretrainData]:
    """The same of --data or --mixture, of which one tokenizer is trained on all. Raises: DataError for other words."""
    if not config.mixture:
        tokenizer, splits = text_tokens(config, vocab_size=vocab_size)
        return tokenizer, PretrainData(splits.train, {"": splits.held_out}, {"": 1.0})
    if config.data:
        raise DataError("--data and --mixture are both given. Name each source in --mixture.")
    paths: dict[str, str] = {}
    weights: dict[str, float] = {}
    for word in config.mixture:
        found = re.fullmatch(r"([\w.-]+)=(.+):(\d+\.?\d*|\.\d+)", word)
        if found is None or found[1] in paths:
            again = "is there twice" if found else "is no source"
            raise DataError(f"--mixture: {word!r} {again}. Give NAME=PATH:WEIGHT once for each, as web=corpus/web:3.")
        paths[found[1]], weights[found[1]] = found[2], float(found[3])
    sources = {name: find_corpus(path) for name, path in paths.items()}
    tokenizer, of_sources = _tokens(config, find_corpus(tuple(paths.values())), sources, vocab_size)
    mixture = Mixture({name: each.train for name, each in of_sources.items()}, weights)
    held_out = {name: each.held_out for name, each in of_sources.items()}
    return tokenizer, PretrainData(mixture, held_out, mixture.shares(0))


def _corpus(data: tuple[str, ...]) -> Corpus:
    return find_corpus(data) if data else standard_library()


def _tokens(
    config: TextFlags, whole: Corpus, sources: Mapping[str, Corpus], vocab_size: int
) -> tuple[Tokenizer, dict[str, Splits]]:
    is_main, cache = dist.get_rank() == 0, make_folder("cache", config.cache)
    if config.pretrained is not None:
        check_pretrained(config.pretrained)  # before the corpus is read
    # A pretrained model knows only its own tokens, so its tokenizer comes before any that is trained here.
    folder = config.tokenizer or config.pretrained
    # The others find the files of rank 0 in the cache, and read them.
    with main_rank_first():
        if folder is not None:
            tokenizer = load_tokenizer(folder)
        else:
            tokenizer = prepare_tokenizer(whole, cache, vocab_size=vocab_size, progress=is_main)
        return tokenizer, {
            name: prepare(corpus, tokenizer, cache, verify=is_main, progress=is_main)
            for name, corpus in sources.items()
        }


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
