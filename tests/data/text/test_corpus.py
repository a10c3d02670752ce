"""A corpus is the same list of documents everywhere, and a bad file is named with its line."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from pathlib import Path

import pytest

from meshkit.data import Corpus, corpus_bytes, corpus_fingerprint, find_corpus, read_documents, standard_library
from meshkit.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def contents(corpus: Corpus) -> list[tuple[str, str]]:
    return [(document.source, document.text) for document in read_documents(corpus)]


def write_parquet(path: Path, **columns: list[object]) -> None:
    parquet.write_table(pyarrow.table(columns), path)


def test_standard_library_is_every_python_file_but_tests_and_packages() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    expected = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not left_out & set(path.relative_to(root).parts)
    }
    corpus = standard_library()
    names = [name for name, _ in corpus.files]
    assert set(names) <= expected
    assert len(names) + corpus.skipped == len(expected)
    assert "collections/__init__.py" in names
    assert [document.source for document in read_documents(corpus)] == [n for n, p in corpus.files if p.stat().st_size]
    assert names == [name for name, _ in standard_library().files]


def test_standard_library_counts_files_that_are_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "check.py").write_text("x = 2\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    corpus = standard_library()
    assert (contents(corpus), corpus.skipped) == ([("good.py", "x = 1\n")], 1)


def test_standard_library_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="keeps no standard library sources there"):
        standard_library()


def test_folder_file_and_pattern_name_the_same_documents_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_bytes("# zwölf\r\n".encode())
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "no.txt").write_text("no")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    expected = [("a.txt", "one"), ("b/two.md", "# zwölf\r\n")]
    assert contents(find_corpus(tmp_path)) == expected
    assert contents(find_corpus([tmp_path / "**" / "*.*"])) == expected
    (tmp_path / "z.txt").symlink_to(tmp_path / "a.txt")
    assert contents(find_corpus([tmp_path / "a.txt", tmp_path])) == expected, "a file named twice is read once"


def test_jsonl_lines_and_parquet_rows_are_documents(tmp_path: Path) -> None:
    texts = ["one", "zwei\n", "三"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts[:2]) + "\n\n")
    write_parquet(tmp_path / "b.parquet", body=[texts[2], ""], other=[1, 2])
    corpus = find_corpus(tmp_path, field="body")
    assert contents(corpus) == [("a.jsonl:1", "one"), ("a.jsonl:2", "zwei\n"), ("b.parquet:1", "三")]
    assert corpus_bytes(corpus) == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_fingerprint_changes_with_any_file_and_only_then(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    seen = [corpus_fingerprint(find_corpus(tmp_path))]
    assert corpus_fingerprint(find_corpus(tmp_path)) == seen[0]
    (tmp_path / "a.txt").write_text("two")
    os.utime(tmp_path / "a.txt", (1, 1))
    seen.append(corpus_fingerprint(find_corpus(tmp_path)))
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    seen.append(corpus_fingerprint(find_corpus(tmp_path)))
    (tmp_path / "c.txt").write_text("new")
    seen.append(corpus_fingerprint(find_corpus(tmp_path)))
    seen.append(corpus_fingerprint(find_corpus(tmp_path, field="body")))
    assert len(set(seen)) == 5


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("a.txt", b"fine\nnot \xff fine", "a.txt line 2: not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl line 2: not JSON: Expecting value at column"),
        ("a.jsonl", b'\n{"body": "x", "id": 1}\n', "a.jsonl line 2: has no field 'text', only ['body', 'id']"),
        ("a.jsonl", b'["x"]\n', "a.jsonl line 1: holds a JSON list, not an object"),
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl line 1: 'text' is int, not text"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl line 1: not UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl line 1: 'text' holds a lone surrogate"),
        ("a.jsonl", b'{"text": "x", "n": ' + b"9" * 5000 + b"}", "a.jsonl line 1: Exceeds the limit (4300 digits)"),
        ("a.parquet", b"text", "a.parquet: not a readable Parquet file"),
        ("a.txt", b"", "the corpus has no text: all 1 files are empty"),
    ],
)
def test_bad_file_is_refused_by_name_and_line(tmp_path: Path, name: str, raw: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=re.escape(message)):
        contents(find_corpus(tmp_path))


def test_parquet_without_the_column_or_with_a_hole_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", body=["x"], id=[1])
    with pytest.raises(DataError, match=r"a.parquet: has no column 'text', only \['body', 'id'\]"):
        contents(find_corpus(tmp_path))
    write_parquet(tmp_path / "a.parquet", text=["x", None])
    with pytest.raises(DataError, match=r"a.parquet row 2: 'text' is NoneType, not text"):
        contents(find_corpus(tmp_path))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", text=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs pyarrow. Run: pip install 'meshkit\[parquet\]'"):
        contents(find_corpus(tmp_path))


def test_paths_that_name_nothing_readable_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match="the corpus is empty: no paths"):
        find_corpus([])
    with pytest.raises(DataError, match=r"none/\*.txt: matches no file"):
        find_corpus(tmp_path / "none" / "*.txt")
    with pytest.raises(DataError, match=r"none of its 1 files can be read. Give files of one of .txt, .md"):
        find_corpus(tmp_path)
    with pytest.raises(DataError, match=r"a.png: cannot read a file of this kind"):
        find_corpus(tmp_path / "a.png")


def test_file_that_goes_away_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    corpus = find_corpus(tmp_path)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a.txt: cannot be read: No such file"):
        contents(corpus)
    with pytest.raises(DataError, match=r"a.txt: cannot be read: No such file"):
        corpus_fingerprint(corpus)
