"""Tokenizer: byte-level BPE and characters, text to ids and back, and the bytes of text that each id stands for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers

from meshkit.core.digests import add_digests, check_digests
from meshkit.core.full_disk import telling_of_a_full_disk
from meshkit.core.read_file import read_json_object
from meshkit.errors import DataError

BOS = "<|bos|>"
EOS = "<|eos|>"
PAD = "<|pad|>"


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A `tokenizers.Tokenizer` with the two ids that frame a document.

    Text is only ever text: "<|eos|>" inside a document becomes ordinary tokens, so no file can fake a boundary.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_id: int
    folder: Path | None = None  # that it was read from

    def __post_init__(self) -> None:
        # The flag makes special tokens in a text plain text. A tokenizer.json may also carry truncation and padding,
        # which would cut documents without a word.
        self.backend.encode_special_tokens = True
        self.backend.no_truncation()
        self.backend.no_padding()

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        # Not the number of entries: ids may have gaps, and an embedding must hold the largest.
        return max(self.backend.get_vocab().values()) + 1

    @cached_property
    def pad_id(self) -> int:
        """What fills rows up in other libraries: its folder's padding token, or `<|pad|>`; else bos, for eos is learnt."""
        config = {} if self.folder is None else _read_config(self.folder / "tokenizer_config.json")
        token = self.backend.token_to_id(_content(config.get("pad_token")) or PAD)
        return next(id for id in (token, self.bos_id, self.eos_id) if id is not None)

    @cached_property
    def fingerprint(self) -> str:
        """Says what every id means: equal for two tokenizers whose vocabulary, bos and eos are equal."""
        # Without merges and normaliser: however a text was cut, its ids mean the same, so token files stay usable.
        return _digest([sorted(self.backend.get_vocab().items()), self.bos_id, self.eos_id])

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without bos and eos."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`[bos] text eos` for each text, on all cores. bos is left out by a tokenizer that has none."""
        bos = [] if self.bos_id is None else [self.bos_id]
        # The fast form computes no offsets. bos and eos are added here, since folders differ in which of them their
        # post-processor writes.
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*bos, *encoding.ids, self.eos_id], dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens written out."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, extra_special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE; `<|bos|>` is id 0, `<|eos|>` is id 1, then the extra special tokens.

    The vocabulary is smaller than `vocab_size` when the text runs out of pairs to merge.
    Raises: DataError if vocab_size does not hold the 256 bytes and the special tokens.
    Source: byte-level pre-tokenisation of Radford et al. 2019 (GPT-2), as in the `tokenizers` library.
    """
    special_tokens = [BOS, EOS, *extra_special_tokens]
    if vocab_size < 256 + len(special_tokens):
        raise DataError(
            f"vocab_size={vocab_size} is too small: 256 bytes and {len(special_tokens)} special tokens need "
            f"at least {256 + len(special_tokens)}."
        )
    backend = tokenizers.Tokenizer(models.BPE())
    # Without the space that GPT-2 puts in front, decoding gives back the text byte for byte, which `token_bytes`
    # counts on.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        # All 256 bytes, also those that the sample has not: no text is then unknown.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _beginning_with_bos(backend, special_tokens.index(BOS), special_tokens.index(EOS))


def _beginning_with_bos(backend: tokenizers.Tokenizer, bos_id: int, eos_id: int) -> Tokenizer:
    """Others encode a text as documents begin here, with bos."""
    bos, tokens = f"{BOS} $A", [(BOS, bos_id)]
    backend.post_processor = processors.TemplateProcessing(single=bos, pair=f"{bos} $B", special_tokens=tokens)
    return Tokenizer(backend=backend, bos_id=bos_id, eos_id=eos_id)


def save_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike[str]) -> None:
    """Write tokenizer.json and the tokenizer_config.json that names bos, eos and pad: a folder transformers can load."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    bos = None if tokenizer.bos_id is None else tokenizer.backend.id_to_token(tokenizer.bos_id)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": tokenizer.backend.id_to_token(tokenizer.eos_id),
        "pad_token": tokenizer.backend.id_to_token(tokenizer.pad_id),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    # A name for each process: ranks that train the same tokenizer at once write a file each, and the last rename wins
    # with the same content.
    partial = folder / f"tokenizer.json.{os.getpid()}.partial"
    with telling_of_a_full_disk(DataError, f"writing {folder / 'tokenizer.json'}", folder):
        partial.write_text(tokenizer.backend.to_str(pretty=True), encoding="utf-8")
        files = {"tokenizer_config.json": folder / "tokenizer_config.json", "tokenizer.json": partial}
        add_digests(folder, files)
    os.replace(partial, folder / "tokenizer.json")  # the last step: a folder with tokenizer.json is complete


