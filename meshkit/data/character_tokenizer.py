"""A tokenizer with one id for each character of an alphabet: all that a small task needs, and nothing to train."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from meshkit.data.tokenizer import BOS, EOS, Tokenizer
from meshkit.errors import DataError

PAD = "<|pad|>"


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
    return Tokenizer(backend=backend, bos_id=ids[BOS], eos_id=ids[EOS])
