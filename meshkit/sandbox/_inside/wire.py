"""Wire between a program and its tests (JSON lines, strict): plain data by value, everything else by a number.

One side decodes what the other side says, and believes none of it: a value has one of the types below, or is refused.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable
from typing import Any

MOST_BYTES = 8 << 20
"""of a message"""
LONG_BITS = 1024
"""integers above it are sent in base 16, which is parsed in linear time"""
_HEX = re.compile(r"-?0x[0-9a-f]+")
_FIELDS = re.compile(r"[A-Za-z]\w{0,60}", re.ASCII)


class WireError(Exception):
    """The other side has gone, or said something that no meshkit would say."""


class Codec:
    """encode and decode plain data; `outgoing` and `incoming` do so for what is none."""

    def __init__(self, outgoing: Callable[[Any], list[Any]], incoming: Callable[[list[Any]], Any]) -> None:
        self._outgoing, self._incoming = outgoing, incoming

    def encode(self, value: Any) -> Any:
        """As JSON has it. A subclass of a plain type is sent as that type, but for named tuples."""
        if value is None or isinstance(value, bool | float | str):
            return value
        if isinstance(value, int):
            return value if value.bit_length() <= LONG_BITS else ["int", hex(value)]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, bytes | bytearray):
            return ["bytearray" if isinstance(value, bytearray) else "bytes", value.hex()]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["named", type(value).__name__, list(value._fields), [self.encode(each) for each in value]]
        if isinstance(value, range):
            return ["range", *map(self.encode, (value.start, value.stop, value.step))]
        if isinstance(value, list | tuple | frozenset | set | deque):
            plain = next(each for each in (list, tuple, frozenset, set, deque) if isinstance(value, each))
            return [plain.__name__, [self.encode(each) for each in value]]
        if isinstance(value, dict):
            kind = "Counter" if isinstance(value, Counter) else "dict"
            kind = "OrderedDict" if isinstance(value, OrderedDict) else kind
            return [kind, [[self.encode(key), self.encode(each)] for key, each in value.items()]]
        # Neither module is loaded unless the program has loaded it: a fifth of the time in which this starts.
        if "fractions" in sys.modules and isinstance(value, sys.modules["fractions"].Fraction):
            return ["Fraction", self.encode(value.numerator), self.encode(value.denominator)]
        if "decimal" in sys.modules and isinstance(value, sys.modules["decimal"].Decimal):
            return ["Decimal", str(value)]
        return self._outgoing(value)

    def decode(self, data: Any) -> Any:
        """Raises: WireError for anything that `encode` would not make."""
        if data is None or isinstance(data, bool | int | float | str):
            return data
        match data:
            case ["int", str(text)] if _HEX.fullmatch(text):
                return int(text, 16)
            case ["complex", float(real), float(imag)]:
                return complex(real, imag)
            case ["bytes" | "bytearray" as kind, str(text)]:
                return (bytes if kind == "bytes" else bytearray).fromhex(text)
            case ["named", str(), list(fields), list(values)] if len(fields) == len(values) and all(
                isinstance(each, str) and _FIELDS.fullmatch(each) for each in fields
            ):
                return namedtuple("named", fields)(*map(self.decode, values))  # its name is data
            case ["range", start, stop, step]:
                return range(*map(self.decode, (start, stop, step)))
            case ["list" | "tuple" | "frozenset" | "set" | "deque" as kind, list(values)]:
                make = {"list": list, "tuple": tuple, "frozenset": frozenset, "set": set, "deque": deque}[kind]
                return make([self.decode(each) for each in values])
            case ["dict" | "Counter" | "OrderedDict" as kind, list(pairs)]:
                decoded = [(self.decode(key), self.decode(value)) for key, value in pairs]
                return {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}[kind](dict(decoded))
            case ["Fraction", above, below]:
                from fractions import Fraction

                return Fraction(self.decode(above), self.decode(below))
            case ["Decimal", str(text)]:
                from decimal import Decimal

                return Decimal(text)
            case ["mine" | "theirs", int(), *_]:
                return self._incoming(data)
        raise WireError(f"{str(data)[:100]} is no value")


class Line:
    """Messages to and from the other side, one a line."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._rest = read, write, bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Raises: WireError if nobody reads."""
        line = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while line:
                line = line[os.write(self._write, line) :]
        except OSError as error:
            raise WireError(f"the other side has gone: {error.strerror}") from None

    def receive(self) -> dict[str, Any]:
        """Raises: WireError at the end, or for a line that is no message."""
        while (end := self._rest.find(b"\n")) < 0:
            more = os.read(self._read, 1 << 16)
            self._rest += more
            if not more or len(self._rest) > MOST_BYTES:
                raise WireError("the other side has gone" if not more else f"a message of over {MOST_BYTES} bytes")
        line, self._rest = bytes(self._rest[:end]), self._rest[end + 1 :]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise WireError("a line that is no message") from None
        if not isinstance(message, dict):
            raise WireError("a line that is no message")
        return message


def last_line(error: BaseException, file: str) -> int | None:
    """The line of the file that the error was in last. Not by `traceback`, which takes as long to import as all of this."""
    line, trace = None, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
