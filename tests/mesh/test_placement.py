"""A placement: which of the launcher's ranks each rank of the world is, said once, and refused where it cannot be."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshkit as mk
from meshkit.errors import MeshError, PlanError
from meshkit.mesh.spec import MeshSpec
from tests.world import fork

SEATS = (2, 0, 3, 1)


def live(rank: int, port: int, folder: str, meshes: list[str], per_node: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    said: dict[str, object] = {}
    try:
        for text in meshes:
            ranks = range(2) if text.startswith("part: ") else None
            mesh = mk.init_mesh(
                text.removeprefix("part: "), ranks=ranks, device_type="cpu", timeout=timedelta(seconds=60)
            )
            said["rank"] = dist.get_rank()
        assert os.environ["RANK"] == str(dist.get_rank())
        said["mesh"] = mesh.spec.text
        if mesh.spec.pp == 2:
            said["loss"] = losses_of(mesh)
    except mk.MeshkitError as error:
        said["error"] = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps(said))
    os._exit(0)


def small() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
    torch.manual_seed(0)
    model = mk.models.Llama(mk.models.LlamaConfig(**sizes, **heads)).double()
    ids = torch.arange(4 * 17).reshape(4, 17) * 7 % 64
    return model, {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def losses_of(mesh: mk.Mesh) -> list[float]:
    model, batch = small()
    run = mk.parallelize(model, mesh)
    optimizer = mk.adamw(run, lr=1e-2)
    losses = []
    for _ in range(3):
        losses.append(float(run.forward_backward(batch, microbatches=2)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def lives(
    folder: Path, meshes: list[str] | list[list[str]], *, per_node: int = 4, ends: bool = True
) -> list[dict[str, object]]:
    """What each of the launcher's ranks says. ends: whether rank 0 does; else the others are waited for."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_rank = [meshes] * 4 if isinstance(meshes[0], str) else meshes
    ranks = [fork(live, rank, store.port, str(folder), of_rank[rank], per_node) for rank in range(4)]
    try:
        for each in ranks[0 if ends else 1 :]:
            each.join(120)
            assert each.exitcode == 0
    finally:
        for each in ranks:
            each.kill()
    files = [folder / f"{rank}.json" for rank in range(4)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def test_ranks_sit_where_the_placement_says_and_train_as_one_device(tmp_path) -> None:
    said = lives(tmp_path, ["pp=2 tp=2 placement=2-0-3-1"])
    assert [each["rank"] for each in said] == [SEATS.index(rank) for rank in range(4)]
    assert {each["mesh"] for each in said} == {"pp=2 tp=2 placement=2-0-3-1"}
    model, batch = small()
    logits = model(batch["input_ids"]).flatten(0, 1)
    first = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())
    (tmp_path / "plain").mkdir()
    for each, plain in zip(said, lives(tmp_path / "plain", ["pp=2 tp=2"]), strict=True):
        assert each["loss"][0] == pytest.approx(float(first.detach()), rel=1e-10)
        assert each["loss"] == pytest.approx(plain["loss"], rel=1e-10)


def test_later_meshes_keep_the_order_of_the_world(tmp_path) -> None:
    said = lives(tmp_path, ["dp_shard=4 placement=2-0-3-1", "dp_shard=2 tp=2", "tp=4 placement=2-0-3-1"])
    assert [each["rank"] for each in said] == [SEATS.index(rank) for rank in range(4)]


@pytest.mark.parametrize(
    ("meshes", "per_node", "words"),
    [
        (["dp_shard=4", "tp=4 placement=2-0-3-1"], 4, "the ranks of this world are 0-1-2-3 of the launcher's"),
        (["dp_shard=4 placement=0-2-1-3"], 2, r"ranks 0 to 1 are on nodes \[0, 1\] of 2 ranks"),
        (["dp_shard=4 placement=0-2-1"], 4, "names each of the 4 ranks, 0 to 3, once"),
        (["dp_shard=4 placement=0-2-1-1"], 4, "names each of the 4 ranks, 0 to 3, once"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(tmp_path, meshes, per_node, words) -> None:
    for each in lives(tmp_path, meshes, per_node=per_node):
        assert "error" in each
        with pytest.raises(MeshError, match=words):
            raise MeshError(each["error"])


def test_a_part_of_the_world_has_no_placement_of_its_own(tmp_path) -> None:
    for each in lives(tmp_path, ["dp_shard=4 placement=1-0-3-2", "part: dp_shard=2 placement=1-0"]):
        assert "a placement is of the whole world" in each["error"]
        assert each["rank"] is not None


def test_ranks_that_differ_are_told(tmp_path) -> None:
    said = lives(tmp_path, [["dp_shard=4 placement=1-0-3-2"], *([["dp_shard=4"]] * 3)], ends=False)
    assert "rank 0 of the launcher asks for placement=1-0-3-2, rank 1 for none" in said[1]["error"]


def test_nodes_may_change_places_and_ranks_inside_of_one(tmp_path) -> None:
    said = lives(tmp_path, ["dp_shard=4 placement=3-2-0-1"], per_node=2)
    assert [each["rank"] for each in said] == [2, 3, 1, 0]


def test_it_is_read_and_written_as_text() -> None:
    spec = MeshSpec.parse("pp=2, tp=2 placement=0-2-1-3")
    assert spec.placement == (0, 2, 1, 3)
    assert MeshSpec.parse(spec.text) == spec
    assert spec.resolve(4) == spec
    assert MeshSpec(tp=2, placement=[1, 0]).placement == (1, 0)
    strategy = mk.Strategy(mesh=spec)
    assert mk.Strategy.from_toml(strategy.to_toml()) == strategy
    for text, words in (("tp=2 placement=1,0", "not axis=size"), ("tp=2 placement=a-b", "Write ranks")):
        with pytest.raises(MeshError, match=words):
            MeshSpec.parse(text)
    for placement in ((0,), (0, 0), (1, 2)):
        with pytest.raises(MeshError, match="name each of the ranks 0 to 1 once"):
            MeshSpec(tp=2, placement=placement).resolve(2)
    with pytest.raises(MeshError, match="a rank for each rank of the mesh"):
        MeshSpec(tp=2, placement=("0", "1"))


def test_a_strategy_for_one_order_is_not_for_another() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(PlanError, match="placement=1-0"):
        mk.forecast(model, mk.Strategy(mesh="dp_shard=2 placement=1-0"), "cpu", spec="dp_shard=2 placement=0-1")
