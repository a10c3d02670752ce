"""Corpus: a fixed, sorted list of text files, the same on every rank and in every run."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshkit.data.text.documents import READERS, Document, read_file
from meshkit.errors import DataError

# What is installed differs between machines, and this corpus must not; tests hold files that are broken on purpose.
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A list of files. Build one with `standard_library` or `find_corpus`, read it with `read_documents`."""

    files: tuple[tuple[str, Path], ...]
    """(name, path) in reading order; the name is relative to what was asked for, so it survives a move of the folder"""
    field: str = "text"
    """the JSONL key or Parquet column that holds the text"""
    skipped: int = 0
    """files left out because they are not UTF-8 (the standard library only; elsewhere such a file is an error)"""


def standard_library() -> Corpus:
    """The source files of Python's own standard library, without tests and installed packages.

    Real text that every machine has: about 12 MB. Reads every file once, to leave out those that are not UTF-8.
    Raises: DataError if this Python keeps no .py files on disk.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files, skipped = [], 0
    for path in _walk(root, without=_NOT_THE_LIBRARY):
        if path.suffix == ".py":
            try:
                path.read_bytes().decode()
            except UnicodeDecodeError:
                skipped += 1
            else:
                files.append((path.relative_to(root).as_posix(), path))
    if not files:
        raise DataError(f"{root}: this Python keeps no standard library sources there. Name a corpus of your own.")
    return Corpus(files=tuple(files), skipped=skipped)


def find_corpus(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, field: str = "text") -> Corpus:
    """The files that `paths` name: files, folders (all they hold below, hidden folders left out) and glob patterns.

    A .txt, .md or .py file is one document, a .jsonl line is one, a .parquet row is one. Folders and patterns pass
    over other kinds of files. Order: as in `paths`, sorted by path within each; a file named twice is read once.
    Raises: DataError for a path that matches nothing, and for a file of a kind that cannot be read.
    """
    files: dict[Path, tuple[str, Path]] = {}
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        for name, file in _files_at(str(path)):
            # By what the path resolves to: a link, or a folder and a pattern that both hold a file, would train on it
            # twice.
            files.setdefault(file.resolve(), (name, file))
    if not files:
        raise DataError("the corpus is empty: no paths were given. Name a file, a folder or a pattern.")
    return Corpus(files=tuple(files.values()), field=field)


def _files_at(path: str) -> list[tuple[str, Path]]:
    """(name, path) of every readable file that one path, folder or pattern stands for."""
    kinds = ", ".join(READERS)
    if os.path.isdir(path):
        root, files = Path(path), list(_walk(Path(path)))
    elif os.path.exists(path):
        root, files = Path(path).parent, [Path(path)]
        if files[0].suffix not in READERS:
            raise DataError(f"{path}: cannot read a file of this kind. Give one of {kinds}.")
    else:
        # Names are relative to what comes before the first wildcard: a hash of its name says whether a document is
        # held out, and that must not change when the corpus is moved.
        root = Path(*_before_wildcard(path))
        files = sorted(file for match in glob.iglob(path, recursive=True) if (file := Path(match)).is_file())
        if not files:
            raise DataError(f"{path}: matches no file. Check the path; relative ones start at {os.getcwd()}.")
    readable = [(file.relative_to(root).as_posix(), file) for file in files if file.suffix in READERS]
    for _, file in readable:
        if file.exists() and not file.is_file():
            raise DataError(
                f"{file}: a pipe or a device, whose reader may wait for ever. Give a file, or leave it out."
            )
    if not readable:
        raise DataError(f"{path}: none of its {len(files)} files can be read. Give files of one of {kinds}.")
    return readable


def _before_wildcard(pattern: str) -> list[str]:
    parts = Path(pattern).parts
    wild = next((i for i, component in enumerate(parts) if glob.has_magic(component)), 0)
    return list(parts[:wild])


def _walk(root: Path, *, without: Collection[str] = ()) -> Iterator[Path]:
    """Every file under `root` in sorted order, hidden folders left out; links to folders are not followed."""
    for folder, folders, files in os.walk(root):
        # In place: os.walk goes on with this list. Sorted, since the order of a file system differs between machines,
        # and the order of documents is that of the token file.
        folders[:] = sorted(name for name in folders if name not in without and not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files))


def read_documents(corpus: Corpus) -> Iterator[Document]:
    """Every document of the corpus that has text, in order.

    Raises: DataError for a bad file, naming file and line, and for a corpus without any text.
    """
    empty = True
    for name, path in corpus.files:
        for document in read_file(path, name=name, field=corpus.field):
            empty = False
            yield document
    if empty:
        names = ", ".join(str(path) for _, path in corpus.files[:3])
        raise DataError(f"the corpus has no text: all {len(corpus.files)} files are empty ({names}). Add some text.")


def corpus_bytes(corpus: Corpus) -> int:
    """Bytes of all files on disk."""
    return sum(_stat(path).st_size for _, path in corpus.files)


def corpus_fingerprint(corpus: Corpus) -> str:
    """Changes when a file is added, removed, renamed or written again; reads no content, so it is quick."""
    # The 1 is the version of the readers: whoever changes what they make of a file raises it, and caches are built
    # anew.
    digest = hashlib.sha256(f"corpus 1 {corpus.field}".encode())
    for name, path in corpus.files:
        stat = _stat(path)
        digest.update(f"\n{name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Check the path and its permissions.") from None
