"""A token file gives back what was written, and anything else is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.data import Tokenizer, TokenWriter, open_npy, open_tokens, read_ids, train_tokenizer, verify_tokens
from meshkit.errors import DataError

DOCUMENTS = [[5, 6, 7], [299], [0, 1]]


def write(path: Path, documents: list[list[int]], *, vocab_size: int = 300, tokenizer: str = "made") -> Path:
    with TokenWriter(path, vocab_size=vocab_size, tokenizer=tokenizer) as writer:
        for document in documents:
            writer.add(np.array(document, dtype=np.int64), text_bytes=len(document))
    return path


@settings(deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 299), max_size=7), min_size=1, max_size=6).filter(any),
    vocab_size=st.sampled_from([300, 1 << 16, (1 << 16) + 1]),
)
def test_documents_come_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab_size: int
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "round.tokens", documents, vocab_size=vocab_size)
    tokens = open_tokens(path)
    spans = zip(tokens.offsets, tokens.offsets[1:], strict=False)
    assert [tokens.ids[start:stop].tolist() for start, stop in spans] == documents
    assert tokens.ids.dtype == (np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4"))
    assert tokens.documents == len(documents)
    assert tokens.text_bytes == sum(map(len, documents))
    verify_tokens(tokens)


def test_ids_are_raw_little_endian_after_one_page(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.tokens", DOCUMENTS).read_bytes()
    assert raw[4096 : 4096 + 12] == bytes([5, 0, 6, 0, 7, 0, 43, 1, 0, 0, 1, 0])
    assert raw[:4096].endswith(b"\n")
    assert b'"tokens": 6, "documents": 3, "vocab_size": 300' in raw[:4096]


def test_every_shorter_or_longer_file_is_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.tokens", DOCUMENTS).read_bytes()
    header = raw.index(b"}") + 1
    for size in [0, 1, header // 2, header - 1, header, *range(4096, len(raw))]:
        (tmp_path / "cut.tokens").write_bytes(raw[:size])
        with pytest.raises(DataError, match="not a token file" if size < header else "it is truncated"):
            open_tokens(tmp_path / "cut.tokens")
    (tmp_path / "cut.tokens").write_bytes(raw + b"x")
    with pytest.raises(DataError, match=f"has {len(raw) + 1} bytes, but 6 tokens in 3 documents take {len(raw)}"):
        open_tokens(tmp_path / "cut.tokens")


def damaged(path: Path, *, at: int, value: bytes) -> Path:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(value)] = value
    path.write_bytes(raw)
    return path


def test_damaged_headers_and_offsets_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tokens", DOCUMENTS)
    raw = path.read_bytes()
    for old, new, message in [
        (b'"tokens": 6', b'"tokens": 0', "its header is damaged"),
        (b'"vocab_size": 3', b'"vocab_size": 4', "its header is damaged"),
        (b'"tokens": 6', b'"tokenz": 6', "its header is damaged"),
        (b'"tokens": 6', b'"tokens":""', "its header is damaged"),
        (b"uint16", b"uint99", "its header is damaged"),
        (b"tokens 2", b"tokens 9", "not a token file"),
    ]:
        path.write_bytes(raw.replace(old, new, 1))
        with pytest.raises(DataError, match=message):
            open_tokens(path)
    path.write_bytes(raw)
    with pytest.raises(DataError, match="document offsets do not run from 0 to 6"):
        open_tokens(damaged(path, at=len(raw) - 24, value=b"\x09"))
    with pytest.raises(DataError, match=r"missing.tokens: cannot be read: No such file"):
        open_tokens(tmp_path / "missing.tokens")


def test_a_file_of_format_1_which_has_no_digest_of_its_header_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tokens", DOCUMENTS)
    raw = path.read_bytes()
    header = json.loads(raw[:4096])
    del header["header"]
    header["format"] = "meshkit tokens 1"
    path.write_bytes(json.dumps(header).encode().ljust(4095) + b"\n" + raw[4096:])
    tokens = open_tokens(path)
    verify_tokens(tokens)
    assert tokens.documents == len(DOCUMENTS)
    path.write_bytes(path.read_bytes().replace(b'"tokens": 6', b'"tokens": 0'))
    with pytest.raises(DataError, match="holds no tokens"):
        open_tokens(path)


def test_id_outside_the_vocabulary_is_named_by_file_and_position(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    for bad in (300, -1):
        with pytest.raises(DataError, match=f"a.tokens document 1: id {bad} at position 2 is outside the vocabulary"):
            write(path, [[1], [2, 3, bad]])
    assert not list(tmp_path.iterdir()), "a failed build leaves nothing"
    tokens = open_tokens(damaged(write(path, DOCUMENTS), at=4096 + 2 * 4, value=b"\xff\xff"))
    assert read_ids(tokens, 0, 4).tolist() == [5, 6, 7, 299]
    with pytest.raises(DataError, match=r"a.tokens: id 65535 at position 4 is outside the vocabulary of 300"):
        read_ids(tokens, 2, 6)
    with pytest.raises(DataError, match="id 65535 at position 4"):
        verify_tokens(tokens)


def test_one_flipped_bit_fails_verification(tmp_path: Path) -> None:
    path = damaged(write(tmp_path / "a.tokens", DOCUMENTS), at=4096, value=b"\x04")
    with pytest.raises(DataError, match="the digest differs"):
        verify_tokens(open_tokens(path))


def test_build_without_tokens_or_cut_short_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    with pytest.raises(DataError, match=r"a.tokens: no tokens to write"):
        write(path, [])

    def interrupted() -> None:
        with TokenWriter(path, vocab_size=300, tokenizer="made") as writer:
            writer.add(np.array([1, 2]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_killed_build_leaves_the_old_file_and_nothing_that_looks_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tokens", DOCUMENTS)
    before = path.read_bytes()
    script = (
        "import os, signal, sys, pathlib, numpy as np\n"
        "from meshkit.data import TokenWriter\n"
        "with TokenWriter(pathlib.Path(sys.argv[1]), vocab_size=300, tokenizer='made') as writer:\n"
        "    for _ in range(50):\n"
        "        writer.add(np.arange(300))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[3]
    killed = subprocess.run([sys.executable, "-c", script, str(path)], cwd=root, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    (left,) = set(tmp_path.iterdir()) - {path}
    assert left.stat().st_size > 4096
    with pytest.raises(DataError, match="not a token file"):
        open_tokens(left)


def test_file_of_another_tokenizer_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tokens", DOCUMENTS, tokenizer=tokenizer.fingerprint)
    open_tokens(path, tokenizer=tokenizer)
    other = train_tokenizer(["other words"], vocab_size=260)
    with pytest.raises(
        DataError, match=f"made with tokenizer {tokenizer.fingerprint[:12]} of 300 ids, but .* {other.fingerprint[:12]}"
    ):
        open_tokens(path, tokenizer=other)


@pytest.mark.parametrize("chunk", [1, 2, 1 << 24])
def test_npy_documents_end_with_eos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("meshkit.data.text.tokens._CHUNK", chunk)
    path = tmp_path / "a.npy"
    np.save(path, np.array([5, 6, 1, 1, 7], dtype=np.int32))
    tokens = open_npy(path, vocab_size=8, eos_id=1)
    assert tokens.offsets.tolist() == [0, 3, 4, 5]
    assert read_ids(tokens, 0, 9).tolist() == [5, 6, 1, 1, 7]
    assert open_npy(path, vocab_size=8, eos_id=7).fingerprint != tokens.fingerprint
    verify_tokens(tokens)
    with pytest.raises(DataError, match=r"a.npy: id 7 at position 4 is outside the vocabulary of 7"):
        open_npy(path, vocab_size=7, eos_id=1)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 2), dtype=np.int64), r"holds int64 \[2, 2\], not one row of integer ids"),
        (np.zeros(3), r"holds float64 \[3\], not one row of integer ids"),
        (np.zeros(0, dtype=np.int64), "a.npy: holds no tokens"),
        (np.array([1, 2, 8, 9]), "a.npy: id 8 at position 2 is outside the vocabulary of 8"),
        (np.array([1, -2]), "a.npy: id -2 at position 1"),
    ],
)
def test_bad_npy_is_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=message):
        open_npy(tmp_path / "a.npy", vocab_size=8, eos_id=1)


def test_file_that_is_no_npy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"ids")
    with pytest.raises(DataError, match=r"a.npy: not a readable .npy file"):
        open_npy(tmp_path / "a.npy", vocab_size=8, eos_id=1)
