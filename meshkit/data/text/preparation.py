"""Preparation of a corpus (tokenisation): tokenizer and token files, cached by a hash of all they are made from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from meshkit.data.text.corpus import Corpus, corpus_bytes, corpus_fingerprint, read_documents
from meshkit.data.text.documents import Document
from meshkit.data.text.tokenizer import BOS, Tokenizer, load_tokenizer, save_tokenizer, train_tokenizer
from meshkit.data.text.tokens import Tokens, TokenWriter, open_tokens, verify_tokens
from meshkit.errors import DataError

_BATCH_CHARACTERS = 1 << 22
"""text encoded in one call: enough to keep all cores busy, little enough to hold"""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The two halves of a corpus: what is learnt from, and what is only ever evaluated on."""

    train: Tokens
    held_out: Tokens


def prepare_tokenizer(
    corpus: Corpus,
    folder: str | os.PathLike[str],
    *,
    vocab_size: int,
    sample_bytes: int = 1 << 26,
    progress: bool = False,
) -> Tokenizer:
    """The tokenizer trained on `corpus`, from the cache in `folder` or else trained and put there.

    sample_bytes: train on documents spread evenly over the corpus, of about this much text at most.
    """
    folder = Path(folder)
    where = folder / f"tokenizer-{_key(corpus_fingerprint(corpus), vocab_size, sample_bytes, BOS)}"
    if not (where / "tokenizer.json").exists():
        with _shown(corpus, "sample", progress) as documents:
            sample = sample_texts(documents, sample_bytes=sample_bytes)
        save_tokenizer(train_tokenizer(sample, vocab_size=vocab_size), where)
    return load_tokenizer(where)


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: str | os.PathLike[str],
    *,
    held_out: float = 0.02,
    verify: bool = True,
    progress: bool = False,
) -> Splits:
    """The token files of `corpus`, from the cache in `folder` or else built and put there.

    The cache is keyed by corpus, tokenizer and `held_out`: change one and the files are built anew beside the old.
    held_out: the part of the documents set aside, chosen by a hash of each document's name alone: a file stays on its
    side when other files come or go, a line of JSONL or a row of Parquet as long as its number stays.
    verify: read what was in the cache and compare it with the digest of what was written, once for all ranks of a host; a
    disk may have changed it.
    With several ranks, let one of them call this before the others do; the others then find its files.
    Raises: DataError for a bad file, for one that is not what was written, or if one of the two halves would be empty.
    """
    folder = Path(folder)
    if not 0 < held_out < 1:
        raise DataError(f"held_out={held_out}: not a part of the documents. Give a number between 0 and 1.")
    # The fingerprint says what each id means, which a token file must agree with; how text is cut into ids (merges,
    # normaliser) is in the recipe alone.
    recipe = hashlib.sha256(tokenizer.backend.to_str().encode()).hexdigest()
    where = folder / f"tokens-{_key(corpus_fingerprint(corpus), tokenizer.fingerprint, recipe, held_out)}"
    paths = where / "train.tokens", where / "held_out.tokens"
    # A file has its name only when it is complete, see `TokenWriter`: no lock and no mark are needed.
    cached = all(path.exists() for path in paths)
    if not cached:
        with _shown(corpus, "tokenise", progress) as documents:
            _build(documents, tokenizer, paths, held_out)
    train, evaluation = (open_tokens(path, tokenizer=tokenizer) for path in paths)
    if cached and verify:
        verify_tokens(train)
        verify_tokens(evaluation)
    return Splits(train=train, held_out=evaluation)


def is_held_out(source: str, share: float) -> bool:
    """Whether the document of this name is set aside: a `share` of all names is, the same everywhere."""
    # A hash and not a draw: no state, no order, the same on every rank and in every later run. Python's own hash of a
    # string is salted in each process.
    digest = hashlib.blake2b(source.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def sample_texts(documents: Iterable[Document], *, sample_bytes: int) -> list[str]:
    """The texts of every k-th document, k the least power of 2 for which they take about `sample_bytes` at most.

    One pass, never holding much more than it returns: every second text kept so far goes when there are too many.
    """
    texts: list[str] = []
    sampled_bytes, stride = 0, 1
    for number, document in enumerate(documents):
        if number % stride == 0:
            texts.append(document.text)
            sampled_bytes += len(document.text.encode())
        # After halving, the texts are those of every `stride`-th document, as if that stride had been used from the start.
        while sampled_bytes > sample_bytes and len(texts) > 1:
            texts, stride = texts[::2], stride * 2
            sampled_bytes = sum(len(text.encode()) for text in texts)
    return texts


def _build(documents: Iterable[Document], tokenizer: Tokenizer, paths: tuple[Path, Path], share: float) -> None:
    train_path, held_out_path = paths
    size, name = tokenizer.vocab_size, tokenizer.fingerprint
    with (
        TokenWriter(train_path, vocab_size=size, tokenizer=name) as train,
        TokenWriter(held_out_path, vocab_size=size, tokenizer=name) as held_out,
    ):
        for batch in _batched(documents):
            for document, ids in zip(batch, tokenizer.encode_documents([d.text for d in batch]), strict=True):
                writer = held_out if is_held_out(document.source, share) else train
                writer.add(ids, text_bytes=len(document.text.encode()))
        # Inside of the `with`: raised here, it keeps both files from getting their names.
        if not (train.documents and held_out.documents):
            raise DataError(
                f"held_out={share} puts {train.documents} documents into the training half and {held_out.documents} "
                "into the held-out half, and both need one. Use more documents or another held_out."
            )


def _batched(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@contextmanager
def _shown(corpus: Corpus, title: str, progress: bool) -> Iterator[Iterator[Document]]:
    """The documents of a corpus, with a progress bar of the bytes read if `progress`."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, disable=not progress) as bar:
        task = bar.add_task(title, total=corpus_bytes(corpus))

        def documents() -> Iterator[Document]:
            for document in read_documents(corpus):
                yield document
                bar.advance(task, document.file_bytes)

        yield documents()


def _key(*parts: object) -> str:
    # repr: 1 and "1" are different parts.
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
