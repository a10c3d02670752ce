"""The device `late` itself: what waits is right, what does not wait is seen."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from tests.device.world import run

pytestmark = pytest.mark.gate
SIZE = 1000


def _product(wait: bool) -> float:
    side, current = torch.Stream("late"), torch.accelerator.current_stream()
    values = torch.zeros(SIZE, device="late")
    for _ in range(20):
        values = values + 1
    if wait:
        side.wait_stream(current)
    with side:
        twice = values * 2
    current.wait_stream(side)
    return float(twice.sum())


def _products(wait: bool) -> list[float]:
    _product(True)  # the first call of an operation shows its shapes, and is not late
    return [_product(wait) for _ in range(20)]


def test_a_stream_that_waits_reads_what_the_other_wrote() -> None:
    assert run(1, _products, True) == [([40.0 * SIZE] * 20, [])]


def test_a_stream_that_does_not_wait_reads_something_else_and_is_told_of() -> None:
    [(sums, races)] = run(1, _products, False)
    assert [value for value in sums if value != 40.0 * SIZE]
    assert any("aten::mul on stream" in race and "reads what aten::add on stream" in race for race in races)


def _freed(record: bool) -> float:
    side, current = torch.Stream("late"), torch.accelerator.current_stream()
    values = torch.full((SIZE,), 3.0, device="late")
    side.wait_stream(current)
    with side:
        twice = values * 2
    if record:
        values.record_stream(side)
    del values
    other = torch.zeros(SIZE, device="late")  # may be the same memory
    current.wait_stream(side)
    return float(twice.sum() + other.sum())


def _all_freed(record: bool) -> list[float]:
    _freed(True)
    return [_freed(record) for _ in range(20)]


def test_memory_that_another_stream_reads_is_kept_by_record_stream() -> None:
    assert run(1, _all_freed, True) == [([6.0 * SIZE] * 20, [])]


def test_memory_that_is_freed_too_early_is_overwritten_and_told_of() -> None:
    [(sums, races)] = run(1, _all_freed, False)
    assert [value for value in sums if value != 6.0 * SIZE]
    assert any("was freed while aten::mul on stream" in race for race in races)


def _to_host(wait: bool) -> bool:
    host = torch.zeros(SIZE, pin_memory=True)
    values = torch.ones(SIZE, device="late")
    host.copy_(values, non_blocking=True)
    if wait:
        torch.accelerator.current_stream().synchronize()
    return bool((host == 1).all())


def _all_to_host(wait: bool) -> list[bool]:
    return [_to_host(wait) for _ in range(20)]


def test_pinned_memory_is_filled_when_the_host_has_waited_and_perhaps_not_before() -> None:
    assert run(1, _all_to_host, True) == [([True] * 20, [])]
    [(filled, _)] = run(1, _all_to_host, False)
    assert not all(filled)


def _threads() -> tuple[int, int]:
    seen = []
    weight = torch.ones(3, device="late", requires_grad=True)
    weight.register_hook(lambda grad: seen.append(threading.get_ident()))
    weight.sum().backward()
    return threading.get_ident(), seen[0]


def test_backward_has_a_thread_of_its_own() -> None:
    [((caller, backward), _)] = run(1, _threads)
    assert caller != backward


def _asked_meanwhile() -> float:
    """A thread waits for a sum that the other rank begins late, while this one asks whether it is over."""
    values = torch.full((SIZE,), 1.0 + dist.get_rank(), device="late")
    time.sleep(0.5 * dist.get_rank())
    with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):  # gloo's thread takes them along
        dist.all_reduce(values, async_op=True).wait()
    event = torch.accelerator.current_stream().record_event()
    waiter = threading.Thread(target=event.synchronize)
    waiter.start()
    while waiter.is_alive():
        event.query()
    waiter.join()
    return float(values.sum())


def test_a_thread_that_waits_for_another_rank_holds_up_no_python() -> None:
    assert run(2, _asked_meanwhile, timeout_s=60.0) == [(3.0 * SIZE, [])] * 2
