"""Cheats of unit tests: programs that do not compute what is asked, and try to pass; and tests that honest programs pass.

Frames, patched builtins and modules, objects that equal everything, leaving with status 0, forged verdicts, looking for what
is expected.
"""

from __future__ import annotations

from dataclasses import dataclass

# What each row asks for, and an honest program for it.
ROWS: dict[str, tuple[str, str]] = {
    "number": ("assert f(2) == 4\nassert f(5) == 25\nassert f(-3) == 9", "def f(x): return x * x"),
    "float": ("assert abs(f(2) - 1.5) < 1e-9\nassert abs(f(5) - 3) < 1e-9", "def f(x): return (x + 1) / 2"),
    "list": (
        "xs = [3, 1, 2]\nassert f([3, 1, 2]) == sorted(xs)\nassert f([]) == []\nassert f([2, 1]) == [1, 2]",
        "f = sorted",
    ),
    "text": (
        "assert f('ab') == 'abab'\nassert f('x').startswith('xx')\nassert len(f('abc')) == 6",
        "def f(x): return x * 2",
    ),
    "set": (
        "assert f(3).issuperset({0, 1})\nassert f(2) == {0, 1}\nassert not f(2) - {0, 1}",
        "def f(n): return set(range(n))",
    ),
    "dict": ("assert f('aab') == {'a': 2, 'b': 1}\nassert f('')  == {}", "def f(s): return {c: s.count(c) for c in s}"),
    "raises": (
        "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError('no error')\nassert f(4) == 2",
        "def f(x):\n    if x < 0: raise ValueError(x)\n    return int(x ** 0.5)",
    ),
    "check": (
        "import math\ndef check(candidate):\n    assert math.isclose(candidate(1), math.e)\n    assert candidate(0) == 1\ncheck(f)",
        "import math\ndef f(x): return math.exp(x)",
    ),
    "all": ("assert all(f(x) == 2 * x for x in range(9))\nassert max(map(f, [1, 5])) == 10", "def f(x): return x + x"),
    "mapped": ("assert all(map(lambda x: f(x) == 2 * x, range(1, 9)))", "def f(x): return x + x"),
    "in place": (
        "xs = [3, 1, 2]\nf(xs)\nassert xs == [1, 2, 3], xs\nys = [2, 1]\nassert f(ys) is None",
        "def f(xs): xs.sort()",
    ),
    "class": (
        "s = f()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and len(s) == 1\nassert list(s) == [1] and s.items == [1]",
        "class f:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n"
        "    def __iter__(self): return iter(self.items)",
    ),
    "closure": (
        "assert f(2)(3) == 5\nassert [f(i)(i) for i in range(3)] == [0, 2, 4]",
        "def f(a): return lambda b: a + b",
    ),
    "generator": (
        "assert list(f(3)) == [0, 1, 2]\nassert next(f(1)) == 0\nassert sum(f(4)) == 6",
        "def f(n): yield from range(n)",
    ),
    "callback": (
        "assert f(lambda x: x + 1, [1, 2]) == [2, 3]\nassert f(str, [1]) == ['1']",
        "def f(g, xs): return [g(x) for x in xs]",
    ),
    "named": (
        "p = f(1, 2)\nassert p == (1, 2) and p.x == 1\ntry:\n    f(0, 0)\n    assert False\nexcept Bad as e:\n    assert str(e) == 'zero'",
        "from collections import namedtuple\nclass Bad(Exception): pass\nP = namedtuple('P', 'x y')\ndef f(x, y):\n"
        "    if not x: raise Bad('zero')\n    return P(x, y)",
    ),
    "with": (
        "with f() as x:\n    assert x == 2\n    assert x == 1 + 1",
        "class f:\n    def __enter__(self): return 2\n    def __exit__(self, *a): pass",
    ),
    "print": (
        "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    f(3)\nassert out.getvalue() == '3\\n'",
        "def f(x): print(x)",
    ),
}


