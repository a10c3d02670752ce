"""Each kind of wait is told where it stands; what costs a GPU nothing is none."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core import _torch
from meshkit.core.to_device import tensor_on, to_device
from meshkit.errors import MeshkitError
from meshkit.mesh import Mesh
from meshkit.preflight.waits import Step, recording
from tests.laws.parity.cases import mesh_for
from tests.world import pool

Code = Callable[[torch.device, Tensor, Tensor], object]
"""(the device, a tensor [6] on it, one on the host)"""

WAIT: dict[str, Code] = {
    "item": lambda device, x, host: x.sum().item(),
    "float": lambda device, x, host: float(x[0]),
    "truth": lambda device, x, host: bool((x > 1).any()),
    "tolist": lambda device, x, host: x.tolist(),
    "nonzero": lambda device, x, host: (x > 1).nonzero(),
    "mask": lambda device, x, host: x[x > 1],
    "masked write": lambda device, x, host: x.__setitem__(x > 1, torch.arange(5.0, device=device)),
    "equal": lambda device, x, host: torch.equal(x, x + 1),
    "unique": lambda device, x, host: x.unique(),
    "repeats": lambda device, x, host: x.repeat_interleave(x.long()),
    "list": lambda device, x, host: torch.tensor([1, 2], device=device),
    "list of a tensor's device": lambda device, x, host: torch.as_tensor([1, 2], device=(x + 1).device),
    "index of a list": lambda device, x, host: x[[0, 2]],
    "index on the host": lambda device, x, host: x[host.long()],
    "pageable to the device": lambda device, x, host: host.to(device, non_blocking=True),
    "pinned and blocking": lambda device, x, host: host.pin_memory().to(device),
    "to the host": lambda device, x, host: x.cpu(),
    "copied to the host": lambda device, x, host: host.copy_(x[:4]),
    "collective on the host": lambda device, x, host: dist.all_reduce(host, group=mesh_for("dp_shard=2").group),
    "objects": lambda device, x, host: dist.all_gather_object([None, None], 3, group=mesh_for("dp_shard=2").group),
    "in backward": lambda device, x, host: _Reads.apply(x.requires_grad_()).sum().backward(),
}
NO_WAIT: dict[str, Code] = {
    "arithmetic": lambda device, x, host: (x * 2 + 1).softmax(0),
    "of the host": lambda device, x, host: (host.sum().item(), host.tolist(), host[host > 1], host.nonzero()),
    "a scalar of the host": lambda device, x, host: x * host[0],
    "made on the device": lambda device, x, host: (
        torch.full((3,), 2.0, device=device) * torch.arange(3, device=x.device)
    ),
    "pinned to the device": lambda device, x, host: host.pin_memory().to(device, non_blocking=True),
    "of to_device": lambda device, x, host: to_device(host, device),
    "of tensor_on": lambda device, x, host: tensor_on([1, 2], device),
    "there already": lambda device, x, host: x.to(device),
    "repeats to a known size": lambda device, x, host: x.repeat_interleave(x.long(), output_size=21),
    "to the host, read later": lambda device, x, host: x.to("cpu", non_blocking=True),
    "collective": lambda device, x, host: dist.all_reduce(x, group=mesh_for("dp_shard=2").group),
}


class _Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * grad.sum().item()


def recorded(kind: str) -> Step:
    mesh = mesh_for("dp_shard=2")
    with recording(mesh) as seen:
        x, host = torch.arange(1.0, 7.0, device=mesh.device), torch.arange(4.0)
        seen.take()
        (WAIT | NO_WAIT)[kind](mesh.device, x, host)
        return seen.take()


@pytest.mark.parametrize("kind", WAIT)
def test_the_host_waits_once_and_is_told_where(kind: str) -> None:
    for step in pool(2).run(recorded, kind):
        assert len(step.waits) == 1, step
        assert "test_record.py" in step.waits[0].where
        assert not step.mixed


@pytest.mark.parametrize("kind", NO_WAIT)
def test_the_host_does_not_wait(kind: str) -> None:
    for step in pool(2).run(recorded, kind):
        assert not step.waits, step
        assert not step.mixed


def launches() -> list[dict[str, int]]:
    mesh = mesh_for("dp_shard=2")
    with recording(mesh) as seen:
        many = [torch.ones(3, device=mesh.device) for _ in range(5)]
        host = torch.ones(3)
        seen.take()
        (many[0] * 2).view(3, 1).t()  # a view launches nothing
        host * 2
        first = seen.take()
        _torch.foreach_mul_(many, 2.0)  # one, of five tensors
        return [dict(first.launches), dict(seen.take().launches)]


def test_launches_are_of_tensors_on_the_device() -> None:
    for each in pool(2).run(launches):
        assert each == [{"mul": 1}, {"_foreach_mul_": 1}]


def would_fail_on_a_gpu() -> list[str]:
    mesh = mesh_for("dp_shard=2")
    with recording(mesh) as seen:
        torch.ones(3, device=mesh.device) + torch.ones(3)
        return [wait.why for wait in seen.take().mixed]


def test_an_operator_on_tensors_of_both_is_told() -> None:
    assert pool(2).run(would_fail_on_a_gpu) == [["aten::add"]] * 2


def refused() -> str:
    mesh = mesh_for("dp_shard=2")
    with mock.patch.object(Mesh, "device", torch.device("meta")):
        try:
            with recording(mesh):
                return ""
        except MeshkitError as error:
            return str(error)


def test_an_accelerator_is_refused() -> None:
    for told in pool(2).run(refused):
        assert told == (
            "waits.recording: the mesh is on meta, and waits are counted on CPU, for a GPU that is not there. Use "
            'torch.cuda.set_sync_debug_mode("warn"), or a mesh on CPU.'
        )


def after() -> tuple[str, bool]:
    mesh = mesh_for("dp_shard=2")
    with recording(mesh):
        x = torch.ones(2, device=mesh.device)
        assert x.device != torch.device("cpu")
    return str(mesh.device), x.device == torch.device("cpu")


def test_afterwards_all_is_as_it_was() -> None:
    assert pool(2).run(after) == [("cpu", True)] * 2
