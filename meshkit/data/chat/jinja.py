"""Jinja for chat templates: sandboxed, with the tags, filters and globals of transformers, and limits of time and memory.

Templates come with models of other people. One process renders all of them for this one, and is ended where a template takes
too long or too much: a power of two integers or a product of a text cannot be interrupted from within.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import weakref
from pathlib import Path
from threading import Lock
from typing import Any

from meshkit.errors import DataError

LIMIT_S = 5.0
LIMIT_BYTES = 1 << 30
"""of the whole process, Python and jinja2 included"""
LIMIT_CHARACTERS = 1 << 26
"""of one chat"""


class CompiledTemplate:
    """A template that was found to be one. Raises: DataError for one that is not."""

    def __init__(self, source: str, where: str) -> None:
        self._source, self._where = source, where
        told = _ask({"source": source}, where)
        if "damaged" in told:
            raise DataError(f"{where}: not a chat template: {told['damaged']}. Correct it.")
        self.marks_answers: bool = told["marks"]

    def render(self, values: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text and the (start, end) of each {% generation %} block, in characters. values: of JSON's own types.

        A block inside a macro, or inside a {% set %} that is written later, gets a wrong position: positions count the text
        written so far. transformers does the same.
        Raises: DataError where the template fails or refuses, or takes more than LIMIT_S or LIMIT_BYTES.
        """
        told = _ask({"source": self._source, "values": values, "most": LIMIT_CHARACTERS}, self._where)
        if "large" in told:
            raise DataError(
                f"{self._where}: this chat takes more than {LIMIT_CHARACTERS:,} characters, or {LIMIT_BYTES:,} bytes of "
                "memory. Change the chat or the template."
            )
        if "text" not in told:
            why = told.get("refused", told.get("damaged"))
            raise DataError(f"{self._where}: refuses this chat: {why}. Change the chat or the template.")
        return told["text"], [(start, end) for start, end in told["spans"]]


class _Renderer:
    """The process, started when it is first asked, and again after it had to be ended."""

    def __init__(self) -> None:
        child = Path(__file__).with_name("_jinja_child.py")
        # -P: the folder of the script holds a jinja.py, which must not be taken for a library.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(child), str(LIMIT_S), str(LIMIT_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._readable = select.poll()  # and not select, which refuses descriptors from 1024 on
        self._readable.register(self._process.stdout, select.POLLIN)  # type: ignore[arg-type]
        self.pid = os.getpid()
        self.end = weakref.finalize(self, _end, self._process, self.pid)

    def ask(self, line: bytes) -> bytes:
        """Raises: TimeoutError for no answer in time, EOFError or OSError if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # Unbuffered: one write may take a part of it.
        view = memoryview(line)
        while view:
            view = view[self._process.stdin.write(view) :]
        answer, until = bytearray(), time.monotonic() + LIMIT_S
        while not answer.endswith(b"\n"):
            if not self._readable.poll(max(0.0, 1000 * (until - time.monotonic()))):
                raise TimeoutError
            piece = self._process.stdout.read(1 << 20)
            if not piece:
                raise EOFError
            answer += piece
        return bytes(answer)


_LOCK = Lock()
_renderers: list[_Renderer] = []


def _ask(request: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        line = json.dumps(request).encode() + b"\n"
    except RecursionError:
        raise DataError(f"{where}: the chat is nested too deeply to be written. Drop it.") from None
    with _LOCK:
        # A forked child has the object of its parent, whose answers would come to either of them.
        if _renderers and _renderers[0].pid != os.getpid():
            _renderers.clear()
        if not _renderers:
            _renderers.append(_Renderer())
        try:
            told: dict[str, Any] = json.loads(_renderers[0].ask(line))
            return told
        except TimeoutError:
            _renderers.pop().end()
            raise DataError(
                f"{where}: has not rendered this chat within {LIMIT_S:.0f} s, and was ended. Change the chat or the template."
            ) from None
        except (EOFError, OSError, ValueError):
            _renderers.pop().end()
            raise DataError(
                f"{where}: the process that renders has ended, perhaps for want of memory ({LIMIT_BYTES:,} bytes). Change "
                "the chat or the template."
            ) from None
        except BaseException:  # of a signal, while the answer is on its way: the next one must not get it
            _renderers.pop().end()
            raise


def _end(process: subprocess.Popen[bytes], pid: int) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    if pid == os.getpid():  # not of a forked child's parent
        process.kill()
        process.wait(10)
