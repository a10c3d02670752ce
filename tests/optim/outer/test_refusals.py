"""What replicas must have alike is compared, and a replica that is not finite is named on every rank."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

import meshkit as mk
from meshkit.core.sharding import local_tensor
from meshkit.errors import AgreementError, MeetingError, PlanError, StepError
from meshkit.mesh import replica_mesh
from meshkit.models import LLAMA_PLAN
from meshkit.optim.outer import CO2, DiLoCo, LocalSGD, MeetingPlace, OuterOptimizer, Policy
from tests.optim.outer.test_local_updates import data, model, sgd
from tests.world import pool


def outer_of(policy: Policy, spec: str = "dp_replicate=2", change: float = 0.0) -> OuterOptimizer:
    mesh = mk.init_mesh(spec)
    run = mk.parallelize(model(), replica_mesh(mesh), plan=LLAMA_PLAN)
    if change:
        with torch.no_grad():
            local_tensor(next(run.model.parameters())).add_(change * mesh["dp_replicate"].get_local_rank())
    return OuterOptimizer(run, sgd(run.model), mesh, policy)


def whole_mesh() -> None:
    mesh = mk.init_mesh("dp_replicate=2")
    run = mk.parallelize(model(), mesh, plan=LLAMA_PLAN)
    with pytest.raises(
        PlanError, match="DiLoCo: the run is on a mesh with dp_replicate=2, over which it sums gradients"
    ):
        OuterOptimizer(run, sgd(run.model), mesh, DiLoCo())


def other_values() -> None:
    for change, text in ((1.0, "replicas begin with different values"), (torch.nan, "some parameters are not finite")):
        with pytest.raises(PlanError, match=text):
            outer_of(DiLoCo(), change=change)


def other_policies() -> None:
    lr = 0.7 if mk.init_mesh("dp_replicate=2")["dp_replicate"].get_local_rank() else 0.6
    with pytest.raises(AgreementError, match="policy"):
        outer_of(DiLoCo(lr=lr))


def other_steps() -> None:
    outer = outer_of(DiLoCo(every=4, weights="equal"))
    outer.step()
    if outer.mesh.rank == 0:
        outer.step()
    with pytest.raises(AgreementError, match="different numbers of steps: 4 on replica 0, 3 on replica 1"):
        for _ in range(3):
            outer.step()
            if outer.mesh.rank == 1 and outer.steps == 3:
                outer.meet()


def not_finite(policy: Policy) -> None:
    outer = outer_of(policy, "dp_replicate=2 dp_shard=2")
    outer.run.forward_backward(data(1, 2)[0][0])
    if outer.mesh["dp_replicate"].get_local_rank() == 1 and outer.run.mesh.rank == 0:
        with torch.no_grad():  # one element, on one rank of one replica
            local_tensor(next(outer.run.model.parameters())).view(-1)[0] = torch.nan
    with pytest.raises(StepError, match="mean of the replicas' parameters is not finite. Those of replica 1 are not"):
        for _ in range(5):
            outer.step()


def no_tokens() -> None:
    with pytest.raises(PlanError, match="no forward_backward has counted tokens"):
        outer_of(LocalSGD(every=1)).step()


def late_buffers() -> None:
    mesh = mk.init_mesh("dp_replicate=2")
    made = model()
    made.register_buffer("average", torch.zeros(3, dtype=torch.float64))
    run = mk.parallelize(made, replica_mesh(mesh), plan=LLAMA_PLAN)
    with pytest.raises(PlanError, match="CO2 with a delay: 'average' is a buffer that replicas write"):
        OuterOptimizer(run, sgd(run.model), mesh, CO2())
    for index, policy in enumerate((DiLoCo(every=1, weights="equal"), DiLoCo(every=1, weights="equal", wire="int4"))):
        outer = OuterOptimizer(run, sgd(run.model), mesh, policy)
        run.model.average.copy_(torch.tensor([0.1, 100.0, 3.0]) + mesh["dp_replicate"].get_local_rank())
        outer.step()
        wanted = torch.tensor([0.1, 100.0, 3.0]) + 0.5
        # As it is: without the outer optimizer, and not rounded.
        assert (run.model.average - wanted).abs().max() < 1e-6, index
        assert outer.period.sent_bytes > outer.period.layouts[0].sizes[-1] == 3


def test_a_run_on_all_replicas_is_refused() -> None:
    pool(2).run(whole_mesh)


def test_replicas_that_begin_with_other_values_or_without_values_are_refused() -> None:
    pool(2).run(other_values)


def test_replicas_with_other_policies_are_refused() -> None:
    pool(2).run(other_policies)


def test_replicas_that_count_other_steps_are_named() -> None:
    pool(2).run(other_steps)


@pytest.mark.parametrize(
    "policy", [DiLoCo(every=2), DiLoCo(every=2, delay=1, wire="int4"), CO2(every=2, wire="int8")], ids=str
)
def test_a_replica_that_is_not_finite_is_named_on_every_rank_of_all(policy: Policy) -> None:
    pool(4).run(not_finite, policy)


def test_tokens_that_nobody_counted_are_no_weights() -> None:
    pool(2).run(no_tokens)


def test_buffers_are_averaged_and_refused_where_their_mean_would_come_late() -> None:
    pool(2).run(late_buffers)


def plain_count() -> None:
    run = mk.parallelize(model(), mk.init_mesh("dp_shard=1", device_type="cpu"), plan=LLAMA_PLAN)
    with pytest.raises(PlanError, match=r"forward_backward\(count=\): it returned a int. Return a tensor"):
        run.forward_backward(data(1, 1)[0][0], count=lambda batch: 3)  # type: ignore[arg-type, return-value]


def test_a_count_that_is_no_tensor_is_refused_in_one_line() -> None:
    pool(1).run(plain_count)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["http", "closes"])
def test_what_is_no_meeting_place_is_told_in_one_line(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answered, args=(server, answer), daemon=True)
        thread.start()
        pool(1).run(not_a_place, server.getsockname()[1])
        thread.join(10)


def answered(server: socket.socket, answer: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(1 << 10)
        connection.sendall(answer)


def not_a_place(port: int) -> None:
    with pytest.raises(
        MeetingError, match=f"what answers at 127.0.0.1:{port} is no meeting place: .* Give the port"
    ) as told:
        MeetingPlace(f"127.0.0.1:{port}", mk.init_mesh("dp_shard=1"), steps=1)
    assert "\n" not in str(told.value)
