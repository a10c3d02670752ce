"""A place names the step, the direction, the module and the part of meshkit, of this thread and of an error."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch
from torch import Tensor, nn

from meshkit import _torch
from meshkit.errors import StepError
from meshkit.metrics import Meter
from meshkit.place import Place, follow, place_now, place_of


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


def followed() -> nn.Module:
    model = nn.Sequential(Mlp(), Mlp())
    follow(model, ["0", "1"])
    return model


def fail(*_: object) -> None:
    raise ValueError("enough")


def place_of_failure(act: object) -> Place:
    with pytest.raises(ValueError, match="enough") as raised:
        act()  # type: ignore[operator]
    return place_of(raised.value)


def test_an_error_in_forward_names_step_module_and_line() -> None:
    model = followed()
    model[1].act.register_forward_pre_hook(fail)
    Meter(total_steps=9, start_step=6)
    place = place_of_failure(lambda: model(torch.ones(2, 4)))
    assert re.fullmatch(r"step 7, forward of 1\.act, test_place.py:\d+ in fail", place.text), place
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
    assert re.fullmatch(rf"step 2, backward of {block}, test_place.py:\d+ in backward", place.text), place


def test_another_thread_sees_where_the_main_one_is_and_that_it_waits() -> None:
    model, seen = followed(), []
    model[0].up.register_forward_pre_hook(lambda module, args: time.sleep(0.5))
    model[1].up.register_forward_pre_hook(lambda module, args: time.sleep(0.5))  # as in work.wait()

    def look() -> None:
        for _ in range(2):
            time.sleep(0.25)
            seen.append(place_now())
            time.sleep(0.25)

    thread = threading.Thread(target=look)
    thread.start()
    model(torch.ones(2, 4))
    thread.join()
    assert "forward of 0.up, test_place.py" in seen[0].text
    assert "forward of 1.up, test_place.py" in seen[1].text
    assert [place.waits for place in seen] == [False, True]


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
    assert _torch.lost_others(error) is lost
    assert _torch.lost_others(outer) is lost
