"""Jinja for chat templates: sandboxed, with the tags, filters and globals of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from threading import Lock
from typing import Any

from jinja2 import TemplateError
from jinja2.environment import Environment
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from meshkit.errors import DataError


class CompiledTemplate:
    """A template and the places of its {% generation %} blocks. Its renderings take turns, one at a time."""

    def __init__(self, source: str, where: str) -> None:
        self._where = where
        # transformers' settings: templates are written for them, and other white space would be other tokens.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)
        self._blocks: _Generation = environment.extensions[_Generation.identifier]  # type: ignore[assignment]
        # `_note` is called by the template and finds the rendering's lists on the extension, one for all renderings:
        # hence one at a time.
        self._lock = Lock()
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise DataError(f"{where}: not a chat template: {error}. Correct it.") from None

    @property
    def marks_answers(self) -> bool:
        return self._blocks.present

    def render(self, values: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text and the (start, end) of each block, in characters.

        A block inside a macro, or inside a {% set %} that is written later, gets a wrong position: positions count the text
        written so far. transformers does the same.
        """
        with self._lock:
            written, spans = self._blocks.begin()
            try:
                # Piece by piece and not render(): the length of what is written so far is where a block begins.
                for piece in self._template.generate(**values):
                    written.append(piece)
            except (TemplateError, TypeError, AttributeError, KeyError, ValueError, IndexError) as error:
                raise DataError(
                    f"{self._where}: refuses this chat: {error}. Change the chat or the template."
                ) from None
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
