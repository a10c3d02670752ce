"""The process that renders chat templates (jinja2, sandboxed): a request in JSON on each line of its input, then an answer.

It is started as a script and imports nothing of meshkit. A template may compute for ever or fill the memory, in one call of
Python that nothing can interrupt: here both end with the process. See jinja.py.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.environment import Environment, Template
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

KEPT = 16  # compiled templates


class Compiled:
    """A template and the places of its {% generation %} blocks."""

    def __init__(self, source: str) -> None:
        # transformers' settings: templates are written for them, and other white space would be other tokens.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)
        self.blocks: _Generation = environment.extensions[_Generation.identifier]  # type: ignore[assignment]
        self._template: Template = environment.from_string(source)

    def render(self, values: dict[str, Any], most: int) -> tuple[str, list[tuple[int, int]]]:
        written, spans = self.blocks.begin()
        length = 0
        # Piece by piece and not render(): the length of what is written so far is where a block begins.
        for piece in self._template.generate(**values):
            written.append(piece)
            length += len(piece)
            if length > most:
                raise MemoryError
        return "".join(written), spans


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: written out as it is, and noted."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads it from the class

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.present = False
        self.begin()

    def begin(self) -> tuple[list[str], list[tuple[int, int]]]:
        self._written: list[str] = []
        self._spans: list[tuple[int, int]] = []
        return self._written, self._spans

    def parse(self, parser: Parser) -> Node:
        self.present = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block hands the rendered body to `_note`, as `caller`, and writes what that returns in its place.
        return CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        text = caller()
        start = sum(map(len, self._written))
        self._spans.append((start, start + len(text)))
        return text


class _Namespace(Namespace):
    """Jinja's namespace without names that start with an underscore, which lead out of the sandbox."""

    def __init__(*args: Any, **names: Any) -> None:  # as Jinja's own, so that a template may store a name `self`
        Namespace.__init__(*args, **names)
        for name in dict(*args[1:], **names):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateError(f"a namespace cannot hold {name!r}, a name with an underscore in front")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which no model has seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def answer(request: dict[str, Any], compiled: dict[str, Compiled]) -> dict[str, Any]:
    """`marks`, or `text` and `spans`; or `damaged` or `refused` with why, or `large`."""
    source = request["source"]
    try:
        if source not in compiled:
            while len(compiled) >= KEPT:
                del compiled[next(iter(compiled))]
            compiled[source] = Compiled(source)
        if "values" not in request:
            return {"marks": compiled[source].blocks.present}
    except MemoryError:
        return {"damaged": "it is nested too deeply, or too large"}  # which Python's own parser calls the same
    except RecursionError:
        return {"damaged": "it is nested too deeply"}
    except (TemplateError, SyntaxError, ValueError, TypeError, OverflowError) as error:
        return {"damaged": str(error)}
    try:
        text, spans = compiled[source].render(request["values"], request["most"])
        return {"text": text, "spans": spans}
    except MemoryError:
        return {"large": True}
    except RecursionError:
        return {"refused": "its macros or values are nested too deeply"}
    except (TemplateError, TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
        return {"refused": str(error) or type(error).__name__}


def main() -> None:
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # SIGINT goes to the whole group of a terminal; the parent says when this process ends, by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    compiled: dict[str, Compiled] = {}
    for line in sys.stdin.buffer:
        # Whoever asked ends this process when it is late. That may be gone: then the kernel does.
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
        told = json.dumps(answer(json.loads(line), compiled))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(told + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
