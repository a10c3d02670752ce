"""A corpus is prepared once, split by document, and again only when something changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshkit.data import (
    Document,
    Tokenizer,
    evaluation_batches,
    find_corpus,
    is_held_out,
    prepare,
    prepare_tokenizer,
    sample_texts,
    token_bytes,
    train_tokenizer,
)
from meshkit.data.text.tokens import HEADER_BYTES
from meshkit.errors import DataError

TEXTS = {f"file{i:03}.txt": f"document {i}: naïve 東京 <|eos|>\n" * (1 + i % 7) for i in range(120)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "text" / name).write_text(text)
    return tmp_path


def written(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("progress", [False, True])
def test_halves_hold_every_document_once_split_by_name(folder: Path, tokenizer: Tokenizer, progress: bool) -> None:
    splits = prepare(find_corpus(folder / "text"), tokenizer, folder / "cache", held_out=0.1, progress=progress)
    expected: dict[bool, list[str]] = {False: [], True: []}
    for name, text in TEXTS.items():
        expected[is_held_out(name, 0.1)].append(f"<|bos|>{text}<|eos|>")
    assert 4 <= len(expected[True]) <= 24
    for half, texts in ((splits.train, expected[False]), (splits.held_out, expected[True])):
        assert tokenizer.decode(half.ids.tolist()) == "".join(texts)
        assert half.documents == len(texts)
        assert half.text_bytes == sum(len(text.encode()) - len("<|bos|><|eos|>") for text in texts)


def test_evaluation_predicts_every_byte_of_the_held_out_half_once(folder: Path, tokenizer: Tokenizer) -> None:
    held_out = prepare(find_corpus(folder / "text"), tokenizer, folder / "cache", held_out=0.1).held_out
    total = 0
    for rank in range(3):
        for batch in evaluation_batches(held_out, seq_len=16, batch=2, rank=rank, ranks=3):
            total += int(token_bytes(tokenizer)[batch["labels"][batch["labels"] >= 0]].sum())
    assert total == held_out.text_bytes


def test_a_bit_that_flipped_in_the_cache_is_found(folder: Path, tokenizer: Tokenizer) -> None:
    corpus = find_corpus(folder / "text")
    path = prepare(corpus, tokenizer, folder / "cache").train.path
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES] ^= 1  # of an id, which stays in the vocabulary
    path.write_bytes(content)
    with pytest.raises(DataError, match="its content is not what was written"):
        prepare(corpus, tokenizer, folder / "cache")
    prepare(corpus, tokenizer, folder / "cache", verify=False)


def test_second_call_writes_nothing_and_finds_the_same(folder: Path, tokenizer: Tokenizer) -> None:
    corpus = find_corpus(folder / "text")
    first = prepare(corpus, tokenizer, folder / "cache")
    trained = prepare_tokenizer(corpus, folder / "cache", vocab_size=270)
    before = written(folder)
    assert prepare(corpus, tokenizer, folder / "cache").train.fingerprint == first.train.fingerprint
    assert prepare_tokenizer(corpus, folder / "cache", vocab_size=270).fingerprint == trained.fingerprint
    assert written(folder) == before


def test_changed_corpus_tokenizer_or_split_is_built_anew(folder: Path, tokenizer: Tokenizer) -> None:
    def train_path(with_tokenizer: Tokenizer = tokenizer, held_out: float = 0.1) -> Path:
        return prepare(find_corpus(folder / "text"), with_tokenizer, folder / "cache", held_out=held_out).train.path

    paths = [train_path(), train_path(held_out=0.2), train_path(train_tokenizer(["other"], vocab_size=260))]
    (folder / "text" / "file000.txt").write_text("changed")
    paths.append(train_path())
    assert len(set(paths)) == 4


def test_half_built_cache_is_built_again(folder: Path, tokenizer: Tokenizer) -> None:
    corpus = find_corpus(folder / "text")
    splits = prepare(corpus, tokenizer, folder / "cache")
    splits.held_out.path.unlink()
    assert prepare(corpus, tokenizer, folder / "cache").held_out.fingerprint == splits.held_out.fingerprint


def test_content_fingerprint_does_not_depend_on_where_files_lie(folder: Path, tokenizer: Tokenizer) -> None:
    here = prepare(find_corpus(folder / "text"), tokenizer, folder / "cache")
    (folder / "text").rename(folder / "moved")
    there = prepare(find_corpus([f"{folder}/moved/*.txt"]), tokenizer, folder / "other cache")
    assert here.train.fingerprint == there.train.fingerprint
    assert here.held_out.fingerprint == there.held_out.fingerprint


@pytest.mark.parametrize("part", [0.02, 0.5, 0.98])
def test_part_of_all_names_is_held_out(part: float) -> None:
    names = 20_000
    share = sum(is_held_out(f"name {i}", part) for i in range(names)) / names
    assert abs(share - part) < 4 * (part * (1 - part) / names) ** 0.5  # four standard deviations
    assert all(is_held_out(f"name {i}", 1.0) >= is_held_out(f"name {i}", part) for i in range(100))


def test_sample_is_every_kth_text_and_fits() -> None:
    documents = [Document(text=f"{i:010}", source=str(i), file_bytes=10) for i in range(1000)]
    for sample_bytes, stride in [(10_000, 1), (9_999, 2), (5_000, 2), (1_000, 16), (1, 1024)]:
        expected = [document.text for document in documents[::stride]]
        assert sample_texts(documents, sample_bytes=sample_bytes) == expected


def test_splits_without_both_halves_are_refused(folder: Path, tokenizer: Tokenizer) -> None:
    corpus = find_corpus(folder / "text" / "file000.txt")
    with pytest.raises(
        DataError, match=r"held_out=0.02 puts 1 documents into the training half and 0 into the held-out"
    ):
        prepare(corpus, tokenizer, folder / "cache")
    assert not written(folder / "cache")
    for part in (0.0, 1.0, -3.0):
        with pytest.raises(DataError, match=f"held_out={part}: not a part of the documents"):
            prepare(corpus, tokenizer, folder / "cache", held_out=part)


def test_bad_file_stops_the_build_and_leaves_no_file(folder: Path, tokenizer: Tokenizer) -> None:
    (folder / "text" / "zzz.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"zzz.jsonl line 1: has no field 'text'"):
        prepare(find_corpus(folder / "text"), tokenizer, folder / "cache")
    assert not written(folder / "cache")
