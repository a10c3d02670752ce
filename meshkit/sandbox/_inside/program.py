"""Program side: runs the program, then answers calls of its tests until they end. Nothing here is believed by the other side.

All that this interpreter knows the program may know: no password, no test, no expected value comes here.
"""

from __future__ import annotations

import builtins
import io
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from .wire import Codec, Line, last_line

MOST_PRINTED = 1 << 20
"""characters of a call's output that its tests see"""
_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and_",
    "or_",
    "xor",
    "lshift",
    "rshift",
)
_UNARY = ("neg", "pos", "abs", "invert", "index", "getitem", "setitem", "delitem")
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*_OPERATORS, *_UNARY)},
    **{each.__name__: each for each in (getattr, setattr, delattr, len, iter, next, reversed, str, repr, format)},
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
    **{each.__name__: each for each in (bool, int, float, complex, round, isinstance, issubclass, dir)},
}


def run(program: str) -> dict[str, Any] | None:
    """Run it as a module of its own; None at its end, or what it raised."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(program, "program.py", "exec"), vars(module))
    except BaseException as error:
        # SystemExit too: exit(0) before the last line is no end.
        return _raised(error)
    return None


def _raised(error: BaseException) -> dict[str, Any]:
    line = last_line(error, "program.py")
    where = f" in line {line} of the program" if line else ""
    return {"raised": f"{type(error).__name__}: {str(error)[:500]}{where}", "kind": type(error).__name__}


class Server:
    """The program's values, by number, and calls of them."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._values: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._codec = Codec(self._outgoing, self._incoming)

    def serve(self) -> None:
        """Until the other side has gone, which ends in WireError."""
        self._line.send({"ready": True})
        while True:
            self._line.send(self._answer(self._line.receive()))

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        printed, sys.stdout = sys.stdout, io.StringIO()
        try:
            arguments = [self._codec.decode(each) for each in message["arguments"]]
            named = {name: self._codec.decode(each) for name, each in message["named"].items()}
            try:
                value = self._codec.encode(self._called(message["what"], arguments, named))
            except BaseException as error:
                return {**self._error(error), "printed": sys.stdout.getvalue()[:MOST_PRINTED]}
            # Lists that a function changed in place.
            changed = {
                index: after
                for index, (argument, before) in enumerate(zip(arguments, message["arguments"], strict=True))
                if isinstance(argument, list | dict | set | bytearray)
                and (after := self._codec.encode(argument)) != before
            }
            return {"value": value, "changed": changed, "printed": sys.stdout.getvalue()[:MOST_PRINTED]}
        finally:
            sys.stdout = printed

    def _called(self, what: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        if what == "name":
            return vars(sys.modules["__main__"])[arguments[0]]
        function = OPERATIONS[what] if isinstance(what, str) else self._codec.decode(what)
        return function(*arguments, **named)

    def _outgoing(self, value: Any) -> list[Any]:
        if isinstance(value, _Theirs):
            return ["theirs", value.number]
        number = self._number(value)
        if isinstance(value, types.ModuleType):
            return ["mine", number, "module"]
        if isinstance(value, type) and issubclass(value, Exception):
            return ["mine", number, "exception", *_base_and_classes(value, self._number)]
        return ["mine", number, "object"]

    def _number(self, value: Any) -> int:
        # By identity, and kept for ever: a number never means another value.
        number = self._numbers.setdefault(id(value), len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number

    def _incoming(self, data: list[Any]) -> Any:
        return self._values[data[1]] if data[0] == "theirs" else _Theirs(data[1], self)

    def _error(self, error: BaseException) -> dict[str, Any]:
        base, classes = _base_and_classes(type(error), self._number)
        try:
            arguments = [self._codec.encode(each) for each in error.args]
        except Exception:
            arguments = [str(error)[:500]]
        return {**_raised(error), "base": base, "classes": classes, "arguments": arguments}

    def call_theirs(self, number: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A function of the tests, which the program was given."""
        encoded = [self._codec.encode(each) for each in arguments]
        names = {name: self._codec.encode(each) for name, each in named.items()}
        self._line.send({"callback": number, "arguments": encoded, "named": names})
        while "what" in (reply := self._line.receive()):  # that function may call the program
            self._line.send(self._answer(reply))
        if "raised" in reply:
            raise getattr(builtins, reply["kind"], RuntimeError)(reply["raised"])
        return self._codec.decode(reply["value"])


class _Theirs:
    def __init__(self, number: int, server: Server) -> None:
        self.number, self._server = number, server

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._server.call_theirs(self.number, arguments, named)


def _base_and_classes(kind: type[BaseException], number: Callable[[Any], int]) -> tuple[str, list[list[Any]]]:
    """The builtin exception that it is one of, and the program's own classes on the way there, by number and name."""
    classes: list[list[Any]] = []
    for each in kind.__mro__:
        if getattr(builtins, each.__name__, None) is each:
            return each.__name__, classes
        classes.append([number(each), each.__name__])
    return "Exception", classes
