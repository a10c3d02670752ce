"""Tests side: runs tests in an interpreter without the program, whose functions are calls over a pipe.

Expected values stay here, and are compared here, by plain types: what the program patches, prints or claims changes nothing.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from .wire import Codec, Line, WireError, last_line

# Methods by which a plain value is judged, or which are told what is expected. An object of the program that has them could
# say what it likes.
JUDGING = {
    *(name for name in dir(str) if name.startswith("is")),
    *("startswith", "endswith", "removeprefix", "removesuffix", "replace", "translate", "partition", "rpartition"),
    *("strip", "lstrip", "rstrip", "is_integer", "isdisjoint", "issubset", "issuperset"),
    *("difference", "intersection", "symmetric_difference"),
}
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
_NO_FUNCTIONS = ("<genexpr>", "<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>")


class Undecided(BaseException):
    """The tests ask what cannot be known from outside. Not an Exception: a test's `except Exception` must not catch it."""


def run(tests: str, line: Line) -> dict[str, Any]:
    """The verdict: whether the program came to its end, and every test holds."""
    program = Program(line)
    try:
        first = line.receive()
        if "raised" in first:
            return {"raised": str(first["raised"])[:600], "by": "program"}
        names = _Names(program)
        exec(compile(_settled(ast.parse(tests)), "tests.py", "exec"), names)
    except WireError as error:
        return {"left": str(error)}
    except BaseException as error:
        # SystemExit too: exit(0) in a test is no pass.
        return program.failed or {"raised": f"{type(error).__name__}: {str(error)[:500]}{_line_of(error)}"}
    return program.failed or {"passed": True}


def _line_of(error: BaseException) -> str:
    line = error.lineno if isinstance(error, SyntaxError) else last_line(error, "tests.py")
    return f" in line {line} of the tests" if line else ""


class _Names(dict[str, Any]):
    """Globals of the tests: their own names and builtins, then the program's, asked for each time."""

    def __init__(self, program: Program) -> None:
        super().__init__(__name__="__main__", __hold__=program.hold, __settle__=program.settle)
        self._program = program

    def __missing__(self, name: str) -> Any:
        # `abs`, `all` and `len` are never the program's: tests judge by them.
        if hasattr(builtins, name) or name.startswith("__"):
            raise KeyError(name)
        return self._program.call("name", [name], {})


def _settled(tree: ast.Module) -> ast.Module:
    """Within an assert, lists that a call changes in place stay as they were.

    Else `assert f(x) == sorted(x)` would compare with a list that the program has just emptied.
    """

    class Hold(ast.NodeTransformer):
        def visit_Assert(self, node: ast.Assert) -> Any:
            self.generic_visit(node)
            hold, settle = ast.parse("__hold__()\n__settle__()").body
            whole = ast.Try(body=[node], handlers=[], orelse=[], finalbody=[settle])
            each = [hold, whole]
            for part in (hold, settle, whole):
                ast.copy_location(part, node)
            return each

    held: ast.Module = ast.fix_missing_locations(Hold().visit(tree))
    return held