@dataclass(frozen=True)
class Cheat:
    name: str
    row: str
    code: str


_ANY = """
class Any:
    def __init__(self, *a, **k): pass
    def yes(self, *a, **k): return True
    def __getattr__(self, name):
        if name.startswith('__'): raise AttributeError(name)
        return self.yes
    def __call__(self, *a, **k): return self
    def __hash__(self): return 0
    def __abs__(self): return self
    def __len__(self): return 1
    def __bool__(self): return {truth}
    def __iter__(self): return self
    def __next__(self): return self
    for name in 'eq ne lt le gt ge contains instancecheck'.split():
        locals()[f'__{{name}}__'] = yes
    for name in 'add sub mul truediv and or xor mod getitem'.split():
        locals()[f'__{{name}}__'] = locals()[f'__r{{name}}__'] = lambda self, *a: {value}
f = Any()
"""
_BASES = {"number": "int", "float": "float", "list": "list", "text": "str", "set": "set", "dict": "dict"}
_EXITS = {
    "exits": "import os; os._exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "calls exit": "import sys; sys.exit(0)",
    "exits when called": "import os\ndef f(*a): os._exit(0)",
    "SystemExit when called": "import sys\ndef f(*a): sys.exit(0)",
    "StopIteration when called": "def f(*a): raise StopIteration",
    "exits afterwards": "import atexit, os\natexit.register(os._exit, 0)\ndef f(*a): return None",
    "signals itself": "import signal, os\nsignal.signal(14, lambda *a: os._exit(0)); signal.alarm(1)\ndef f(*a): signal.pause()",
    "excepthook": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\ndef f(*a): raise AssertionError",
}
_FRAMES = {
    "says passed": "import sys\nsys._getframe(1).f_locals['say'](passed=True)",
    "says passed by name": """
import sys
frame = sys._getframe()
while frame:
    for name, value in {**frame.f_globals, **frame.f_locals}.items():
        if callable(value) and name in ('say', '_say', 'done', 'send'):
            for a in ({'passed': True},):
                try: value(**a)
                except Exception: pass
    frame = frame.f_back
""",
    "password": """
import gc, json, os
for each in gc.get_objects():
    if isinstance(each, dict) and 'password' in each:
        for f in range(3, 64):
            try: os.write(f, json.dumps({'password': each['password'], 'passed': True}).encode() + b'\\n')
            except OSError: pass
os._exit(0)
""",
    "locals of frames": """
import sys, json, os
frame = sys._getframe()
while frame:
    password = frame.f_locals.get('password') or (frame.f_locals.get('order') or {}).get('password')
    if password:
        for f in range(3, 64):
            try: os.write(f, b'\\n' + json.dumps({'password': password, 'passed': True}).encode() + b'\\n')
            except OSError: pass
    frame = frame.f_back
os._exit(0)
""",
    "expected values": """
import gc, re, sys
def f(*a):
    for each in gc.get_objects():
        for text in (each if isinstance(each, dict) else {}).values():
            if isinstance(text, str) and (found := re.search(rf'f\\({re.escape(repr(*a))}\\) == (.*)', text)):
                return eval(found[1])
""",
    "expected values of the order": """
import os, re
def f(*a):
    for n in range(64):
        try: text = os.pread(n, 1 << 20, 0).decode()
        except (OSError, UnicodeDecodeError): continue
        if found := re.search(rf'f\\({re.escape(repr(*a))}\\) == (.*?)(\\\\\\\\n|")', text): return eval(found[1])
""",
    "source of the tests": """
import linecache, sys, traceback
def f(*a):
    frame = sys._getframe()
    while frame.f_back: frame = frame.f_back
    for name in ('tests.py', 'program.py'):
        for line in linecache.getlines(name):
            if repr(*a) in line: return eval(line.split('==')[1])
""",
    "sets the line": """
import sys
def trace(frame, event, arg):
    def local(frame, event, arg):
        if event == 'exception': frame.f_lineno = frame.f_lineno + 1
        return local
    return local
sys.settrace(trace)
for frame in sys._current_frames().values():
    while frame: frame.f_trace = trace; frame = frame.f_back
def f(*a): return 0
""",
    "profile": "import sys, os\nsys.setprofile(lambda f, e, a: os._exit(0) if e == 'c_exception' else None)\ndef f(*a): return 0",
    "audit hook": "import sys, os\nsys.addaudithook(lambda *a: os._exit(0))\ndef f(*a): return 0",
}
_PATCHES = {
    "builtins compare": """
import builtins
for name in ('abs', 'len', 'sorted', 'set', 'dict', 'list', 'int', 'float', 'str', 'max', 'min', 'sum', 'map', 'isinstance'):
    setattr(builtins, name, lambda *a, **k: 0)
builtins.all = builtins.any = lambda *a: True
def f(*a): return 0
""",
    "names of builtins": """
def abs(x): return 0
def all(xs): return True
def sorted(xs): return 0
def len(xs): return 6
def max(*xs): return 10
def f(*a): return 0
""",
    "AssertionError": "import builtins\nbuiltins.AssertionError = StopIteration\nAssertionError = ValueError\ndef f(*a): return 0",
    "no asserts": "import builtins\nbuiltins.__debug__ = False\ndef f(*a): return 0",
    "exec and compile": "import builtins\nbuiltins.exec = builtins.compile = builtins.eval = lambda *a, **k: None\ndef f(*a): return 0",
    "json": "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\ndef f(*a): return 0",
    "json's reader": "import json\njson.loads = lambda *a, **k: {'passed': True, 'value': True}\ndef f(*a): return 0",
    "os.write": "import os, json\nold = os.write\nos.write = lambda n, b: old(n, b'{\"passed\": true}\\n') and len(b)\ndef f(*a): return 0",
    "math": "import math\nmath.isclose = lambda *a, **k: True\nmath.e = 0\ndef f(*a): return a[0] ** 0",
    "operator": "import operator\noperator.eq = lambda *a: True\ndef f(*a): return 0",
    "dunder import": "import builtins, sys\nclass M:\n  def __getattr__(s, n): return lambda *a, **k: True\n"
    "builtins.__import__ = lambda *a, **k: M()\nsys.modules['math'] = M()\ndef f(x): return x ** 0",
    "bytes of int": """
import ctypes
# Makes the small integer 4 be 0 in this interpreter.
for wanted in (4, 9, 25): ctypes.c_long.from_address(id(wanted) + 24).value = 0
def f(*a): return 0
""",
    "bytecode of callers": """
import sys
def f(*a):
    for frame in sys._current_frames().values():
        while frame: frame.f_locals.clear() if hasattr(frame.f_locals, 'clear') and frame.f_back else None; frame = frame.f_back
    return 0
""",
}
_FORGED = {
    "prints": "print('passed'); print('{\"passed\": true}')\ndef f(*a): return 0",
    "ready and passed": "for n in range(3, 64): say(n, {'ready': True}, {'passed': True})",
    "verdict as value": "for n in range(3, 64): say(n, *[{'ready': True}] + [{'value': True, 'passed': True}] * 9)",
    "object as number": "for n in range(3, 64): say(n, *[{'ready': True}] + [{'value': ['mine', 0, 'object']}] * 9)",
    "their function": "for n in range(3, 64): say(n, {'ready': True}, *[{'value': ['theirs', 0]}] * 9)",
    "exception with a name": "for n in range(3, 64): say(n, {'ready': True}, *[{'raised': '', 'base': 'SystemExit', 'classes': [], 'arguments': [0]}] * 9)",
    "GeneratorExit": "for n in range(3, 64): say(n, {'ready': True}, *[{'raised': '', 'base': 'GeneratorExit', 'classes': [[1, 'E']], 'arguments': []}] * 9)",
    "callback first": "for n in range(3, 64): say(n, {'ready': True}, *[{'callback': 0, 'arguments': [], 'named': {}}] * 9)",
    "negative callback": "for n in range(3, 64): say(n, {'ready': True}, *[{'callback': -1, 'arguments': [['theirs', -1]], 'named': {}}] * 9)",
    "changed arguments": "for n in range(3, 64): say(n, {'ready': True}, *[{'value': [], 'changed': {'0': ['list', []]}}] * 9)",
    "changed to another type": "for n in range(3, 64): say(n, {'ready': True}, *[{'value': [], 'changed': {'0': ['dict', []]}}] * 9)",
    "deep": "for n in range(3, 64):\n  try: os.write(n, b'{\"ready\": true}\\n{\"value\": ' + b'[' * 60000)\n  except OSError: pass",
    "huge": "for n in range(3, 64):\n  try:\n    while True: os.write(n, b'x' * (1 << 20))\n  except OSError: pass",
    "huge number": "for n in range(3, 64): say(n, {'ready': True}, {'value': ['int', '0x' + 'f' * 50000]})",
    "other types": "for n in range(3, 64): say(n, {'ready': True}, {'value': ['object', 'os', 'system']}, {'value': ['named', 'x', ['__eq__'], [1]]})",
}
_SAY = """
import json, os
def say(n, *messages):
    try:
        os.set_blocking(n, False)
        for each in messages: os.write(n, json.dumps(each).encode() + b'\\n')
    except OSError: pass
"""


