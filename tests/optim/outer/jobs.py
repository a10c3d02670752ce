"""Replicas that are jobs of their own at a meeting place, in real processes: started, killed at a given moment, ended."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshkit as mk
from meshkit.core.sharding import full_tensor, local_tensor
from meshkit.errors import MeshkitError
from meshkit.models import LLAMA_PLAN
from meshkit.optim.outer import MeetingPlace, OuterOptimizer, Policy
from meshkit.optim.outer.place import MeetingRules, PlaceServer
from tests.optim.outer.test_local_updates import adamw, data, model
from tests.world import fork

WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Replica:
    """What a job does. spec: of its mesh. dies: (where, step) at which rank `victim` kills itself: "step", "here" (it has
    said so), "turn" (between the hops), "done" (after the exchange), "join", "give" (handing its state on). stops: it hangs
    instead. gates: steps before which it waits for a file. slow: seconds of a step."""

    folder: str
    address: str
    policy: Policy
    steps: int
    spec: str = "dp_shard=1"
    dies: tuple[str, int] | None = None
    victim: int = 0
    stops: bool = False
    gates: tuple[int, ...] = ()
    slow: dict[int, float] = field(default_factory=dict)
    seed: int = 5
    bad_step: int = 0
    """in which its parameters become NaN"""
    inner: str = "adamw"
    """or "swapped" (AdamW that lists two blocks the other way round), "sgd", "parts" (state in a tensor subclass)"""


class Parts(torch.Tensor):
    """As the low-bit moments of other packages: values are not in its own memory."""


class InParts(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for param in (param for group in self.param_groups for param in group["params"]):
            self.state[param]["moment"] = torch.zeros_like(param.detach()).as_subclass(Parts)


def inner_of(kind: str, run: mk.Run) -> torch.optim.Optimizer:
    params = dict(run.named_parameters())
    if kind == "swapped":
        swapped = {"layers.0": "layers.1", "layers.1": "layers.0"}
        names = [swapped.get(name[:8], name[:8]) + name[8:] for name in params]
        return torch.optim.AdamW([params[name] for name in names], lr=1e-2)
    if kind in ("sgd", "parts"):
        return (InParts if kind == "parts" else torch.optim.SGD)(params.values(), lr=1e-2)
    return adamw(run.model)


class Clock:
    """A schedule that follows the steps."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]


def work(replica: Replica, name: str, environment: dict[str, str]) -> None:
    """In a process: one rank of a replica."""
    os.environ.update(environment)
    rank, out = int(environment["RANK"]), Path(replica.folder)
    said = (out / f"{name}-{rank}").open("a", buffering=1)
    sys.stdout = sys.stderr = (out / f"{name}-{rank}.log").open("a", buffering=1)
    try:
        _train(replica, name, rank, lambda **values: print(json.dumps(values), file=said))
    except MeshkitError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}", "at": time.time()}), file=said)
        os._exit(3)
    os._exit(0)


def _train(replica: Replica, name: str, rank: int, say: Callable[..., None]) -> None:
    mesh = mk.init_mesh(replica.spec, device_type="cpu")
    where, step = replica.dies if replica.dies is not None and rank == replica.victim else ("", 0)
    now = [0]
    if where:
        _die(where, lambda: step in (now[0], now[0] - 1), stops=replica.stops)
    made = model()
    if replica.seed != 5:
        torch.manual_seed(replica.seed)
        for param in made.parameters():
            torch.nn.init.normal_(param, std=0.1)
    made.register_buffer("count", torch.zeros((), dtype=torch.int64))
    run = mk.parallelize(made, mesh, plan=LLAMA_PLAN)
    place = MeetingPlace(replica.address, mesh, steps=replica.steps)
    optimizer, clock = inner_of(replica.inner, run), Clock()
    outer = OuterOptimizer(run, optimizer, place, replica.policy, follow=[clock])
    outer.join()
    say(joined=outer.steps, slot=place.slot, digest=digest(outer), at=time.time())
    batches = data(replica.steps, place.most, last_is_empty=False)
    while outer.steps < replica.steps:
        number = outer.steps + 1
        now[0] = number
        if number in replica.gates:
            _wait_for(Path(replica.folder, f"gate-{number}"))
        time.sleep(replica.slow.get(number, 0.0))
        if where == "step" and number == step:
            _end(replica.stops)
        mine = batches[number - 1][place.slot]
        rows = {key: value.tensor_split(mesh.data_ranks)[mesh.data_rank] for key, value in mine.items()}
        optimizer.zero_grad()
        run.forward_backward(rows)
        mk.clip_grad_norm(run, 1.0)
        optimizer.step()
        clock.steps += 1
        run.model.count += 1
        if number == replica.bad_step:
            with torch.no_grad():
                local_tensor(next(run.model.parameters())).view(-1)[:1] = torch.nan
        before, began = place.last, time.time()
        outer.step()
        assert clock.steps == outer.steps
        if place.last is not before or outer.steps != number:
            slots = place.last.replicas if place.last is not None and place.last is not before else ()
            say(step=outer.steps, slots=slots, digest=digest(outer), took=time.time() - began, at=time.time())
    outer.meet()
    say(ended=outer.steps, digest=digest(outer), count=int(run.model.count))
    values = {key: full_tensor(value).clone() for key, value in run.named_parameters()}
    momentum = {
        entry.name: full_tensor(entry.momentum).clone()
        for entry in outer.entries.values()
        if entry.momentum is not None
    }
    if rank == 0:
        torch.save({"values": values, "momentum": momentum}, Path(replica.folder, f"{name}.pt"))
    place.leave()