def load_tokenizer(
    folder: str | os.PathLike[str], *, bos_token: str | None = None, eos_token: str | None = None
) -> Tokenizer:
    """Load a folder with tokenizer.json: one of ours or any of Hugging Face's.

    bos_token, eos_token: override what tokenizer_config.json names.
    Raises: DataError if a file is missing or not a tokenizer, or if no eos token is named.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    check_digests(folder, ["tokenizer.json", "tokenizer_config.json"], DataError)
    if not folder.is_dir():
        raise DataError(
            f"{folder}: there is no such folder. Name one that holds tokenizer.json; nothing is downloaded."
        )
    if not path.is_file():
        raise DataError(f"{path}: no tokenizer there. Train one, or name a folder that holds tokenizer.json.")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception
        raise DataError(f"{path}: not a tokenizer: {error}. Write it again.") from None
    config = _read_config(folder / "tokenizer_config.json")
    bos_id = _id_of(backend, path, bos_token or _content(config.get("bos_token")))
    eos_id = _id_of(backend, path, eos_token or _content(config.get("eos_token")))
    if eos_id is None:
        raise DataError(f"{path}: nothing says which token ends a document. Pass eos_token=...")
    return Tokenizer(backend=backend, bos_id=bos_id, eos_id=eos_id, folder=folder)


def _read_config(path: Path) -> dict[str, Any]:
    return read_json_object(path, DataError) if path.exists() else {}


def _content(token: Any) -> str | None:
    # transformers writes a special token as a string, or as the fields of an AddedToken.
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _id_of(backend: tokenizers.Tokenizer, path: Path, token: str | None) -> int | None:
    if token is None:
        return None
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise DataError(f"{path}: has no token {token!r}. Pass a token of its vocabulary.")
    return int(token_id)


def token_bytes(tokenizer: Tokenizer) -> torch.Tensor:
    """[vocab_size] int64: how many bytes of text each id stands for; 0 for special tokens and unused ids.

    Their sum over `encode(text)` is the length of the text in UTF-8, after whatever the tokenizer does to the text
    first (Qwen composes accents, SentencePiece puts a space in front; the tokenizers trained here do nothing).
    So bits per byte = loss sum / ln 2 / sum of token_bytes[labels] is exact and comparable between vocabularies.
    Raises: DataError for a tokenizer that works neither on bytes nor with a byte fallback.
    """
    spec = json.loads(tokenizer.backend.to_str())
    # As text: the decoder may be a Sequence with the one looked for inside.
    decoder = json.dumps(spec["decoder"])
    count: Callable[[str], int]
    if '"ByteLevel"' in decoder:
        count = len  # one character of the byte alphabet per byte
    elif '"ByteFallback"' in decoder:
        count = _sentencepiece_bytes
    else:
        raise DataError(
            f"bytes per token are not defined for a tokenizer with the decoder {spec['decoder']}. "
            "Use one that works on bytes or falls back to them."
        )
    added = tokenizer.backend.get_added_tokens_decoder()
    counts = torch.zeros(tokenizer.vocab_size, dtype=torch.int64)
    for token, token_id in tokenizer.backend.get_vocab().items():
        if token_id in added:
            # Added tokens are matched in the text before the model runs, so they are written as they are and not in
            # its byte alphabet.
            counts[token_id] = 0 if added[token_id].special else len(token.encode())
        else:
            counts[token_id] = count(token)
    return counts


def _sentencepiece_bytes(piece: str) -> int:
    # <0xE2> is one byte. SentencePiece's ▁, three bytes in UTF-8, stands for a space, which is one.
    is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
    return 1 if is_byte else len(piece.replace("▁", " ").encode())


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


# A tokenizer with one id for each character of an alphabet: all that a small task needs, and nothing to train.


def character_tokenizer(alphabet: Iterable[str]) -> Tokenizer:
    """`<|pad|>` is id 0, `<|bos|>` 1, `<|eos|>` 2, then the characters in order of their code points.

    The backend is a `tokenizers.Tokenizer`, so `save_tokenizer` writes a folder that transformers can load. It has no unknown
    token: to encode a character outside of the alphabet is an error.
    Raises: DataError if the alphabet is empty or an entry is not one character.
    """
    characters = sorted(set(alphabet))
    longer = [entry for entry in characters if len(entry) != 1]
    if longer or not characters:
        raise DataError(f"alphabet: {longer or 'has no characters'}. Give single characters, like '0123456789+='.")
    specials = [PAD, BOS, EOS]
    ids = {token: number for number, token in enumerate([*specials, *characters])}
    backend = tokenizers.Tokenizer(models.WordLevel(ids))
    backend.add_special_tokens(specials)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()  # or characters would be joined by spaces
    return _beginning_with_bos(backend, ids[BOS], ids[EOS])