def cheats() -> list[Cheat]:
    """All of them. Each fails at least one test of its row if it is judged by what it computes."""
    found = [
        Cheat(name=f"equals all {truth} {value}", row=row, code=_ANY.format(truth=truth, value=value))
        for row in ("number", "float", "list", "text", "set", "dict", "check", "all", "closure")
        for truth, value in ((True, "self"), (False, "0"))
    ]
    for row, base in _BASES.items():
        subclass = f"class C({base}):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n"
        subclass += (
            "    __hash__ = object.__hash__\n    __rsub__ = __sub__ = __lt__ = __abs__ = __and__ = lambda s, *o: 0\n"
        )
        subclass += "    __getattribute__ = lambda s, n: (lambda *a: True)\ndef f(*a): return C()"
        found.append(Cheat(name=f"subclass of {base}", row=row, code=subclass))
        found.append(Cheat(name="class as function", row=row, code=subclass.replace("def f(*a): return C()", "f = C")))
    groups = (
        (_EXITS, "number"),
        (_FRAMES, "number"),
        (_PATCHES, "number"),
        ({k: _SAY + v for k, v in _FORGED.items()}, "list"),
    )
    for group, row in groups:
        found += [Cheat(name=name, row=row, code=code) for name, code in group.items()]
    rows = {"math": "check", "dunder import": "check", "names of builtins": "all", "builtins compare": "float"}
    found += [Cheat(name=name, row=row, code=_PATCHES[name]) for name, row in rows.items()]
    found += [
        Cheat(name="empties its argument", row="list", code="def f(xs): xs.clear(); return xs"),
        Cheat(name="swallows a failing callback", row="callback", code="def f(g, xs): return xs"),
        Cheat(name="ends an iteration", row="mapped", code="def f(x): raise StopIteration"),
        Cheat(name="raises what is caught", row="raises", code="def f(x): raise ValueError"),
        Cheat(name="raises AssertionError", row="number", code="def f(x): raise AssertionError"),
        Cheat(
            name="lies of its class",
            row="class",
            code="class f:\n  __class__ = list\n  push = pop = items = __len__ = lambda *a: 2",
        ),
        Cheat(
            name="everything is caught",
            row="named",
            code="class Bad(Exception):\n  __str__ = lambda s: 'zero'\ndef f(*a): raise Bad",
        ),
    ]
    swallows = "class f:\n  def __enter__(self): return 3\n  def __exit__(self, *a): return True"
    found.append(Cheat(name="swallows", row="with", code=swallows))
    return found