def digest(outer: OuterOptimizer) -> str:
    """Of the outer state of this rank, and of the steps; the errors are each replica's own."""
    found = hashlib.sha256(repr((outer.steps, outer.next_meeting)).encode())
    for entry in outer.entries.values():
        for tensor in (entry.parameter, entry.momentum) if entry.parameter is not None else (entry.param,):
            found.update(local_tensor(tensor).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _end(stops: bool) -> None:
    os.kill(os.getpid(), signal.SIGSTOP if stops else signal.SIGKILL)


def _die(where: str, now: Callable[[], bool], *, stops: bool) -> None:
    from meshkit.optim.outer._exchange import Exchange
    from meshkit.optim.outer.place import _meeting_place
    from meshkit.optim.outer.place._link import PlaceLink

    send, turn = PlaceLink.send, Exchange.turn
    receive, give = _meeting_place.receive, MeetingPlace._give

    def sends(link: PlaceLink, word: str, **values: Any) -> None:
        if word == where == "done" and now():
            _end(stops)
        send(link, word, **values)
        if word == where == "here" and now():
            _end(stops)

    def turns(exchange: Exchange) -> None:
        if where == "turn" and now():
            _end(stops)
        turn(exchange)

    def receives(group: Any) -> Any:
        if where == "join":
            _end(stops)
        return receive(group)

    def gives(place: MeetingPlace, group: str, snapshot: Any) -> None:
        if where == "give" and now():  # on a thread, and the step may be over
            _end(stops)
        give(place, group, snapshot)

    PlaceLink.send, Exchange.turn = sends, turns  # type: ignore[method-assign]
    _meeting_place.receive, MeetingPlace._give = receives, gives


def _wait_for(path: Path) -> None:
    end = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.01)


class Jobs:
    """The place, in a thread, and the jobs. lines: what the place has said."""

    def __init__(self, folder: Path, rules: MeetingRules) -> None:
        self.folder, self.lines = folder, list[str]()
        self.server = PlaceServer(rules, port=0, say=self.lines.append)
        self.address = f"127.0.0.1:{self.server.port}"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: self.server.run(until=self._stopped.is_set), daemon=True)
        self._thread.start()
        self._processes: dict[str, list[Any]] = {}
        self._stores: list[Any] = []

    def start(self, name: str, policy: Policy, *, steps: int, ranks: int = 1, **given: Any) -> None:
        replica = Replica(folder=str(self.folder), address=self.address, policy=policy, steps=steps, **given)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._processes[name] = [
            fork(work, replica, name, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, daemon=True)
            for rank in range(ranks)
        ]

    def open_gate(self, step: int) -> None:
        (self.folder / f"gate-{step}").touch()

    def wait_until(self, text: str, *, times: int = 1, timeout_s: float = WAIT_S) -> None:
        """The place has said it so many times."""
        end = time.monotonic() + timeout_s
        while sum(text in line for line in self.lines) < times:
            assert time.monotonic() < end, f"{text!r} was not said: {self.lines}\n{self._logs()}"
            time.sleep(0.01)

    def end(self, name: str, *, timeout_s: float = WAIT_S) -> list[int | None]:
        """The exit codes of its ranks. When one fails, the others are ended, as torchrun does."""
        end = time.monotonic() + timeout_s
        processes = self._processes[name]
        while any(process.is_alive() for process in processes):
            if time.monotonic() > end:
                raise AssertionError(f"{name} did not end: {self.lines}\n{self._logs()}")
            if any(process.exitcode for process in processes if not process.is_alive()):
                time.sleep(0.2)
                for process in processes:
                    process.kill()
            time.sleep(0.01)
        return [process.exitcode for process in processes]

    def told(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        path = self.folder / f"{name}-{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def result(self, name: str) -> dict[str, Any]:
        return torch.load(self.folder / f"{name}.pt")

    def end_place(self) -> None:
        self._stopped.set()
        self._thread.join(5.0)
        self.server.close()

    def close(self) -> None:
        for process in (process for group in self._processes.values() for process in group):
            process.kill()
        self.end_place()

    def _logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))


@contextmanager
def jobs(folder: Path, **rules: Any) -> Iterator[Jobs]:
    made = Jobs(folder, MeetingRules(**rules))
    try:
        yield made
    finally:
        made.close()