class Program:
    """The program at the other end. Once it has lied or left, nothing passes any more."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.failed: dict[str, Any] | None = None
        self._objects: dict[int, Object] = {}
        self._exceptions: dict[int, type[Exception]] = {}
        self._functions: list[Callable[..., Any]] = []
        self._held: list[tuple[FrameType, list[tuple[Any, Any]]]] = []
        self._codec = Codec(self._outgoing, self._incoming)

    def call(self, what: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        """what: an operation of `program.OPERATIONS`, or the number of one of the program's values."""
        if self.failed:  # a test that swallows everything and goes on
            raise Undecided(self.failed.get("left") or self.failed.get("raised"))
        encoded = [self._codec.encode(each) for each in arguments]
        names = {name: self._codec.encode(each) for name, each in named.items()}
        what = what if isinstance(what, str) else ["theirs", what]
        self._send({"what": what, "arguments": encoded, "named": names})
        reply = self._receive()
        while "callback" in reply:
            self._send(self._called_back(reply))
            reply = self._receive()
        try:
            if printed := reply.get("printed"):
                sys.stdout.write(str(printed))
            if "value" not in reply:
                error = self._exception(reply)
                # As in a generator: `map` and `all` would take it for their end, and be content.
                if isinstance(error, StopIteration) and what != "next":
                    error = RuntimeError("the program raised StopIteration")
            else:
                changed = dict(reply.get("changed", {})).items()
                self._change([(arguments[int(index)], self._codec.decode(after)) for index, after in changed])
                return self._codec.decode(reply["value"])
        except Undecided:
            raise
        except Exception as problem:
            self.lose({"left": f"it sent what is no answer: {type(problem).__name__}"})
        raise error

    def hold(self) -> None:
        """Of an assert, until `settle`: lists that its calls change stay as they were."""
        self._held.append((sys._getframe(1), []))

    def settle(self) -> None:
        _apply(self._held.pop()[1])

    def undecided(self, text: str) -> None:
        """Raises: Undecided."""
        self.lose({"raised": f"Undecided: {text}"})

    def lose(self, verdict: dict[str, Any]) -> None:
        """Raises: Undecided; from now on nothing passes, whatever the tests catch."""
        self.failed = self.failed or verdict
        raise Undecided(verdict.get("left") or verdict.get("raised"))

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._line.send(message)
        except WireError as error:
            self.lose({"left": str(error)})

    def _receive(self) -> dict[str, Any]:
        try:
            return self._line.receive()
        except WireError as error:
            self.lose({"left": str(error)})
            raise

    def _change(self, changes: list[tuple[Any, Any]]) -> None:
        for old, new in changes:
            if type(old) is not type(new):
                raise WireError("another type")
        # A call in an assert, or in a comprehension or lambda of it; not one in a function that the assert calls.
        frame = sys._getframe(2)
        while frame.f_back and (frame.f_code.co_filename != "tests.py" or frame.f_code.co_name in _NO_FUNCTIONS):
            frame = frame.f_back
        held = [kept for holder, kept in self._held if holder is frame]
        if held:
            held[-1].extend(changes)
        else:
            _apply(changes)

    def _called_back(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            function = self._functions[message["callback"]]
            arguments = [self._codec.decode(each) for each in message["arguments"]]
            named = {str(name): self._codec.decode(each) for name, each in message["named"].items()}
        except Exception as problem:
            self.lose({"left": f"it sent what is no call: {type(problem).__name__}"})
        try:
            return {"value": self._codec.encode(function(*arguments, **named))}
        except AssertionError as error:
            # The program may swallow it; the test has failed.
            self.failed = self.failed or {"raised": f"AssertionError: {error}{_line_of(error)}"}
            return {"raised": "", "kind": "AssertionError"}
        except Exception as error:
            return {"raised": str(error)[:500], "kind": type(error).__name__}

    def _outgoing(self, value: Any) -> list[Any]:
        if isinstance(value, Object):
            return ["theirs", _number(value)]
        for number, kind in self._exceptions.items():
            if kind is value:
                return ["theirs", number]
        if callable(value):
            self._functions.append(value)
            return ["mine", len(self._functions) - 1]
        raise TypeError(
            f"a test passes an object of {type(value).__name__}; a program is given plain data, functions and its own objects"
        )

    def _incoming(self, data: list[Any]) -> Any:
        match data:
            case ["theirs", int(number)]:
                return self._functions[number]
            case ["mine", int(), "module"]:
                self.undecided("a name of the tests is a module that only the program imports. Import it in the tests.")
            case ["mine", int(), "exception", str(base), list(classes)]:
                return self._exception_class(base, classes)
            case ["mine", int(number), "object"]:
                return self._objects.setdefault(number, Object(self, number))
        raise WireError(f"{str(data)[:100]} is no value")

    def _exception(self, reply: dict[str, Any]) -> Exception:
        kind = self._exception_class(str(reply["base"]), reply["classes"])
        arguments = tuple(self._codec.decode(each) for each in reply["arguments"])
        # Not kind(*arguments): some builtin ones insist on theirs.
        error = kind.__new__(kind, *arguments)
        error.args = arguments
        return error

    def _exception_class(self, base: str, classes: list[Any]) -> type[Exception]:
        """The builtin one, or below it a class of ours for each of the program's."""
        kind = getattr(builtins, base, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = RuntimeError  # SystemExit of the program ends the call, not the tests
        for number, name in reversed(classes):
            if number not in self._exceptions:
                self._exceptions[int(number)] = type(str(name), (kind,), {})
            kind = self._exceptions[int(number)]
        return kind


def _apply(changes: list[tuple[Any, Any]]) -> None:
    for old, new in changes:
        if isinstance(old, list | bytearray):
            old[:] = new
        else:
            old.clear()
            old.update(new)


class Object:
    """A value of the program that is no plain data: it can be called, read, iterated, but not judge itself."""

    __slots__ = ("_meshkit_number", "_meshkit_program")
    __hash__ = object.__hash__

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_meshkit_program", program)
        object.__setattr__(self, "_meshkit_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _program(self).call(_number(self), list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__qualname__"):
            raise AttributeError(name)
        value = _ask("getattr", self, name)
        if name in JUDGING and isinstance(value, Object):
            _judge(self, f".{name}()")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        _ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        _ask("delattr", self, name)

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        if other is None:
            return False
        return _judge(self, "==")

    def __ne__(self, other: Any) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return _judge(self, "<")

    __le__ = __gt__ = __ge__ = __lt__

    def __iter__(self) -> Iterator[Any]:
        values = _ask("iter", self)
        return _Next(values) if isinstance(values, Object) else iter(values)

    def __next__(self) -> Any:
        return _ask("next", self)

    def __enter__(self) -> Any:
        return _ask("enter", self)

    def __exit__(self, *raised: Any) -> None:
        # It is not told of what a test raised, and cannot swallow it.
        _ask("exit", self)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Object) and bool(_ask("isinstance", value, self))

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, Object) and bool(_ask("issubclass", value, self))

    def __dir__(self) -> list[str]:
        return list(_ask("dir", self))

    def __round__(self, *digits: Any) -> Any:
        return _ask("round", self, *digits)


