"""Entry point inside of the sandbox: reads an order from stdin, confines itself, then is the program or its tests."""

from __future__ import annotations

import io
import json
import os
import select
import sys
from contextlib import redirect_stdout
from typing import Any

from . import program, tests
from .confine import Refused, confine
from .wire import Line, WireError

MOST_PRINTED = 1_000
"""characters of a program without tests that its word holds"""


def main() -> None:
    # The program's imports do not begin where this lies.
    sys.path.remove(sys.argv[1])
    sys.argv = [""]
    with open(0, "rb", closefd=False) as stdin:
        order = json.load(stdin)
    word: int = order["word"]
    try:
        confine(order)
    except (Refused, OSError, ValueError) as error:
        _say(word, {"refused": str(error)})
        os._exit(1)
    # stdin and stderr are files in memory, with the order and our notes; stdout is /dev/null, which cannot be opened now.
    for number in (0, 2):
        os.dup2(1, number)
    # The job may have died before this process could be told to die with it; nobody then holds the other end.
    alive = select.poll()
    alive.register(order["alive"], 0)
    if alive.poll(0):
        os._exit(1)
    os.close(order["alive"])
    _say(word, {"confined": True})
    if order["role"] == "tests":
        _say(word, tests.run(order["source"], Line(*order["line"])))
    elif order["role"] == "program":
        os.close(word)
        _serve(order["source"], Line(*order["line"]))
    else:
        # Its own word, for want of tests. In ASCII a character has at most 12 bytes: all fits into what is read of a word.
        printed = io.StringIO()
        with redirect_stdout(printed):
            raised = program.run(order["source"])
        # Cut from the end of what memory_bytes allowed it to write.
        _say(word, raised or {"ended": True, "printed": printed.getvalue()[:MOST_PRINTED]})
    # No handler of the program runs.
    os._exit(0)


def _serve(source: str, line: Line) -> None:
    try:
        raised = program.run(source)
        if raised:
            line.send(raised)
        else:
            program.Server(line).serve()
    except WireError:
        pass  # the tests have ended


def _say(word: int, message: dict[str, Any]) -> None:
    os.write(word, json.dumps(message).encode() + b"\n")
