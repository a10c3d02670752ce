"""Stream mistakes that a cell on the device `late` must show: what waits for what, taken out one by one.

Each is planted in the ranks that run the cell: the code of the one function in which the text stands is replaced.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import meshkit
from tests.laws.gate.cell import Cell

ROOT = Path(meshkit.__file__).parent


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """file: below meshkit/. old: as it is, there once; new: what is planted; cell: what must show it."""

    name: str
    file: str
    old: str
    new: str
    cell: Cell


HOST = Cell(offload="host", microbatches=2)
DISK = Cell(offload="disk", microbatches=2)
DISK_OF_RANKS = Cell(mesh="dp_shard=2", offload="disk", optimizer="host", microbatches=2)
OPTIMIZER = Cell(optimizer="host", microbatches=3)
ONE_BATCH = Cell(optimizer="host")
TENSOR = Cell(mesh="tp=2")
EXPERTS = Cell(model="moe", mesh="dp_shard=2 ep=2")
PIPELINE = Cell(model="tied", mesh="pp=2", schedule="1f1b", microbatches=3)
RING = Cell(mesh="cp=2", context="ring")
CAST = Cell(mesh="cp=2", context="group_cast")
GATHER = Cell(mesh="cp=2", context="all_gather")

STREAMS, HOST_TIER, DISK_TIER = (f"memory/offload/_{name}.py" for name in ("streams", "host", "disk"))
COPIES, HOST_ADAMW = "optim/_host_copies.py", "optim/host_offload.py"
PENDING_S = "for _, work, _ in dkvs:\n            if work is not None:\n                work.wait()"

MISTAKES = [
    Mistake(
        name="a store does not wait for the kernel that makes its tensor",
        file=STREAMS,
        old="self._out.wait_stream(self._compute())",
        new="pass",
        cell=HOST,
    ),
    Mistake(name="a fetch waits for nothing", file=STREAMS, old="self._in.wait_event(event)", new="pass", cell=HOST),
    Mistake(
        name="compute does not wait for a fetch", file=STREAMS, old="compute.wait_event(event)", new="pass", cell=HOST
    ),
    Mistake(
        name="another stream waits for a fetch",
        file=STREAMS,
        old="compute.wait_event(event)",
        new="self._in.wait_event(event)",
        cell=HOST,
    ),
    Mistake(
        name="the mark is on another stream",
        file=STREAMS,
        old="return self._compute().record_event()",
        new="return self._out.record_event()",
        cell=HOST,
    ),
    Mistake(
        name="the event of a store is before its copy",
        file=STREAMS,
        old="target.copy_(source, non_blocking=True)\n            return self._out.record_event()",
        new="event = self._out.record_event()\n            target.copy_(source, non_blocking=True)\n            return event",
        cell=HOST,
    ),
    Mistake(
        name="the event of a fetch is before its copy",
        file=STREAMS,
        old="target.copy_(source, non_blocking=True)\n            return self._in.record_event()",
        new="event = self._in.record_event()\n            target.copy_(source, non_blocking=True)\n            return event",
        cell=HOST,
    ),
    Mistake(
        name="a fetch does not wait for the memory it writes",
        file=HOST_TIER,
        old="(self._left, streams.mark())",
        new="(self._left,)",
        cell=HOST,
    ),
    Mistake(
        name="what was fetched is used before it arrives",
        file=HOST_TIER,
        old="self._tier.streams.wait(self._coming)",
        new="pass",
        cell=HOST,
    ),
    Mistake(
        name="memory is freed while its store reads it",
        file="memory/offload/_offload.py",
        old="if not saved.stored.left.query():",
        new="if False:",
        cell=HOST,
    ),
    Mistake(
        name="compute does not wait before memory of a store is freed",
        file="memory/offload/_offload.py",
        old="self.streams.wait(saved.stored.left)",
        new="pass",
        cell=HOST,
    ),
    Mistake(
        name="a file is written before the copy to the host is over",
        file=DISK_TIER,
        old="self._left.synchronize()",
        new="pass",
        cell=DISK,
    ),
    Mistake(
        name="a file is written before what the gathered parameters give has come",
        file=DISK_TIER,
        old="self._left.synchronize()",
        new="pass",
        cell=DISK_OF_RANKS,
    ),
    Mistake(
        name="what was read is used before it arrives",
        file=DISK_TIER,
        old="self._tier.streams.wait(event)",
        new="pass",
        cell=DISK,
    ),
    Mistake(
        name="what was read does not wait for the memory it goes to",
        file=DISK_TIER,
        old="target, (ready,))",
        new="target, ())",
        cell=DISK,
    ),
    Mistake(
        name="a gradient leaves before it is computed",
        file=COPIES,
        old="self._stream.wait_stream(torch.accelerator.current_stream(self._device))",
        new="pass",
        cell=OPTIMIZER,
    ),
    Mistake(
        name="the memory of a gradient is used again while it leaves",
        file=COPIES,
        old="tensor.record_stream(self._stream)",
        new="pass",
        cell=OPTIMIZER,
    ),
    Mistake(
        name="the host does not wait for gradients",
        file=COPIES,
        old="self._stream.synchronize()",
        new="pass",
        cell=ONE_BATCH,
    ),
    Mistake(
        name="a gradient is added before it has come",
        file=HOST_ADAMW,
        old="mark.synchronize()",
        new="pass",
        cell=OPTIMIZER,
    ),
    Mistake(
        name="the update reads gradients that have not come",
        file=HOST_ADAMW,
        old="self._add_oldest()\n        self._carrier.wait()",
        new="self._add_oldest()",
        cell=ONE_BATCH,
    ),
    Mistake(
        name="a collective's result is used at once",
        file="core/_torch/collectives.py",
        old="done: Tensor = _c10d.wait_tensor(tensor) if _timed_waits is None else _timed(_c10d.wait_tensor, tensor)",
        new="done: Tensor = tensor",
        cell=TENSOR,
    ),
    Mistake(
        name="rows of experts are used before they come",
        file="parallel/expert/_exchange.py",
        old="work.wait()\n        self._pending = None",
        new="self._pending = None",
        cell=EXPERTS,
    ),
    Mistake(
        name="keys and values are used before they come",
        file="parallel/context/_ring_group.py",
        old="work.wait()",
        new="pass",
        cell=RING,
    ),
    Mistake(
        name="gradients of a ring are used before they come",
        file="parallel/context/_ring.py",
        old="pending.wait()\n            dkv += arriving",
        new="dkv += arriving",
        cell=RING,
    ),
    Mistake(
        name="gradients that were cast back are used before they come",
        file="parallel/context/_group_cast.py",
        old="    pending.wait()\n    _add_to_keys(total, sent_keys, arriving)",
        new="    _add_to_keys(total, sent_keys, arriving)",
        cell=CAST,
    ),
    Mistake(
        name="gathered keys are used before they come",
        file="parallel/context/_all_gather.py",
        old='with waiting("keys and values of all cp groups"):\n                work.wait()',
        new="pass",
        cell=GATHER,
    ),
    Mistake(
        name="summed gradients of keys are used before they come",
        file="parallel/context/_all_gather.py",
        old=PENDING_S,
        new=PENDING_S.replace("work.wait()", "pass"),
        cell=GATHER,
    ),
    Mistake(
        name="a stage does not wait for its input",
        file="parallel/pipeline/_p2p.py",
        old="work.wait()  # gloo: the host waits.",
        new="pass  # gloo: the host waits.",
        cell=PIPELINE,
    ),
    Mistake(
        name="gradients of tied parameters are added before they come",
        file="parallel/pipeline/_pipeline.py",
        old="for work in works:\n                work.wait()",
        new="pass",
        cell=PIPELINE,
    ),
]


@contextmanager
def planted(mistake: Mistake) -> Iterator[None]:
    """Inside, this process makes the mistake, wherever its code is known already."""
    file = ROOT / mistake.file
    source = file.read_text()
    if source.count(mistake.old) != 1:
        raise LookupError(
            f"{mistake.old!r} is {source.count(mistake.old)} times in {mistake.file}, and has to be there once"
        )
    module = importlib.import_module(".".join(("meshkit", *Path(mistake.file).with_suffix("").parts)))
    right = _functions(compile(source, str(file), "exec", dont_inherit=True))
    wrong = _functions(compile(source.replace(mistake.old, mistake.new), str(file), "exec", dont_inherit=True))
    changed = [name for name, code in wrong.items() if code != right[name] and code.co_code != right[name].co_code]
    changed = [name for name in changed if "<locals>" not in name] or [name.split(".<locals>")[0] for name in changed]
    functions = {name: _function(module, name) for name in changed}
    assert functions, mistake
    before = {name: function.__code__ for name, function in functions.items()}
    for name, function in functions.items():
        function.__code__ = wrong[name]
    try:
        yield
    finally:
        for name, function in functions.items():
            function.__code__ = before[name]


def _functions(code: CodeType) -> dict[str, CodeType]:
    found = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= {constant.co_qualname: constant, **_functions(constant)}
    return found


def _function(module: Any, name: str) -> FunctionType:
    owner: Any = module
    *outer, last = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    found = owner.__dict__[last]
    found = getattr(found, "__func__", getattr(found, "fget", found))
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    assert isinstance(found, FunctionType), name
    return found