class _Next:
    """An iterator over one of the program's."""

    def __init__(self, values: Object) -> None:
        self._values = values

    def __iter__(self) -> _Next:
        return self

    def __next__(self) -> Any:
        return _ask("next", self._values)


def _number(value: Object) -> int:
    number: int = object.__getattribute__(value, "_meshkit_number")
    return number


def _program(value: Object) -> Program:
    program: Program = object.__getattribute__(value, "_meshkit_program")
    return program


def _ask(operation: str, *arguments: Any) -> Any:
    owner = next(each for each in arguments if isinstance(each, Object))
    return _program(owner).call(operation, list(arguments), {})


def _judge(value: Object, comparison: str) -> bool:
    _program(value).undecided(
        f"the tests use {comparison} of a program's object, which could say what it likes. Compare plain data: its fields."
    )
    raise AssertionError


def _add_operators() -> None:
    def binary(name: str, *, reflected: bool) -> Callable[[Object, Any], Any]:
        def operate(self: Object, other: Any) -> Any:
            # `abs(f(2) - 1.5) < 1e-6`: the object would be told 1.5, and could answer 0.
            if not isinstance(other, Object):
                _judge(self, f"the operator {name}")
            return _ask(name, *((other, self) if reflected else (self, other)))

        return operate

    def unary(name: str) -> Callable[..., Any]:
        return lambda self, *arguments: _ask(name, self, *arguments)

    for name in _BINARY:
        bare = name.rstrip("_")
        setattr(Object, f"__{bare}__", binary(name, reflected=False))
        setattr(Object, f"__r{bare}__", binary(name, reflected=True))
    for name in (
        "bool",
        "len",
        "str",
        "repr",
        "format",
        "int",
        "float",
        "complex",
        "index",
        "reversed",
        "abs",
        "neg",
        "pos",
    ):
        setattr(Object, f"__{name}__", unary(name))
    for name in ("getitem", "setitem", "delitem", "invert"):
        setattr(Object, f"__{name}__", unary(name))


_add_operators()
