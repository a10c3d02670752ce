"""A place names the step, the direction, the module and the part of meshkit, of this thread and of an error."""

from __future__ import annotations

import _thread
import re
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshkit.core import _torch, collectives
from meshkit.core.waiting import waiting, waits_of
from meshkit.errors import StepError
from meshkit.faults.location import Location, location_now, location_of, register_modules
from meshkit.metrics import Meter
from tests.world import pool


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


def followed() -> nn.Module:
    model = nn.Sequential(Mlp(), Mlp())
    register_modules(model, ["0", "1"])
    return model


def fail(*_: object) -> None:
    raise ValueError("enough")


def place_of_failure(act: object) -> Location:
    with pytest.raises(ValueError, match="enough") as raised:
        act()  # type: ignore[operator]
    return location_of(raised.value)


def test_an_error_in_forward_names_step_module_and_line() -> None:
    model = followed()
    model[1].act.register_forward_pre_hook(fail)
    Meter(total_steps=9, start_step=6)
    place = place_of_failure(lambda: model(torch.ones(2, 4)))
    assert re.fullmatch(r"step 7, forward of 1\.act, test_location.py:\d+ in fail", place.text), place
    assert not place.waits


@pytest.mark.parametrize("block", ["0", "1"])
def test_an_error_in_backward_names_the_block_whose_backward_ran(block: str) -> None:
    model = followed()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            raise ValueError("enough")

    model.get_submodule(block).act.register_forward_hook(lambda module, args, out: Fails.apply(out))
    meter = Meter(total_steps=9)
    meter.step(1)
    place = place_of_failure(lambda: model(torch.ones(2, 4)).sum().backward())
    assert re.fullmatch(rf"step 2, backward of {block}, test_location.py:\d+ in backward", place.text), place


def looked_at(act: Callable[[], object], times: int = 1) -> list[Location]:
    """Where another thread saw this one, in the middle of each half second of the act."""
    seen = []

    def look() -> None:
        for _ in range(times):
            time.sleep(0.25)
            seen.append(location_now())
            time.sleep(0.25)

    thread = threading.Thread(target=look)
    thread.start()
    act()
    thread.join()
    return seen


def test_another_thread_sees_where_the_main_one_is_and_that_it_waits() -> None:
    model = followed()

    def wait(*_: object) -> None:
        with waiting("row 7 from pp rank 0"):
            time.sleep(0.5)

    model[0].up.register_forward_pre_hook(lambda module, args: time.sleep(0.5))
    model[1].up.register_forward_pre_hook(wait)
    busy, waits = looked_at(lambda: model(torch.ones(2, 4)), times=2)
    assert "forward of 0.up, test_location.py" in busy.text
    assert "forward of 1.up, waits for row 7 from pp rank 0, test_location.py" in waits.text
    assert (busy.waits, waits.waits) == (False, True)


def sleep_with_a_comment() -> None:
    time.sleep(0.5)  # do not wait(2) here, and see work.wait()


def wait(seconds: float) -> None:
    time.sleep(seconds)


def children_end() -> None:
    """Of this process: nobody else's fault."""
    wait(0.5)


@pytest.mark.parametrize("act", [sleep_with_a_comment, children_end])
def test_words_in_the_source_do_not_make_a_rank_wait(act: Callable[[], None]) -> None:
    (place,) = looked_at(act)
    assert not place.waits, place


def test_what_meshkit_does_for_torch_is_no_wait_by_itself() -> None:
    (place,) = looked_at(lambda: _torch.collectives._timed(time.sleep, 0.5))
    assert "collectives.py" in place.text
    assert not place.waits, place


def test_marks_nest_and_are_gone_after_an_error() -> None:
    me = threading.get_ident()
    with pytest.raises(ValueError, match="enough"), waiting("outer"):
        with waiting("inner"):
            assert waits_of(me) == "inner"
        assert waits_of(me) == "outer"
        fail()
    assert waits_of(me) is None


def test_a_wait_of_another_thread_of_this_rank_is_not_the_main_one_s() -> None:
    def writes() -> None:
        with waiting("the other writers"):
            time.sleep(0.5)

    thread = threading.Thread(target=writes)
    thread.start()
    (place,) = looked_at(lambda: time.sleep(0.5))
    thread.join()
    assert not place.waits, place


def waits_in_backward(act: Callable[[], None]) -> Location:
    """Of a loss whose backward runs on a thread that Python did not start, as one of CUDA tensors does."""
    at_work, release = _thread.allocate_lock(), _thread.allocate_lock()
    at_work.acquire()
    release.acquire()

    def autograd() -> None:
        with waiting("an all-reduce"):
            at_work.release()
            release.acquire()

    class Engine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            act()
            return grad

    out = Engine.apply(torch.ones(1, requires_grad=True))
    _thread.start_new_thread(autograd, ())
    at_work.acquire()
    (place,) = looked_at(out.backward)
    release.release()
    return place


def test_a_backward_waits_where_a_thread_of_autograd_does() -> None:
    place = waits_in_backward(lambda: time.sleep(0.5))
    assert place.waits
    assert "waits for an all-reduce" in place.text


# ------------------------------------------------------------------------------------------------------ on two ranks


def place_of_the_first_while_the_second_is_late(how: str) -> tuple[str, bool] | None:
    axis = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rank, value = dist.get_rank(), torch.ones(4)
    works = dist.Work.wait

    def act() -> None:
        if rank == 1:
            time.sleep(0.5)
        if how == "through meshkit":
            collectives.all_reduce(value, axis)
        elif how == "in backward":
            collectives.copy_to_axis(value.requires_grad_(), axis).sum().backward()
        else:
            work = dist.all_reduce(value, async_op=True)
            arrived = work.wait
            arrived()

    if how == "by hand":
        _torch.mark_works()
    try:
        (place,) = looked_at(act)
    finally:
        dist.Work.wait = works  # type: ignore[method-assign]  # the ranks of a pool serve other tests
    return place.text, place.waits


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("through meshkit", "waits for an all-reduce, "),
        # The rank may have trained a model before: then the block whose backward was last is named.
        ("in backward", r"backward( of \S+)?, core\.collectives, waits for an all-reduce, "),
        ("by hand", r"waits for a collective or a message, test_location\.py"),
    ],
)
def test_the_rank_that_waits_is_told_from_the_one_that_is_late(how: str, said: str) -> None:
    (waits, first), (busy, second) = pool(2).run(place_of_the_first_while_the_second_is_late, how)
    assert (first, second) == (True, False), (waits, busy)
    assert re.search(said, waits), waits
    assert "waits for" not in busy


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:547] Connection closed by peer [10.0.0.1]:57023"), True),
        (RuntimeError("Timed out waiting 6000ms for recv operation to complete"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x4 and 8x4)"), False),
        (StepError("the gradient norm is nan"), False),
        (FileNotFoundError("timed out"), False),
    ],
)
def test_only_errors_of_connections_are_the_fault_of_others(error: Exception, lost: bool) -> None:
    outer = StepError("pp rank 0 waited")
    outer.__cause__ = error
    assert _torch.says_peer_is_lost(error) is lost
    assert _torch.says_peer_is_lost(outer) is lost
